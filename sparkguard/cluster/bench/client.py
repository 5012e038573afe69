"""One streamed chat completion over HTTP, as a timeline. Strict: what is not announced as whole is not counted."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import aiohttp

from sparkguard.cluster.bench import chat
from sparkguard.cluster.bench.sse import Parser, StreamFault
from sparkguard.core.measure import DONE, Event, Timeline

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import SimpleNamespace

ERROR_BYTES = 64 << 10
CONNECT_SECONDS = 10.0
# A test of 64 streams wants 64 connections: none waits for another's.
CONNECTIONS = 80
HEADERS = {"Content-Type": "application/json", "Accept": "text/event-stream"}


class Endpoint:
    """An OpenAI-compatible server. The key is in a header only, and is in no record and no message."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self.base = self.url[:-3] if self.url.endswith("/v1") else self.url
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._kept: aiohttp.ClientSession | None = None
        self._streams: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Endpoint:
        tracing = aiohttp.TraceConfig()
        tracing.on_connection_create_start.append(_connecting)
        tracing.on_connection_create_end.append(_connected)
        # No proxy of the laptop's environment (trust_env): it has no business between two machines of one LAN.
        self._kept = aiohttp.ClientSession(headers=self._headers, connector=aiohttp.TCPConnector(limit=4))
        # llama-server says keep-alive after a stream and closes all the same: the next request would meet a closing connection.
        alone = aiohttp.TCPConnector(limit=CONNECTIONS, force_close=True)
        self._streams = aiohttp.ClientSession(headers=self._headers, connector=alone, trace_configs=[tracing])
        return self

    async def __aexit__(self, *_: object) -> None:
        for session in (self._kept, self._streams):
            assert session
            await session.close()

    async def get_text(self, path: str, seconds: float = 3.0, limit_bytes: int = 2 << 20) -> str | None:
        """The body of a 200, or None: not there, too slow, too large."""
        try:
            assert self._kept, "used outside of `async with`"
            async with self._kept.get(self.base + path, timeout=aiohttp.ClientTimeout(total=seconds)) as answer:
                if answer.status != 200:
                    return None
                body = await answer.content.read(limit_bytes + 1)
                while len(body) <= limit_bytes and (more := await answer.content.read(limit_bytes + 1 - len(body))):
                    body += more
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
            return None
        return None if len(body) > limit_bytes else body.decode("utf-8", "replace")

    async def models(self) -> list[str] | None:
        """The ids that the server says it serves; None: it does not say."""
        text = await self.get_text("/v1/models")
        try:
            return [str(model["id"]) for model in json.loads(text)["data"]] if text else None
        except (ValueError, RecursionError, KeyError, TypeError):
            return None

    async def round_trip(self, times: int = 5) -> float | None:
        """Median seconds of an exchange that computes nothing, on a warm connection."""
        took = []
        for _ in range(times + 1):
            began = time.perf_counter()
            if await self.get_text("/v1/models") is None:
                return None
            took.append(time.perf_counter() - began)
        return sorted(took[1:])[times // 2]

    async def stream(self, body: Mapping[str, Any], seconds: float) -> Timeline:
        """Asks and reads to the end. Never raises for what the server or the network does: that is in the timeline.

        Cancellation of the task closes the connection, and with it the generation on every engine that we know.
        """
        reading = _Reading()
        try:
            assert self._streams, "used outside of `async with`"
            await reading.run(self._streams, f"{self.base}/v1/chat/completions", body, seconds)
        except StreamFault as fault:
            return reading.line(fault.kind, fault.detail)
        except asyncio.TimeoutError:
            return reading.line("timeout", f"not whole within {seconds:g} s")
        except aiohttp.ClientConnectorError as error:
            return reading.line("unreachable", str(error))
        except (aiohttp.ClientError, OSError) as error:
            return reading.line("connection", f"{type(error).__name__}: {error}")
        return reading.line()


class _Reading:
    """The state of one request, so that what came before a fault is kept."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.connect = 0.0
        self.events: list[Event] = []
        self.last: dict[str, Any] = {}

    async def run(self, session: aiohttp.ClientSession, url: str, body: Mapping[str, Any], seconds: float) -> None:
        limits = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
        options = {"data": json.dumps(body).encode(), "headers": HEADERS, "timeout": limits, "allow_redirects": False}
        self.began = time.perf_counter()
        async with session.post(url, trace_request_ctx=self, **options) as answer:
            if answer.status != 200:
                raise StreamFault(f"http_{answer.status}", _message(await answer.content.read(ERROR_BYTES)))
            if answer.content_type != "text/event-stream":
                text = await answer.content.read(ERROR_BYTES)
                raise StreamFault("error_body" if _is_error(text) else "not_a_stream", _message(text))
            await self._read(answer.content)

    async def _read(self, content: aiohttp.StreamReader) -> None:
        parser = Parser()
        done = False
        while piece := await content.readany():
            at = time.perf_counter()
            for name, data in parser.feed(piece):
                if done:
                    raise StreamFault("after_done", data[:200])
                chunk = chat.read(name, data)
                self.events.append(Event(at, chunk.kinds))
                done = DONE in chunk.kinds
                for key in ("usage", "timings", "finish"):
                    if (value := getattr(chunk, key)) is not None:
                        self.last[key] = value
        if not done and not parser.is_between_events:
            raise StreamFault("cut_off", "the stream ended within an event")

    def line(self, failure: str | None = None, detail: str = "") -> Timeline:
        return Timeline(
            began=self.began,
            ended=time.perf_counter(),
            connect=self.connect,
            events=tuple(self.events),
            failure=failure,
            detail=detail[:500],
            **self.last,
        )


async def _connecting(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
    context.began = time.perf_counter()


async def _connected(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
    reading = context.trace_request_ctx
    if isinstance(reading, _Reading):
        # The request's clock begins with the connection: a client that keeps its connections pays for one once.
        reading.began = time.perf_counter()
        reading.connect = reading.began - context.began


def _is_error(text: bytes) -> bool:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(body, dict) and chat.error_in(body) is not None


def _message(text: bytes) -> str:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        body = None
    found = chat.error_in(body) if isinstance(body, dict) else None
    if found is None and isinstance(body, dict) and "detail" in body:
        found = str(body["detail"])
    return found or text[:300].decode("utf-8", "replace")
