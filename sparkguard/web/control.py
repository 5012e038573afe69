"""The control API: models, runners, devices, logs and events, as JSON."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, TypeVar

from aiohttp import web

from sparkguard.errors import SparkguardError
from sparkguard.supervisor.protocol import Refused
from sparkguard.web import bodies, stream
from sparkguard.web.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from sparkguard.supervisor.protocol import Json, Supervisor

_SETTINGS_BYTES = 1 << 20
_PING_SECONDS = 10.0  # the page takes a connection that is silent for 25 s for dead
T = TypeVar("T")


class Control:
    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._closing = asyncio.Event()
        self._bodies = bodies.Bodies(_SETTINGS_BYTES)

    def close(self) -> None:
        """Ends all streams: a drain waits for requests, and these have no end of their own."""
        self._closing.set()

    async def running(self, request: web.Request) -> web.Response:
        keys = ("id", "model", "state", "device", "pid")
        return web.json_response({"running": [{key: runner[key] for key in keys} for runner in self._supervisor.runners()]})

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"models": self._supervisor.models(), "warning": self._supervisor.warning()})

    async def model(self, request: web.Request) -> web.Response:
        return web.json_response(self._supervisor.model(self._id(request)))

    async def patch(self, request: web.Request) -> web.Response:
        with self._bodies.one() as held:
            changes = bodies.parse(await held.read(request))
        try:
            return web.json_response(await self._supervisor.patch(self._id(request), changes))
        except Refused:
            raise
        except SparkguardError as error:
            message = f"{error.message}; {error.hint}" if error.hint else error.message
            raise ApiError(400, message, "invalid_setting", param=getattr(error, "param", None)) from None

    async def load(self, request: web.Request) -> web.Response:
        id = self._id(request)
        await self._supervisor.load(id)
        return web.json_response(self._supervisor.model(id))

    async def unload(self, request: web.Request) -> web.Response:
        id = self._id(request)
        await self._supervisor.unload(id)
        return web.json_response(self._supervisor.model(id))

    async def runners(self, request: web.Request) -> web.Response:
        return web.json_response({"runners": self._supervisor.runners()})

    async def kill(self, request: web.Request) -> web.Response:
        await self._supervisor.kill(request.match_info["id"])
        return web.json_response({"killed": request.match_info["id"]})

    async def devices(self, request: web.Request) -> web.Response:
        return web.json_response({"devices": self._supervisor.devices()})

    async def log(self, request: web.Request) -> web.StreamResponse:
        """Lines of text; with follow=1 the next ones as they come, as events for who asks for events."""
        ring = self._supervisor.log(request.match_info["id"])
        if ring is None:
            raise ApiError(404, f"there is no runner {request.match_info['id']!r}", "runner_not_found")
        as_events = "text/event-stream" in request.headers.get("Accept", "")
        wrap = _line_as_event if as_events else _line
        if request.query.get("follow") not in ("1", "true"):
            return web.Response(text="".join(line + "\n" for line in ring.lines()))
        # The lines so far are taken after following has begun, in one step of the loop: none is missed or told twice.
        lines = ring.follow()
        text = b"".join(wrap(line) for line in ring.lines())
        return await self._stream(request, lines, wrap, text, as_events)

    async def events(self, request: web.Request) -> web.StreamResponse:
        """All that changes, from now on; the first event is everything as it is."""
        events = self._supervisor.subscribe()
        everything = {
            "type": "snapshot",
            "models": self._supervisor.models(),
            "warning": self._supervisor.warning(),
            "runners": self._supervisor.runners(),
            "devices": self._supervisor.devices(),
        }
        return await self._stream(request, events, _event, _event(everything), True)

    async def _stream(
        self, request: web.Request, source: AsyncIterator[T], wrap: Callable[[T], bytes], first: bytes, as_events: bool
    ) -> web.StreamResponse:
        upcoming: asyncio.Future[T] = asyncio.ensure_future(_next(source))
        closing = asyncio.ensure_future(self._closing.wait())
        kind = "text/event-stream" if as_events else "text/plain; charset=utf-8"
        response = web.StreamResponse(headers={"Content-Type": kind, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        stream.let_read_slowly(request)
        try:
            await asyncio.sleep(0)  # an iterator lets go of what it holds only when it has begun
            await response.prepare(request)
            await response.write(first)
            while True:
                done, _ = await asyncio.wait((upcoming, closing), timeout=_PING_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if closing in done:
                    break
                if upcoming in done:
                    try:
                        item = upcoming.result()
                    except StopAsyncIteration:
                        break
                    await response.write(wrap(item))
                    upcoming = asyncio.ensure_future(_next(source))
                elif as_events:
                    await response.write(b":\n\n")
        finally:
            closing.cancel()
            upcoming.cancel()
            await asyncio.wait((closing, upcoming))
            close = getattr(source, "aclose", None)
            if close is not None:
                await close()
        return response

    def _id(self, request: web.Request) -> str:
        name = request.match_info["id"]
        id = self._supervisor.resolve(name)
        if id is None or self._supervisor.model(id) is None:
            raise ApiError(404, f"there is no model {name[:200]!r}", "model_not_found")
        return id


async def _next(source: AsyncIterator[T]) -> T:
    return await source.__anext__()


def _line(line: str) -> bytes:
    return line.encode("utf-8", "replace") + b"\n"


def _line_as_event(line: str) -> bytes:
    return b"data: " + line.encode("utf-8", "replace") + b"\n\n"


def _event(event: Json) -> bytes:
    """A model or a runner stands whole under its kind, as in the snapshot's lists."""
    kind = event["type"]
    if kind in ("model", "runner") and kind not in event:
        whole = {key: value for key, value in event.items() if key != "type"}
        gone = whole.get("state") == "removed"
        event = {"type": kind, "id": whole["id"], "removed": True} if gone else {"type": kind, kind: whole}
    return b"data: " + json.dumps(event).encode() + b"\n\n"
