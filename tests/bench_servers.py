"""Servers for the benchmarks' tests: a real llama-server, and one that answers what a test tells it to."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import mkgguf
from aiohttp import web

CACHE = Path(os.environ.get("SPARKGUARD_TEST_CACHE", "/var/cache/sparkguard-tests"))
Answer = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


@contextmanager
def llama_server(folder: Path, *arguments: str, name: str = "bench", **shape: int) -> Iterator[str]:
    """The url of one with a tiny model of its own; it serves one request at a time, with metrics."""
    model = mkgguf.make(folder / f"{name}.gguf", **({"context": 4096} | shape))
    command = [CACHE / "llama" / "engine" / "llama-server", "-m", model, "--host", "127.0.0.1", "--port", "0", "--alias", name]
    options = ["-t", "1", "-c", "4096", "-np", "1", "--cache-ram", "0", "--no-warmup", "--metrics", *arguments]
    with subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True, errors="replace") as process:
        assert process.stderr is not None
        try:
            heard = next((line for line in process.stderr if "listening on" in line), None)
            assert heard is not None, "it did not start"
            drain = subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)
            yield heard.split("listening on", 1)[1].split()[0]
        finally:
            process.kill()
    drain.wait()


def chunk(**delta: Any) -> str:
    return json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})


def counted(prompt: int, completion: int, total: int | None = None, **more: Any) -> str:
    total = prompt + completion if total is None else total
    return json.dumps(
        {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total, **more}}
    )


FINISH = json.dumps({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
DONE = "[DONE]"


def whole(completion: int = 16, prompt: int = 20) -> list[str]:
    """What a good answer consists of."""
    return [chunk(role="assistant", content=""), *[chunk(content="x")] * completion, FINISH, counted(prompt, completion), DONE]


async def stream(request: web.Request, events: list[str], *, cut: bool = False, wait: float = 0.0) -> web.StreamResponse:
    """Server-sent events; cut ends the connection instead of the answer."""
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await answer.prepare(request)
    for event in events:
        await answer.write(f"data: {event}\n\n".encode())
        await asyncio.sleep(wait)
    if cut and request.transport is not None:
        request.transport.abort()
    return answer


class StandIn:
    """asked: the bodies and headers of the completions; metrics and models can be changed while it serves."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.models = ["m"]
        self.metrics: str | None = None
        self.url = ""

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        self.keys.append(request.headers.get("Authorization"))
        return await self.answer(request, body)

    async def list(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": id} for id in self.models]})

    async def scrape(self, _: web.Request) -> web.Response:
        return web.Response(text=self.metrics) if self.metrics is not None else web.Response(status=404)


@asynccontextmanager
async def stand_in(answer: Answer) -> AsyncIterator[StandIn]:
    served = StandIn(answer)
    app = web.Application()
    app.add_routes(
        [
            web.post("/v1/chat/completions", served.complete),
            web.get("/v1/models", served.list),
            web.get("/metrics", served.scrape),
        ]
    )
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    served.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
    try:
        yield served
    finally:
        await runner.cleanup()
