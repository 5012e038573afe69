"""The texts that a node runs: a program of cluster/node with the modules that it imports, in one payload for its stdin.

Nothing is installed on a node. Its python3 reads node/boot.py from stdin; that reads the rest, and runs the program.
"""

from __future__ import annotations

import ast
import json
from functools import cache
from importlib.resources import files
from typing import Any

_PACKAGE = "sparkguard.cluster.node"
# One command for every program, and no quotes inside the quotes: any login shell passes it on. -I: what the node's user has
# in PYTHONPATH or in the folder is not ours, nor, with -S, are installed packages; -u: what is said comes at once.
BOOT = (
    "exec python3 -I -S -u -c "
    '\'import sys; reader = sys.stdin.buffer; exec(compile(reader.read(int(reader.readline())), "boot", "exec"))\''
)
# What a login shell prints before the program is skipped up to these bytes. Said by node/base.py.
MARKER = b"\x1esparkguard node 1\n"


def payload(
    program: str, request: dict[str, Any], seconds: float | None, beat_seconds: float | None, secret: bytes | None
) -> bytes:
    """All that goes to the node's stdin before the program begins. seconds: it ends itself then; beat_seconds: or when
    nothing has come on its stdin for so long. The secret is the last part, and no part of the text."""
    order = {
        "modules": _modules(program),
        "program": f"{_PACKAGE}.{program}",
        "request": request,
        "seconds": seconds,
        "beat_seconds": beat_seconds,
        "secret_bytes": len(secret or b""),
    }
    boot = _source("boot").encode()
    text = json.dumps(order).encode()
    return b"%d\n%b%d\n%b%b" % (len(boot), boot, len(text), text, secret or b"")


@cache
def _modules(program: str) -> list[tuple[str, str]]:
    """The program's text and those that it needs, each after what it imports."""
    found: dict[str, str] = {}

    def add(name: str) -> None:
        if name in found:
            return
        source = _source(name)
        for needed in _imports(source):
            add(needed)
        found[name] = source

    add("base")
    add(program)
    return [(f"{_PACKAGE}.{name}", source) for name, source in found.items()]


def _imports(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == _PACKAGE:
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_PACKAGE + "."):
            found.append(str(node.module)[len(_PACKAGE) + 1 :])
    return found


def _source(name: str) -> str:
    return (files(_PACKAGE) / f"{name}.py").read_text(encoding="utf-8")
