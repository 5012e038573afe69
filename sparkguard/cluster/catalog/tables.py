"""Reads one table of a TOML file key by key, and notes every fault instead of stopping at the first.

What a getter returns after a fault is a value of the right type that nobody will use: the catalog is refused as a whole.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

T = TypeVar("T")
TOML_TYPES = {str: "a text", bool: "true or false", int: "a whole number", float: "a number", list: "a list", dict: "a table"}


class Faults:
    """All that is wrong with one file, in the order in which it was found."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, where: str, what: str) -> None:
        line = f"{where}: {what}"
        if line not in self.lines:
            self.lines.append(line)


class Table:
    """A table and the keys of it that were asked for; end() names the rest."""

    def __init__(self, values: dict[str, Any], where: str, faults: Faults) -> None:
        self.values = values
        self.where = where
        self.faults = faults
        self.known: list[str] = []

    def fault(self, key: str, what: str) -> None:
        self.faults.add(f"{self.where} {key}" if self.where else key, what)

    def has(self, key: str) -> bool:
        return key in self.values

    def text(self, key: str, default: str = "", check: Callable[[str], str | None] | None = None) -> str:
        """check says what is wrong with the text, or None."""
        value = self._typed(key, str, default)
        if key in self.values and value != default:
            what = text_fault(value) or (check(value) if check else None)
            if what:
                self.fault(key, what)
        return value

    def number(self, key: str, default: int, low: int, high: int) -> int:
        value = self._typed(key, int, default)
        if not low <= value <= high:
            self.fault(key, f"{value} is not between {low} and {high}")
        return value

    def optional_number(self, key: str, low: int, high: int) -> int | None:
        return self.number(key, low, low, high) if self._asked(key) else None

    def real(self, key: str, low: float, high: float) -> float | None:
        """Above low and up to high; None: not given."""
        if not self._asked(key):
            return None
        value = self.values[key]
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.fault(key, f"wants a number, has {shown(value)}")
            return None
        if not low < value <= high:
            self.fault(key, f"{value} is not above {low:g} and at most {high:g}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        return self._typed(key, bool, default)

    def texts(self, key: str, default: tuple[str, ...] = (), check: Callable[[str], str | None] | None = None) -> tuple[str, ...]:
        values = self._typed(key, list, list(default))
        if not all(isinstance(value, str) for value in values):
            self.fault(key, f"wants a list of texts, has {shown(values)}")
            return default
        for value in values:
            what = text_fault(value, empty=True) or (check(value) if check else None)
            if what:
                self.fault(key, what)
        return tuple(values)

    def commands(self, key: str) -> tuple[tuple[str, ...], ...]:
        """A list of argument lists."""
        values = self._typed(key, list, [])
        if not all(isinstance(value, list) and value and all(isinstance(word, str) for word in value) for value in values):
            self.fault(key, f"wants a list of argument lists, has {shown(values)}")
            return ()
        return tuple(tuple(value) for value in values)

    def environment(self, key: str) -> tuple[tuple[str, str], ...]:
        """A table of variables; numbers and flags are written as the programs that read them expect."""
        inner = self.table(key)
        pairs = []
        for name, value in inner.values.items():
            inner.known.append(name)
            if not name.isidentifier() or not name.isascii():
                inner.fault(name, "is no name of an environment variable")
            if isinstance(value, bool):
                value = "1" if value else "0"
            if not isinstance(value, (str, int, float)):
                inner.fault(name, f"wants a text, has {shown(value)}")
                continue
            if what := text_fault(str(value), empty=True):
                inner.fault(name, what)
            pairs.append((name, str(value)))
        return tuple(pairs)

    def table(self, key: str) -> Table:
        return Table(self._typed(key, dict, {}), f"{self.where[:-1]}.{key}]" if self.where else f"[{key}]", self.faults)

    def tables(self, key: str) -> list[Table]:
        values = self._typed(key, list, [])
        if not all(isinstance(value, dict) for value in values):
            self.fault(key, f"wants [[tables]], has {shown(values)}")
            return []
        inside = f"{self.where[:-1]}.{key}" if self.where else f"[{key}"
        return [Table(value, f"{inside}[{number}]]", self.faults) for number, value in enumerate(values, 1)]

    def end(self) -> None:
        """Notes each key that nobody asked for, with the nearest one that could have been meant."""
        for key in self.values:
            if key not in self.known:
                self.fault(key, "is unknown" + nearest(key, self.known))

    def _asked(self, key: str) -> bool:
        self.known.append(key)
        return key in self.values

    def _typed(self, key: str, wanted: type[T], default: T) -> T:
        if not self._asked(key):
            return default
        value = self.values[key]
        if isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool)):
            return value
        self.fault(key, f"wants {TOML_TYPES[wanted]}, has {shown(value)}")
        return default


def nearest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), 1, 0.6)
    return f"; did you mean {close[0]}?" if close else ""


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def text_fault(value: str, empty: bool = False) -> str | None:
    if not value and not empty:
        return "is empty"
    if any(not char.isprintable() for char in value):
        return f"holds a control character: {shown(value)}"
    return None
