"""The door for the guard: a start of vLLM may ask for the memory of idle models (sparkguard/room.py is its side).

A Unix socket in a folder of its user's own, and no path of the front: who can reach the front from elsewhere cannot empty it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import select
from typing import TYPE_CHECKING

from sparkguard.errors import SparkguardError
from sparkguard.room import MOST_BYTES, NAME

if TYPE_CHECKING:
    from sparkguard.supervisor.protocol import Supervisor

log = logging.getLogger("sparkguard.serve")
_LINE_SECONDS = 5.0  # for the one line of who has connected


class Door:
    """start(), then close()."""

    def __init__(self, supervisor: Supervisor, folder: str) -> None:
        self._supervisor = supervisor
        self._path = os.path.join(folder, NAME)
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Where it cannot be, everything else works all the same."""
        try:
            self._server = await asyncio.start_unix_server(self._answer, self._path, limit=MOST_BYTES)
            os.chmod(self._path, 0o600)
        except OSError as error:
            log.warning("no start of vLLM can ask for room: %s: %s", self._path, error.strerror or error)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            try:
                os.unlink(self._path)
            except FileNotFoundError:
                pass

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        unloaded: tuple[str, ...] = ()
        refused = ""
        try:
            name, amounts = _read(await asyncio.wait_for(reader.readline(), _LINE_SECONDS))
            if _has_gone(writer):
                writer.close()
                return
            log.info("%s asks for room: %s", name, ", ".join(f"{amount >> 20} MB of {pool}" for pool, amount in amounts.items()))
            unloaded = await self._supervisor.make_room(amounts)
        except SparkguardError as error:
            refused = error.message
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, asyncio.TimeoutError):
            refused = "what was asked cannot be read"
        try:
            writer.write(json.dumps({"unloaded": unloaded, "refused": refused}).encode() + b"\n")
            await writer.drain()
        except OSError:
            pass  # the guard has gone
        finally:
            writer.close()


def _has_gone(writer: asyncio.StreamWriter) -> bool:
    """Closed, and not only the half on which nothing more is said."""
    poll = select.poll()
    poll.register(writer.get_extra_info("socket").fileno(), 0)
    return bool(poll.poll(0))


def _read(line: bytes) -> tuple[str, dict[str, int]]:
    asked = json.loads(line)
    amounts = {str(pool): int(amount) for pool, amount in asked["pools"].items()}
    if not amounts or min(amounts.values()) <= 0:
        raise ValueError(line)
    return "".join(c if c.isprintable() else "?" for c in str(asked["for"])[:200]), amounts
