"""Where a runner's engine listens: on a private Unix socket, or, where its build has none, on a port that is proven its own.

Between the choice of a port and the engine's bind somebody else may take it, and answer. So two things must hold before a
request is sent there: the kernel shows the listening socket in the engine's hands, and the answers are those of a process that
was given the start's key, which is said to nobody who has not refused a wrong one first.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket

from sparkguard.core.record import Record

_LISTENS = "0A"  # state of a socket in /proc/net/tcp
_MOST_BYTES = 1 << 20


class Door(Record):
    """socket: a path, or http://127.0.0.1:PORT; key: the start's nonce, None for a path, which is private already."""

    socket: str
    key: str | None = None

    @property
    def port(self) -> int | None:
        return int(self.socket.rpartition(":")[2]) if self.key else None


def at_a_port() -> Door:
    """A free one. The key goes to the engine by its environment, which only this user can read, never by its arguments."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return Door(f"http://127.0.0.1:{free.getsockname()[1]}", secrets.token_hex(32))


async def connect(door: Door) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if door.port is None:
        return await asyncio.open_unix_connection(door.socket, limit=_MOST_BYTES)
    return await asyncio.open_connection("127.0.0.1", door.port, limit=_MOST_BYTES)


def holds(pid: int, port: int, proc_root: str = "/proc") -> bool:
    """Whether the process has the socket that listens on the port of 127.0.0.1; where nobody can know, yes."""
    if not os.path.isdir(f"{proc_root}/{pid}"):
        return not os.path.isdir(f"{proc_root}/self")
    sockets = set()
    with open(f"{proc_root}/net/tcp", encoding="ascii") as table:
        for line in table:
            fields = line.split()
            if fields[3] == _LISTENS and fields[1].endswith(f":{port:04X}"):
                sockets.add(f"socket:[{fields[9]}]")
    try:
        names = os.listdir(f"{proc_root}/{pid}/fd")
    except OSError:
        return False
    mine = set()
    for name in names:
        try:
            mine.add(os.readlink(f"{proc_root}/{pid}/fd/{name}"))
        except OSError:  # closed meanwhile
            continue
    return bool(sockets) and sockets <= mine
