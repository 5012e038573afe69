"""The laptop's clock, and beats on it."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from sparkguard.cluster.watch import clock

moments = st.floats(min_value=0, max_value=1e6)
intervals = st.floats(min_value=0.25, max_value=3600)


def test_it_goes_on() -> None:
    """And never back."""
    first = clock.now()
    assert clock.now() >= first


@given(moments, intervals, st.sampled_from([0.0, 0.5]))
def test_the_next_beat_is_within_an_interval(at: float, interval: float, phase: float) -> None:
    """It lies in the future, on the beat."""
    pause = clock.pause(at, interval, phase)
    assert 0 < pause <= interval * (1 + 1e-9)
    beats = (at + pause) / interval - phase
    assert math.isclose(beats, round(beats), abs_tol=1e-3)


@given(moments, intervals)
def test_one_beat_of_the_other_phase_between_two(at: float, interval: float) -> None:
    """So each tick has one new reading of an engine."""
    tick = at + clock.pause(at, interval)
    off = tick + clock.pause(tick, interval, 0.5)
    assert tick < off
    assert off - tick < interval * 0.51 + 1e-3
