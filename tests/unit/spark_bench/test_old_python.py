"""What is sent to a node: the Python there may be three years older than ours."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from spark_bench.remote import PACKAGE

SOURCES = Path(__file__).parents[3] / "spark_bench"


@pytest.mark.parametrize("name", PACKAGE)
def test_it_reads_as_python_3_8(name: str) -> None:
    """Its grammar is 3.8's, its annotations are never evaluated, and it joins no dictionaries with a bar."""
    tree = ast.parse((SOURCES / f"{name}.py").read_text(), feature_version=(3, 8))
    if name != "__init__":
        assert any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body)
    bars = [node for node in ast.walk(tree) if isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, ast.BitOr)]
    annotations = [node for node in ast.walk(tree) if isinstance(node, (ast.arg, ast.AnnAssign)) and node.annotation]
    typed = {id(inner) for node in annotations for inner in ast.walk(node.annotation or node)}
    typed |= {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.returns
        for inner in ast.walk(node.returns)
    }
    assert [ast.unparse(node) for node in bars if id(node) not in typed] == []


def test_all_of_it_is_sent() -> None:
    """Every module but the laptop's own part."""
    assert {path.stem for path in SOURCES.glob("*.py")} == {*PACKAGE, "remote"}
