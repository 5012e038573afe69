"""A stand-in for the supervisor, for tests of the front: one queue a model, and runners that a test starts and ends itself.

What stands behind its sockets is a real llama-server, or an engine that answers what a test tells it to.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import http.client
import json
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from sparkguard.supervisor.logs import Ring
from sparkguard.supervisor.protocol import Json, Refused, RunnerDied
from sparkguard.supervisor.runners_toml import BadSetting
from sparkguard.web.app import Options, Server

T = TypeVar("T")
SECONDS = 30.0  # no wait in these tests is near it
TRIES = 3


class Loop:
    """An event loop in a thread: the clients of the tests are blocking ones, as their users' are."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(SECONDS)

    def call(self, function: Callable[..., T], *args: Any) -> T:
        async def work() -> T:
            return function(*args)

        return self.run(work())

    def start(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(SECONDS)
        self._loop.close()


class Runner:
    """One generation of a model's runner, at a path."""

    def __init__(self, socket: str, generation: int) -> None:
        self.socket = socket
        self.generation = generation
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()


class Model:
    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.waiting = 0
        self.generation = 0
        self.runner: Runner | None = None
        self.next: asyncio.Event = asyncio.Event()  # a runner is there
        self.log = Ring()


class Lease:
    def __init__(self, supervisor: StandIn, id: str) -> None:
        self.model = id
        self.key: str | None = None
        self._supervisor = supervisor
        self._model = supervisor.all[id]
        self._tries = 1
        self._sent = False
        self._well = True
        self._take()

    def _take(self) -> None:
        assert self._model.runner is not None
        self.runner = self._model.runner
        self.generation = self.runner.generation
        self.socket = self.runner.socket

    async def __aenter__(self) -> Lease:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._model.turn.release()
        self._supervisor.note("done" if self._well and kind is None else "failed")

    def first_byte(self) -> None:
        self._sent = True

    def tokens(self, prompt: int, generated: int) -> None:
        self._supervisor.tokens.append((prompt, generated))

    def failed(self) -> None:
        self._well = False

    @property
    def death(self) -> asyncio.Future[str]:
        return self.runner.died

    async def replay(self) -> None:
        self._supervisor.note("replay")
        if self._sent:
            raise RunnerDied("bytes were sent")
        self._tries += 1
        if self._tries > TRIES:
            raise Refused(502, "runner_died", f"the runner died {TRIES} times under this request")
        if self._model.runner is self.runner:
            self._model.runner = None
            self._model.next.clear()
        await self._model.next.wait()
        self._take()


class StandIn:
    """The protocol of sparkguard.supervisor.protocol.Supervisor; made within the loop."""

    def __init__(self) -> None:
        self.all: dict[str, Model] = {}
        self.aliases: dict[str, str] = {}
        self.refusal: Refused | None = None
        self.tokens: list[tuple[int, int]] = []
        self.notes: list[str] = []
        self.patched: list[Json] = []
        self._noted = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._readers: list[asyncio.Queue[Json | None]] = []

    def note(self, word: str) -> None:
        """Something that a test may wait for."""
        self.notes.append(word)

        async def tell() -> None:
            async with self._noted:
                self._noted.notify_all()

        task = asyncio.ensure_future(tell())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def noted(self, word: str, times: int = 1) -> None:
        async with self._noted:
            await asyncio.wait_for(self._noted.wait_for(lambda: self.notes.count(word) >= times), SECONDS)

    def start(self, id: str, socket: str) -> None:
        """A runner, or the next one after a death."""
        model = self.all.setdefault(id, Model())
        model.generation += 1
        model.runner = Runner(socket, model.generation)
        model.next.set()

    def end(self, id: str, reason: str) -> None:
        """What the supervisor says when a runner dies or is to be stopped."""
        runner = self.all[id].runner
        assert runner is not None
        runner.died.set_result(reason)

    async def lease(self, model: str, on_position: Callable[[int], None] | None = None) -> Lease:
        if self.refusal is not None:
            raise self.refusal
        asked = self.all[model]
        asked.waiting += 1
        self.note("waiting")
        try:
            await asked.turn.acquire()
        finally:
            asked.waiting -= 1
            self.note("left")
        await asked.next.wait()
        return Lease(self, model)

    def resolve(self, name: str) -> str | None:
        name = self.aliases.get(name, name)
        return name if name in self.all else None

    def warning(self) -> str | None:
        return "half of the folder was not looked at"

    def models(self) -> list[Json]:
        return [model for id in self.all if (model := self.model(id))]

    def model(self, id: str) -> Json | None:
        if id not in self.all:
            return None
        aliases = [alias for alias, of in self.aliases.items() if of == id]
        return {
            "id": id,
            "aliases": aliases,
            "state": "ready" if self.all[id].runner else "stopped",
            "queue": self.all[id].waiting,
        }

    def runners(self) -> list[Json]:
        return [
            {"id": id, "model": id, "state": "ready", "device": "cpu", "pid": os.getpid(), "memory_bytes": 1 << 20}
            for id, model in self.all.items()
            if model.runner
        ]

    def devices(self) -> list[Json]:
        return [{"id": "cpu", "total_bytes": 1 << 30}]

    async def load(self, id: str) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.note(f"load {id}")

    async def unload(self, id: str) -> None:
        self.note(f"unload {id}")

    async def kill(self, runner_id: str) -> None:
        if runner_id not in self.all:
            raise Refused(404, "runner_not_found", f"there is no runner {runner_id!r}")
        self.note(f"kill {runner_id}")

    async def patch(self, id: str, changes: Json) -> Json:
        if "context" in changes and not isinstance(changes["context"], int):
            raise BadSetting("context", "context is no number", "write 4096")
        self.patched.append(changes)
        return self.model(id) or {}

    async def reload(self) -> None:
        self.note("reload")

    def log(self, runner_id: str) -> Ring | None:
        model = self.all.get(runner_id)
        return model.log if model else None

    def subscribe(self) -> AsyncIterator[Json]:
        queue: asyncio.Queue[Json | None] = asyncio.Queue()
        self._readers.append(queue)
        return self._events(queue)

    async def _events(self, queue: asyncio.Queue[Json | None]) -> AsyncIterator[Json]:
        try:
            while (event := await queue.get()) is not None:
                yield event
        finally:
            self._readers.remove(queue)
            self.note("unsubscribed")

    def tell(self, event: Json) -> None:
        for reader in self._readers:
            reader.put_nowait(event)

    def counters(self) -> list[Json]:
        keys = ("requests", "failed", "prompt_tokens", "generated_tokens", "loads", "crashes", "seconds")
        return [{"model": id, "queue": model.waiting, **dict.fromkeys(keys, 7)} for id, model in self.all.items()]


class Engine:
    """An HTTP server on a Unix socket that does what a test's script says, a request a step, and then dies; within the loop.

    A step is given the request's bytes, and reader and writer of its connection.
    """

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.steps: list[Step] = []
        self.requests: list[bytes] = []
        self.asked = asyncio.Event()  # a request has come
        self.closed = asyncio.Event()  # the front has closed a connection

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self.path)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")), 0
                )
                self.requests.append(head + await reader.readexactly(length))
                self.asked.set()
                await (self.steps.pop(0) if self.steps else sends(close=True))(reader, writer)
                if writer.is_closing():
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            self.closed.set()
        finally:
            writer.close()

    async def stop(self) -> None:
        self._server.close()
        Path(self.path).unlink(missing_ok=True)


Step = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def sends(*parts: bytes, close: bool = False) -> Step:
    async def step(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
        if close:
            writer.close()

    return step


def answers(body: bytes, status: str = "200 OK", kind: str = "application/json") -> Step:
    return sends(f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)


def sends_until_closed(*parts: bytes) -> Step:
    """Then says nothing more until the front closes the connection."""

    async def step(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await sends(*parts)(reader, writer)
        if not await reader.read(1):
            raise ConnectionResetError

    return step


class World:
    """The front on a free port, over a stand-in; the pieces of it that a test touches."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        self.loop = Loop()
        self.supervisor = self.loop.call(StandIn)
        self.server = Server(self.supervisor, Options(port=0, **{"drain_seconds": SECONDS, **options}))
        self.url = self.loop.run(self.server.start())
        self.port = int(self.url.rpartition(":")[2])
        self._engines: list[Engine] = []
        self._connections: list[http.client.HTTPConnection] = []

    def ask(self, method: str, path: str, body: object = None, **headers: str) -> http.client.HTTPResponse:
        """body is bytes, or a value to be sent as JSON; an underscore in a header's name stands for its hyphen."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        self._connections.append(connection)
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body)
        connection.request(method, path, raw, {name.replace("_", "-"): value for name, value in headers.items()})
        return connection.getresponse()

    def hang_up(self) -> None:
        """As a client that leaves."""
        while self._connections:
            self._connections.pop().close()

    def engine(self, model: str, *steps: Step) -> Engine:
        """A scripted engine behind this model from now on."""
        path = self.folder / f"{len(self._engines)}.sock"
        engine = self.loop.call(Engine, path)
        engine.steps += steps
        self._engines.append(engine)
        self.loop.run(engine.start())
        self.loop.call(self.supervisor.start, model, engine.path)
        return engine

    @property
    def tokens(self) -> list[tuple[int, int]]:
        """What was counted; asked within the loop, since an answer is sent before it is counted."""
        return self.loop.call(lambda: list(self.supervisor.tokens))

    @property
    def notes(self) -> list[str]:
        return self.loop.call(lambda: list(self.supervisor.notes))

    def wait(self, word: str, times: int = 1) -> None:
        self.loop.run(self.supervisor.noted(word, times))

    def close(self) -> None:
        self.hang_up()
        try:
            self.loop.run(self.server.close())
            for engine in self._engines:
                self.loop.run(engine.stop())
        finally:
            self.loop.close()
