"""What the events of the engines carry."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sparkguard.cluster.bench import chat
from sparkguard.cluster.bench.sse import StreamFault
from sparkguard.core.measure import CONTENT, DONE, FINISH, REASONING, ROLE, TOOL, USAGE, Timings, Usage


def of(delta: dict[str, Any], **more: Any) -> str:
    return json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": None}], **more})


DELTAS = [
    ({"role": "assistant", "content": ""}, {ROLE}),
    ({"role": "assistant", "content": None}, {ROLE}),
    ({"role": "assistant", "content": "Hi"}, {CONTENT}),
    ({"content": "Hi"}, {CONTENT}),
    ({"content": ""}, set()),
    ({"reasoning": "Hm"}, {REASONING}),
    ({"reasoning_content": "Hm", "content": None}, {REASONING}),
    ({"reasoning_content": "Hm", "content": "Hi"}, {REASONING, CONTENT}),
    ({"tool_calls": [{"index": 0, "function": {"name": "f"}}]}, {TOOL}),
    ({"tool_calls": []}, set()),
    ({}, set()),
]


@pytest.mark.parametrize(("delta", "kinds"), DELTAS, ids=[json.dumps(delta) for delta, _ in DELTAS])
def test_kinds_of_a_delta(delta: dict[str, Any], kinds: set[str]) -> None:
    """Output is text, thought or a tool call; a role and an empty text are none."""
    assert chat.read("", of(delta)).kinds == kinds


def test_the_usage_of_vllm() -> None:
    """The last chunk has no choice and all of the counts."""
    details = {"prompt_tokens_details": {"cached_tokens": 16}, "completion_tokens_details": {"reasoning_tokens": 3}}
    counts = {"prompt_tokens": 20, "completion_tokens": 5, "total_tokens": 25, **details}
    chunk = chat.read("", json.dumps({"choices": [], "usage": counts}))
    assert (chunk.kinds, chunk.usage) == ({USAGE}, Usage(20, 5, 25, 16, 3))


def test_details_that_are_null() -> None:
    """vLLM without its --enable-prompt-tokens-details: whether a cache answered is unknown, and not 0."""
    counts = {"prompt_tokens": 20, "completion_tokens": 5, "total_tokens": 25, "prompt_tokens_details": None}
    usage = chat.read("", json.dumps({"choices": [], "usage": counts})).usage
    assert usage is not None
    assert usage.cached is None


@pytest.mark.parametrize(
    "counts", [None, {}, {"prompt_tokens": "20"}, {"prompt_tokens": -1, "completion_tokens": 1, "total_tokens": 0}]
)
def test_a_usage_that_is_none(counts: object) -> None:
    """Numbers that are missing or no counts are no usage."""
    assert chat.read("", json.dumps({"choices": [], "usage": counts})).usage is None


def test_the_timings_of_llama_server() -> None:
    """They come with the last chunk, in milliseconds."""
    timings = {"prompt_n": 10, "prompt_ms": 500.0, "predicted_n": 4, "predicted_ms": 80.5, "cache_n": 2}
    assert chat.read("", of({}, timings=timings)).timings == Timings(10, 0.5, 4, 0.0805, 2)


def test_the_end() -> None:
    """[DONE] is the announcement that the stream is whole, and a finish reason is not."""
    finished = json.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
    assert (chat.read("", "[DONE]").kinds, chat.read("", finished).kinds) == ({DONE}, {FINISH})


FAULTS = {
    "error_event": '{"error": {"message": "EngineDeadError", "code": 500}}',
    "bad_json": '{"choices": [',
    "bad_event": '{"choices": [{"index": 0}]}',
}


@pytest.mark.parametrize("kind", FAULTS)
def test_faults(kind: str) -> None:
    """An event that is an error, no JSON, or no chunk ends the request with its class."""
    with pytest.raises(StreamFault) as caught:
        chat.read("", FAULTS[kind])
    assert caught.value.kind == kind


def test_an_event_that_is_named_error() -> None:
    """The name alone makes it one."""
    with pytest.raises(StreamFault) as caught:
        chat.read("error", '{"detail": "gone"}')
    assert caught.value.kind == "error_event"
