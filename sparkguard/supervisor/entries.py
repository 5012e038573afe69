"""What one model is made into: how it is listed, where it may run, and what is started for it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache

from sparkguard.core import engine_args
from sparkguard.core.affinity import cores_for
from sparkguard.core.estimate import DEVICE, HOST, Needs
from sparkguard.core.events import Model, Placement, Problem
from sparkguard.core.record import Record
from sparkguard.errors import USAGE, SparkguardError
from sparkguard.probe import cores, llama_server
from sparkguard.probe.llama_server import LlamaServer
from sparkguard.supervisor import engine, files, headers, ways
from sparkguard.supervisor.devices import Device
from sparkguard.supervisor.effects import Start
from sparkguard.supervisor.runner_settings import RunnerSettings
from sparkguard.supervisor.runners_toml import ModelSettings

log = logging.getLogger("sparkguard.library")
DEFAULT_CONTEXT = 4096
_STEP = 256  # tokens: llama.cpp rounds contexts up to it
# A cap is for what nobody counted; what was counted wrong by a little must not be killed for it.
_LEAST_SLACK_BYTES = 1 << 30
_NO_CACHE = "this engine has no cache on the GPU for experts in host memory, so SPARK_EXPERT_CACHE_PERCENT changes nothing"


class Entry(Record):
    """One model as it is now."""

    found: files.Found
    settings: ModelSettings
    model: Model
    launch: engine.Launch | None = None
    needs: Needs | None = None  # on the device that comes first
    trained_context: int = 0
    error: str | None = None
    warning: str | None = None
    quick: bool = False  # its work buffers are not reckoned exactly yet


class Maker:
    """By the settings, devices and engine of this moment."""

    def __init__(self, site: RunnerSettings, devices: tuple[Device, ...], server: LlamaServer, known: headers.Headers) -> None:
        self._site = site
        self._devices = devices
        self._server = server
        self._headers = known

    def later(self, found: files.Found, settings: ModelSettings) -> Entry:
        """As it is listed until its header is read, a moment later."""
        launch = self._launch(found, settings)
        problem = Problem(503, "not_read_yet", f"the header of {found.id} is being read; ask again in a moment")
        version = (found.state, launch, settings.device)
        model = Model(found.id, (), version, launch.parallel, not settings.unload_when_idle, problem)
        return Entry(found, settings, model, warning="its header is not read yet")

    def _launch(self, found: files.Found, settings: ModelSettings) -> engine.Launch:
        folder = os.path.dirname(found.path)

        def path(name: str) -> str:
            """Beside the model, or under MODELS_DIR."""
            name = os.path.expanduser(name)
            beside = os.path.join(folder, name)
            return beside if os.path.exists(beside) else os.path.join(self._site.models_dir, name)

        projector = found.projector if settings.projector is None else settings.projector or None
        return engine.Launch(
            context=DEFAULT_CONTEXT if settings.context is None else settings.context,
            parallel=settings.parallel or 1,
            threads=self._site.threads if settings.threads is None else settings.threads,
            key_type=settings.kv_type or "f16",
            value_type=settings.kv_type or "f16",
            projector=path(projector) if isinstance(projector, str) else None,
            draft=path(settings.draft) if settings.draft else None,
            lora=tuple(path(adapter) for adapter in settings.lora),
            args=settings.args,
        )

    def _reckon(self, header: headers.Header, launch: engine.Launch, quick: bool = False) -> Callable[[bool, int], Needs]:
        @cache
        def needs(on_gpu: bool, host_expert_layers: int) -> Needs:
            asked = engine.ask_of(self._server, launch.replace(on_gpu=on_gpu, host_expert_layers=host_expert_layers))
            return header.needs(asked, quick)

        return needs

    def _cached_percent(self) -> float:
        return self._site.expert_cache_percent if self._server.knows(engine.EXPERT_CACHE) else 0.0

    def _movable(self, layers: tuple[tuple[int, int], ...], launch: engine.Launch) -> tuple[tuple[int, int], ...]:
        """Those experts that may go to the host: none where the user's arguments say what goes where."""
        return layers if self._site.host_experts and not engine_args.places_tensors(launch.args) else ()

    def entry(self, found: files.Found, settings: ModelSettings, quick: bool = False) -> Entry | None:
        """None: a file that is no model, an adapter beside one. quick: what is not known already may be a few MB off."""
        launch = self._launch(found, settings)
        version = (found.state, launch, settings.device)
        pinned = not settings.unload_when_idle
        try:
            if any(c < " " or "\ud800" <= c <= "\udfff" for c in found.id):
                # No address and no JSON can name it, and the engine's answers cannot either.
                raise SparkguardError(f"{found.path!r}: its name is not UTF-8 or has a control character: rename it")
            header = self._headers.of(_sources(found, launch))
            facts = header.facts
            if facts.kind in ("adapter", "mmproj"):
                return None
            launch = launch.replace(pooling=facts.pooling)
            devices = ways.candidates(settings.device or self._site.device, self._devices)
            reckoned = self._reckon(header, launch, quick)
            layers = self._movable(facts.expert_layers, launch)
            places = ways.placements(reckoned, layers, devices, self._cached_percent())
            needs = reckoned(devices[0].kind == "cuda", 0)
        except SparkguardError as error:
            code = "bad_settings" if error.status == USAGE else "bad_file"
            problem = error.problem if isinstance(error, ways.NoDevice) else Problem(500, code, error.message)
            broken = Model(found.id, (), version, launch.parallel, pinned, problem)
            return Entry(found, settings, broken, None, error=error.message)
        warning = "; ".join(needs.doubts) or None
        if devices[0].kind == "cpu" and (settings.device or self._site.device) == "auto":
            unusable = next((device for device in self._devices if device.kind == "cuda"), None)
            if unusable is not None:
                warning = f"runs on the CPU: {unusable.name}: {unusable.reason}" + (f"; {warning}" if warning else "")
        if ways.must_move_experts(places, self._devices) and not self._server.knows(engine.EXPERT_CACHE):
            warning = f"{warning}; {_NO_CACHE}" if warning else _NO_CACHE
        model = Model(found.id, places, version, launch.parallel, pinned)
        return Entry(found, settings, model, launch, needs, facts.context, None, warning, quick)

    def largest_context(self, entry: Entry, rooms: Sequence[Mapping[str, int]]) -> int | None:
        """By halving: what a model takes grows with its context."""
        if entry.launch is None:
            return None
        try:
            # By itself: what is kept of each model are the few answers of its settings, not those of a search.
            header = headers.Header(_sources(entry.found, entry.launch))
            devices = ways.candidates(entry.settings.device or self._site.device, self._devices)
            layers = self._movable(header.facts.expert_layers, entry.launch)
            low, high = 0, max(_STEP, entry.trained_context or entry.launch.context) // _STEP
            while low < high:
                middle = (low + high + 1) // 2
                reckoned = self._reckon(header, entry.launch.replace(context=middle * _STEP))
                places = ways.placements(reckoned, layers, devices, self._cached_percent())
                if any(all(room.get(pool, 0) >= amount for pool, amount in place.amounts) for place in places for room in rooms):
                    low = middle
                else:
                    high = middle - 1
        except SparkguardError:
            return None
        return low * _STEP or None

    def start(self, entry: Entry, placement: Placement) -> Start:
        """What RealEffects is to start."""
        id = entry.found.id
        if entry.launch is None:
            raise SparkguardError(entry.error or f"{id} cannot be started")
        device = next((device for device in self._devices if device.id == placement.device), None)
        if device is None:
            raise SparkguardError(f"{placement.device} is there no more")
        launch = entry.launch.replace(
            on_gpu=device.kind == "cuda",
            host_expert_layers=placement.host_expert_layers,
            expert_cache_mib=placement.expert_cache_mib,
            threads=entry.launch.threads or _cores(self._site.cpu_share),
        )
        if placement.host_expert_layers and not self._server.knows(engine.EXPERT_CACHE):
            log.info("%s: %s", id, _NO_CACHE)
        arguments = tuple(engine.arguments(self._server, id, launch))
        pools = {HOST: "ram", DEVICE: device.pool}
        host = dict(placement.amounts).get("ram", 0)
        cap = host + max(_LEAST_SLACK_BYTES, host // 4)
        port = not self._server.knows(llama_server.SOCKETS)
        return Start(id, entry.found.path, device.target, self._server.path, arguments, pools, entry.found.bytes, cap, port)


def _sources(found: files.Found, launch: engine.Launch) -> headers.Sources:
    shards = tuple(path for path, *_ in found.state)
    return headers.Sources(found.path, launch.projector, launch.lora, launch.draft, shards)


def _cores(share: int) -> int:
    """Of the share that spark-runner pins itself to; hyperthreads of one core count once. 0: nobody knows."""
    usable = cores.usable()
    chosen = set(cores_for(share, usable)) if usable else set()
    return len({core.first_sibling for core in usable if core.cpu in chosen})
