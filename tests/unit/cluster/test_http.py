"""The probe's HTTP client: bounded in time and size, and an error says which kind it is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sparkguard.cluster import http
from sparkguard.cluster.http import Answer, Unanswered

PLAIN = b'HTTP/1.1 200 OK\r\nContent-Length: 11\r\nX-A: b\r\n\r\n{"a": [1]}\n'
CHUNKED = b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n{"a"\r\n6;x=y\r\n: [1]}\r\n0\r\n\r\n'
TO_THE_END = b'HTTP/1.0 200 OK\r\n\r\n{"a": [1]}'
AFTER_100 = b"HTTP/1.1 100 Continue\r\n\r\n" + PLAIN

FAULTS = {
    "no HTTP": (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "protocol"),
    "cut off head": (b"HTTP/1.1 200 OK\r\nContent-Le", "protocol"),
    "cut off body": (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhalf", "protocol"),
    "bad length": (b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n", "protocol"),
    "endless head": (b"HTTP/1.1 200 OK\r\n" + b"X-A: b\r\n" * 20000, "protocol"),
    "3 MiB announced": (b"HTTP/1.1 200 OK\r\nContent-Length: 3145728\r\n\r\n", "too_large"),
    "3 MiB to the end": (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (3 << 20), "too_large"),
    "3 MiB in a chunk": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n300000\r\n", "too_large"),
}


async def asked(answer: bytes, *, silent: bool = False, seconds: float = 20, body: object = None) -> tuple[Answer, bytes]:
    """One request to a server that sends these bytes, and what it was asked."""
    heard = b""
    done = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal heard
        heard = await reader.readuntil(b"\r\n\r\n")
        if body is not None:
            heard += await reader.readexactly(int(heard.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
        if silent:
            await done.wait()
        try:
            writer.write(answer)
            await writer.drain()
        except ConnectionError:
            pass
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        return await http.ask(f"http://127.0.0.1:{port}/v1/models?x=1", body, seconds=seconds), heard
    finally:
        done.set()
        server.close()


@pytest.mark.parametrize("answer", [PLAIN, CHUNKED, TO_THE_END, AFTER_100], ids=["length", "chunked", "to the end", "after 100"])
def test_an_answer_is_read_however_it_is_framed(answer: bytes) -> None:
    """Content-Length, chunks, and a body that ends with the connection give the same."""
    got, heard = asyncio.run(asked(answer))
    assert (got.status, got.json()) == (200, {"a": [1]})
    assert heard.startswith(b"GET /v1/models?x=1 HTTP/1.1\r\nHost: 127.0.0.1:")


def test_a_body_is_posted_as_json() -> None:
    """With a body it is a POST with its length and type."""
    _, heard = asyncio.run(asked(PLAIN, body={"max_tokens": 1}))
    assert heard.startswith(b"POST ")
    assert heard.endswith(b'\r\n\r\n{"max_tokens": 1}')


@pytest.mark.parametrize(("answer", "cause"), FAULTS.values(), ids=FAULTS)
def test_a_bad_answer_has_a_cause(answer: bytes, cause: str) -> None:
    """What is no whole HTTP answer of bearable size raises with the kind of fault."""
    with pytest.raises(Unanswered) as caught:
        asyncio.run(asked(answer))
    assert caught.value.cause == cause


def test_a_silent_server_ends_with_the_time() -> None:
    """A server that accepts and says nothing costs the time that was given and no more."""
    with pytest.raises(Unanswered, match=r"no answer within 0\.05 s") as caught:
        asyncio.run(asked(PLAIN, silent=True, seconds=0.05))
    assert caught.value.cause == "timeout"


def test_nobody_listens() -> None:
    """A refused connection says so."""

    async def closed() -> Any:
        server = await asyncio.start_server(lambda _r, _w: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        return await http.ask(f"http://127.0.0.1:{port}/", seconds=5)

    with pytest.raises(Unanswered) as caught:
        asyncio.run(closed())
    assert caught.value.cause == "refused"


def test_what_no_engine_would_write_is_no_json() -> None:
    """A body that is nested without end is read as none."""
    assert Answer(200, (), b"[" * 100_000).json() is None
    assert Answer(200, (), b"\xff{").json() is None
