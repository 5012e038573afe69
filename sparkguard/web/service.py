"""The supervisor as a service: settings, engine, library, processes and front put together; its life from signal to signal."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from typing import TYPE_CHECKING

from sparkguard import guard, ledger
from sparkguard.core.events import Limits
from sparkguard.core.record import Record
from sparkguard.errors import OSERR, SparkguardError
from sparkguard.probe import llama_server
from sparkguard.settings import Settings, home_folder, load
from sparkguard.supervisor import devices, effects, library, memory, runner_settings
from sparkguard.supervisor.cgroup import Cgroups
from sparkguard.supervisor.loop import SupervisorLoop
from sparkguard.supervisor.notify import Notifier
from sparkguard.web import connections, room, stderr_log
from sparkguard.web.app import Options, Server
from sparkguard.web.keys import read_keys

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sparkguard.core.types import MemoryPool
    from sparkguard.probe.llama_server import LlamaServer
    from sparkguard.supervisor.devices import Device
    from sparkguard.supervisor.protocol import Supervisor
    from sparkguard.supervisor.runner_settings import RunnerSettings

log = logging.getLogger("sparkguard.serve")
# The one deadline of a stop; the unit's TimeoutStopSec= is longer by what processes need to be reaped.
DRAIN_SECONDS = 30.0
STATUS_SECONDS = 2.0
_LAST_WORDS_SECONDS = 2.0  # for the error events of streams that the deadline has cut off


class Fit(Record):
    """All that has to be right before anything is started."""

    settings: Settings
    site: RunnerSettings
    keys: tuple[bytes, ...]
    engine: LlamaServer


def check(env: Mapping[str, str]) -> Fit:
    """Reads settings, keys, engine and machine. Raises SparkguardError for the first that is not fit."""
    settings = load(env)
    site = runner_settings.read(settings)
    keys = read_keys(site.api_key_file, env)
    engine = llama_server.ask(llama_server.find(site.llama_server, env), env)
    guard.look(settings, env, guard.Roots())
    return Fit(settings, site, keys, engine)


class Service:
    """run() until a signal ends it. Settings are held here, so that a reload changes them for all at once."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env
        self._notifier = Notifier(env)
        self._fit = check(env)
        folder = ledger.directory(env)
        state = user_folder(env, "XDG_STATE_HOME", ".local/state")
        cache = user_folder(env, "XDG_CACHE_HOME", ".cache")
        self._library = library.ModelLibrary(
            lambda: self._fit.site,
            os.path.join(self._fit.settings.config_dir, "runners.toml"),
            self._fit.engine,
            self._devices,
            kept_in=os.path.join(cache, "sparkguard", "models.json"),
        )
        runners = effects.Site(
            os.path.join(folder, "runners"), os.path.join(state, "sparkguard", "logs"), self._fit.site.hang_seconds
        )
        self._supervisor = SupervisorLoop(
            effects.RealEffects(self._library.start, runners, Cgroups()),
            self._library,
            memory.MachineMemory(lambda: self._fit.settings, self._reserve_of, env),
            self._limits,
        )
        self._server = Server(
            self._supervisor,
            Options(
                host=self._fit.site.host,
                port=self._fit.site.port,
                keys=self._fit.keys,
                drain_seconds=DRAIN_SECONDS + _LAST_WORDS_SECONDS,
            ),
        )

        self._door = room.Door(self._supervisor, folder)

    def _reserve_of(self, pool: MemoryPool) -> int:
        return self._fit.site.reserve_of(pool)

    def _devices(self) -> tuple[Device, ...]:
        machine = guard.look(self._fit.settings, self._env, guard.Roots(), ask_nvml=True).machine
        return devices.find(machine, self._fit.engine, self._fit.site, dict(self._fit.engine.capabilities))

    def _limits(self) -> Limits:
        site = self._fit.site
        return Limits(idle_seconds=site.idle_seconds, most_loaded=site.most_loaded, queue_limit=site.queue_limit)

    async def run(self) -> None:
        """Returns after a drain. Raises SparkguardError when it cannot start, and what a bug raised."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, ended.set)
        hung_up = asyncio.Event()
        loop.add_signal_handler(signal.SIGHUP, hung_up.set)
        await self._supervisor.start()
        try:
            url = await self._server.start()
        except SparkguardError:
            await self._supervisor.close(0)
            raise
        await self._door.start()
        self._notifier.ready(_status(self._supervisor, url))
        log.info("the page is at %s/", url)
        work = [
            asyncio.ensure_future(coroutine)
            for coroutine in (
                ended.wait(),
                self._supervisor.failed(),
                self._reload_when(hung_up, url),
                self._keep_watchdog(),
                self._tell_status(url),
            )
        ]
        try:
            done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in work:
                task.cancel()
            await asyncio.wait(work)
            await self._drain()
        for task in done:
            task.result()

    async def _drain(self) -> None:
        """What runs may end, what waits is refused, and no connection is taken; one deadline for all of it."""
        log.info("stopping: running requests have %d s to end", DRAIN_SECONDS)
        self._notifier.stopping("finishing what runs")
        await self._door.close()
        await asyncio.gather(self._server.close(), self._supervisor.close(DRAIN_SECONDS))

    async def _reload_when(self, hung_up: asyncio.Event, url: str) -> None:
        while True:
            await hung_up.wait()
            hung_up.clear()
            self._notifier.reloading()
            try:
                await self._reload()
            except SparkguardError as error:
                log.error("not reloaded: %s", error.message)
            self._notifier.ready(_status(self._supervisor, url))

    async def _reload(self) -> None:
        settings = load(self._env)
        site = runner_settings.read(settings)
        keys = read_keys(site.api_key_file, self._env)
        for key, changed in (
            ("SPARK_HOST or SPARK_PORT", (site.host, site.port) != (self._fit.site.host, self._fit.site.port)),
            ("SPARK_LLAMA_SERVER", site.llama_server != self._fit.site.llama_server),
            ("SPARK_RUNNER_HANG_SECONDS", site.hang_seconds != self._fit.site.hang_seconds),
        ):
            if changed:
                log.warning("a new %s counts from the next start on", key)
        self._fit = self._fit.replace(settings=settings, site=site, keys=keys)
        self._server.set_keys(keys)
        logging.getLogger().setLevel(site.log_level)
        await self._supervisor.reload()
        log.info("reloaded")

    async def _keep_watchdog(self) -> None:
        """From the loop that does all the work: if it is stuck, systemd hears nothing."""
        seconds = self._notifier.watchdog_seconds
        while seconds is not None:
            self._notifier.watchdog()
            await asyncio.sleep(seconds)
        await asyncio.get_running_loop().create_future()

    async def _tell_status(self, url: str) -> None:
        """Now and then: a subscriber would have every event of every request made into JSON."""
        last = ""
        while self._notifier.heard:
            text = _status(self._supervisor, url)
            if text != last:
                self._notifier.status(text)
                last = text
            await asyncio.sleep(STATUS_SECONDS)
        await asyncio.get_running_loop().create_future()


def user_folder(env: Mapping[str, str], key: str, below: str) -> str:
    """What the variable says, which counts only as a full path, else below the user's home."""
    folder = env.get(key, "")
    return folder if os.path.isabs(folder) else os.path.join(home_folder(env), below)


def _status(supervisor: Supervisor, url: str) -> str:
    models = supervisor.counters()
    loaded = [runner["id"] for runner in supervisor.runners() if runner["state"] in ("ready", "draining")]
    waiting = sum(model["queue"] for model in models)
    names = f" ({', '.join(loaded)})" if loaded else ""
    return f"{len(models)} models, {len(loaded)} loaded{names}, {waiting} waiting; {url}/"


def serve(env: Mapping[str, str]) -> None:
    """Until a signal. Raises SparkguardError."""
    connections.raise_limit()
    with stderr_log.writing(runner_settings.read(load(env)).log_level, env):
        try:
            service = Service(env)
        except OSError as error:
            raise SparkguardError(f"cannot start: {error}", status=OSERR) from None
        asyncio.run(service.run())
