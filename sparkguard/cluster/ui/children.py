"""spark-serve as a child process: the dashboard's only hand and only eye."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from sparkguard.cluster.deadline import within
from sparkguard.core.record import Record
from sparkguard.errors import INTERRUPTED, OK, SOFTWARE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

LINE_LIMIT_BYTES = 4 << 20  # a benchmark with all its requests is one line
SAID_LIMIT_BYTES = 64 << 10  # of stderr, kept for who asks why
STOP_SECONDS = 90.0  # after Ctrl-C a verb still cleans up what it started


class Ended(Record):
    """How a child ended, and what it said on stderr."""

    status: int
    said: str


class Child:
    """One run of spark-serve. Iterate over its JSON lines, then read `ended`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._said = asyncio.create_task(_bounded(process.stderr))

    @classmethod
    async def start(cls, program: Sequence[str], argv: Sequence[str], secret: str | None = None) -> Child:
        """A secret goes to its stdin and nowhere else: an argument could be read by every user of this machine."""
        process = await asyncio.create_subprocess_exec(
            *program,
            *argv,
            stdin=asyncio.subprocess.DEVNULL if secret is None else asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=LINE_LIMIT_BYTES,
            start_new_session=True,  # the terminal's Ctrl-C is for the dashboard, which passes it on once
            env={**os.environ, "NO_COLOR": "1"},
        )
        if secret is not None and process.stdin is not None:
            with suppress(ConnectionError):
                process.stdin.write(secret.encode() + b"\n")
                await process.stdin.drain()
            process.stdin.close()
        return cls(process)

    async def lines(self) -> AsyncIterator[dict[str, Any]]:
        """Each JSON object when it comes. What is none is left out: it is talk."""
        assert self._process.stdout is not None
        while True:
            try:
                line = await self._process.stdout.readline()
            except ValueError:
                continue  # longer than the limit; asyncio has dropped it
            if not line:
                return
            with suppress(ValueError):
                value = json.loads(line)
                if isinstance(value, dict):
                    yield value

    async def ended(self) -> Ended:
        status = await self._process.wait()
        return Ended(status if status >= 0 else INTERRUPTED, await self._said)

    def interrupt(self) -> None:
        """Ctrl-C: the verb cleans up and ends by itself."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)

    async def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Ctrl-C, and when that has not ended it in time, SIGKILL to it and its children."""
        self.interrupt()
        try:
            await within(seconds, self._process.wait())
        except asyncio.TimeoutError:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()
        self._said.cancel()


def program(config: str | None) -> tuple[str, ...]:
    """This Python with this spark-serve, and the same catalog."""
    return (sys.executable, "-m", "sparkguard.cli.cluster", *(("--config", config) if config else ()))


async def ask(program: Sequence[str], *argv: str, seconds: float = 60.0) -> dict[str, Any]:
    """The one object that a verb prints, and its status; with `error` when it failed."""
    child = await Child.start(program, argv)
    try:
        found, ended = await within(seconds, _whole(child))
    except asyncio.TimeoutError:
        await child.stop(1.0)
        return {"error": f"spark-serve {argv[0]} did not answer within {seconds:.0f} s", "status": SOFTWARE}
    if ended.status == OK:
        return {**found, "status": OK}
    said = ended.said.strip() or f"spark-serve {argv[0]} ended with status {ended.status}"
    return {"error": said, **found, "status": ended.status}


async def _whole(child: Child) -> tuple[dict[str, Any], Ended]:
    found: dict[str, Any] = {}
    async for value in child.lines():
        found = value
    return found, await child.ended()


async def _bounded(stream: asyncio.StreamReader | None) -> str:
    """The last of what a child says; it is always read, so that the child never blocks."""
    said = b""
    while stream is not None and (chunk := await stream.read(4096)):
        said = (said + chunk)[-SAID_LIMIT_BYTES:]
    return said.decode("utf-8", "replace")
