"""What an engine tells of itself, whichever it is: one record for vLLM, NIM, SGLang, llama.cpp, ds4 and TensorFold.

Names by engine and version as their sources and scrapes have them: docs/cluster/monitoring.md. Only what has no side effect
is read: llama.cpp's two gauges in tokens per second begin anew with each scrape, SGLang's sticks when nothing runs, so all
speeds come from counters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkguard.cluster import json_text
from sparkguard.core.prometheus_text import MAX_CHARS, Sample, parse
from sparkguard.core.rates import Histogram, Reading
from sparkguard.core.record import Record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sparkguard.core.prometheus_text import Labels

# Names to add up, and those of other versions if the first ones are not there.
Names = tuple[tuple[str, ...], ...]


class Family(Record):
    gauges: Mapping[str, Names]
    counters: Mapping[str, Names]
    histograms: Mapping[str, Names] = {}


class EngineMetrics(Record):
    """Gauges as they are; counters and histograms as a reading to compare with the next one. None: the engine does not say."""

    running: float | None
    waiting: float | None
    kv_used: float | None  # of 1; of several engines the fullest
    acceptance: float | None  # of drafted tokens, where the engine has it as a gauge only
    finished: Mapping[str, float]  # requests by the reason why they ended, since the engine began
    reading: Reading
    foreign: tuple[str, ...] = ()  # models of other names that were in the same text, and left out


def _vllm(prefix: str) -> Family:
    def one(*names: str) -> Names:
        return tuple((prefix + name,) for name in names)

    return Family(
        gauges={
            "running": one("num_requests_running"),
            "waiting": one("num_requests_waiting"),
            "kv_used": one("kv_cache_usage_perc", "gpu_cache_usage_perc"),
        },
        counters={
            "prompt_tokens": one("prompt_tokens_total"),
            "generation_tokens": one("generation_tokens_total"),
            "cached_tokens": one("prompt_tokens_cached_total"),
            "prefix_queries": one("prefix_cache_queries_total", "gpu_prefix_cache_queries_total"),
            "prefix_hits": one("prefix_cache_hits_total", "gpu_prefix_cache_hits_total"),
            "finished": one("request_success_total", "request_finish_total"),
            "preemptions": one("num_preemptions_total"),
            "drafts": one("spec_decode_num_drafts_total"),
            "draft_tokens": one("spec_decode_num_draft_tokens_total"),
            "accepted_tokens": one("spec_decode_num_accepted_tokens_total"),
        },
        histograms={
            "ttft": one("time_to_first_token_seconds"),
            "itl": one("inter_token_latency_seconds", "time_per_output_token_seconds"),
            "e2e": one("e2e_request_latency_seconds"),
            "queue": one("request_queue_time_seconds"),
            "prefill": one("request_prefill_time_seconds"),
        },
    )


def _either(first: Family, second: Family) -> Family:
    def both(one: Mapping[str, Names], other: Mapping[str, Names]) -> dict[str, Names]:
        return {name: one.get(name, ()) + other.get(name, ()) for name in (*one, *(name for name in other if name not in one))}

    return Family(
        both(first.gauges, second.gauges), both(first.counters, second.counters), both(first.histograms, second.histograms)
    )


_LLAMACPP = Family(
    gauges={"running": (("llamacpp:requests_processing",),), "waiting": (("llamacpp:requests_deferred",),)},
    counters={
        # Without the cached ones since the day when those got a counter of their own.
        "prompt_tokens": (
            ("llamacpp:prompt_tokens_total", "llamacpp:prompt_tokens_cached_total"),
            ("llamacpp:prompt_tokens_total",),
        ),
        "cached_tokens": (("llamacpp:prompt_tokens_cached_total",),),
        "generation_tokens": (("llamacpp:tokens_predicted_total",),),
        "drafts": (("llamacpp:spec_decode_num_drafts_total",),),
        "draft_tokens": (("llamacpp:spec_decode_num_draft_tokens_total",),),
        "accepted_tokens": (("llamacpp:spec_decode_num_accepted_tokens_total",),),
    },
)
_SGLANG = Family(
    gauges={
        "running": (("sglang:num_running_reqs",),),
        "waiting": (("sglang:num_queue_reqs",),),
        "kv_used": (("sglang:token_usage",),),
        "acceptance": (("sglang:spec_accept_rate",),),
    },
    counters={
        "prompt_tokens": (("sglang:prompt_tokens_total",),),
        "generation_tokens": (("sglang:generation_tokens_total",),),
        "cached_tokens": (("sglang:cached_tokens_total",),),
        "finished": (("sglang:num_requests_total",),),
    },
    histograms={
        "ttft": (("sglang:time_to_first_token_seconds",),),
        "itl": (("sglang:inter_token_latency_seconds",), ("sglang:time_per_output_token_seconds",)),
        "e2e": (("sglang:e2e_request_latency_seconds",),),
        "queue": (("sglang:queue_time_seconds",),),
    },
)
_DS4 = Family(
    gauges={"running": (("ds4_requests_inflight",),)},
    counters={"prompt_tokens": (("ds4_tokens_prefilled_total",),), "generation_tokens": (("ds4_tokens_decoded_total",),)},
)
FAMILIES = {
    "vllm": _vllm("vllm:"),
    "nim": _either(_vllm(""), _vllm("vllm:")),  # a NIM for vLLM may pass on vLLM's own names
    "sglang": _SGLANG,
    "llamacpp": _LLAMACPP,
    "ds4": _either(_DS4, _vllm("vllm:")),
}
_TENSORFOLD = {
    "prompt_tokens": "prompt_tokens_total",
    "generation_tokens": "completion_tokens_total",
}
_START = "process_start_time_seconds"
_SHARD_LABELS = ("tp_rank", "pp_rank", "moe_ep_rank")  # each shard of one engine counts the same requests


def read(engine: str, body: str, served: str, at: float, identity: tuple[str, ...] = ()) -> EngineMetrics:
    """The record of one scrape that arrived at that time. A body of another form than expected has nothing to say."""
    if engine == "tensorfold":
        return _tensorfold(body, at, identity)
    family = FAMILIES.get(engine, FAMILIES["vllm"])
    samples = parse(body, _wanted(family))
    own = [sample for sample in samples if _is_own(sample, served)]
    by_name: dict[str, list[Sample]] = {}
    for sample in own:
        by_name.setdefault(sample.name, []).append(sample)
    counters = {name: _series(by_name, names) for name, names in family.counters.items()}
    histograms = {name: _histogram(by_name, names) for name, names in family.histograms.items()}
    start = ",".join(str(sample.value) for sample in by_name.get(_START, ()))
    foreign = {sample.label("model_name") or "" for sample in samples if not _is_own(sample, served) and not _is_shard(sample)}
    kv = [sample.value for sample in _found(by_name, family.gauges.get("kv_used", ()))]
    return EngineMetrics(
        _total(by_name, family.gauges["running"]),
        _total(by_name, family.gauges.get("waiting", ())),
        max(kv) if kv else None,
        _total(by_name, family.gauges.get("acceptance", ())),
        _by_reason(by_name, family.counters.get("finished", ())),
        Reading(
            at,
            (*identity, start),
            {name: series for name, series in counters.items() if series},
            {name: histogram for name, histogram in histograms.items() if histogram is not None},
        ),
        tuple(sorted(foreign)),
    )


def _wanted(family: Family) -> set[str]:
    wanted = {_START}
    for table in (family.gauges, family.counters):
        wanted |= {name for names in table.values() for group in names for name in group}
    for names in family.histograms.values():
        wanted |= {name + suffix for group in names for name in group for suffix in ("_bucket", "_sum", "_count")}
    return wanted


def _is_shard(sample: Sample) -> bool:
    return any(sample.label(name) not in (None, "", "0") for name in _SHARD_LABELS)


def _is_own(sample: Sample, served: str) -> bool:
    model = sample.label("model_name")
    return not _is_shard(sample) and (model is None or not served or model == served)


def _found(by_name: Mapping[str, list[Sample]], names: Names) -> list[Sample]:
    for group in names:
        if all(name in by_name for name in group):
            return [sample for name in group for sample in by_name[name]]
    return []


def _total(by_name: Mapping[str, list[Sample]], names: Names) -> float | None:
    found = _found(by_name, names)
    return sum(sample.value for sample in found) if found else None


def _series(by_name: Mapping[str, list[Sample]], names: Names) -> dict[Labels, float]:
    return {(("__name__", sample.name), *sample.labels): sample.value for sample in _found(by_name, names)}


def _by_reason(by_name: Mapping[str, list[Sample]], names: Names) -> dict[str, float]:
    reasons: dict[str, float] = {}
    for sample in _found(by_name, names):
        reason = sample.label("finished_reason") or "any"
        reasons[reason] = reasons.get(reason, 0.0) + sample.value
    return reasons


def _histogram(by_name: Mapping[str, list[Sample]], names: Names) -> Histogram | None:
    for group in names:
        for name in group:
            if name + "_count" in by_name and name + "_sum" in by_name:
                return _summed(by_name, name)
    return None


def _summed(by_name: Mapping[str, list[Sample]], name: str) -> Histogram | None:
    """One histogram of all engines; None where their buckets differ."""
    parts: dict[Labels, list[tuple[float, float]]] = {}
    for sample in by_name.get(name + "_bucket", ()):
        le = sample.label("le")
        bound = _bound(le)
        if bound is not None:
            parts.setdefault(tuple(it for it in sample.labels if it[0] != "le"), []).append((bound, sample.value))
    sums = {sample.labels: sample.value for sample in by_name[name + "_sum"]}
    total: Histogram | None = None
    for sample in by_name[name + "_count"]:
        part = Histogram(tuple(sorted(parts.get(sample.labels, ()))), sample.value, sums.get(sample.labels, 0.0))
        if total is None:
            total = part
        else:
            total = total + part
            if total is None:
                return None
    return total


def _bound(le: str | None) -> float | None:
    try:
        bound = float(le or "")
    except ValueError:
        return None
    return bound if bound - bound == 0 else None


def _tensorfold(body: str, at: float, identity: tuple[str, ...]) -> EngineMetrics:
    """Its /health is JSON: requests_running, prompt_tokens_total, completion_tokens_total."""
    try:
        value = json_text.loads(body[:MAX_CHARS])
    except ValueError:
        value = None
    health = value if isinstance(value, dict) else {}
    numbers = {key: float(it) for key, it in health.items() if type(it) in (int, float) and it - it == 0}
    counters: dict[str, Mapping[Labels, float]] = {
        name: {(): numbers[key]} for name, key in _TENSORFOLD.items() if key in numbers
    }
    running, waiting = (_first(numbers, keys) for keys in (("requests_running",), ("requests_waiting", "requests_queued")))
    return EngineMetrics(running, waiting, None, None, {}, Reading(at, identity, counters, {}))


def _first(numbers: Mapping[str, float], keys: Sequence[str]) -> float | None:
    return next((numbers[key] for key in keys if key in numbers), None)
