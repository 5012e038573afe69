"""A container's log, line by line, for as long as the laptop listens.

Runs on a node: Linux, Python 3.8, the standard library.
"""

from __future__ import annotations

import subprocess

from sparkguard.cluster.node import docker
from sparkguard.cluster.node.base import FAILED, Fault, at_end

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from sparkguard.cluster.node.base import Reply

_LINE_BYTES = 64 << 10


def main(request: dict[str, Any], reply: Reply) -> None:
    """id: the whole id. tail: how many of its last lines. follow: until the container ends or nobody listens."""
    if docker.one(request["id"]) is None:
        raise Fault("gone", f"container {request['id'][:12]} is gone", FAILED)
    words = ["docker", "logs", "--tail", str(request["tail"]), *(["--follow"] if request["follow"] else []), request["id"]]
    child = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    at_end(child.kill)
    assert child.stdout is not None
    reply({"begin": True})
    while True:
        line = child.stdout.readline(_LINE_BYTES)
        if not line:
            break
        reply({"line": line.decode("utf-8", "replace").rstrip("\r\n")})
    child.wait()
