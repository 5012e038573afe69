"""A stand-in for the supervisor behind the real page: its JSON and its streams, in whatever state a test wants to look at."""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from aiohttp import web

from sparkguard.web.page import routes

Json = dict[str, Any]
MB = 1 << 20
GB = 1 << 30


class FakeSupervisor:
    """Runs in a thread of its own; every method may be called from the test's."""

    def __init__(self) -> None:
        self.models: dict[str, Json] = {}
        self.runners: dict[str, Json] = {}
        self.devices: list[Json] = []
        self.warning: str | None = None
        self.log: list[str] = []
        self.key: str | None = None
        self.answers: dict[tuple[str, str], tuple[int, Json]] = {}  # (method, path) -> status and body of the next request
        self.asked: list[tuple[str, str, Json | None]] = []  # what changed something: method, path, body
        self._heard = threading.Condition()
        self._events: set[asyncio.Queue[Json | None]] = set()
        self._logs: set[asyncio.Queue[str | None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._runner: web.AppRunner | None = None
        self.port = 0
        self.up()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def up(self) -> None:
        self._wait(self._up())

    def down(self) -> None:
        """Nobody listens, and every connection is cut."""
        self._wait(self._down())

    def close(self) -> None:
        self.down()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def show(self, *models: Json, runners: tuple[Json, ...] = (), devices: tuple[Json, ...] | None = None) -> None:
        """What the next snapshot says."""
        self.models = {model["id"]: model for model in models}
        self.runners = {runner["id"]: runner for runner in runners}
        self.devices = list((gpu(), cpu()) if devices is None else devices)

    def tell_model(self, model: Json) -> None:
        self.models[model["id"]] = model
        self._tell({"type": "model", **copy.deepcopy(model)})

    def tell_runner(self, runner: Json) -> None:
        self.runners[runner["id"]] = runner
        self._tell({"type": "runner", **copy.deepcopy(runner)})

    def tell_gone(self, id: str) -> None:
        self._tell({"type": "runner", **self.runners.pop(id), "state": "stopped", "pid": None})

    def tell_queue(self, model: str, waiting: int) -> None:
        self._tell({"type": "queue", "model": model, "queue": waiting})

    def tell_library(self, warning: str | None) -> None:
        self.warning = warning
        self._tell({"type": "library", "warning": warning})

    def tell_nothing_useful(self) -> None:
        """An event of a type that the page does not know: it reads the lists."""
        self._tell({"type": "dropped"})

    def write(self, *lines: str) -> None:
        """Lines of every runner's log."""
        self.log += lines
        self._loop.call_soon_threadsafe(lambda: [queue.put_nowait(line) for queue in self._logs for line in lines])

    def answer(self, method: str, path: str, status: int, message: str, param: str | None = None) -> None:
        """What the next such request is told."""
        self.answers[method, path] = (status, {"error": {"message": message, "param": param}})

    def wait_for(self, method: str, path: str, seconds: float = 10) -> Json | None:
        """The body of the first such request, once it has come."""
        found: list[Json | None] = []

        def came() -> bool:
            found[:] = [body for asked_method, asked_path, body in self.asked if (asked_method, asked_path) == (method, path)]
            return bool(found)

        with self._heard:
            assert self._heard.wait_for(came, seconds), f"{method} {path} was not asked: {self.asked}"
        return found[0]

    def _tell(self, event: Json) -> None:
        self._loop.call_soon_threadsafe(lambda: [queue.put_nowait(event) for queue in self._events])

    def _wait(self, work: Any) -> None:
        done: Future[None] = asyncio.run_coroutine_threadsafe(work, self._loop)
        done.result(30)

    async def _up(self) -> None:
        app = web.Application(middlewares=[self._guard])
        app.add_routes(routes())
        app.add_routes([
            web.get("/api/models", self._list("models", lambda: list(self.models.values()), warning=lambda: self.warning)),
            web.get("/api/runners", self._list("runners", lambda: list(self.runners.values()))),
            web.get("/api/devices", self._list("devices", lambda: self.devices)),
            web.get("/api/events", self._follow_events),
            web.get("/api/runners/{id}/log", self._follow_log),
            web.patch("/api/models/{id}", self._patch),
            web.post("/api/{kind}/{id}/{verb}", self._act),
        ])  # fmt: skip
        self._runner = web.AppRunner(app, shutdown_timeout=1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def _down(self) -> None:
        for queue in (*self._events, *self._logs):
            queue.put_nowait(None)
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @web.middleware
    async def _guard(self, request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
        path = request.path
        if path.startswith("/api/") and self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "the API key is missing or wrong"}}, status=401)
        body = json.loads(await request.read() or b"null") if request.method != "GET" else None
        if request.method != "GET":
            with self._heard:
                self.asked.append((request.method, request.raw_path, body))
                self._heard.notify_all()
        if (request.method, request.raw_path) in self.answers:
            status, told = self.answers.pop((request.method, request.raw_path))
            return web.json_response(told, status=status)
        response: web.StreamResponse = await handler(request)
        return response

    def _list(self, name: str, rows: Callable[[], list[Json]], **more: Callable[[], Any]) -> Callable[[web.Request], Any]:
        async def answer(request: web.Request) -> web.Response:
            return web.json_response({name: rows(), **{key: told() for key, told in more.items()}})

        return answer

    async def _patch(self, request: web.Request) -> web.Response:
        model = self.models[request.match_info["id"]]
        model["settings"].update(await request.json())
        return web.json_response(model)

    async def _act(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def _follow_events(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        queue: asyncio.Queue[Json | None] = asyncio.Queue()
        self._events.add(queue)
        try:
            await response.prepare(request)
            event: Json | None = {
                "type": "snapshot",
                "models": list(self.models.values()),
                "warning": self.warning,
                "runners": list(self.runners.values()),
                "devices": self.devices,
            }
            while event is not None:
                await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                event = await queue.get()
        finally:
            self._events.discard(queue)
        return response

    async def _follow_log(self, request: web.Request) -> web.StreamResponse:
        if request.match_info["id"] not in self.runners:
            return web.json_response({"error": {"message": "there is no such runner"}}, status=404)
        response = web.StreamResponse(headers={"Content-Type": "text/plain; charset=utf-8"})
        queue: asyncio.Queue[str | None] = asyncio.Queue()
        self._logs.add(queue)
        try:
            await response.prepare(request)
            await response.write("".join(line + "\n" for line in self.log).encode())
            while (line := await queue.get()) is not None:
                await response.write(line.encode() + b"\n")
        finally:
            self._logs.discard(queue)
        return response


def gpu(**changes: Any) -> Json:
    device = {
        "id": "cuda:0",
        "name": "NVIDIA RTX 5000 Ada",
        "kind": "cuda",
        "pool": "cuda:0",
        "total_bytes": 32 * GB,
        "available_bytes": 21 * GB,
        "compute_capability": "8.9",
        "uuid": "GPU-5ab0f3c2-1b1e-4bd1-9f60-3b5f2f9f3f10",
        "usable": True,
        "reason": None,
    }
    return {**device, **changes}


def cpu(**changes: Any) -> Json:
    device = {
        "id": "cpu",
        "name": "AMD Ryzen 9 7950X, 16 cores",
        "kind": "cpu",
        "pool": "ram",
        "total_bytes": 64 * GB,
        "available_bytes": 41 * GB,
        "compute_capability": None,
        "uuid": None,
        "usable": True,
        "reason": None,
    }
    return {**device, **changes}


def model(id: str, state: str = "stopped", **changes: Any) -> Json:
    needs = {
        "weights_bytes": 4300 * MB,
        "kv_cache_bytes": 1152 * MB,
        "state_bytes": 0,
        "compute_bytes": 304 * MB,
        "output_bytes": 2 * MB,
        "projector_bytes": 0,
        "prompt_cache_bytes": 0,
        "total_bytes": 5758 * MB,
        "text": "5758 MB for 8192 tokens of context (weights 4300 MB, KV cache 1152 MB, work buffers 304 MB, output 2 MB)",
    }
    settings = {
        "file": None,
        "aliases": [],
        "device": None,
        "context": 8192,
        "kv_type": None,
        "parallel": None,
        "threads": None,
        "unload_when_idle": True,
        "args": [],
        "projector": None,
        "draft": None,
        "lora": [],
    }
    described = {
        "id": id,
        "aliases": [],
        "file": f"/home/ada/models/{id}.gguf",
        "bytes": 4302 * MB,
        "state": state,
        "device": "cuda:0" if state in ("ready", "starting", "draining") else None,
        "pinned": False,
        "context": 8192,
        "needs": needs,
        "fits": True,
        "reason": None,
        "settings": settings,
        "queue": 0,
        "error": None,
        "warning": None,
    }
    return {**described, **changes}


def runner(id: str, state: str = "ready", **changes: Any) -> Json:
    described = {
        "id": id,
        "model": id,
        "state": state,
        "device": "cuda:0",
        "pid": 48123,
        "memory_bytes": 5688 * MB,
        "estimated_bytes": 5758 * MB,
        "requests": 1284,
        "tokens": 902_133,
        "queue": 0,
        "started_at": 1_700_000_000,
        "restarts": 0,
        "last_error": None,
        "generation": 1,
        "progress": None,
        "running": 0,
    }
    return {**described, **changes}
