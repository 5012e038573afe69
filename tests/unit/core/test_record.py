"""Record: what a frozen dataclass does, without its import."""

from __future__ import annotations

import pytest

from sparkguard.core.record import Record


class Base(Record):
    one: int
    two: str = "b"


class Derived(Base):
    three: tuple[int, ...] = ()


def test_positional_named_and_default_values() -> None:
    """Fields come in the order of their annotations, a base class's first."""
    record = Derived(1, three=(3,))
    assert (record.one, record.two, record.three) == (1, "b", (3,))
    assert repr(record) == "Derived(one=1, two='b', three=(3,))"


def test_equal_records_have_equal_hashes() -> None:
    """How a record was built makes no difference to what it is."""
    one, other = Derived(two="x", one=1), Derived(1, "x", ())
    assert one == other
    assert hash(one) == hash(other)
    assert len({one, other, one.replace(one=1)}) == 1
    assert one != other.replace(one=2)


def test_kinds_are_not_equal() -> None:
    """Two classes with the same fields are two things."""
    assert Base(1) != Derived(1)


WRONG = {
    "lacks a field": ((), {}),
    "too many": ((1, "b", (), 4), {}),
    "twice": ((1,), {"one": 1}),
    "unknown": ((1,), {"four": 4}),
}


@pytest.mark.parametrize(("args", "kwargs"), WRONG.values(), ids=WRONG)
def test_wrong_arguments(args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    """A missing, an unknown or a repeated field is a TypeError."""
    with pytest.raises(TypeError, match="Derived"):
        Derived(*args, **kwargs)


def test_frozen() -> None:
    """A field cannot be set; replace() makes a copy."""
    record = Base(1)
    with pytest.raises(AttributeError, match="frozen"):
        record.one = 2  # type: ignore[misc]
    assert (record.one, record.replace(one=2).one) == (1, 2)
