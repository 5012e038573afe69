"""A TCP relay between the laptop and a node's sshd, which can fail as networks do."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

FORWARD, REFUSE, HANG_BANNER, HALF_OPEN = "forward", "refuse", "hang_banner", "half_open"


class Relay:
    """Listens on 127.0.0.1. Its loop runs in a thread of its own, so that tests may block."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.connections = 0  # accepted so far
        self.delay_seconds = 0.0  # of each piece, in both directions
        self._mode = FORWARD
        self._writers: set[asyncio.StreamWriter] = set()
        self._flowing = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.port = 0
        self._do(self._listen)

    def refuse(self) -> None:
        """Nobody listens; connections that there are go on."""
        self._do(self._deaf)

    def half_open(self) -> None:
        """What is sent from now on arrives nowhere, and nobody is told."""
        self._set(HALF_OPEN)

    def hang_banner(self) -> None:
        """New connections are accepted, and stay silent."""
        self._set(HANG_BANNER)

    def forward(self) -> None:
        """All is well again; what was held back is sent."""
        self._set(FORWARD)
        self._do(self._listen)

    def drop(self) -> None:
        """All connections are reset."""
        self._do(self._reset)

    def close(self) -> None:
        self._do(self._shut)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work: Callable[[], Any]) -> None:
        asyncio.run_coroutine_threadsafe(work(), self._loop).result(10)

    def _set(self, mode: str) -> None:
        async def change() -> None:
            self._mode = mode
            if mode == FORWARD:
                self._flowing.set()
            else:
                self._flowing.clear()

        self._do(change)

    async def _listen(self) -> None:
        self._flowing.set()
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
            self.port = self._server.sockets[0].getsockname()[1]

    async def _deaf(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        await asyncio.sleep(0)

    async def _reset(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    async def _shut(self) -> None:
        await self._deaf()
        await self._reset()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            await self._flowing.wait()
            far_reader, far_writer = await asyncio.wait_for(asyncio.open_connection(*self.target), 5)
            self._writers.add(far_writer)
            try:
                await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
            finally:
                self._writers.discard(far_writer)
                far_writer.transport.abort()
        except (OSError, asyncio.TimeoutError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await self._flowing.wait()
            if self.delay_seconds:
                await asyncio.sleep(self.delay_seconds)
            writer.write(data)
            await writer.drain()
        with contextlib.suppress(OSError):
            writer.write_eof()
