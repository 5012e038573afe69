"""What a sample of numbers says, and how sure that is: order statistics, and the mean of repeats with its interval."""

from __future__ import annotations

from sparkguard.core.record import Record

# With fewer, a 95th percentile is the largest but in name; then minimum, median and maximum are said and no percentile.
LEAST_FOR_PERCENTILES = 20

# Student's t for a two-sided interval of 95 %, by degrees of freedom 1..30; beyond, _t() comes within 0.0005.
_T = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281,
    2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
    2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
)  # fmt: skip


class Sample(Record):
    """Order statistics of n numbers; p95 and p99 are None below LEAST_FOR_PERCENTILES."""

    n: int
    least: float
    median: float
    most: float
    mean: float
    p95: float | None = None
    p99: float | None = None


class Mean(Record):
    """A mean over repeats; half is half the width of its 95 % interval, None for fewer than two."""

    n: int
    mean: float
    half: float | None


def sample(numbers: list[float]) -> Sample | None:
    """None of nothing."""
    if not numbers:
        return None
    ordered = sorted(numbers)
    many = len(ordered) >= LEAST_FOR_PERCENTILES
    return Sample(
        n=len(ordered),
        least=ordered[0],
        median=quantile(ordered, 0.5),
        most=ordered[-1],
        mean=sum(ordered) / len(ordered),
        p95=quantile(ordered, 0.95) if many else None,
        p99=quantile(ordered, 0.99) if many else None,
    )


def quantile(ordered: list[float], share: float) -> float:
    """Linear between the two nearest, as numpy and `vllm bench` have it."""
    place = (len(ordered) - 1) * share
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def mean_of_repeats(numbers: list[float]) -> Mean | None:
    """Repeats are whole batches: requests of one batch share its luck, and are no independent repeats."""
    count = len(numbers)
    if not count:
        return None
    mean = sum(numbers) / count
    if count < 2:
        return Mean(count, mean, None)
    variance = sum((number - mean) ** 2 for number in numbers) / (count - 1)
    return Mean(count, mean, _t(count - 1) * (variance / count) ** 0.5)


def _t(freedom: int) -> float:
    if freedom <= len(_T):
        return _T[freedom - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
