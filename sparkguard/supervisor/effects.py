"""The processes: starts runners, waits until they answer, watches them, ends them, and reports each step as an event."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import subprocess
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sparkguard.core.affinity import format_cpus
from sparkguard.core.estimate import DEVICE, HOST
from sparkguard.core.events import CRASH, HANG, STOPPED, Event, Exited, Placement, Ready, Started
from sparkguard.core.record import Record
from sparkguard.errors import SparkguardError
from sparkguard.supervisor import health, logs, standby, sweep
from sparkguard.supervisor.cgroup import Cgroups
from sparkguard.supervisor.door import Door, at_a_port
from sparkguard.supervisor.engine import Measured, classify

log = logging.getLogger("sparkguard.runners")
_FIRST_POLL, _LAST_POLL = 0.01, 0.25
_CLOSE_SECONDS = 10.0  # a process that a driver holds in the kernel ends when the driver lets it, not before
_DRAIN_SECONDS = 1.0  # for the rest of the pipe after the exit; a child that holds it open has been killed
_SLUG_LETTERS = 40  # a path of a socket has 107 bytes in all


class Start(Record):
    """All that a process needs to be told, and how its memory is to be counted."""

    id: str
    file: str
    device: str  # cpu, cuda:0, cuda:GPU-...
    engine: str  # path of the llama-server
    arguments: tuple[str, ...]
    pools: Mapping[str, str]  # of HOST and DEVICE
    load_bytes: int  # resident when it is loaded, for progress
    memory_max: int | None = None  # cap of its cgroup, in bytes
    port: bool = False  # for an engine that cannot listen on a Unix socket


class Site(Record):
    """Where runners run."""

    folder: str  # of sockets and records, private
    logs: str | None  # folder of the log files; None: none are kept
    hang_seconds: float = 120.0
    cpus: tuple[int, ...] = ()  # empty: spark-runner's own choice


@dataclass(eq=False)
class _Runner:
    start: Start
    generation: int
    name: str
    socket: str  # its name among processes, and where it listens unless it must have a port
    door: Door
    watch: health.Watch
    process: subprocess.Popen[bytes] | None = None
    capture: logs.Capture | None = None
    cgroup: str | None = None
    measured: Measured = field(default_factory=Measured)
    loaded: asyncio.Event = field(default_factory=asyncio.Event)
    exited: asyncio.Event = field(default_factory=asyncio.Event)
    ready: bool = False
    stopping: bool = False
    killed: tuple[str, str] | None = None  # cause and words, where we have ended it
    deadline: float | None = None  # of the stop, on the loop's clock
    timers: list[asyncio.TimerHandle] = field(default_factory=list)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid


class RealEffects:
    """The Effects of supervisor/protocol.py. launch(model, placement) says what to start; it may raise SparkguardError."""

    def __init__(self, launch: Callable[[str, Placement], Start], site: Site, cgroups: Cgroups | None = None) -> None:
        self._launch = launch
        self._site = site
        self._cgroups = cgroups
        self._folder = sweep.Folder(site.folder)
        self._standby = standby.Standby()
        self._runners: dict[tuple[str, int], _Runner] = {}
        self._rings: dict[str, logs.Ring] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._post: Callable[[Event], None] = lambda event: None
        for left in self._folder.sweep():
            log.warning("ended what an earlier supervisor left behind: %s (pid %d)", left.model, left.pid)

    def attach(self, post: Callable[[Event], None]) -> None:
        self._post = post
        self._standby.prepare()

    def spawn(self, model: str, generation: int, placement: Placement) -> None:
        try:
            start = self._launch(model, placement)
        except SparkguardError as error:
            # From a task, so that nobody hears of an exit while still inside spawn().
            asyncio.get_running_loop().call_soon(self._post, Exited(model, generation, CRASH, error.message))
            return
        name = f"{slug(model)}-{generation}"
        watch = health.Watch(self._site.hang_seconds, time.monotonic())
        socket = f"{self._site.folder}/{name}.sock"
        runner = _Runner(start, generation, name, socket, at_a_port() if start.port else Door(socket), watch)
        self._runners[model, generation] = runner
        task = asyncio.get_running_loop().create_task(self._live(runner))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def stop(self, model: str, generation: int, grace_seconds: float) -> None:
        runner = self._runners.get((model, generation))
        if runner is None:
            return
        loop = asyncio.get_running_loop()
        runner.stopping = True
        if runner.process is None:
            return  # _live() sees it
        if grace_seconds <= 0:
            self._kill(runner)
            return
        deadline = loop.time() + grace_seconds
        if runner.deadline is not None and deadline >= runner.deadline:
            return
        for timer in runner.timers:
            timer.cancel()
        # A SIGTERM waits for requests that still run; a second one does not. A stopped process hears neither before SIGCONT.
        if runner.deadline is None:
            self._signal(runner, signal.SIGTERM)
            self._signal(runner, signal.SIGCONT)
        runner.deadline = deadline
        runner.timers = [
            loop.call_at(deadline - grace_seconds / 2, self._signal, runner, signal.SIGTERM),
            loop.call_at(deadline, self._kill, runner),
        ]

    def busy(self, model: str, generation: int, requests: int) -> None:
        if runner := self._runners.get((model, generation)):
            runner.watch.busy(requests, time.monotonic())
            if not requests:
                self._standby.prepare()  # for the next model, while nobody waits

    def endpoint(self, model: str, generation: int) -> tuple[str, str | None]:
        runner = self._runners.get((model, generation))
        return (runner.door.socket, runner.door.key) if runner else ("", None)

    def pid(self, model: str, generation: int) -> int | None:
        runner = self._runners.get((model, generation))
        return runner.process.pid if runner and runner.process else None

    def progress(self, model: str) -> float | None:
        runner = next((each for each in self._runners.values() if each.start.id == model and not each.ready), None)
        if runner is None or runner.process is None or not runner.start.load_bytes:
            return None
        return min(0.99, health.vital(runner.pid).resident_bytes / runner.start.load_bytes)

    def log(self, model: str) -> logs.Ring | None:
        return self._rings.get(model)

    async def close(self) -> None:
        self._standby.close()
        for runner in list(self._runners.values()):
            runner.stopping = True
            self._kill(runner)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_SECONDS)
        self._folder.close()

    # One runner's life.

    async def _live(self, runner: _Runner) -> None:
        start, generation = runner.start, runner.generation
        try:
            await self._begin(runner)
        except (OSError, ValueError, SparkguardError) as error:  # ValueError: an argument that no process can take
            what = error.strerror if isinstance(error, OSError) else error
            words = error.message if isinstance(error, SparkguardError) else f"no process could be started: {what}"
            if runner.cgroup:
                Cgroups.remove(runner.cgroup)
            del self._runners[start.id, generation]
            self._folder.forget(runner.name)
            self._post(Exited(start.id, generation, STOPPED if runner.stopping else CRASH, words))
            return
        self._post(Started(start.id, generation, runner.pid))
        if runner.stopping:
            self._kill(runner)
        watching = asyncio.get_running_loop().create_task(self._watch(runner))
        try:
            await runner.exited.wait()
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
        code, memory = await self._bury(runner)
        if runner.killed:
            cause, words = runner.killed
        elif runner.stopping:
            cause, words = STOPPED, ""
        else:
            assert runner.capture is not None
            cause, words = classify(code, runner.ready, runner.capture.last, memory)
        log.log(
            logging.INFO if cause == STOPPED else logging.ERROR,
            "runner of %s (pid %d) ended: %s%s", start.id, runner.pid, cause, f", {words}" if words else "",
        )  # fmt: skip
        self._post(Exited(start.id, generation, cause, words))

    async def _begin(self, runner: _Runner) -> None:
        start, loop = runner.start, asyncio.get_running_loop()
        ring = self._rings.setdefault(start.id, logs.Ring())
        file = logs.LogFile(f"{self._site.logs}/{slug(start.id)}.log") if self._site.logs else None
        if self._cgroups is not None:
            runner.cgroup = self._cgroups.make(runner.name, start.memory_max)
        options = {
            "model": start.file, "device": start.device, "socket": runner.socket, "id": start.id, "engine": start.engine,
            "parent": str(os.getpid()), "mark": runner.socket,
        }  # fmt: skip
        if runner.door.key:
            del options["socket"]
            options |= {"port": str(runner.door.port), "key": runner.door.key}
        if self._site.cpus:
            options["cpus"] = format_cpus(self._site.cpus)
        if runner.cgroup:
            options["cgroup"] = runner.cgroup
        words = [word for key, value in options.items() for word in (f"--{key}", value)]
        started = self._standby.start([*words, "--", *start.arguments])
        try:
            self._folder.remember(runner.name, start.id, started.process.pid)
            self._on_exit(started.process.pid, runner.exited, loop)
            runner.capture = await self._capture(runner, started.output, ring, file)
        except (OSError, SparkguardError):
            standby.end(started)
            raise
        runner.process = started.process

    @staticmethod
    async def _capture(runner: _Runner, reading: int, ring: logs.Ring, file: logs.LogFile | None) -> logs.Capture:
        def on_line(line: str) -> None:
            runner.measured.read(line)
            if logs.LOADED in line:
                runner.loaded.set()

        def make() -> logs.Capture:
            about = {"model": runner.start.id, "runner": f"{runner.start.id}@{runner.generation}"}
            return logs.Capture(ring, file, log.getChild(runner.start.id.replace(".", "_")), on_line, about=about)

        loop = asyncio.get_running_loop()
        _, capture = await loop.connect_read_pipe(make, os.fdopen(reading, "rb", 0))
        return capture

    @staticmethod
    def _on_exit(pid: int, exited: asyncio.Event, loop: asyncio.AbstractEventLoop) -> None:
        """Tells of the exit before the pid is given back: as long as it is not reaped, its group can be killed safely."""
        if hasattr(os, "pidfd_open"):
            fd = os.pidfd_open(pid)

            def ended() -> None:
                loop.remove_reader(fd)
                os.close(fd)
                exited.set()

            loop.add_reader(fd, ended)
        else:  # macOS: a thread waits, without reaping

            def wait() -> None:
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
                loop.call_soon_threadsafe(exited.set)

            loop.run_in_executor(None, wait)

    async def _bury(self, runner: _Runner) -> tuple[int, bool]:
        """Ends what it started, reaps it, and removes its traces. (status as waitpid's, whether memory's OOM killer did it)."""
        assert runner.process is not None and runner.capture is not None
        for timer in runner.timers:
            timer.cancel()
        self._kill(runner)
        for pid in sweep.marked("/proc", runner.socket) if os.path.isdir("/proc/self") else ():
            if pid != runner.pid:
                log.warning("runner of %s left a process behind, which is ended: pid %d", runner.start.id, pid)
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        code = runner.process.wait()
        runner.capture.hurry()
        await asyncio.wait({runner.capture.closed}, timeout=_DRAIN_SECONDS)
        runner.capture.stop()
        memory = bool(runner.cgroup) and Cgroups.killed_for_memory(runner.cgroup or "")
        if runner.cgroup:
            Cgroups.remove(runner.cgroup)
        self._folder.forget(runner.name)
        del self._runners[runner.start.id, runner.generation]
        return code, memory

    async def _watch(self, runner: _Runner) -> None:
        """Until it is ready, then for as long as it lives."""
        assert runner.capture is not None
        if not await self._until_ready(runner):
            return
        runner.ready = runner.capture.serving = True
        sizes = runner.measured.sizes()
        measured: dict[str, int] = {}
        for part in (HOST, DEVICE):
            if part in sizes:
                pool = runner.start.pools.get(part, runner.start.pools[HOST])
                measured[pool] = measured.get(pool, 0) + sizes[part]
        if not runner.stopping:
            self._post(Ready(runner.start.id, runner.generation, tuple(measured.items()) or None))
        watch = runner.watch
        watch.busy(watch.requests, time.monotonic())
        watch.answered(time.monotonic())
        pause = min(health.HEALTH_SECONDS, watch.hang_seconds / 4)
        while True:
            await asyncio.sleep(pause)
            await health.look(watch, runner.door, runner.pid, runner.start.device != "cpu", pause)
            if not runner.stopping and (why := watch.verdict(time.monotonic())):
                self._end(runner, why)
                return

    async def _until_ready(self, runner: _Runner) -> bool:
        """Polls faster at first; the line that says so ends the pause. A load may take any time as long as something moves."""
        assert runner.capture is not None
        pause = _FIRST_POLL
        mark: object = None
        moved_at = time.monotonic()
        while True:
            answer = await health.get(runner.door, "/health", 5.0)
            if answer is not None and answer.status == 200:
                if runner.door.key and not await health.proven(runner.door, runner.pid, 5.0):
                    self._end(runner, f"port {runner.door.port} is not answered by the runner, or not as it should be", CRASH)
                    return False
                if answer.pid in (None, runner.pid):
                    return True
                self._end(runner, f"process {answer.pid} has taken the runner's socket", CRASH)
                return False
            now = time.monotonic()
            seen = (runner.capture.size, health.vital(runner.pid))
            if seen != mark:
                mark, moved_at = seen, now
            elif now - moved_at > runner.watch.hang_seconds and not runner.stopping:
                self._end(runner, f"nothing moved for {now - moved_at:.0f} s while it loaded")
                return False
            if await health.within(asyncio.ensure_future(runner.loaded.wait()), pause):
                runner.loaded.clear()
            pause = min(pause * 1.3, _LAST_POLL)

    def _end(self, runner: _Runner, why: str, cause: str = HANG) -> None:
        runner.killed = (cause, why)
        log.error("runner of %s (pid %d) is killed: %s", runner.start.id, runner.pid, why)
        self._kill(runner)

    @staticmethod
    def _signal(runner: _Runner, number: int) -> None:
        """To the engine alone: what it started is ended when it has ended."""
        if not runner.exited.is_set():
            with contextlib.suppress(OSError):
                os.kill(runner.pid, number)

    @staticmethod
    def _kill(runner: _Runner) -> None:
        """The group, and the cgroup where there is one. Safe until the process is reaped."""
        if runner.process is None or runner.process.returncode is not None:
            return
        if runner.cgroup:
            Cgroups.kill(runner.cgroup)
        sweep.kill_group(runner.pid)


def slug(id: str) -> str:
    """A short file name of an id, unlike every other id's."""
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", id)[:_SLUG_LETTERS].lstrip(".-") or "model"
    return plain if plain == id else f"{plain}-{zlib.crc32(os.fsencode(id)):08x}"
