"""What may be believed of a run: was the engine ours alone, were the prompts new to it, was the output as long as asked. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sparkguard.cluster.bench import counters
from sparkguard.cluster.bench.request import OFF
from sparkguard.core.measure import OK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparkguard.cluster.bench.counters import Counters
    from sparkguard.cluster.bench.report import Request
    from sparkguard.cluster.bench.request import Settings

# The words in front of a prompt that a template brings are everybody's: so many cached tokens are no cache hit.
TEMPLATE_TOKENS = 64
CLIENT_BUSY = 0.8  # of one core: above it, our own clock is late


def told_tokens(requests: Sequence[Request]) -> int:
    """Output that the server said it gave this run."""
    return sum(one.measured.completion or 0 for one in requests)


def made(
    settings: Settings,
    requests: Sequence[Request],
    before: Counters | None,
    after: Counters | None,
    busy_share: float,
    saw_reasoning: bool,
) -> tuple[dict[str, Any], list[str]]:
    """The checks, and a note in words for each that did not hold or could not be made. busy_share: of a core, this process's."""
    told, counted = told_tokens(requests), counters.grown(before, after, "generated")
    whole = all(one.measured.completion is not None for one in requests)
    exclusive = _exclusive(told, counted, len(requests), whole)
    cache, notes = _cache(requests, before, after)
    if exclusive is False:
        notes.append(f"not exclusive: the engine generated {counted:g} tokens, {told} of them for this run")
    if exclusive is None:
        notes.append("whether others used the engine is not known")
    if busy_share > CLIENT_BUSY:
        notes.append(f"this process used {busy_share:.0%} of a core: its own clock may be late")
    if lost := sum(one.measured.outcome != OK for one in requests):
        notes.append(
            f"{lost} of {len(requests)} requests were not whole: no statistic has them, and their time is in the throughput"
        )
    lengths = {one.measured.completion for one in requests if one.measured.outcome == OK}
    fixed = lengths == {settings.max_tokens} if lengths else None
    if fixed is False:
        notes.append(f"the output's length was not fixed: {min(filter(None, lengths), default=0)} tokens at the least")
    if settings.reasoning == OFF and saw_reasoning:
        notes.append("reasoning was asked off, and came all the same")
    found = {"usage_tokens": told, "counted_tokens": counted, "exclusive": exclusive, "client_cpu_share": round(busy_share, 3)}
    rest = {"output_length_fixed": fixed, "reasoning_seen": saw_reasoning}
    return {**found, **cache, **_prefill(requests, before, after), **rest}, notes


def _cache(requests: Sequence[Request], before: Counters | None, after: Counters | None) -> tuple[dict[str, Any], list[str]]:
    """By the usage where it tells, else by the engine's counters; their sum over the run is bounded the same way."""
    said = [one.measured.cached for one in requests if one.measured.cached is not None]
    if said:
        worst, by = max(said), "usage"
    else:
        grown = counters.grown(before, after, "cached")
        if grown is None or not requests:
            return {}, ["whether a prefix cache answered is not known"]
        worst, by = round(grown / len(requests)), "metrics"
    missed = worst <= TEMPLATE_TOKENS
    notes = [] if missed else [f"a prefix cache answered up to {worst} tokens of a prompt"]
    return {"cache_missed": missed, "cached_tokens_most": worst, "cache_by": by}, notes


def _prefill(requests: Sequence[Request], before: Counters | None, after: Counters | None) -> dict[str, Any]:
    """The engine's own histogram beside ours, where it counted exactly our requests."""
    seconds, count = counters.grown(before, after, "prefill_seconds"), counters.grown(before, after, "prefills")
    tokens = sum((one.measured.prompt or 0) - (one.measured.cached or 0) for one in requests)
    return {"prefill_metrics_tokens_per_s": round(tokens / seconds, 3)} if seconds and count == len(requests) else {}


def _exclusive(told: int, counted: float | None, requests: int, whole: bool) -> bool | None:
    """A token or so a request may be counted or not (the end of the text): within that, or 1 %, it was ours alone."""
    if counted is None or not whole:
        return None
    slack = max(requests, told // 100)
    if counted < told - slack:
        return None  # the counter is of something else
    return counted <= told + slack
