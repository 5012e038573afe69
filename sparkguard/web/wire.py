"""HTTP on one connection to an engine: a request goes out in one write, and its answer comes whole or piece by piece.

A general client takes 0.4 ms of each short answer for what no runner needs: redirects, cookies, proxies, names to look up.
httptools reads what comes; who connects, and to what, is upstream.py's.
"""

from __future__ import annotations

import asyncio
from typing import cast

import httptools

from sparkguard.errors import UNAVAILABLE, SparkguardError

EVENTS = "text/event-stream"
# Of a stream, read ahead of who takes it; then the engine has to wait. Its own buffers hold as much again.
_AHEAD_BYTES = 256 << 10
_HEAD_BYTES = 64 << 10  # of an answer; an engine's has 200
_ONE_WRITE_BYTES = 64 << 10  # a copy is cheaper than a second write


class Lost(SparkguardError):
    """The runner has died, or its connection broke, before the answer was whole."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=UNAVAILABLE)


class Wire(asyncio.Protocol):
    """One connection. It carries one request at a time: ask(), and then the rest of the answer by body() or piece()."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}  # by their names in lower case
        self.whole = True  # the last answer has come to its end, or none was asked for
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser
        self.begun = False  # there is a status
        self._reusable = False
        self._head_bytes = 0
        self._pieces: list[bytes] = []
        self._ahead = 0
        self._paused = False
        self._news: asyncio.Future[None] | None = None  # awaited by who takes the answer
        self._lost: str | None = None

    # What upstream.py asks

    async def ask(self, head: bytes, body: bytes) -> None:
        """Returns when there is a status, and of an answer that is no stream all the rest. Raises Lost."""
        assert self._transport is not None and self.whole
        self.whole = self.begun = False
        self._parser = httptools.HttpResponseParser(self)
        if len(body) <= _ONE_WRITE_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)
        while not self._enough:
            await self._more()

    @property
    def streams(self) -> bool:
        return self.headers.get("content-type", "").partition(";")[0].strip().lower() == EVENTS

    @property
    def _enough(self) -> bool:
        """To return from ask()."""
        return self.whole or (self.begun and self.streams)

    def body(self) -> bytes:
        """Of an answer that is whole."""
        pieces, self._pieces, self._ahead = self._pieces, [], 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def piece(self) -> bytes:
        """What has come since the last one; nothing: the stream has ended. Raises Lost."""
        while not self._pieces and not self.whole:
            if self._paused and self._transport is not None:
                self._paused = False
                self._transport.resume_reading()
            await self._more()
        return self.body()

    @property
    def free(self) -> bool:
        """Whether it can be asked again: not when an engine has answered before it took all of the body."""
        if not self._reusable or self._lost is not None or self._transport is None:
            return False
        return not self._transport.is_closing() and not self._transport.get_write_buffer_size()

    def close(self) -> None:
        """At once: an engine that still generates is told so, and stops."""
        if self._transport is not None:
            self._transport.abort()

    async def _more(self) -> None:
        if self._lost is not None:
            raise Lost(self._lost)
        self._news = self._loop.create_future()
        try:
            await self._news
        finally:
            self._news = None

    def _tell(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    # What the connection says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.whole:
            self._break("it speaks without being asked")
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade, UnicodeDecodeError):
            self._break("its answer is no HTTP")
            return
        if self._enough:
            self._tell()

    def connection_lost(self, exc: BaseException | None) -> None:
        # An answer that says nothing of its length ends with its connection.
        if self.begun and not self.whole and not {"content-length", "transfer-encoding"} & self.headers.keys():
            self.whole = True
        self._lost = self._lost or ("its connection broke within the answer" if self.begun else "its connection broke")
        self._tell()

    def _break(self, why: str) -> None:
        self._lost = self._lost or why
        self.close()
        self._tell()

    # What the parser finds

    def on_message_begin(self) -> None:
        if self.whole:
            raise ValueError("a second answer to one request")
        self.status, self.headers, self._head_bytes, self._reusable = 0, {}, 0, False

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.begun:
            return  # a trailer would change what the answer's head has said
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > _HEAD_BYTES:
            raise ValueError("a head without end")
        self.headers[name.decode("ascii").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self.begun = self.status >= 200

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)
        self._ahead += len(body)
        if self._ahead > _AHEAD_BYTES and self.streams and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        self.whole = self.begun  # an interim one (100 Continue) is none
        self._reusable = self.whole and self._parser.should_keep_alive()
