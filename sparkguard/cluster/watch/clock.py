"""This laptop's steady clock, which goes on while the laptop sleeps: an age that slept along is an age all the same."""

from __future__ import annotations

import sys
import time


def _clock() -> int:
    """Linux stops CLOCK_MONOTONIC in suspend and has CLOCK_BOOTTIME; macOS has it the other way round: its CLOCK_MONOTONIC goes
    on, and what Python's time.monotonic() reads stops."""
    if sys.platform == "darwin":
        return time.CLOCK_MONOTONIC
    return getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


_ID = _clock()


def pause(at: float, interval: float, phase: float = 0.0) -> float:
    """Seconds until the next beat. Who beats at another phase of the same interval comes exactly once between two of ours."""
    return interval - (at - phase * interval) % interval


def now() -> float:
    """Seconds since some moment."""
    return time.clock_gettime(_ID)
