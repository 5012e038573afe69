"""What is said over one ssh process: the program that a node runs, and the lines that it answers. Who starts it is ssh.py."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

from sparkguard.cluster import json_text
from sparkguard.cluster.causes import PROTOCOL, TIMEOUT, NodeError, Unreachable, cause_of, last_words, never_started
from sparkguard.cluster.deadline import within
from sparkguard.cluster.program import MARKER

# A python3 that starts on a node that swaps; beyond it a master whose link is dead is not told from a slow node.
BEGIN_SECONDS = 15
BEAT_SECONDS = 10  # a held stream's; the node ends it after three that did not come
MOST_BYTES = 16 << 20  # of one answer
MOST_REPLIES = 1000  # of one call; programs give one, or a few
MOST_MESSAGE = 8 << 10  # its end: that of a traceback tells most
MOST_ERROR_BYTES = 64 << 10
MOST_CHATTER_BYTES = 256 << 10  # a login shell's, before the program


class NeverStarted(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


class Channel:
    """One ssh process: the program's stdin and its lines."""

    def __init__(self, node: str, process: asyncio.subprocess.Process, text: bytes) -> None:
        self._node = node
        self._process = process
        self._text = text
        self._buffer = bytearray()
        self._errors = asyncio.create_task(self._read_errors())
        self._feeding = asyncio.create_task(self._feed())

    async def begin(self, multiplexed: bool) -> None:
        """Returns when the program runs."""
        chatter = 0
        loop = asyncio.get_running_loop()
        until = loop.time() + BEGIN_SECONDS
        while MARKER not in self._buffer:
            try:
                data = await within(until - loop.time(), self._more())
            except asyncio.TimeoutError:
                raise Unreachable(self._node, TIMEOUT, f"no answer within {BEGIN_SECONDS} s") from None
            if not data:
                said = await self._last_errors()
                if multiplexed and self._process.returncode == 255 and never_started(said):
                    raise NeverStarted(said)
                raise self._ended(said, self._buffer)
            chatter += len(data)
            self._buffer += data
            if chatter > MOST_CHATTER_BYTES:
                raise Unreachable(self._node, PROTOCOL, "its login shell prints without end, and our program does not begin")
        del self._buffer[: self._buffer.index(MARKER) + len(MARKER)]

    async def replies(self, quiet_seconds: float | None, seconds: float | None = None) -> AsyncIterator[dict[str, Any]]:
        loop = asyncio.get_running_loop()
        until = None if seconds is None else loop.time() + seconds
        for count in itertools.count(1):
            line = await self._line(quiet_seconds if until is None else max(0.0, until - loop.time()))
            if "end" in line:
                return
            if seconds is not None and count > MOST_REPLIES:  # each comes in time, and they never end
                raise Unreachable(self._node, PROTOCOL, "it answers without end")
            error = line.get("error")
            if isinstance(error, dict):
                details = error.get("details")
                raise NodeError(
                    self._node,
                    str(error.get("code", "bug")),
                    str(error.get("message", ""))[-MOST_MESSAGE:],
                    int(error.get("status", 1)),
                    details if isinstance(details, dict) else None,
                )
            reply = line.get("reply")
            if not isinstance(reply, dict):
                raise Unreachable(self._node, PROTOCOL, "what it answers is no answer of our program")
            yield reply

    async def _line(self, seconds: float | None) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        until = None if seconds is None else loop.time() + seconds
        seen = 0  # looking through a long answer from its start for every piece would take its square
        while (end := self._buffer.find(b"\n", seen)) < 0:
            seen = len(self._buffer)
            try:
                data = await within(None if until is None else until - loop.time(), self._more())
            except asyncio.TimeoutError:
                raise Unreachable(self._node, TIMEOUT, f"it has said nothing for {seconds:.0f} s") from None
            if not data:
                raise self._ended(await self._last_errors(), self._buffer)
            self._buffer += data
            if len(self._buffer) > MOST_BYTES:
                raise Unreachable(self._node, PROTOCOL, f"its answer is longer than {MOST_BYTES >> 20} MiB")
        head = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        try:
            line = json_text.loads(head)
        except ValueError:
            line = None
        if not isinstance(line, dict):
            shown = head[:200].decode("utf-8", "replace")
            raise Unreachable(self._node, PROTOCOL, f"what it answers is no JSON object: {shown!r}")
        return line

    def _ended(self, said: str, rest: bytearray) -> Unreachable:
        status = self._process.returncode
        if status == 255 or (status is not None and status < 0):
            return Unreachable(self._node, cause_of(said), last_words(said))
        if status == 127:  # a shell's, for a command that it does not find
            return Unreachable(self._node, PROTOCOL, "it has no python3 that its login shell finds; 3.8 or newer is needed")
        shown = said.strip() or rest.decode("utf-8", "replace").strip()
        words = shown.splitlines()[-1][:300] if shown else "without a word"
        return Unreachable(self._node, PROTOCOL, f"our program did not run or broke off, with status {status}: {words}")

    async def _more(self) -> bytes:
        assert self._process.stdout is not None
        return await self._process.stdout.read(65536)

    async def _feed(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(self._text)
            await self._process.stdin.drain()

    async def beat(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):
            while True:
                await asyncio.sleep(BEAT_SECONDS)
                self._process.stdin.write(b"\n")
                await self._process.stdin.drain()

    async def _read_errors(self) -> bytes:
        assert self._process.stderr is not None
        kept = b""
        while data := await self._process.stderr.read(65536):
            kept = (kept + data)[-MOST_ERROR_BYTES:]
        return kept

    async def _last_errors(self) -> str:
        """All of its stderr, once its stdout has ended."""
        await asyncio.wait((self._errors, ended := asyncio.ensure_future(self._process.wait())), timeout=2)
        ended.cancel()
        return self._errors.result().decode("utf-8", "replace") if self._errors.done() else ""

    async def end(self) -> None:
        """The ssh process and all of its group are gone afterwards; on the node, its stdin ends."""
        for task in (self._feeding, self._errors):
            task.cancel()
        await kill(self._process)


async def kill(process: asyncio.subprocess.Process) -> None:
    """It is gone afterwards, with all of its group."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    # wait() waits for the pipes as well, and one that nobody reads to its end would never be done. (Closing the transport as a
    # whole would reap the process behind the back of asyncio, which then complains.)
    for number in (0, 1, 2):
        pipe = process._transport.get_pipe_transport(number)  # type: ignore[attr-defined]
        if pipe is not None:
            pipe.close()
    await asyncio.shield(asyncio.ensure_future(process.wait()))
