"""Benchmarks on the page: `spark-serve bench` run, listed, shown, compared and cancelled. One at a time, beside no lifecycle."""

from __future__ import annotations

import asyncio
import re
import time
from typing import TYPE_CHECKING, Any

from aiohttp import web

from sparkguard.cluster.ui import body
from sparkguard.cluster.ui.children import Child, ask
from sparkguard.errors import OK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparkguard.cluster.ui.feed import Feed

# Keys of a request -> flags of `bench run`, and what they take.
FLAGS: dict[str, tuple[str, type]] = {
    "node": ("--node", str), "kind": ("--kind", str), "requests": ("--requests", int), "concurrency": ("--concurrency", str),
    "max_tokens": ("--max-tokens", int), "prompt_tokens": ("--prompt-tokens", str), "reasoning": ("--reasoning", str),
}  # fmt: skip
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}")


class Bench:
    def __init__(self, program: Sequence[str], feed: Feed) -> None:
        self._program = program
        self._feed = feed
        self._child: Child | None = None
        self._task: asyncio.Task[None] | None = None
        self.running: dict[str, Any] | None = None

    async def run(self, request: web.Request) -> web.Response:
        try:
            asked = body.read(await request.read())
            argv = arguments(asked)
        except ValueError as error:
            return _refuse(400, str(error))
        if self.running is not None:
            return _refuse(409, "a benchmark is running")
        self.running = {"asked": asked, "since": time.time(), "last": None}
        self._tell()
        self._task = asyncio.create_task(self._run(argv))
        return web.json_response({"running": self.running}, status=202)

    async def runs(self, request: web.Request) -> web.Response:
        return _answer(await ask(self._program, "bench", "list", "--json"))

    async def show(self, request: web.Request) -> web.Response:
        id = request.match_info["id"]
        if not _ID.fullmatch(id):
            return _refuse(404, "no such run")
        return _answer(await ask(self._program, "bench", "show", "--json", id))

    async def compare(self, request: web.Request) -> web.Response:
        first, second = request.query.get("a", ""), request.query.get("b", "")
        if not _ID.fullmatch(first) or not _ID.fullmatch(second):
            return _refuse(400, "a and b must be ids of runs")
        return _answer(await ask(self._program, "bench", "compare", "--json", first, second))

    async def cancel(self, request: web.Request) -> web.Response:
        if self._child is not None:
            self._child.interrupt()
        return web.json_response({"cancelled": self._child is not None})

    async def close(self) -> None:
        if self._child is not None:
            await self._child.stop(10.0)
        if self._task is not None:
            await self._task

    async def _run(self, argv: list[str]) -> None:
        error: str | None = None
        try:
            self._child = await Child.start(self._program, argv)
            async for event in self._child.lines():
                if self.running is not None:
                    self.running["last"] = event
                self._feed.put({"type": "bench_event", "event": event})
            ended = await self._child.ended()
            if ended.status != OK:
                error = ended.said.strip() or f"it ended with status {ended.status}"
        except OSError as fault:
            error = str(fault)
        finally:
            self._child = None
            self.running = None
            self._tell(error)

    def _tell(self, error: str | None = None) -> None:
        self._feed.put({"type": "bench", "running": self.running, "error": error})


def arguments(asked: Any) -> list[str]:
    """The arguments of spark-serve. Raises ValueError."""
    if not isinstance(asked, dict):
        raise ValueError("the body must be a JSON object")
    argv = ["bench", "run", "--json"]
    for key, value in asked.items():
        if key not in FLAGS:
            raise ValueError(f"a benchmark does not take {key!r}")
        flag, kind = FLAGS[key]
        if value in (None, ""):
            continue
        if not isinstance(value, kind) or isinstance(value, bool) or str(value).startswith("-"):
            raise ValueError(f"{key}={value!r} is no {'number' if kind is int else 'text'}")
        argv.append(f"{flag}={value}")
    return argv


def _answer(found: dict[str, Any]) -> web.Response:
    return web.json_response(found) if found["status"] == OK else _refuse(502, found.get("error", "it failed"))


def _refuse(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)
