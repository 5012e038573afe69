"""When an experiment pauses or ends for the machine's sake."""

from __future__ import annotations

from typing import Any

import pytest

from spark_bench.guards import GO, PAUSE, STOP, Limits, decide

GIB = 1 << 30
LIMITS = Limits(12 * GIB, 85.0, GIB, 900.0)
GOOD: dict[str, Any] = {"available_bytes": 40 * GIB, "swap_used_bytes": 2 * GIB, "gpus": [{"temperature_c": 60.0}]}


CASES: dict[str, tuple[dict[str, Any], float | None, str, str | None]] = {
    "well": ({}, None, GO, None),
    "at the edge": ({"available_bytes": 12 * GIB, "swap_used_bytes": 3 * GIB, "gpus": [{"temperature_c": 84.9}]}, None, GO, None),
    "little memory": ({"available_bytes": 12 * GIB - 1}, None, STOP, "12.0 GiB are free, fewer than 12.0"),
    "swap grew": ({"swap_used_bytes": 3 * GIB + 1}, None, STOP, "swap has grown by 1.00 GiB, more than 1.00"),
    "hot": ({"gpus": [{"temperature_c": 60.0}, {"temperature_c": 85.0}]}, None, PAUSE, "85 degrees, not below 85"),
    "still warm": ({"gpus": [{"temperature_c": 82.0}]}, 10.0, PAUSE, "82 degrees, not below 80"),
    "cooled": ({"gpus": [{"temperature_c": 79.0}]}, 10.0, GO, None),
    "does not cool": ({"gpus": [{"temperature_c": 82.0}]}, 901.0, STOP, "82 degrees after a pause of 901 s"),
    "no memory to read": ({"available_bytes": None}, None, STOP, "the free memory cannot be read"),
    "no swap to read": ({"swap_used_bytes": None}, None, STOP, "the use of swap cannot be read"),
    "no GPU to ask": ({"gpus": None}, None, STOP, "the GPU's temperature cannot be read"),
    "no temperature": ({"gpus": [{"temperature_c": None}]}, None, STOP, "the GPU's temperature cannot be read"),
}


@pytest.mark.parametrize("case", CASES)
def test_guards(case: str) -> None:
    """Memory and swap end it, heat pauses it, and what cannot be read ends it as well."""
    changes, paused, verdict, why = CASES[case]
    assert decide({**GOOD, **changes}, GOOD, LIMITS, paused) == (verdict, why)
