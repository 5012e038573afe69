"""The texts that nodes run."""

from __future__ import annotations

import ast
import io
import json
from importlib.resources import files
from typing import Any

import pytest

from sparkguard.cluster import program
from sparkguard.cluster.node import base

NODE = files("sparkguard.cluster.node")
PROGRAMS = sorted(path.name[:-3] for path in NODE.iterdir() if path.name.endswith(".py") and path.name != "__init__.py")


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_nodes_python_can_read_it(name: str) -> None:
    """The syntax is Python 3.8's, and annotations are never evaluated."""
    text = (NODE / f"{name}.py").read_text(encoding="utf-8")
    tree = ast.parse(text, feature_version=(3, 8))
    assert name == "boot" or any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body)


def order_of(text: bytes) -> dict[str, Any]:
    """What boot.py reads: the payload is its text and this, each after its length."""
    stdin = io.BytesIO(text)
    stdin.read(int(stdin.readline()))
    order: dict[str, Any] = json.loads(stdin.read(int(stdin.readline())))
    return order


def test_what_a_program_imports_comes_before_it() -> None:
    """With what that imports itself, each once, base first."""
    order = order_of(program.payload("act", {"x": 1}, 5, None, b"s3cret"))
    names = [name.rpartition(".")[2] for name, _ in order["modules"]]
    assert names[0] == "base" and names[-1] == "act" and len(names) == len(set(names))
    assert names.index("docker") < names.index("act") and names.index("records") < names.index("act")
    assert (order["request"], order["seconds"], order["secret_bytes"]) == ({"x": 1}, 5, 6)


def test_a_secret_is_no_part_of_the_text() -> None:
    """It is the payload's last bytes, and nothing else."""
    text = program.payload("observe", {}, 5, None, b"s3cret")
    assert text.endswith(b"s3cret") and text.count(b"s3cret") == 1


def test_both_ends_know_the_same_marker() -> None:
    """What the laptop skips to is what a program says first."""
    assert program.MARKER == base.MARKER


def test_the_command_needs_no_quoting() -> None:
    """One pair of single quotes, so that any login shell passes it on as it is."""
    assert program.BOOT.count("'") == 2 and not set("!$`\\") & set(program.BOOT)
