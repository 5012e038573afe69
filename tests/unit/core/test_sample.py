"""Order statistics and intervals, held to numpy's and to a t table."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkguard.core.sample import LEAST_FOR_PERCENTILES, _t, mean_of_repeats, sample

NUMBERS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60)


@given(NUMBERS)
def test_percentiles_are_numpys(numbers: list[float]) -> None:
    """The same linear rule as numpy, and so as the benchmarks that use it."""
    found = sample(numbers)
    assert found is not None
    assert found.median == pytest.approx(np.percentile(numbers, 50), abs=1e-6)
    if len(numbers) >= LEAST_FOR_PERCENTILES:
        assert (found.p95, found.p99) == pytest.approx(tuple(np.percentile(numbers, [95, 99])), abs=1e-6)


def test_few_numbers_have_no_percentile() -> None:
    """With 19 numbers, a 95th percentile is the largest but in name."""
    found = sample([float(n) for n in range(LEAST_FOR_PERCENTILES - 1)])
    assert found is not None
    assert (found.n, found.least, found.most, found.p95, found.p99) == (19, 0.0, 18.0, None, None)


def test_of_nothing_nothing_is_said() -> None:
    """No number gives None."""
    assert (sample([]), mean_of_repeats([])) == (None, None)


def test_one_repeat_has_no_interval() -> None:
    """How sure a single mean is cannot be known from it."""
    found = mean_of_repeats([5.0])
    assert found is not None
    assert (found.mean, found.half) == (5.0, None)


def test_the_interval_is_students() -> None:
    """1, 2, 3: a mean of 2 with a deviation of 1, so 4.3027 times 1 by the root of 3."""
    found = mean_of_repeats([1.0, 2.0, 3.0])
    assert found is not None
    assert (found.mean, found.half) == (2.0, pytest.approx(2.4842, abs=1e-4))


@pytest.mark.parametrize(("freedom", "expected"), [(1, 12.7062), (30, 2.0423), (31, 2.0395), (60, 2.0003), (120, 1.9799)])
def test_t_beyond_the_table(freedom: int, expected: float) -> None:
    """The series takes over from the table without a step."""
    assert _t(freedom) == pytest.approx(expected, abs=5e-4)
