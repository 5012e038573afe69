"""What the events of /v1/chat/completions carry, by engine and version. Pure."""

from __future__ import annotations

import json
from typing import Any

from sparkguard.cluster.bench.sse import StreamFault
from sparkguard.core.measure import CONTENT, DONE, FINISH, REASONING, ROLE, TOOL, USAGE, Timings, Usage

END = "[DONE]"
MOST = 10**12  # tokens or milliseconds: beyond, a number is no count and no time
# Where engines and versions put what a model thinks: vLLM since 0.11 and OpenRouter; vLLM before, SGLang, llama-server.
_REASONING_KEYS = ("reasoning", "reasoning_content")


class Chunk:
    """One event, read: its kinds, and what else it brings."""

    __slots__ = ("finish", "kinds", "timings", "usage")

    def __init__(self, kinds: frozenset[str], usage: Usage | None = None, finish: str | None = None) -> None:
        self.kinds = kinds
        self.usage = usage
        self.finish = finish
        self.timings: Timings | None = None


def read(name: str, data: str) -> Chunk:
    """Raises StreamFault: bad_json, bad_event, error_event."""
    if data.strip() == END:
        return Chunk(frozenset((DONE,)))
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):  # the second: brackets without end
        raise StreamFault("bad_json", data[:200]) from None
    if not isinstance(body, dict):
        raise StreamFault("bad_event", data[:200])
    if name == "error" or error_in(body) is not None:
        raise StreamFault("error_event", error_in(body) or data[:200])
    kinds: set[str] = set()
    finish = None
    choices = body.get("choices") or []
    if not isinstance(choices, list):
        raise StreamFault("bad_event", data[:200])
    for choice in choices:
        delta = choice.get("delta") if isinstance(choice, dict) else None
        if not isinstance(delta, dict):
            raise StreamFault("bad_event", data[:200])
        kinds |= _kinds(delta)
        if choice.get("finish_reason"):
            finish = str(choice["finish_reason"])
            kinds.add(FINISH)
    usage = _usage(body.get("usage"))
    if usage:
        kinds.add(USAGE)
    chunk = Chunk(frozenset(kinds), usage, finish)
    chunk.timings = _timings(body.get("timings"))
    return chunk


def error_in(body: dict[str, Any]) -> str | None:
    """The message of an error body: {"error": {"message"}}, {"error": text}, or vLLM's old {"object": "error", "message"}."""
    error = body.get("error")
    if isinstance(error, dict):
        return str(error.get("message") or error)[:500]
    if error:
        return str(error)[:500]
    if body.get("object") == "error":
        return str(body.get("message") or body)[:500]
    return None


def _kinds(delta: dict[str, Any]) -> set[str]:
    kinds = set()
    if delta.get("content"):
        kinds.add(CONTENT)
    if any(delta.get(key) for key in _REASONING_KEYS):
        kinds.add(REASONING)
    if delta.get("tool_calls"):
        kinds.add(TOOL)
    if delta.get("role") and not kinds:
        kinds.add(ROLE)
    return kinds


def _usage(value: Any) -> Usage | None:
    """None also of one whose numbers are none: a request without a count is incomplete, and that is said there."""
    if not isinstance(value, dict):
        return None
    prompt, completion, total = (_count(value.get(f"{key}_tokens")) for key in ("prompt", "completion", "total"))
    if prompt is None or completion is None or total is None:
        return None
    prompts, completions = value.get("prompt_tokens_details"), value.get("completion_tokens_details")
    return Usage(
        prompt,
        completion,
        total,
        _count(prompts.get("cached_tokens")) if isinstance(prompts, dict) else None,
        _count(completions.get("reasoning_tokens")) if isinstance(completions, dict) else None,
    )


def _timings(value: Any) -> Timings | None:
    if not isinstance(value, dict):
        return None
    prompt, decoded = _count(value.get("prompt_n")), _count(value.get("predicted_n"))
    prompt_ms, decode_ms = _time(value.get("prompt_ms")), _time(value.get("predicted_ms"))
    if prompt is None or decoded is None or prompt_ms is None or decode_ms is None:
        return None
    return Timings(prompt, prompt_ms / 1000, decoded, decode_ms / 1000, _count(value.get("cache_n")))


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST else None


def _time(value: Any) -> float | None:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= MOST else None
