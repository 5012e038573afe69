"""The few layers that tell of all: what is left out stands between two places that must be alike."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sparkguard.core.repeats import without_repeats


def test_layers_that_are_all_alike() -> None:
    """Two to begin with, one round, and the one after the last round; the last layer is of its own kind."""
    assert without_repeats([0] * 31 + [1]) == ([0, 1, 2, 30, 31], [(2, 3)])


def test_a_row_with_a_period() -> None:
    """Every sixth layer is another: four layers, six of a round, and what follows the last round."""
    kinds = [0, 0, 0, 0, 0, 1] * 8
    assert without_repeats(kinds[:-1] + [2]) == ([*range(10), 46, 47], [(4, 10)])


def test_several_rows() -> None:
    """Each has its places; a row that is too short for a round is kept whole."""
    chosen, pairs = without_repeats([0] * 3 + [1] * 20 + [2] * 20)
    assert chosen == [0, 1, 2, 3, 4, 5, 22, 23, 24, 25, 42] and pairs == [(5, 6), (9, 10)]


def test_layers_without_a_period() -> None:
    """Nothing is left out."""
    assert without_repeats([0, 1, 0, 0, 1, 1, 0, 1, 1, 1]) == (list(range(10)), [])


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 12), st.integers(1, 2))
def test_what_is_left_out_repeats(kinds: list[int], times: int, periods: int) -> None:
    """Between two places are layers that what is left out consists of, and what goes on there is what came after the first."""
    row = kinds[:10] * times + kinds[10:]
    chosen, pairs = without_repeats(row, periods)
    assert chosen == sorted(set(chosen)) and set(chosen) <= set(range(len(row)))
    left_out = 0
    for begin, end in pairs:
        cycle = [row[i] for i in chosen[begin:end]]
        gap = row[chosen[end - 1] + 1 : chosen[end]]
        assert gap == cycle * (len(gap) // len(cycle)) and gap
        assert row[chosen[end]] == cycle[0] and row[chosen[begin - 1]] == cycle[-1]
        left_out += len(gap)
    assert len(chosen) + left_out == len(row)
