"""Clients that have sent all they have to say, closed their half of the connection, and wait for the answer.

TCP shows the same for a client that is gone. So the front asks: an interim response (100 Continue), which every client of
HTTP/1.1 passes over, or a comment within a stream of events. The system of a client that is gone answers with a reset, and the
next write then fails.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from aiohttp import HttpVersion11, web

if TYPE_CHECKING:
    from collections.abc import Callable

    from sparkguard.web.connections import Connections

FIRST_SECONDS = 30.0  # for the head of a connection's first request; aiohttp sees to later ones
_BEGIN_SECONDS = 1.0  # for a request that has come whole to be read; what has not by then never will
# The second one meets the reset that the first has called forth; the rest find who leaves later.
_PROBES, _PROBE_SECONDS = (0.0, 0.05), 1.0
_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
_COMMENT = b"3\r\n:\n\n\r\n"  # within a stream of events: a chunk with an empty comment


def of(request: web.BaseRequest) -> HalfOpen | None:
    protocol = request.transport.get_protocol() if request.transport is not None else None
    return protocol if isinstance(protocol, HalfOpen) else None


class HalfOpen(asyncio.Protocol):
    """Between a connection and aiohttp, which takes the end of what a client sends for the end of the client."""

    def __init__(self, inner: web.RequestHandler, connections: Connections) -> None:
        self._inner = inner
        self._connections = connections
        self._entered = False
        self._asks = False  # something has come that is not answered yet
        self._ended = False
        self._request: web.BaseRequest | None = None
        self._streams = False
        self._timer: asyncio.TimerHandle | None = None
        self._first: asyncio.TimerHandle | None = None

    def asked(self) -> None:
        """The head of a request has come."""
        if self._first is not None:
            self._first.cancel()
            self._first = None

    def begin(self, request: web.BaseRequest) -> None:
        """An answer is being made that is worth waiting for."""
        self._request = request
        if self._ended:
            self._hold()

    def streams(self) -> None:
        """It is a stream of events, has begun, and is written by whole events."""
        self._streams = True

    def end(self) -> None:
        self._request = None
        self._asks = self._streams = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._entered = self._connections.enter()
        if not self._entered:
            self._transport.abort()
            return
        self._first = asyncio.get_running_loop().call_later(FIRST_SECONDS, self._transport.abort)
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._asks = True
        self._inner.data_received(data)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._cancel()
        if self._entered:
            self.asked()
            self._connections.leave()
            self._inner.connection_lost(exc)

    def eof_received(self) -> bool:
        """Whether the other half stays open."""
        if not self._asks:
            return False
        self._ended = True
        self._inner.close()  # once it has answered
        if self._request is not None:
            self._hold()
        else:
            self._call_later(_BEGIN_SECONDS, self._transport.close)
        return True

    def _hold(self) -> None:
        """For as long as the client is there, if it has sent a whole request."""
        self._cancel()
        request = self._request
        if request is None or not request.content.is_eof() or request.version < HttpVersion11:
            self._transport.close()
        else:
            self._probe(0)

    def _probe(self, number: int) -> None:
        if self._request is None or (self._request.writer.output_size and not self._streams):
            return
        self._transport.write(_COMMENT if self._streams else _INTERIM)
        seconds = _PROBES[number + 1] if number + 1 < len(_PROBES) else _PROBE_SECONDS
        self._call_later(seconds, lambda: self._probe(number + 1))

    def _call_later(self, seconds: float, what: Callable[[], None]) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, what)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
