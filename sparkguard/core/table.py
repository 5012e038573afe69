"""The table of a model's tensors, taken apart by layer: most layers of a model are alike, and need be looked at once."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from sparkguard.core.ggml import Stored

_PREFIX = "blk."


class Table:
    """by_name: all tensors, in the file's order. others: those of no layer, by name.

    layers: each one's number, and its tensors by the rest of the name, the dot included; layers that are alike share a mapping.
    """

    def __init__(self, by_name: Mapping[str, Stored]) -> None:
        self.by_name = by_name
        self.others: dict[str, Stored] = {}
        found: dict[str, dict[str, Stored]] = {}
        begin, tensors = "\n", self.others  # of one letter, so that a name stays whole
        for name, stored in by_name.items():
            if not name.startswith(begin):  # those of a layer follow each other, mostly
                number = _number(name)
                if number is None:
                    self.others[name] = stored
                    continue
                begin, tensors = f"{_PREFIX}{number}.", found.setdefault(number, {})
            tensors[name[len(begin) - 1 :]] = stored
        alike: dict[tuple[object, ...], dict[str, Stored]] = {}
        self.layers = [
            (int(number), alike.setdefault((*tensors, *map(id, tensors.values())), tensors)) for number, tensors in found.items()
        ]


def layer_of(name: str) -> int | None:
    number = _number(name)
    return None if number is None else int(number)


def _number(name: str) -> str | None:
    if not name.startswith(_PREFIX):
        return None
    number = name[len(_PREFIX) :].partition(".")[0]
    return number if number.isdecimal() and len(number) < 5 else None
