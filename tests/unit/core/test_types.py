"""The words of the house."""

from __future__ import annotations

import inspect

import pytest

from sparkguard.core import types
from sparkguard.core.record import Record

RECORDS = [kind for _, kind in inspect.getmembers(types, inspect.isclass) if issubclass(kind, Record) and kind is not Record]


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_units_stand_in_the_names(kind: type[Record]) -> None:
    """A field of bytes is named so, and no share or byte is a float."""
    assert kind.__annotations__
    for name, annotation in kind.__annotations__.items():
        assert "float" not in annotation
        if name.endswith("bytes"):
            assert annotation in ("int", "int | None")


def test_unknown_is_none() -> None:
    """What nobody has said is None, never 0."""
    assert types.MemoryPool("ram", types.RAM, 1).available_bytes is None
    assert types.Hold("ram", None, None).share is None
    assert types.Budget(1).reserve_bytes is None
