"""Runners as processes: a real llama-server for what it does, a misbehaving stand-in for what it may do."""

from __future__ import annotations

import asyncio
import errno
import http.client
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import mkgguf
import pytest

from sparkguard.core.events import BAD_FILE, BAD_SETTINGS, CRASH, HANG, STOPPED, Event, Exited, Placement, Ready, Started
from sparkguard.errors import SparkguardError
from sparkguard.probe import llama_server, procfs
from sparkguard.probe.engines import recognise
from sparkguard.supervisor import effects, engine
from sparkguard.supervisor.door import Door
from sparkguard.supervisor.effects import RealEffects, Site, Start

TESTS = Path(__file__).parents[1]
SECONDS = 30.0  # for what takes a fraction of one on a machine with nothing else to do
HERE = Placement("cpu", (("ram", 1 << 20),))
CANARY = "CanaryInTheMine"


@pytest.fixture(scope="module")
def server() -> llama_server.LlamaServer:
    cache = Path(os.environ.get("SPARKGUARD_TEST_CACHE", "/var/cache/sparkguard-tests")) / "llama"
    made = subprocess.run([TESTS / "tools" / "llama-server.sh", cache], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    return llama_server.ask(os.path.realpath(cache / "engine" / "llama-server"), os.environ)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mkgguf.make(tmp_path_factory.mktemp("models") / "模型 'ü.gguf")


@pytest.fixture
def folder(home: Path) -> Iterator[Path]:
    """Of sockets. No process and no file of a runner may be left in it, whatever the test did."""
    yield home / "run" / "runners"
    left = procfs.scan("/proc", (os.fsencode(home),)).processes
    assert [process for process in left if process.pid != os.getpid()] == []
    assert [path.name for path in (home / "run" / "runners").iterdir()] == ["lock"]


class Runners:
    """RealEffects, and the events that they post, one after the other."""

    def __init__(self, folder: Path, launch: Callable[[str, Placement], Start], hang_seconds: float) -> None:
        self.effects = RealEffects(launch, Site(str(folder), str(folder.parent / "logs"), hang_seconds))
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self.effects.attach(self._events.put_nowait)

    async def next(self) -> Event:
        return await asyncio.wait_for(self._events.get(), SECONDS)

    async def started(self, name: str = "a", generation: int = 1) -> int:
        self.effects.spawn(name, generation, HERE)
        event = await self.next()
        assert isinstance(event, Started), event
        return event.pid

    async def ready(self, name: str = "a", generation: int = 1) -> int:
        pid = await self.started(name, generation)
        event = await self.next()
        assert isinstance(event, Ready), event
        return pid

    async def exited(self) -> Exited:
        event = await self.next()
        assert isinstance(event, Exited), event
        return event


@asynccontextmanager
async def runners(
    folder: Path, launch: Callable[[str, Placement], Start], hang_seconds: float = SECONDS
) -> AsyncIterator[Runners]:
    made = Runners(folder, launch, hang_seconds)
    try:
        yield made
    finally:
        await made.effects.close()


def real(server: llama_server.LlamaServer, model: Path, *more: str) -> Callable[[str, Placement], Start]:
    launch = engine.Launch(context=2048, threads=1, args=more)

    def start(id: str, placement: Placement) -> Start:
        return Start(id, str(model), "cpu", server.path, tuple(engine.arguments(server, id, launch)), {"host": "ram"}, 1 << 18)

    return start


def stand_in(folder: Path, *acts: str) -> Callable[[str, Placement], Start]:
    program = folder.parent / "engine"
    program.write_text(f"#!{sys.executable}\n{(TESTS / 'fakes' / 'engine.py').read_text()}")
    program.chmod(0o755)
    words = tuple(word for act in acts for word in ("--act", act))
    return lambda id, placement: Start(id, str(folder.parent / "no model"), "cpu", str(program), words, {"host": "ram"}, 0)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 4 * SECONDS))


def ask(path: str, target: str, body: str) -> bytes:
    """The answer, or what came of it until the engine ended."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(SECONDS)
        connection.connect(path)
        head = f"POST {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        answer = b""
        try:
            while more := connection.recv(65536):
                answer += more
        except ConnectionError:
            pass
        return answer


def gone(pid: int) -> bool:
    """Waits for the end of a process that is no child of ours."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], SECONDS)[0])
    finally:
        os.close(fd)


def test_a_runner_serves_under_its_own_name(server: llama_server.LlamaServer, model: Path, folder: Path) -> None:
    """It is the engine by /proc/PID/exe and a runner by its first argument, in a group of its own, first to go for memory."""

    async def test() -> None:
        async with runners(folder, real(server, model)) as made:
            made.effects.spawn("folder/a", 7, HERE)
            started, ready = await made.next(), await made.next()
            assert isinstance(started, Started) and isinstance(ready, Ready)
            assert ready.measured is not None and 100_000 < dict(ready.measured)["ram"] < 20_000_000
            argv = procfs.argv_of("/proc", started.pid)
            assert argv[0] == "spark-runner: folder/a"
            assert os.path.realpath(f"/proc/{started.pid}/exe") == server.path
            found = recognise(argv, lambda path: None)
            assert found is not None and (found.engine, found.note) == ("llama-server", "runner of folder/a")
            assert os.getpgid(started.pid) == started.pid
            assert int(Path(f"/proc/{started.pid}/oom_score_adj").read_text()) == 500
            path, key = made.effects.endpoint("folder/a", 7)
            answer = await asyncio.to_thread(ask, path, "/completion", json.dumps({"prompt": "hi", "n_predict": 4}))
            assert b"200 OK" in answer and key is None
            made.effects.stop("folder/a", 7, 10)
            assert await made.exited() == Exited("folder/a", 7, STOPPED)

    run(test())


def test_an_argument_that_no_process_can_take_is_a_crash_and_leaves_nothing(
    server: llama_server.LlamaServer, model: Path, folder: Path
) -> None:
    """It is told like any other end: whoever waits for the runner must not wait for ever."""

    async def test() -> None:
        async with runners(folder, real(server, model, "a\0b")) as made:
            made.effects.spawn("a", 1, HERE)
            event = await made.exited()
            assert (event.cause, event.words) == (CRASH, "no process could be started: an argument with a zero byte")

    run(test())


def test_no_prompt_is_in_any_log(
    server: llama_server.LlamaServer, model: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not at any level, although llama-server prints grammars and broken requests, and at its highest verbosity prompts."""
    caplog.set_level(logging.DEBUG)
    requests = (
        ("/v1/chat/completions", json.dumps({"messages": [{"role": "user", "content": CANARY}], "max_tokens": 3})),
        ("/v1/chat/completions", f'{{"messages": [{{"role": "user", "content": "{CANARY} sings}}]'),
        ("/v1/chat/completions", json.dumps({"messages": [{"role": CANARY, "content": [{"type": CANARY}]}]})),
        ("/completion", json.dumps({"prompt": CANARY, "grammar": f"{CANARY} ::= ]["})),
        ("/completion", json.dumps({"prompt": f"{CANARY} " * 3000, "n_predict": 3})),
    )

    async def test() -> None:
        async with runners(folder, real(server, model, "--log-verbosity", "5")) as made:
            await made.ready()
            path, _ = made.effects.endpoint("a", 1)
            answers = [await asyncio.to_thread(ask, path, target, body) for target, body in requests]
            assert answers[0].split(b" ", 2)[1] == b"200"
            made.effects.stop("a", 1, 10)
            await made.exited()
            ring = made.effects.log("a")
            assert ring is not None and any("a request failed: " in line for line in ring.lines())
            written = (folder.parent / "logs" / "a.log").read_text()
            assert CANARY.lower() not in "\n".join((*ring.lines(), written, caplog.text)).lower()

    run(test())


def test_a_damaged_file_is_the_files_fault(server: llama_server.LlamaServer, model: Path, folder: Path, tmp_path: Path) -> None:
    """The engine's own words come with it."""
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(model.read_bytes()[:-70_000])

    async def test() -> None:
        async with runners(folder, real(server, damaged)) as made:
            await made.started()
            event = await made.exited()
            assert event.cause == BAD_FILE and "not within the file bounds" in event.words

    run(test())


@pytest.mark.parametrize(
    ("words", "said"), [(("--ctx-size", "1"), ""), (("--ubatch-size", "x"), "-ub"), (("--rope-scaling", "x"), "rope-scaling")]
)
def test_settings_that_the_engine_refuses(
    server: llama_server.LlamaServer, model: Path, folder: Path, words: tuple[str, ...], said: str
) -> None:
    """They are no fault of the file, and its own last words tell why; a context of 1 ends in an assertion at the warm-up."""

    async def test() -> None:
        async with runners(folder, real(server, model, *words)) as made:
            await made.started()
            event = await made.exited()
            assert event.cause == BAD_SETTINGS and (said or "failed") in event.words

    run(test())


def test_a_request_that_runs_does_not_hold_up_a_stop(server: llama_server.LlamaServer, model: Path, folder: Path) -> None:
    """llama-server waits for it after a SIGTERM, for ever; a second one ends that."""

    async def test() -> None:
        async with runners(folder, real(server, model, "--ctx-size", "65536")) as made:
            await made.ready()
            path, _ = made.effects.endpoint("a", 1)
            body = json.dumps({"prompt": "hi", "n_predict": 60000})
            asking = asyncio.create_task(asyncio.to_thread(ask, path, "/completion", body))
            while b'"is_processing":true' not in await asyncio.to_thread(slots, path):
                pass
            made.effects.stop("a", 1, 4)
            assert (await made.exited()).cause == STOPPED
            await asking

    run(test())


def slots(path: str) -> bytes:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(b"GET /slots HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = b""
        while more := connection.recv(65536):
            answer += more
        return answer


def test_a_stopped_runner_is_found_hanging(server: llama_server.LlamaServer, model: Path, folder: Path) -> None:
    """SIGSTOP leaves a process that accepts connections and never answers."""

    async def test() -> None:
        async with runners(folder, real(server, model), hang_seconds=1) as made:
            os.kill(await made.ready(), signal.SIGSTOP)
            event = await made.exited()
            assert event.cause == HANG and "no answer to /health" in event.words

    run(test())


def test_a_runner_that_makes_no_token_hangs(folder: Path) -> None:
    """It answers /health all the time; idle it lives, with a request it does not."""

    async def test() -> None:
        async with runners(folder, stand_in(folder, "mute"), hang_seconds=1) as made:
            await made.ready()
            made.effects.busy("a", 1, 1)
            event = await made.exited()
            assert event.cause == HANG and "no token" in event.words

    run(test())


def test_a_runner_that_spins_hangs(folder: Path) -> None:
    """It burns CPU, and /slots says that no token comes of it."""

    async def test() -> None:
        async with runners(folder, stand_in(folder, "mute", "spin"), hang_seconds=1) as made:
            await made.ready()
            made.effects.busy("a", 1, 1)
            event = await made.exited()
            assert event.cause == HANG and "no token" in event.words

    run(test())


def test_a_long_batch_is_no_hang(folder: Path) -> None:
    """Within one, llama-server does not answer /slots: 3 s with CPU time are 3 s of life, where 1 s of silence is a hang."""

    async def test() -> None:
        async with runners(folder, stand_in(folder, "deaf", "prefill"), hang_seconds=1) as made:
            await made.ready()
            made.effects.busy("a", 1, 1)
            event = await made.exited()
            assert event.cause == CRASH and "status 0" in event.words

    run(test())


def test_a_batch_into_which_no_time_goes_hangs(folder: Path) -> None:
    """It answers /health and says nothing of its slots, and no CPU computes: a GPU that is stuck looks so."""

    async def test() -> None:
        async with runners(folder, stand_in(folder, "deaf"), hang_seconds=1) as made:
            await made.ready()
            made.effects.busy("a", 1, 1)
            event = await made.exited()
            assert event.cause == HANG and "no token" in event.words

    run(test())


def test_a_load_that_stands_still_hangs(folder: Path) -> None:
    """No line, no byte, no CPU time: then it will never be ready."""

    async def test() -> None:
        async with runners(folder, stand_in(folder, "silent"), hang_seconds=1) as made:
            await made.started()
            event = await made.exited()
            assert event.cause == HANG and "while it loaded" in event.words

    run(test())


def test_a_runner_that_ignores_sigterm_is_killed(folder: Path) -> None:
    """At the deadline, and a shorter one takes the place of a longer."""

    async def test() -> None:
        async with runners(folder, stand_in(folder, "stubborn")) as made:
            await made.ready()
            made.effects.stop("a", 1, 1000)
            made.effects.stop("a", 1, 0.2)
            assert await made.exited() == Exited("a", 1, STOPPED)

    run(test())


def test_what_a_runner_forked_ends_with_it(folder: Path) -> None:
    """Even in a session of its own, and with the log's pipe in its hands."""

    async def test() -> None:
        async with runners(folder, stand_in(folder, "fork")) as made:
            pid = await made.ready()
            children = [child for child in procfs.descendants("/proc", pid) if child != pid]
            assert len(children) == 1
            made.effects.stop("a", 1, 10)
            assert (await made.exited()).cause == STOPPED
            assert await asyncio.to_thread(gone, children[0])

    run(test())


def test_a_runner_that_has_just_gone_is_nowhere(folder: Path) -> None:
    """Its end may be known here before whoever sends requests has heard of it; that one must get an answer all the same."""

    async def test() -> None:
        async with runners(folder, stand_in(folder)) as made:
            os.kill(await made.ready(), signal.SIGKILL)
            await made.exited()
            assert made.effects.endpoint("a", 1) == ("", None)

    run(test())


def test_an_engine_that_leaves_with_status_0_has_crashed(folder: Path) -> None:
    """Nobody told it to."""

    async def test() -> None:
        async with runners(folder, stand_in(folder, "quit")) as made:
            os.kill(await made.ready(), signal.SIGUSR1)
            event = await made.exited()
            assert event.cause == CRASH and "status 0" in event.words

    run(test())


def test_a_flood_of_log_costs_little(folder: Path) -> None:
    """A hundred thousand lines and one of three megabytes: the runner gets ready, the rest is counted, the line is cut."""

    async def test() -> None:
        async with runners(folder, stand_in(folder, "flood")) as made:
            await made.ready()
            made.effects.stop("a", 1, 10)
            await made.exited()
            ring = made.effects.log("a")
            assert ring is not None
            lines = ring.lines()
            assert any("lines were left out" in line for line in lines)
            assert max(map(len, lines)) < 2200
            assert sum(path.stat().st_size for path in (folder.parent / "logs").iterdir()) < 3 << 20

    run(test())


def test_a_stranger_on_the_socket_is_found_out(folder: Path) -> None:
    """Whoever answers in the runner's place is another process, and the kernel says which."""

    async def test() -> None:
        async with runners(folder, stand_in(folder, "silent")) as made:
            made.effects.spawn("a", 1, HERE)
            path, _ = made.effects.endpoint("a", 1)
            await made.next()
            ring = made.effects.log("a")
            assert ring is not None
            async for line in ring.follow():  # the engine is there, and what was in its way has been removed
                if "silent from now on" in line:
                    break
            stranger = await asyncio.start_unix_server(answer_ok, path)
            event = await made.exited()
            stranger.close()
            assert event.cause == CRASH and f"process {os.getpid()} has taken" in event.words

    run(test())


async def answer_ok(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
    await writer.drain()
    writer.close()


def test_an_engine_that_is_not_there(folder: Path) -> None:
    """The event says so; nothing is left."""

    async def test() -> None:
        launch = stand_in(folder)
        async with runners(folder, lambda id, placement: launch(id, placement).replace(engine="/no/such")) as made:
            await made.started()
            event = await made.exited()
            assert event.cause == CRASH and "/no/such cannot be started" in event.words

    run(test())


def test_a_runner_that_cannot_be_recorded_is_not_left_running(folder: Path) -> None:
    """A folder that takes no more costs the start, which is told so, and nothing else; the next start goes as ever."""

    async def test() -> None:
        async with runners(folder, stand_in(folder)) as made:
            (folder / "a-1.json").mkdir()
            made.effects.spawn("a", 1, HERE)
            assert await made.exited() == Exited("a", 1, CRASH, f"{folder} cannot be written: Is a directory")
            assert made.effects.pid("a", 1) is None
            (folder / "a-1.json").rmdir()
            await made.ready(generation=2)

    run(test())


def test_a_runner_that_cannot_be_watched_is_not_left_running(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a descriptor for its end, it is ended at once."""

    def none_left(pid: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def test() -> None:
        async with runners(folder, stand_in(folder)) as made:
            with monkeypatch.context() as at_first:
                at_first.setattr(os, "pidfd_open", none_left)
                made.effects.spawn("a", 1, HERE)
                assert await made.exited() == Exited("a", 1, CRASH, "no process could be started: Too many open files")
            await made.ready(generation=2)

    run(test())


def test_a_supervisor_starts_where_the_disk_is_full(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has its lock; only its pid cannot be written there."""

    def full(descriptor: int, data: bytes, at: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)

    async def test() -> None:
        async with runners(folder, stand_in(folder)):
            with pytest.raises(SparkguardError, match="another supervisor"):
                Runners(folder, stand_in(folder), SECONDS)

    run(test())


def test_a_runner_that_dies_at_any_moment(folder: Path) -> None:
    """Killed sooner or later after its start, there is one Exited each time, at once, and Ready comes before it or never."""

    async def test() -> None:
        async with runners(folder, stand_in(folder)) as made:
            for generation in range(1, 41):
                pid = await made.started(generation=generation)
                asyncio.get_running_loop().call_later(generation / 400, os.kill, pid, signal.SIGKILL)
                event = await made.next()
                if isinstance(event, Ready):
                    event = await made.next()
                assert isinstance(event, Exited) and (event.generation, event.cause) == (generation, CRASH)

    run(test())


SUPERVISOR = """
import asyncio, sys
from sparkguard.core.events import Placement
from sparkguard.supervisor.effects import RealEffects, Site, Start
async def main():
    folder, state, program, *acts = sys.argv[1:]
    start = Start("a", "no model", "cpu", program, tuple(acts), {"host": "ram"}, 0)
    effects = RealEffects(lambda id, placement: start, Site(folder, None))
    def told(event):
        name = type(event).__name__
        if name == "Ready" and state == "Stopping":
            effects.stop("a", 1, 1000)
            name = state
        print(name, effects.pid("a", 1), flush=True)
    effects.attach(told)
    effects.spawn("a", 1, Placement("cpu", ()))
    await asyncio.Event().wait()
asyncio.run(main())
"""


def killed_supervisor(folder: Path, *acts: str, state: str = "Ready") -> int:
    """The pid of the runner of a supervisor that was killed once the runner was so far."""
    start = stand_in(folder, *acts)("a", HERE)
    command = [sys.executable, "-c", SUPERVISOR, str(folder), state, start.engine, *start.arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith(state))
        process.kill()
    return int(line.split()[-1])


@pytest.mark.parametrize("state", ["Started", "Ready", "Stopping"])
def test_no_runner_outlives_its_supervisor(folder: Path, state: str) -> None:
    """kill -9 of the supervisor is the end of a runner that ignores SIGTERM, whatever it does; the next one removes the files."""
    acts = ("stubborn", "silent") if state == "Started" else ("stubborn",)
    assert gone(killed_supervisor(folder, *acts, state=state))
    RealEffects(stand_in(folder), Site(str(folder), None))._folder.close()


def test_what_a_runner_forked_is_found_by_the_next_supervisor(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The kernel ends the runner, the sweep its child."""
    pid = killed_supervisor(folder, "fork")
    assert gone(pid)
    RealEffects(stand_in(folder), Site(str(folder), None))._folder.close()
    assert "a child of a runner" in caplog.text


def test_a_second_supervisor_is_refused(folder: Path) -> None:
    """It would sweep away the first one's runners."""

    async def test() -> None:
        async with runners(folder, stand_in(folder)) as made:
            pid = await made.ready()
            with pytest.raises(SparkguardError, match=f"another supervisor runs already .pid {os.getpid()}."):
                RealEffects(stand_in(folder), Site(str(folder), None))
            assert Path(f"/proc/{pid}").exists()

    run(test())


def test_no_descriptor_and_no_thread_is_left(folder: Path) -> None:
    """After thirty runners there are as many as after three."""

    async def test() -> None:
        async with runners(folder, stand_in(folder)) as made:
            counts = []
            for generation in range(1, 31):
                await made.ready(generation=generation)
                made.effects.stop("a", generation, 0)
                await made.exited()
                if generation in (3, 30):
                    counts.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
            assert counts[0] == counts[1]

    run(test())


def at_a_port(start: Callable[[str, Placement], Start]) -> Callable[[str, Placement], Start]:
    """As for a build that cannot listen on a Unix socket."""
    return lambda id, placement: start(id, placement).replace(port=True)


def asked_with(endpoint: str, key: str | None, body: str = '{"content": "hi"}') -> int:
    connection = http.client.HTTPConnection(endpoint.removeprefix("http://"), timeout=SECONDS)
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    connection.request("POST", "/tokenize", body, headers)
    with connection.getresponse() as answer:
        answer.read()
    connection.close()
    return answer.status


@pytest.mark.parametrize("builder", ["a stand-in", "a real engine"])
def test_an_engine_without_sockets_has_a_port_and_a_key(
    folder: Path, server: llama_server.LlamaServer, model: Path, builder: str
) -> None:
    """Only who has the key is answered, and no argument of any process shows it."""
    launch = at_a_port(stand_in(folder, "mute") if builder == "a stand-in" else real(server, model))

    async def test() -> None:
        async with runners(folder, launch) as made:
            pid = await made.ready()
            endpoint, key = made.effects.endpoint("a", 1)
            assert endpoint.startswith("http://127.0.0.1:") and key and len(key) == 64
            asked = [await asyncio.to_thread(asked_with, endpoint, each) for each in (None, "0" * 64, key)]
            assert asked == [401, 401, 200]
            assert all(key.encode() not in raw for raw in map(Path.read_bytes, Path("/proc").glob("[0-9]*/cmdline")))
            made.effects.stop("a", 1, SECONDS)
            assert (await made.exited()).cause == STOPPED
            assert not Path(f"/proc/{pid}").exists()

    run(test())


def test_an_engine_that_asks_for_no_key_is_not_used(folder: Path) -> None:
    """Anybody on the machine could use it, and nothing proves that it is ours."""

    async def test() -> None:
        async with runners(folder, at_a_port(stand_in(folder, "open"))) as made:
            await made.started()
            ended = await made.exited()
            assert ended.cause == CRASH and "is not answered by the runner, or not as it should be" in ended.words

    run(test())


def test_somebody_else_on_the_port_gets_no_key(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """He answers /health as the engine would, before the engine does; the kernel shows that it is not the engine."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as squatter:
        door = Door(f"http://127.0.0.1:{squatter.getsockname()[1]}", "k" * 64)
        monkeypatch.setattr(effects, "at_a_port", lambda: door)

        def answer() -> None:
            connection, _ = squatter.accept()
            with connection:
                heard.append(connection.recv(4096))
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

        answering = threading.Thread(target=answer)
        answering.start()

        async def test() -> None:
            async with runners(folder, at_a_port(stand_in(folder, "silent"))) as made:
                await made.started()
                assert (await made.exited()).cause == CRASH

        run(test())
        answering.join(SECONDS)
    assert len(heard) == 1 and b"/health" in heard[0] and b"kkk" not in heard[0]
