"""What is asked for: the settings of a run, their bounds, and the body of one request. Pure."""

from __future__ import annotations

from typing import Any

from sparkguard.core.record import Record
from sparkguard.errors import USAGE, SparkguardError

DECODE, PREFILL = "decode", "prefill"
KINDS = (DECODE, PREFILL)
ON, OFF, DEFAULT = "on", "off", "default"

# How the output's length is fixed, best first. NIM refuses fields that it does not know, hence the second.
IGNORE_EOS, MAX_TOKENS = "ignore_eos", "max_tokens"

BOUNDS = {
    "requests": (1, 10_000),
    "concurrency": (1, 64),
    "max_tokens": (1, 32_768),
    "prompt_tokens": (8, 1_048_576),
    "repeats": (1, 100),
    "warmup": (1, 20),
    "request_seconds": (1, 7200),
    "run_seconds": (1, 86_400),
}
MAX_LEVELS = 32  # sizes times concurrencies


class Settings(Record):
    kind: str = DECODE
    requests: int = 3  # of each level and repeat; never fewer than its streams
    concurrency: tuple[int, ...] = (1,)
    max_tokens: int = 128
    prompt_tokens: tuple[int, ...] = (256,)
    reasoning: str = DEFAULT
    repeats: int = 1
    warmup: int = 1  # requests of each size, after the one that finds out how long a token is
    seed: int = 0
    fixed_length: bool = True
    request_seconds: float = 600.0
    run_seconds: float = 3600.0

    @property
    def levels(self) -> list[tuple[int, int]]:
        """(prompt tokens, concurrency), in the order in which they run."""
        return [(size, streams) for size in self.prompt_tokens for streams in self.concurrency]


def checked(settings: Settings) -> Settings:
    """The same, or SparkguardError (2) naming every fault."""
    faults = []
    for name, (least, most) in BOUNDS.items():
        values = getattr(settings, name)
        for value in values if isinstance(values, tuple) else (values,):
            if not least <= value <= most:
                faults.append(f"--{_option(name)} {value:g} is not from {least} to {most}")
        if values == ():
            faults.append(f"--{_option(name)} names none")
    if settings.kind not in KINDS:
        faults.append(f"--kind {settings.kind} is neither decode nor prefill")
    if settings.reasoning not in (ON, OFF, DEFAULT):
        faults.append(f"--reasoning {settings.reasoning} is not on, off or default")
    if len(settings.levels) > MAX_LEVELS:
        faults.append(f"{len(settings.levels)} levels are more than {MAX_LEVELS}")
    if faults:
        raise SparkguardError("; ".join(faults), None, USAGE)
    return settings


def _option(name: str) -> str:
    return {"request_seconds": "timeout", "run_seconds": "deadline"}.get(name, name.replace("_", "-"))


def body(model: str, prompt: str, settings: Settings, max_tokens: int, length: str) -> dict[str, Any]:
    """One request. Greedy, so that a run differs from the next by the machine's speed and by nothing that was drawn."""
    asked: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if length == IGNORE_EOS:
        # vLLM, SGLang and llama-server take the first; the second keeps vLLM from stopping at stop tokens of the model's own.
        asked |= {"ignore_eos": True, "min_tokens": max_tokens}
    if settings.reasoning != DEFAULT:
        # Qwen, GLM and MiMo read the first, DeepSeek's templates the second; a template ignores what it does not name.
        wanted = settings.reasoning == ON
        asked["chat_template_kwargs"] = {"enable_thinking": wanted, "thinking": wanted}
    return asked
