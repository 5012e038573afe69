"""Connections to one runner's engine: kept for the next request where that is safe, and closed where it is not."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from sparkguard.web import upstream
from sparkguard.web.upstream import Upstreams
from sparkguard.web.wire import Lost

if TYPE_CHECKING:
    from sparkguard.supervisor.protocol import Lease

WHOLE = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n:\n\n\n\r\n0\r\n\r\n"


class Engine:
    """Answers each request on a real socket, and counts connections."""

    def __init__(self, answer: bytes = WHOLE) -> None:
        self.answer = answer
        self.then_close = False
        self.heads: list[bytes] = []
        self.connections = 0
        self.closed = asyncio.Queue[int]()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        number = self.connections
        try:
            while True:
                self.heads.append(await reader.readuntil(b"\r\n\r\n"))
                writer.write(self.answer)
                if self.then_close:
                    self.closed.put_nowait(number)
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            self.closed.put_nowait(number)
        finally:
            writer.close()


def lease(path: str, generation: int = 1, key: str | None = None) -> Lease:
    return cast("Lease", SimpleNamespace(model="m", generation=generation, socket=path, key=key))


def run(tmp_path: Path, test: Callable[[Upstreams, Engine, str], Awaitable[None]], answer: bytes = WHOLE) -> None:
    async def main() -> None:
        path, engine, upstreams = str(tmp_path / "e.sock"), Engine(answer), Upstreams()
        server = await asyncio.start_unix_server(engine.serve, path)
        try:
            await asyncio.wait_for(test(upstreams, engine, path), 30)
        finally:
            upstreams.close()
            server.close()
            while engine.closed.qsize() < engine.connections:
                await asyncio.sleep(0)

    asyncio.run(main())


async def ask(upstreams: Upstreams, of: Lease, keep: bool = True, body: bytes = b"", **headers: str) -> bytes:
    async with upstreams.of(of).ask("GET", "/props", headers, body, keep) as wire:
        answer = b"" if wire.streams else wire.body()
        while wire.streams and (piece := await wire.piece()):
            answer += piece
    return answer


def test_a_connection_is_kept_for_the_next_request(tmp_path: Path) -> None:
    """A new one for each takes a tenth of a millisecond and a thread of the engine."""

    async def test(upstreams: Upstreams, engine: Engine, path: str) -> None:
        assert [await ask(upstreams, lease(path)) for _ in range(3)] == [b"{}"] * 3
        assert engine.connections == 1

    run(tmp_path, test)


@pytest.mark.parametrize("came, requests", [(b"", 3), (WHOLE[:-1], 2)])
def test_a_kept_connection_that_breaks_is_made_up_for_before_an_answer_only(tmp_path: Path, came: bytes, requests: int) -> None:
    """Else what the engine has generated already would be generated twice."""

    async def test(upstreams: Upstreams, engine: Engine, path: str) -> None:
        await ask(upstreams, lease(path))
        engine.answer, engine.then_close = came, True
        with pytest.raises(Lost, match="its connection broke"):
            await ask(upstreams, lease(path))
        assert len(engine.heads) == requests

    run(tmp_path, test)


def test_requests_at_once_have_a_connection_each(tmp_path: Path) -> None:
    """HTTP/1.1 answers one after the other."""

    async def test(upstreams: Upstreams, engine: Engine, path: str) -> None:
        await asyncio.gather(*(ask(upstreams, lease(path)) for _ in range(3)))
        assert engine.connections == 3

    run(tmp_path, test)


@pytest.mark.parametrize("keep", [True, False])
def test_the_connection_of_a_stream_is_not_used_again(tmp_path: Path, keep: bool) -> None:
    """llama-server closes it, although it says that it keeps it."""

    async def test(upstreams: Upstreams, engine: Engine, path: str) -> None:
        assert await ask(upstreams, lease(path), keep) == b":\n\n\n"
        assert await engine.closed.get() == 1
        engine.closed.put_nowait(1)
        await ask(upstreams, lease(path), keep)
        assert engine.connections == 2

    run(tmp_path, test, STREAM)


def test_who_wants_a_stream_says_that_it_will_close(tmp_path: Path) -> None:
    """And who does not says nothing."""

    async def test(upstreams: Upstreams, engine: Engine, path: str) -> None:
        await ask(upstreams, lease(path), keep=False)
        await ask(upstreams, lease(path), keep=True)
        assert [b"Connection: close\r\n" in head for head in engine.heads] == [True, False]

    run(tmp_path, test)


def test_the_next_runner_of_a_model_has_its_own_connections(tmp_path: Path) -> None:
    """The former one's are closed, as the engine waits for that when it is to end."""

    async def test(upstreams: Upstreams, engine: Engine, path: str) -> None:
        await ask(upstreams, lease(path))
        await ask(upstreams, lease(path, generation=2))
        assert await engine.closed.get() == 1
        engine.closed.put_nowait(1)
        assert engine.connections == 2

    run(tmp_path, test)


def test_a_runner_that_was_replaced_within_a_request_keeps_nothing(tmp_path: Path) -> None:
    """Its pool is closed by then, and nobody would close the connection."""

    async def test(upstreams: Upstreams, engine: Engine, path: str) -> None:
        async with upstreams.of(lease(path)).ask("GET", "/", {}, b"", keep=True):
            upstreams.of(lease(path, generation=2))
        assert await engine.closed.get() == 1
        engine.closed.put_nowait(1)

    run(tmp_path, test)


def test_an_unused_connection_is_closed_before_the_engine_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request on a closing connection would be lost, and it is not asked on one of that age."""
    monkeypatch.setattr(upstream, "KEEP_ALIVE_SECONDS", 0.05)

    async def test(upstreams: Upstreams, engine: Engine, path: str) -> None:
        await ask(upstreams, lease(path))
        assert await engine.closed.get() == 1
        engine.closed.put_nowait(1)
        monkeypatch.setattr(upstream, "KEEP_ALIVE_SECONDS", 0.0)
        await ask(upstreams, lease(path))
        await ask(upstreams, lease(path))
        assert engine.connections == 3

    run(tmp_path, test)


def test_the_request_is_the_clients_and_the_key_is_ours(tmp_path: Path) -> None:
    """Bytes of a header that are no UTF-8 go on as they came."""

    async def test(upstreams: Upstreams, engine: Engine, path: str) -> None:
        await ask(upstreams, lease(path, key="nonce"), Accept="\udcff/x")
        head = engine.heads[0]
        assert head.startswith(b"GET /props HTTP/1.1\r\nHost: runner\r\n")
        assert b"Authorization: Bearer nonce\r\n" in head
        assert b"Accept: \xff/x\r\n" in head
        assert b"Content-Length" not in head

    run(tmp_path, test)


def test_a_runner_at_a_port_is_asked_there(tmp_path: Path) -> None:
    """Where the engine has no Unix sockets."""

    async def test(upstreams: Upstreams, engine: Engine, path: str) -> None:
        server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        assert await ask(upstreams, lease(f"http://127.0.0.1:{port}")) == b"{}"
        assert f"Host: 127.0.0.1:{port}\r\n".encode() in engine.heads[0]
        server.close()

    run(tmp_path, test)


@pytest.mark.parametrize("path, why", [("/nowhere/e.sock", "No such file"), ("", "it has ended")])
def test_a_runner_that_is_not_there_is_lost(tmp_path: Path, path: str, why: str) -> None:
    """With the system's word for it."""

    async def test(upstreams: Upstreams, engine: Engine, _: str) -> None:
        with pytest.raises(Lost, match=why):
            await ask(upstreams, lease(path))

    run(tmp_path, test)


def test_a_client_that_leaves_ends_its_connection(tmp_path: Path) -> None:
    """Whether the answer has begun or not; so the engine stops generating, and no descriptor is left."""

    async def test(upstreams: Upstreams, engine: Engine, path: str) -> None:
        before = len(os.listdir("/proc/self/fd"))
        for turn in range(1, 20):
            asking = asyncio.ensure_future(ask(upstreams, lease(path)))
            for _ in range(turn % 5):
                await asyncio.sleep(0)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
        while len(os.listdir("/proc/self/fd")) > before:  # ends, or run() ends it
            await asyncio.sleep(0)
        assert engine.closed.qsize() == engine.connections

    run(tmp_path, test, answer=b"")
