"""Rates, means and percentiles: what two readings tell, and when they tell nothing. Rows of the fault list: 16, 17, 24."""

from __future__ import annotations

import bisect
import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkguard.core import rates
from sparkguard.core.rates import Histogram, Reading, Window, between, is_stale, mean, patience, quantile

LES = (0.1, 0.5, 1.0, 5.0)
ONE = (("engine", "0"),)
TWO = (("engine", "1"),)
small = st.integers(min_value=0, max_value=10**9)


def reading(at: float, value: float, *, identity: tuple[str, ...] = ("a",), node: float | None = None) -> Reading:
    return Reading(at, identity, {"tokens": {ONE: value}}, {}, node)


def histogram(values: list[float]) -> Histogram:
    ordered = sorted(values)
    return Histogram(tuple((le, float(bisect.bisect_right(ordered, le))) for le in LES), float(len(values)), sum(values))


@given(small, small, st.floats(min_value=0.01, max_value=6))
def test_a_rate_is_the_growth_over_the_laptops_time(first: int, growth: int, seconds: float) -> None:
    """Two readings in a row give the growth divided by the seconds between their arrivals."""
    made = between(reading(10.0, first), reading(10.0 + seconds, first + growth), 2.0)
    assert made.reason is None
    assert made.rates["tokens"] == pytest.approx(growth / (10.0 + seconds - 10.0))


@given(st.lists(small, min_size=2, max_size=30))
def test_no_rate_is_ever_negative_or_made_up(values: list[int]) -> None:
    """A fall gives no value and a mark, whatever else the counters do; a rate is never below zero."""
    for before, now in pairwise(values):
        made = between(reading(1.0, before), reading(2.0, now), 1.0)
        if now < before:
            assert (made.reason, made.reset, made.rates["tokens"]) == (rates.RESET, True, None)
        else:
            assert made.rates["tokens"] == now - before


def test_the_first_reading_has_no_rate() -> None:
    """There is nothing to compare it with, and that is no reset."""
    made = between(None, reading(1.0, 5), 1.0)
    assert (made.reason, made.reset, made.rates) == (rates.FIRST, False, {"tokens": None})


def test_one_of_two_engines_that_begins_anew_is_noticed() -> None:
    """Although the sum of both has grown."""
    before = Reading(1.0, (), {"tokens": {ONE: 100, TWO: 100}}, {})
    now = Reading(2.0, (), {"tokens": {ONE: 5, TWO: 300}}, {})
    assert between(before, now, 1.0).reason == rates.RESET


def test_a_fall_of_one_counter_takes_all_values_of_the_interval() -> None:
    """Another counter may already have grown past its old value."""
    before = Reading(1.0, (), {"a": {(): 100}, "b": {(): 3}}, {})
    now = Reading(2.0, (), {"a": {(): 1}, "b": {(): 50}}, {})
    assert between(before, now, 1.0).rates == {"a": None, "b": None}


def test_another_container_or_process_is_another_counter() -> None:
    """A changed identity gives no value and a mark, also where the number grew."""
    made = between(reading(1.0, 5), reading(2.0, 9, identity=("b",)), 1.0)
    assert (made.reason, made.reset, made.rates) == (rates.CHANGED, True, {"tokens": None})


def test_a_counter_whose_labels_change_has_no_value() -> None:
    """An engine that came or went makes the sum one of other things; the other counters keep theirs."""
    before = Reading(1.0, (), {"a": {ONE: 5}, "b": {(): 3}}, {})
    now = Reading(2.0, (), {"a": {ONE: 6, TWO: 7}, "b": {(): 4}}, {})
    assert between(before, now, 1.0).rates == {"a": None, "b": 1}


@given(st.floats(min_value=0.25, max_value=30), st.floats(min_value=0.01, max_value=7200))
def test_a_gap_has_no_rate(interval: float, more: float) -> None:
    """After more than the larger of 6 s and three intervals, as when the laptop slept, the next reading begins anew."""
    long = patience(interval) + more
    assert patience(interval) == max(6, 3 * interval)
    made = between(reading(1.0, 5), reading(1.0 + long, 9), interval)
    assert (made.reason, made.reset, made.rates) == (rates.GAP, False, {"tokens": None})


def test_a_scrape_that_comes_twice_divides_by_nothing() -> None:
    """Two readings at one moment have no rate."""
    assert between(reading(1.0, 5), reading(1.0, 9), 1.0).rates == {"tokens": None}


def test_a_reading_that_was_held_up_has_no_rate() -> None:
    """Four seconds late, it would show a quarter of the rate, and the one behind it a spike."""
    readings = [reading(0.0, 0, node=100.0), reading(5.0, 100, node=101.0), reading(5.01, 200, node=102.0)]
    readings += [reading(6.0, 600, node=106.0), reading(7.0, 700, node=107.0)]
    made = [between(before, now, 1.0) for before, now in pairwise(readings)]
    assert [it.reason for it in made] == [rates.LATE, rates.LATE, rates.LATE, None]
    assert made[-1].rates == {"tokens": 100.0}


def test_what_is_old_is_stale() -> None:
    """By the same bound; what never came is stale, too."""
    assert [is_stale(age, 2.0) for age in (None, 0.0, 6.0, 6.1)] == [True, False, False, True]
    assert not is_stale(29.0, 10.0)


values = st.lists(st.floats(min_value=0.001, max_value=4.9), max_size=60)


@given(values, values)
def test_a_mean_is_that_of_the_interval(old: list[float], new: list[float]) -> None:
    """What came before does not count, and without events there is none."""
    made = mean(histogram(old), histogram(old + new))
    if new:
        assert made == pytest.approx(math.fsum(new) / len(new), abs=1e-6)
    else:
        assert made is None


@given(values, values.filter(bool), st.floats(min_value=0.01, max_value=1))
def test_a_percentile_is_in_the_bucket_of_the_true_one(old: list[float], new: list[float], share: float) -> None:
    """Of the new events alone."""
    made = quantile(share, histogram(old), histogram(old + new))
    true = sorted(new)[max(0, math.ceil(share * len(new) - 1e-9) - 1)]
    place = bisect.bisect_left(LES, true)
    assert made is not None
    assert (LES[place - 1] if place else 0.0) - 1e-9 <= made <= LES[place] + 1e-9


@given(values, values.filter(bool))
def test_percentiles_are_in_order(old: list[float], new: list[float]) -> None:
    """A higher share never gives a smaller value."""
    made = [quantile(share, histogram(old), histogram(old + new)) for share in (0.0, 0.1, 0.5, 0.9, 0.95, 0.99, 1.0)]
    assert None not in made
    assert made == sorted(made, key=lambda it: it or 0.0)


def test_a_percentile_as_prometheus_computes_it() -> None:
    """The example of its documentation's rule: linear within the bucket, and the highest bound for what lies above."""
    before = Histogram(((1.0, 0), (2.0, 0)), 0, 0)
    assert quantile(0.5, before, Histogram(((1.0, 2), (2.0, 6)), 6, 8)) == pytest.approx(1.25)
    assert quantile(0.99, before, Histogram(((1.0, 1), (2.0, 1)), 10, 80)) == 2.0


def test_no_events_no_percentile() -> None:
    """Nor where the buckets are others than before, or one reading lacks them."""
    some = histogram([0.2])
    assert quantile(0.5, some, some) is None
    assert quantile(0.5, None, some) is None
    assert quantile(0.5, Histogram(((0.3, 0),), 0, 0), some) is None


def test_a_window_forgets() -> None:
    """Its percentiles are those of the last seconds, and nothing from before a break counts."""
    window = Window(10.0)
    events: list[float] = []

    def add(at: float, new: list[float], reason: str | None) -> None:
        events.extend(new)
        window.add(Reading(at, (), {"n": {(): float(len(events))}}, {"ttft": histogram(events)}), reason)

    add(0.0, [4.0] * 50, rates.FIRST)
    assert (window.span, window.quantile(0.5, "ttft"), window.delta("n")) == (None, None, None)
    for second in range(1, 21):
        add(float(second), [0.05], None)
    assert window.events("ttft") == 10
    assert window.delta("n") == 10
    assert window.mean("ttft") == pytest.approx(0.05)
    add(30.0, [4.0], rates.GAP)
    assert window.quantile(0.5, "ttft") is None


def test_histograms_of_two_engines_add_up() -> None:
    """Where their buckets are the same; else there is no sum."""
    assert histogram([0.5]) + histogram([0.5, 3.0]) == histogram([0.5, 0.5, 3.0])
    assert histogram([0.2]) + Histogram((), 1, 0.2) is None
