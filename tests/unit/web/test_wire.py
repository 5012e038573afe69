"""One connection to an engine: an answer is whole, comes in pieces, or is lost, and nothing in between."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkguard.web import wire
from sparkguard.web.wire import Lost, Wire

T = TypeVar("T")
HEAD = b"HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nContent-Type: application/json; charset=utf-8\r\n"
BODY = b'{"choices":[]}'
LENGTH = HEAD + b"Content-Length: 14\r\n\r\n" + BODY
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n9\r\n" + BODY[:9] + b"\r\n5\r\n" + BODY[9:] + b"\r\n0\r\n\r\n"
UNTIL_THE_END = HEAD + b"\r\n" + BODY
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: Text/Event-Stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class Transport(asyncio.Transport):
    """What a wire does to its connection."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []
        self.unsent = 0
        self.aborted = False
        self.reading: list[bool] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent.append(bytes(data))

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def abort(self) -> None:
        self.aborted = True

    def is_closing(self) -> bool:
        return self.aborted

    def pause_reading(self) -> None:
        self.reading.append(False)

    def resume_reading(self) -> None:
        self.reading.append(True)


def run(test: Callable[[Wire, Transport], Awaitable[T]]) -> T:
    async def main() -> T:
        made, transport = Wire(), Transport()
        made.connection_made(transport)
        return await test(made, transport)

    return asyncio.run(main())


async def asked(made: Wire, *parts: bytes, ends: bool = False) -> None:
    """An answer that comes in these parts, each when all before it has been seen."""
    asking = asyncio.ensure_future(made.ask(b"GET / HTTP/1.1\r\n\r\n", b""))
    await asyncio.sleep(0)
    for part in parts:
        made.data_received(part)
    if ends:
        made.connection_lost(None)
    await asking


@pytest.mark.parametrize("answer", [LENGTH, CHUNKED], ids=["with its length", "in chunks"])
def test_an_answer_is_whole_however_it_is_cut(answer: bytes) -> None:
    """A socket gives what has come, from one byte to all."""

    async def test(made: Wire, _: Transport) -> None:
        await asked(made, *(answer[at : at + 1] for at in range(len(answer))))
        assert (made.status, made.body(), made.free) == (200, BODY, True)
        assert made.headers["content-type"] == "application/json; charset=utf-8"
        for cut in range(len(answer)):
            await asked(made, answer[:cut], answer[cut:])
            assert (made.status, made.body(), made.free) == (200, BODY, True)

    run(test)


@pytest.mark.parametrize("answer", [LENGTH, CHUNKED], ids=["with its length", "in chunks"])
def test_an_answer_that_ends_early_is_lost_at_every_byte(answer: bytes) -> None:
    """Half an answer is never taken for one."""

    async def test() -> None:
        for cut in range(len(answer)):
            made = Wire()
            made.connection_made(Transport())
            with pytest.raises(Lost, match="its connection broke"):
                await asked(made, answer[:cut], ends=True)
            assert not made.free

    asyncio.run(test())


def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    """HTTP/1.1 allows it, and such a connection carries no second request."""

    async def test(made: Wire, _: Transport) -> None:
        await asked(made, UNTIL_THE_END, ends=True)
        assert (made.body(), made.free) == (BODY, False)

    run(test)


def test_an_interim_answer_is_passed_over() -> None:
    """100 Continue is not what was asked for, and its headers are not the answer's."""

    async def test(made: Wire, _: Transport) -> None:
        await asked(made, b"HTTP/1.1 100 Continue\r\nContent-Type: text/event-stream\r\n\r\n" + LENGTH)
        assert (made.status, made.body(), made.streams) == (200, BODY, False)

    run(test)


def test_a_trailer_changes_nothing_of_the_head() -> None:
    """The front has acted by it."""

    async def test(made: Wire, _: Transport) -> None:
        await asked(made, CHUNKED.removesuffix(b"\r\n") + b"Content-Type: text/event-stream\r\n\r\n")
        assert (made.body(), made.streams, made.free) == (BODY, False, True)

    run(test)


def test_an_engine_that_closes_is_not_asked_again() -> None:
    """Connection: close."""

    async def test(made: Wire, _: Transport) -> None:
        await asked(made, LENGTH.replace(b"Server: llama.cpp", b"Connection: close"))
        assert (made.body(), made.free) == (BODY, False)

    run(test)


def test_an_engine_that_answered_too_early_is_not_asked_again() -> None:
    """The rest of the body would come before the next request."""

    async def test(made: Wire, transport: Transport) -> None:
        transport.unsent = 1
        await asked(made, LENGTH)
        assert (made.body(), made.free) == (BODY, False)

    run(test)


def test_a_second_answer_makes_a_connection_useless() -> None:
    """It would be taken for that to the next request."""

    async def test(made: Wire, transport: Transport) -> None:
        await asked(made, LENGTH + LENGTH)
        assert (made.body(), made.free, transport.aborted) == (BODY, False, True)

    run(test)


def test_an_answer_to_nothing_ends_the_connection() -> None:
    """Whoever speaks unasked is no engine that waits."""

    async def test(made: Wire, transport: Transport) -> None:
        await asked(made, LENGTH)
        made.data_received(LENGTH)
        assert (made.free, transport.aborted) == (False, True)

    run(test)


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nnot a number\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: " + b"y" * (wire._HEAD_BYTES + 1) + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * wire._HEAD_BYTES,
    ],
    ids=["another protocol", "two lengths", "a bad chunk", "an upgrade", "a long header", "many headers"],
)
def test_what_is_no_answer_is_lost(answer: bytes) -> None:
    """The runner's request is told so, and the connection goes."""

    async def test(made: Wire, transport: Transport) -> None:
        with pytest.raises(Lost, match="its answer is no HTTP"):
            await asked(made, answer)
        assert (made.free, transport.aborted) == (False, True)

    run(test)


@given(
    st.lists(
        st.one_of(st.binary(max_size=80), st.sampled_from([LENGTH, CHUNKED, STREAM, HEAD, b"\r\n", b"0\r\n\r\n"])), max_size=6
    )
)
def test_no_bytes_do_more_than_lose_an_answer(parts: list[bytes]) -> None:
    """Whatever comes, there is an answer or it is lost; nothing else is raised, and nothing waits for ever."""

    async def test(made: Wire, _: Transport) -> None:
        try:
            await asked(made, *parts, ends=True)
            while made.streams and await made.piece():
                pass
        except Lost:
            assert not made.free
        else:
            assert made.whole

    run(test)


def test_a_stream_comes_as_it_is_made() -> None:
    """Its head is enough to begin with, and each piece is there when it has come."""

    async def test(made: Wire, _: Transport) -> None:
        await asked(made, STREAM)
        assert made.streams and not made.whole
        for word in (b"data: a\n\n", b"data: b\n\n"):
            taking = asyncio.ensure_future(made.piece())
            await asyncio.sleep(0)
            assert not taking.done()
            made.data_received(b"9\r\n" + word + b"\r\n")
            assert await taking == word
        made.data_received(b"0\r\n\r\n")
        assert (await made.piece(), made.whole) == (b"", True)

    run(test)


def test_a_stream_that_breaks_gives_what_came_and_is_lost() -> None:
    """What has come is the client's all the same."""

    async def test(made: Wire, _: Transport) -> None:
        await asked(made, STREAM, b"9\r\ndata: a\n\n\r\n5\r\nda", ends=True)
        assert await made.piece() == b"data: a\n\nda"
        with pytest.raises(Lost, match="within the answer"):
            await made.piece()

    run(test)


def test_an_engine_waits_for_who_takes_its_stream() -> None:
    """Else a slow client's answer would fill our memory."""

    async def test(made: Wire, transport: Transport) -> None:
        await asked(made, STREAM)
        size = wire._AHEAD_BYTES // 2
        made.data_received(b"%x\r\n" % size + bytes(size) + b"\r\n")
        assert transport.reading == []
        made.data_received(b"%x\r\n" % (size + 1) + bytes(size + 1) + b"\r\n")
        assert transport.reading == [False]
        assert len(await made.piece()) == 2 * size + 1
        taking = asyncio.ensure_future(made.piece())
        await asyncio.sleep(0)
        assert transport.reading == [False, True]
        made.data_received(b"0\r\n\r\n")
        assert await taking == b""

    run(test)


@pytest.mark.parametrize("size, writes", [(10, 1), (wire._ONE_WRITE_BYTES + 1, 2)])
def test_a_request_leaves_whole(size: int, writes: int) -> None:
    """A short one in one write."""

    async def test(made: Wire, transport: Transport) -> None:
        asking = asyncio.ensure_future(made.ask(b"head", bytes(size)))
        await asyncio.sleep(0)
        assert (b"".join(transport.sent), len(transport.sent)) == (b"head" + bytes(size), writes)
        made.data_received(LENGTH)
        await asking

    run(test)
