"""JSON that others wrote: nodes, engines, and files that a person or another version may have touched."""

from __future__ import annotations

import json
import math
from typing import Any

_MOST_DIGITS = 40  # no count of anything; beyond, int() takes the square of the length, and float() of it raises


def loads(text: str | bytes | bytearray) -> Any:
    """json.loads, whose only failure is ValueError: also for a value that is nested too deep for Python, and for numbers
    that JSON does not have (NaN, Infinity, 1e999), which could not be told on as JSON."""
    try:
        return json.loads(text, parse_constant=_no_number, parse_float=_finite, parse_int=_bounded)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_number(text)


def _bounded(text: str) -> int:
    return int(text) if len(text) <= _MOST_DIGITS else _no_number(f"{text[:_MOST_DIGITS]}...")
