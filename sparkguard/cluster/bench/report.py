"""From measured requests to the record that is saved and shown: one object, docs/schemas/bench.json. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sparkguard.core.measure import CANCELLED, FAILED, INCOMPLETE, OK, Measured, Span, throughput
from sparkguard.core.sample import Mean, Sample, mean_of_repeats, sample

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Name of the number in a record -> where a measured request has it.
NUMBERS: dict[str, Callable[[Measured], float | None]] = {
    "ttft_s": lambda one: one.ttft,
    "ttfo_s": lambda one: one.ttfo,
    "seconds": lambda one: one.seconds,
    "decode_tokens_per_s": lambda one: one.decode_rate,
    "prefill_tokens_per_s": lambda one: one.prefill_rate,
    "prefill_client_tokens_per_s": lambda one: one.prefill_client_rate,
}
_DIGITS = 6


class Request:
    """A measured request, and its place in the run."""

    def __init__(self, number: int, repeat: int, began: float, connect: float, detail: str, measured: Measured) -> None:
        self.number = number
        self.repeat = repeat
        self.began = began  # seconds since the run's start
        self.connect = connect
        self.detail = detail
        self.measured = measured
        self._record: dict[str, Any] | None = None

    @property
    def span(self) -> Span:
        """Only whole requests count their tokens."""
        ok = self.measured.outcome == OK
        ended = self.began + self.measured.seconds
        return Span(self.began, ended, (self.measured.completion or 0) if ok else 0, (self.measured.prompt or 0) if ok else 0)

    def record(self) -> dict[str, Any]:
        """Made once: it is asked for at each save."""
        if self._record is None:
            self._record = self._made()
        return self._record

    def _made(self) -> dict[str, Any]:
        one = self.measured
        return {
            "number": self.number,
            "repeat": self.repeat,
            "outcome": one.outcome,
            "reason": one.reason or None,
            "detail": self.detail or None,
            "began_s": _round(self.began),
            "connect_s": _round(self.connect),
            **{name: _round(number(one)) for name, number in NUMBERS.items()},
            "prefill_by": one.prefill_by,
            "gap_median_s": _round(_median(one.gaps)),
            "gap_max_s": _round(max(one.gaps, default=None)),
            "prompt_tokens": one.prompt,
            "cached_tokens": one.cached,
            "completion_tokens": one.completion,
            "reasoning_tokens": one.reasoning,
            "chunks": one.chunks,
            "finish": one.finish,
            "unmeasured": dict(one.unmeasured),
        }


def level(size: int, streams: int, requests: Sequence[Request], gaps: bool = True) -> dict[str, Any]:
    """All repeats of one size of prompt at one concurrency. gaps: a million of them take half a second to sort."""
    good = [one.measured for one in requests if one.measured.outcome == OK]
    repeats = [
        _repeat(number, [one for one in requests if one.repeat == number]) for number in sorted({r.repeat for r in requests})
    ]
    counts = {
        outcome: sum(one.measured.outcome == outcome for one in requests) for outcome in (OK, INCOMPLETE, FAILED, CANCELLED)
    }
    statistics = {name: _sample([v for one in good if (v := number(one)) is not None]) for name, number in NUMBERS.items()}
    statistics["gap_s"] = _sample([gap for one in good for gap in one.gaps]) if gaps else None
    # A mean over repeats is one of whole repeats only: one that lost a request measured something else.
    whole = [one for one in repeats if one["ok"] == one["n"]]
    return {
        "prompt_tokens_wanted": size,
        "concurrency": streams,
        "n": len(requests),
        **counts,
        "prompt_tokens": _sample([float(one.prompt) for one in good if one.prompt is not None]),
        "completion_tokens": _sample([float(one.completion) for one in good if one.completion is not None]),
        "cached_tokens_max": max((one.cached for one in good if one.cached is not None), default=None),
        "statistics": statistics,
        "repeats": repeats,
        "over_repeats": {
            name: _mean([one[name] for one in whole if one[name] is not None])
            for name in ("generated_tokens_per_s", "prompt_tokens_per_s", "decode_tokens_per_s", "prefill_tokens_per_s", "ttft_s")
        },
        "requests": [one.record() for one in requests],
    }


def _repeat(number: int, requests: Sequence[Request]) -> dict[str, Any]:
    good = [one.measured for one in requests if one.measured.outcome == OK]
    made = throughput([one.span for one in requests])
    return {
        "repeat": number,
        "n": len(requests),
        "ok": len(good),
        "seconds": _round(made[2]) if made else None,
        "generated_tokens_per_s": _round(made[0]) if made and good else None,
        "prompt_tokens_per_s": _round(made[1]) if made and good else None,
        **{
            name: _round(_mean_of([v for one in good if (v := NUMBERS[name](one)) is not None]))
            for name in ("decode_tokens_per_s", "prefill_tokens_per_s", "ttft_s")
        },
    }


def summary(kind: str, levels: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a list shows: medians of the first level, and the best throughput of all. None: nothing was measured."""
    first = levels[0]["statistics"] if levels else {}
    rates = [r["generated_tokens_per_s"] for one in levels for r in one["repeats"] if r["generated_tokens_per_s"] is not None]
    return {
        "kind": kind,
        **{
            name: (first.get(name) or {}).get("median")
            for name in ("ttft_s", "ttfo_s", "decode_tokens_per_s", "prefill_tokens_per_s")
        },
        "best_generated_tokens_per_s": max(rates, default=None),
        "levels": len(levels),
        "n": sum(one["n"] for one in levels),
        **{outcome: sum(one[outcome] for one in levels) for outcome in (OK, INCOMPLETE, FAILED, CANCELLED)},
    }


def _sample(numbers: list[float]) -> dict[str, Any] | None:
    found: Sample | None = sample(numbers)
    if found is None:
        return None
    values = found.__dict__
    return {"n": found.n, **{name: _round(values[key]) for name, key in _NAMES.items()}}


_NAMES = {"min": "least", "median": "median", "max": "most", "mean": "mean", "p95": "p95", "p99": "p99"}


def _mean(numbers: list[float]) -> dict[str, Any] | None:
    found: Mean | None = mean_of_repeats(numbers)
    return None if found is None else {"n": found.n, "mean": _round(found.mean), "half_95": _round(found.half)}


def _mean_of(numbers: list[float]) -> float | None:
    return sum(numbers) / len(numbers) if numbers else None


def _median(numbers: Sequence[float]) -> float | None:
    found = sample(list(numbers))
    return found.median if found else None


def _round(number: float | None) -> float | None:
    """Microseconds, and as many digits of a rate: more is noise."""
    return None if number is None else round(number, _DIGITS)
