"""Requests to a runner's engine, over its private socket."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING, Any

import aiohttp
from yarl import URL

from sparkguard.errors import UNAVAILABLE, SparkguardError

if TYPE_CHECKING:
    from sparkguard.supervisor.protocol import Lease

# llama-server closes a connection after 5 s idle; ours goes first, so that no request meets a closing one.
KEEP_ALIVE_SECONDS = 4.0


class Lost(SparkguardError):
    """The runner has died, or its connection broke, before the answer was whole."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=UNAVAILABLE)


class Upstreams:
    """One pool of connections a runner; the pool of a model's former runner is closed once nobody uses it."""

    def __init__(self) -> None:
        self._pools: dict[str, _Pool] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def of(self, lease: Lease) -> _Pool:
        pool = self._pools.get(lease.model)
        if pool is None or pool.generation != lease.generation:
            if pool is not None:
                self._retire(pool)
            pool = self._pools[lease.model] = _Pool(lease)
        return pool

    def _retire(self, pool: _Pool) -> None:
        task = asyncio.ensure_future(pool.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        for pool in self._pools.values():
            self._retire(pool)
        self._pools.clear()
        if self._closing:
            await asyncio.wait(self._closing)


class _Pool:
    """Kept connections for answers that are whole, and one of its own for each stream: after a stream llama-server closes the
    connection, although it says that it keeps it.
    """

    def __init__(self, lease: Lease) -> None:
        self.generation = lease.generation
        self._socket = lease.socket
        self._base = "http://runner" if lease.socket.startswith("/") else lease.socket
        self._authorization = {"Authorization": f"Bearer {lease.key}"} if lease.key else {}
        self._users = 0
        self._unused = asyncio.Event()
        self._unused.set()
        self._kept = self._session(keepalive_timeout=KEEP_ALIVE_SECONDS)
        self._single = self._session(force_close=True)

    def _session(self, **keeping: Any) -> aiohttp.ClientSession:
        is_path = self._socket.startswith("/")
        connector: aiohttp.BaseConnector
        if is_path:
            connector = aiohttp.UnixConnector(self._socket, limit=0, **keeping)
        else:
            connector = aiohttp.TCPConnector(limit=0, **keeping)
        return aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),  # an engine may think for hours; hangs are seen elsewhere
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent", "Content-Type"),
        )

    async def ask(self, method: str, path: str, headers: dict[str, str], body: bytes, keep: bool) -> aiohttp.ClientResponse:
        """The answer's beginning. Raises Lost.

        A lost connection is tried once more on a new one: it may be a kept one that the engine has just closed. A runner that
        died does not take the new one.
        """
        url = URL(self._base + path, encoded=True)
        passed = {**headers, **self._authorization}
        if keep:
            try:
                return await self._kept.request(method, url, data=body or None, headers=passed, allow_redirects=False)
            except (aiohttp.ClientError, OSError):
                pass
        try:
            return await self._single.request(method, url, data=body or None, headers=passed, allow_redirects=False)
        except aiohttp.ClientConnectorError as error:
            raise Lost(f"it does not answer: {error.strerror}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise Lost(f"its connection broke: {type(error).__name__}") from None

    def __enter__(self) -> _Pool:
        self._users += 1
        self._unused.clear()
        return self

    def __exit__(self, *_: object) -> None:
        self._users -= 1
        if not self._users:
            self._unused.set()

    async def close(self) -> None:
        await self._unused.wait()
        await self._kept.close()
        await self._single.close()


class WhileAlive:
    """Ends its block with Lost when the leased runner dies, or is to be stopped: a stop waits for open requests."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._reason: str | None = None

    async def __aenter__(self) -> None:
        self._task = asyncio.current_task()
        self._watch = asyncio.ensure_future(self._lease.died())
        self._watch.add_done_callback(self._interrupt)

    def _interrupt(self, watch: asyncio.Future[str]) -> None:
        if not watch.cancelled() and self._task is not None:
            self._reason = watch.result()
            self._task.cancel()

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._watch.remove_done_callback(self._interrupt)
        self._watch.cancel()
        if self._reason is None or self._task is None:
            return
        # A client that leaves in the same instant cancels as well, and that one goes on.
        uncancel = getattr(self._task, "uncancel", None)  # Python 3.11
        remaining = uncancel() if uncancel else 0
        if kind is asyncio.CancelledError and not remaining:
            raise Lost(self._reason) from None
