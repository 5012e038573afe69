"""The table of tensors by layer: alike ones are one, and whatever a file calls its tensors, none is lost."""

from __future__ import annotations

from sparkguard.core.ggml import BY_NAME, Stored
from sparkguard.core.table import Table, layer_of

SMALL, LARGE = (Stored((rows, 32), BY_NAME["f16"], 2 * 32 * rows) for rows in (1, 2))


def test_layers_that_are_alike_are_one() -> None:
    """They have the same names and the same kinds of tensors."""
    table = Table({"blk.0.a": SMALL, "blk.0.b": LARGE, "blk.1.a": SMALL, "blk.1.b": LARGE, "blk.2.a": LARGE, "blk.2.b": SMALL})
    assert table.layers == [(0, {".a": SMALL, ".b": LARGE}), (1, {".a": SMALL, ".b": LARGE}), (2, {".a": LARGE, ".b": SMALL})]
    assert table.layers[0][1] is table.layers[1][1]


def test_tensors_of_no_layer() -> None:
    """A number that no layer can have makes none, in whatever script it is written."""
    names = ["output.weight", "blk.x.a", "blk.\N{SUPERSCRIPT TWO}.a", "blk.12345.a", "blk..a", "blk."]
    table = Table(dict.fromkeys(names, SMALL))
    assert list(table.others) == names and table.layers == []
    assert {layer_of(name) for name in names} == {None}


def test_no_tensor_is_lost() -> None:
    """Not even where two names mean the same layer, or have no more than its number."""
    names = ["blk.7.a", "blk.07.a", "blk.7", "blk.7."]
    table = Table(dict.fromkeys(names, SMALL))
    assert [number for number, _ in table.layers] == [7, 7] and {layer_of(name) for name in names} == {7}
    assert sum(len(tensors) for _, tensors in table.layers) == len(names)


def test_a_layer_in_pieces() -> None:
    """Its tensors need not follow each other, and names that begin alike are of different layers."""
    names = ["blk.1.a", "blk.12.a", "\nblk.1.a", "blk.1.b", "output", "blk.1.c", "blk.12.b"]
    table = Table(dict.fromkeys(names, SMALL))
    assert [(number, list(tensors)) for number, tensors in table.layers] == [(1, [".a", ".b", ".c"]), (12, [".a", ".b"])]
    assert list(table.others) == ["\nblk.1.a", "output"]
