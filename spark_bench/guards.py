"""Whether it may go on: from one reading of the machine, and the first. Pure."""

from __future__ import annotations

from typing import Any

GO, PAUSE, STOP = "go", "pause", "stop"
COOLER = 5.0  # degrees below the limit, before it goes on


class Limits:
    """Where the experiment ends for the machine's sake. They are no statement about the hardware."""

    def __init__(self, free_bytes: int, celsius: float, swap_growth_bytes: int, pause_seconds: float) -> None:
        self.free_bytes = free_bytes
        self.celsius = celsius
        self.swap_growth_bytes = swap_growth_bytes
        self.pause_seconds = pause_seconds

    def record(self) -> dict[str, float]:
        return dict(self.__dict__)


def decide(now: dict[str, Any], first: dict[str, Any], limits: Limits, paused_seconds: float | None) -> tuple[str, str | None]:
    """(GO, PAUSE or STOP, why). paused_seconds: for how long no job has been started; None: it runs.

    Memory and swap end it, since a machine that swaps is one step from its OOM killer; heat pauses it. What cannot be read
    cannot be guarded, and ends it too.
    """
    free = now.get("available_bytes")
    if free is None:
        return STOP, "the free memory cannot be read"
    if free < limits.free_bytes:
        return STOP, f"{free / 2**30:.1f} GiB are free, fewer than {limits.free_bytes / 2**30:.1f}"
    swap, before = now.get("swap_used_bytes"), first.get("swap_used_bytes")
    if swap is None or before is None:
        return STOP, "the use of swap cannot be read"
    if swap - before > limits.swap_growth_bytes:
        return STOP, f"swap has grown by {(swap - before) / 2**30:.2f} GiB, more than {limits.swap_growth_bytes / 2**30:.2f}"
    heat = hottest(now)
    if heat is None:
        return STOP, "the GPU's temperature cannot be read"
    limit = limits.celsius - COOLER if paused_seconds is not None else limits.celsius
    if heat >= limit:
        if paused_seconds is not None and paused_seconds > limits.pause_seconds:
            return STOP, f"{heat:.0f} degrees after a pause of {paused_seconds:.0f} s"
        return PAUSE, f"{heat:.0f} degrees, not below {limit:.0f}"
    return GO, None


def hottest(reading: dict[str, Any]) -> float | None:
    found: list[float] = [gpu["temperature_c"] for gpu in reading.get("gpus") or [] if gpu.get("temperature_c") is not None]
    return max(found) if found else None
