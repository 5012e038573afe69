"""An engine's own counters before and after: whether others used it, whether a cache answered, whether it is still the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkguard.core.prometheus_text import Sample, parse
from sparkguard.core.record import Record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparkguard.cluster.bench.client import Endpoint

PATHS = ("/metrics", "/v1/metrics")  # NIM has the second

# One quantity, as the engines name it; the first that is there counts.
GENERATED = (
    "vllm:generation_tokens_total", "llamacpp:tokens_predicted_total", "sglang:generation_tokens_total",
    "generation_tokens_total", "ds4_tokens_decoded_total",
)  # fmt: skip
PROMPT = ("vllm:prompt_tokens_total", "llamacpp:prompt_tokens_total", "sglang:prompt_tokens_total", "prompt_tokens_total")
CACHED = (
    "vllm:prompt_tokens_cached_total",
    "vllm:prefix_cache_hits_total",
    "llamacpp:prompt_tokens_cached_total",
    "sglang:cached_tokens_total",
)
RUNNING = (
    "vllm:num_requests_running",
    "llamacpp:requests_processing",
    "sglang:num_running_reqs",
    "num_requests_running",
    "ds4_requests_inflight",
)
WAITING = ("vllm:num_requests_waiting", "llamacpp:requests_deferred", "sglang:num_queue_reqs", "num_requests_waiting")
PREFILL_SECONDS = ("vllm:request_prefill_time_seconds_sum",)
PREFILLS = ("vllm:request_prefill_time_seconds_count",)
STARTED = ("process_start_time_seconds",)
WANTED = frozenset((*GENERATED, *PROMPT, *CACHED, *RUNNING, *WAITING, *PREFILL_SECONDS, *PREFILLS, *STARTED))


class Counters(Record):
    """None: the engine does not say. Counts are the engine's since its start."""

    generated: float | None = None
    prompt: float | None = None
    cached: float | None = None
    running: float | None = None
    waiting: float | None = None
    prefill_seconds: float | None = None
    prefills: float | None = None
    started: float | None = None


async def look(endpoint: Endpoint, model: str, paths: Sequence[str] = PATHS) -> Counters | None:
    """None: the server exposes none."""
    for path in paths:
        text = await endpoint.get_text(path)
        if text is not None:
            return read(text, model)
    return None


def read(text: str, model: str) -> Counters:
    """Series of other models, as their label tells, are left out; those of all engines are added up."""
    samples = [one for one in parse(text, WANTED) if one.label("model_name") in (None, model)]
    return Counters(
        generated=_sum(samples, GENERATED),
        prompt=_sum(samples, PROMPT),
        cached=_sum(samples, CACHED),
        running=_sum(samples, RUNNING),
        waiting=_sum(samples, WAITING),
        prefill_seconds=_sum(samples, PREFILL_SECONDS),
        prefills=_sum(samples, PREFILLS),
        started=_sum(samples, STARTED),
    )


def _sum(samples: list[Sample], names: tuple[str, ...]) -> float | None:
    for name in names:
        values = [sample.value for sample in samples if sample.name == name]
        if values:
            total = sum(values)
            return total if total < float("inf") else None
    return None


def grown(before: Counters | None, after: Counters | None, name: str) -> float | None:
    """None where it is not known, or where the counter fell: the engine began anew."""
    if before is None or after is None:
        return None
    sooner, later = getattr(before, name), getattr(after, name)
    return later - sooner if sooner is not None and later is not None and later >= sooner else None
