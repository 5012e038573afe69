"""What the Docker daemon says of itself, over its own socket: a fiftieth of what starting its command costs on a Spark.

Only where the command would ask the same daemon; everything else, and every failure to connect, is left to the command, whose
words are better known.
"""

from __future__ import annotations

import json
import os
import socket

from sparkguard.cluster.node.base import UNAVAILABLE, Fault, read

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SOCKET = "/var/run/docker.sock"
MOST_BYTES = 16 << 20


def get(path: str, seconds: float = 20) -> tuple[int, Any] | None:
    """HTTP status and JSON of a GET; None: ask the command. Fault "daemon" (69) when it accepts and does not answer."""
    if not _is_the_commands():
        return None
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(seconds)
        try:
            link.connect(SOCKET)
        except OSError:
            return None
        try:
            # 1.0: the answer ends with the connection, and comes in one piece.
            link.sendall(f"GET {path} HTTP/1.0\r\nHost: docker\r\n\r\n".encode())
            answer = bytearray()
            while data := link.recv(65536):
                answer += data
                if len(answer) > MOST_BYTES:
                    raise Fault("daemon", "the Docker daemon's answer has no end", UNAVAILABLE)
        except socket.timeout:  # noqa: UP041 - no TimeoutError before Python 3.10
            raise Fault("daemon", f"the Docker daemon has not answered within {seconds:.0f} s", UNAVAILABLE) from None
        except OSError as error:
            raise Fault("daemon", f"the Docker daemon broke off: {error.strerror}", UNAVAILABLE) from None
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    try:
        return int(head.split(None, 2)[1]), json.loads(body)
    except (IndexError, ValueError):
        raise Fault("daemon", f"the Docker daemon answers what is no JSON: {answer[:200]!r}", UNAVAILABLE) from None


def _is_the_commands() -> bool:
    """Whether `docker`, asked by this user, would ask this socket too: no other host or context is chosen."""
    if os.environ.get("DOCKER_HOST") or os.environ.get("DOCKER_CONTEXT"):
        return False
    text = read(os.path.join(os.environ.get("DOCKER_CONFIG") or os.path.expanduser("~/.docker"), "config.json"))
    try:
        config = json.loads(text) if text else {}
    except ValueError:
        return False
    return isinstance(config, dict) and config.get("currentContext") in (None, "", "default")
