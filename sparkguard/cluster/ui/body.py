"""What the page sends: a JSON object of plain words, since they become arguments of a command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any


def read(data: bytes) -> dict[str, Any]:
    """Raises ValueError, and nothing else, for any other body."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError("the body must be a JSON object")
    # A NUL ends an argument, and a lone surrogate cannot be one.
    if not all(text.isprintable() for text in _strings(value)):
        raise ValueError("the body holds what cannot be printed")
    return value


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield key
            yield from _strings(each)
    elif isinstance(value, list):
        for each in value:
            yield from _strings(each)
