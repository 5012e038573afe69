"""Exact containers of a start, as they are now: their states, and lines of their logs that a start is judged by.

Runs on a node: Linux, Python 3.8, the standard library.
"""

from __future__ import annotations

import re

from sparkguard.cluster.node import docker

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from sparkguard.cluster.node.base import Reply

_LOG_BYTES = 4 << 20
_MATCHES = 200


def main(request: dict[str, Any], reply: Reply) -> None:
    """ids: whole ids. find: a regular expression; with it, the last lines of each log that it is found in."""
    found = docker.inspect(request["ids"]) if request["ids"] else []
    lines = {each["id"]: _found(each["id"], request["find"]) for each in found} if request.get("find") else {}
    reply({"containers": found, "lines": lines})


def _found(identity: str, expression: str) -> list[str]:
    done = docker.docker("logs", identity, limit=_LOG_BYTES)
    text = re.compile(expression)
    return [line[:1000] for line in (done.out + "\n" + done.err).splitlines() if text.search(line)][-_MATCHES:]
