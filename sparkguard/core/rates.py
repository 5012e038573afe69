"""What two readings of the same counters tell: rates, means and percentiles of the time between them, or that they tell nothing.

Times are seconds of the laptop's own clock, which also counts while it sleeps: no clock of a node is ever compared with it.
Nothing is guessed: where the counters began anew, or nothing happened, or too long a time went by, the answer is None.
"""

from __future__ import annotations

from sparkguard.core.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from sparkguard.core.prometheus_text import Labels

    Series = Mapping[Labels, float]

GAP_SECONDS = 6.0
GAP_INTERVALS = 3

# Why an interval has no values.
FIRST, RESET, CHANGED, GAP, SAME, LATE = "first", "reset", "changed", "gap", "same", "late"


class Histogram(Record):
    """A cumulative histogram: of how many events the value was at most `le`."""

    buckets: tuple[tuple[float, float], ...]  # by le, without +Inf
    count: float
    sum: float

    def __add__(self, other: Histogram) -> Histogram | None:
        """Of two engines together; None where their buckets differ."""
        if [le for le, _ in self.buckets] != [le for le, _ in other.buckets]:
            return None
        buckets = tuple((le, mine + its) for (le, mine), (_, its) in zip(self.buckets, other.buckets))
        return Histogram(buckets, self.count + other.count, self.sum + other.sum)


class Reading(Record):
    """Counters as they were read at one moment."""

    at: float  # this laptop's clock, when they arrived
    identity: tuple[str, ...]  # container, allocation, start of the process: other counters where it differs
    counters: Mapping[str, Series]
    histograms: Mapping[str, Histogram]
    node_seconds: float | None = None  # the sender's own steady clock, only to see that the reading was held up


class Interval(Record):
    """From one reading to the next. reason: why there are no values, None where there are."""

    seconds: float | None
    reason: str | None
    rates: Mapping[str, float | None]  # per second
    deltas: Mapping[str, float | None]

    @property
    def reset(self) -> bool:
        """A line through these values is to be broken here."""
        return self.reason in (RESET, CHANGED)


def patience(interval: float) -> float:
    """After so many seconds without news, what is known is old."""
    return max(GAP_SECONDS, GAP_INTERVALS * interval)


def is_stale(age: float | None, interval: float) -> bool:
    return age is None or age > patience(interval)


def between(before: Reading | None, now: Reading, interval: float) -> Interval:
    """What happened between two readings."""
    reason = _reason(before, now, interval)
    if before is None or reason is not None:
        return Interval(None, reason, dict.fromkeys(now.counters), dict.fromkeys(now.counters))
    seconds = now.at - before.at
    deltas = {name: _delta(before.counters.get(name), series) for name, series in now.counters.items()}
    rates = {name: None if delta is None else delta / seconds for name, delta in deltas.items()}
    return Interval(seconds, None, rates, deltas)


def _reason(before: Reading | None, now: Reading, interval: float) -> str | None:
    if before is None:
        return FIRST
    if now.identity != before.identity:
        return CHANGED
    seconds = now.at - before.at
    if seconds > patience(interval):
        return GAP
    # One counter that went back tells that all of them began anew, also those that have grown past their old value.
    if any(_fell(before.counters.get(name), series) for name, series in now.counters.items()):
        return RESET
    if any(name in before.histograms and it.count < before.histograms[name].count for name, it in now.histograms.items()):
        return RESET
    if seconds <= 0:
        return SAME
    return LATE if _was_held_up(before, now, seconds, interval) else None


def _was_held_up(before: Reading, now: Reading, seconds: float, interval: float) -> bool:
    """The next ones come at once behind such a one: their distance here is not the distance of their counting."""
    if now.node_seconds is None or before.node_seconds is None:
        return False
    return abs(now.node_seconds - before.node_seconds - seconds) > max(0.5, interval / 2)


def _fell(before: Series | None, now: Series) -> bool:
    return before is not None and any(value < before[labels] for labels, value in now.items() if labels in before)


def _delta(before: Series | None, now: Series) -> float | None:
    """None where series came or went: the sum is of other things then."""
    if before is None or before.keys() != now.keys():
        return None
    return sum(now.values()) - sum(before.values())


def mean(before: Histogram | None, now: Histogram | None) -> float | None:
    """Of the events between two readings; None where there were none."""
    if before is None or now is None or now.count <= before.count or now.sum < before.sum:
        return None
    return (now.sum - before.sum) / (now.count - before.count)


def quantile(share: float, before: Histogram | None, now: Histogram | None) -> float | None:
    """Of the events between two readings, as Prometheus's histogram_quantile estimates it: evenly spread in each bucket.

    An event above the highest bound counts as that bound. None where there were no events.
    """
    if before is None or now is None or [le for le, _ in before.buckets] != [le for le, _ in now.buckets]:
        return None
    total = now.count - before.count
    if total <= 0 or not now.buckets:
        return None
    wanted = share * total
    lower, below = 0.0, 0.0
    for (le, upto), (_, earlier) in zip(now.buckets, before.buckets):
        events = max(below, upto - earlier)  # cumulative: a dip is a scrape that was taken while they were counted
        if events >= wanted and events > below:
            return lower + (le - lower) * max(0.0, wanted - below) / (events - below) if le > 0 else le
        lower, below = le, events
    return now.buckets[-1][0]


class Window:
    """The readings of the last so many seconds, for percentiles of now and not of a whole life. Emptied at each break."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._readings: list[Reading] = []

    def add(self, reading: Reading, reason: str | None) -> None:
        if reason in (FIRST, RESET, CHANGED, GAP):
            self._readings.clear()
        if reason == SAME:
            return
        self._readings.append(reading)
        # The newest one that is old enough is where the window begins.
        while len(self._readings) > 2 and reading.at - self._readings[1].at >= self.seconds:
            self._readings.pop(0)

    @property
    def span(self) -> tuple[Reading, Reading] | None:
        return (self._readings[0], self._readings[-1]) if len(self._readings) > 1 else None

    def delta(self, name: str) -> float | None:
        if self.span is None or name not in self.span[1].counters:
            return None
        return _delta(self.span[0].counters.get(name), self.span[1].counters[name])

    def quantile(self, share: float, name: str) -> float | None:
        return None if self.span is None else quantile(share, *(it.histograms.get(name) for it in self.span))

    def mean(self, name: str) -> float | None:
        return None if self.span is None else mean(*(it.histograms.get(name) for it in self.span))

    def events(self, name: str) -> float | None:
        if self.span is None or any(name not in it.histograms for it in self.span):
            return None
        return self.span[1].histograms[name].count - self.span[0].histograms[name].count
