"""A small OpenAI-compatible server for tests of what asks engines: it says what it is told to, and counts what it is asked."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Engine:
    def __init__(self) -> None:
        self.model = "m"
        self.running = 0
        self.tokens = 100
        self.metrics: str | None = None  # instead of its own
        self.status = {"/metrics": 200, "/v1/models": 200, "/v1/chat/completions": 200}
        self.asked: Counter[str] = Counter()
        self.url = ""
        self.hangs = False
        self.health: dict[str, object] | None = None

    def text(self) -> str:
        if self.metrics is not None:
            return self.metrics
        return (
            "process_start_time_seconds 1\n"
            f'vllm:num_requests_running{{model_name="{self.model}"}} {self.running}\n'
            f'vllm:num_requests_waiting{{model_name="{self.model}"}} 0\n'
            f'vllm:generation_tokens_total{{model_name="{self.model}"}} {self.tokens}\n'
        )

    def _answer(self, path: str) -> str:
        if path.endswith("/metrics"):
            return self.text()
        if path == "/health":
            return json.dumps(self.health)
        if path == "/v1/models":
            return json.dumps({"data": [{"id": self.model}]})
        self.tokens += 1
        return json.dumps({"choices": [{"message": {"content": ""}}], "usage": {"completion_tokens": 1}})

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            path = head.split()[1]
            self.asked[path] += 1
            if self.hangs and path == "/v1/chat/completions":
                await reader.read()
                return
            status = self.status.get(path, 200 if path == "/health" and self.health is not None else 404)
            body = self._answer(path).encode() if status == 200 else b"{}"
            writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def engine() -> AsyncIterator[Engine]:
    made = Engine()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        server.close()
