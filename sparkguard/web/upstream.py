"""Requests to a runner's engine, over its private socket."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING, Any

from sparkguard.web.wire import Lost, Wire

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sparkguard.supervisor.protocol import Lease

# llama-server closes a connection after 5 s idle; ours goes first, so that no request meets a closing one.
KEEP_ALIVE_SECONDS = 4.0
_CONNECT_SECONDS = 10.0


class Upstreams:
    """One pool of connections a runner; that of a model's former runner lets none be used again."""

    def __init__(self) -> None:
        self._pools: dict[str, _Pool] = {}

    def of(self, lease: Lease) -> _Pool:
        pool = self._pools.get(lease.model)
        if pool is None or pool.generation != lease.generation:
            if pool is not None:
                pool.close()
            pool = self._pools[lease.model] = _Pool(lease)
        return pool

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


class _Pool:
    """Kept connections for answers that are whole, and one of its own for each stream: after a stream llama-server closes the
    connection, although it says that it keeps it.
    """

    def __init__(self, lease: Lease) -> None:
        self.generation = lease.generation
        self._endpoint = lease.socket
        host = "runner" if lease.socket.startswith("/") else lease.socket.removeprefix("http://")
        self._ours = f"Host: {host}\r\n" + (f"Authorization: Bearer {lease.key}\r\n" if lease.key else "")
        self._kept: list[tuple[float, Wire]] = []  # since when; the latest last
        self._sweep: asyncio.TimerHandle | None = None
        self.closed = False

    def ask(self, method: str, path: str, headers: Mapping[str, str], body: bytes, keep: bool) -> _Asking:
        """`async with pool.ask(...) as wire:` has the answer's beginning; raises Lost."""
        words = [f"{method} {path} HTTP/1.1\r\n{self._ours}"]
        words += [f"{name}: {value}\r\n" for name, value in headers.items()]
        if body or method == "POST":
            words.append(f"Content-Length: {len(body)}\r\n")
        words.append("\r\n" if keep else "Connection: close\r\n\r\n")
        # A client's header may have bytes that are no UTF-8; aiohttp hands them over so.
        return _Asking(self, "".join(words).encode("utf-8", "surrogateescape"), body, keep)

    async def connect(self) -> Wire:
        """Raises Lost."""
        if not self._endpoint:
            raise Lost("it has ended")
        wire = Wire()
        connecting = asyncio.ensure_future(self._connect(wire))
        try:
            # asyncio.wait_for() before Python 3.12 may swallow a cancellation.
            await asyncio.wait({connecting}, timeout=_CONNECT_SECONDS)
            if not connecting.done():
                raise Lost(f"it takes no connection within {_CONNECT_SECONDS:.0f} s")
            connecting.result()
        except OSError as error:
            raise Lost(f"it does not answer: {error.strerror}") from None
        except BaseException:
            connecting.cancel()
            wire.close()
            raise
        return wire

    async def _connect(self, wire: Wire) -> None:
        loop = asyncio.get_running_loop()
        if self._endpoint.startswith("/"):
            await loop.create_unix_connection(lambda: wire, self._endpoint)
        else:
            host, _, port = self._endpoint.removeprefix("http://").rpartition(":")
            await loop.create_connection(lambda: wire, host, int(port))

    def kept(self) -> Wire | None:
        """One that the engine has not closed and will not close yet."""
        oldest = asyncio.get_running_loop().time() - KEEP_ALIVE_SECONDS
        while self._kept:
            since, wire = self._kept.pop()
            if wire.free and since > oldest:
                return wire
            wire.close()
        return None

    def keep(self, wire: Wire) -> None:
        loop = asyncio.get_running_loop()
        self._kept.append((loop.time(), wire))
        if self._sweep is None:
            self._sweep = loop.call_later(KEEP_ALIVE_SECONDS, self._let_go)

    def _let_go(self) -> None:
        """Of those that nobody has used for so long."""
        loop = asyncio.get_running_loop()
        oldest = loop.time() - KEEP_ALIVE_SECONDS
        while self._kept and (self._kept[0][0] <= oldest or not self._kept[0][1].free):
            self._kept.pop(0)[1].close()
        self._sweep = loop.call_at(self._kept[0][0] + KEEP_ALIVE_SECONDS, self._let_go) if self._kept else None

    def close(self) -> None:
        self.closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        while self._kept:
            self._kept.pop()[1].close()


class _Asking:
    """One request, and its connection until the answer has been taken."""

    def __init__(self, pool: _Pool, head: bytes, body: bytes, keep: bool) -> None:
        self._pool, self._head, self._body, self._keep = pool, head, body, keep
        self._wire: Wire | None = None

    async def __aenter__(self) -> Wire:
        """A kept connection that is lost before an answer begins is tried once more on a new one: the engine may have just closed
        it. A runner that died does not take the new one.
        """
        if self._keep and (wire := self._pool.kept()) is not None:
            try:
                return await self._on(wire)
            except Lost:
                if wire.begun:
                    raise
        return await self._on(await self._pool.connect())

    async def _on(self, wire: Wire) -> Wire:
        self._wire = wire
        try:
            await wire.ask(self._head, self._body)
        except BaseException:
            wire.close()
            raise
        return wire

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        wire = self._wire
        assert wire is not None
        if self._keep and wire.free and not wire.streams and not self._pool.closed:
            self._pool.keep(wire)
        else:
            wire.close()


class WhileAlive:
    """Ends its block with Lost when the leased runner dies, or is to be stopped: a stop waits for open requests."""

    def __init__(self, lease: Lease) -> None:
        self._death = lease.death
        self._reason: str | None = None
        self._task: asyncio.Task[Any] | None = None

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        self._death.add_done_callback(self._interrupt)

    def _interrupt(self, death: asyncio.Future[str]) -> None:
        if self._task is not None:
            self._reason = death.result()
            self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._death.remove_done_callback(self._interrupt)
        task, self._task = self._task, None  # a callback that is under way finds nobody
        if self._reason is None or task is None:
            return
        # A client that leaves in the same instant cancels as well, and that one goes on.
        uncancel = getattr(task, "uncancel", None)  # Python 3.11
        remaining = uncancel() if uncancel else 0
        if kind is asyncio.CancelledError and not remaining:
            raise Lost(self._reason) from None
