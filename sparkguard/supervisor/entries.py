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


class Maker:
    """By the settings, devices and engine of this moment."""

    def __init__(self, site: RunnerSettings, devices: tuple[Device, ...], server: LlamaServer, known: headers.Headers) -> None:
        self._site = site
        self._devices = devices
        self._server = server
        self._headers = known

    def later(self, found: files.Found, settings: ModelSettings) -> Entry:
        """As it is listed until its header is read, a moment later."""
        problem = Problem(503, "not_read_yet", f"the header of {found.id} is being read; ask again in a moment")
        model = _model(found, settings, self._launch(found, settings), problem=problem)
        return Entry(found, settings, model, None, error="its header is not read yet")

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

    def _reckon(self, header: headers.Header, launch: engine.Launch) -> Callable[[bool, int], Needs]:
        @cache
        def needs(on_gpu: bool, host_expert_layers: int) -> Needs:
            asked = engine.ask_of(self._server, launch.replace(on_gpu=on_gpu, host_expert_layers=host_expert_layers))
            return header.needs(asked)

        return needs

    def _cached_percent(self) -> float:
        return self._site.expert_cache_percent if self._server.knows(engine.EXPERT_CACHE) else 0.0

    def _movable(self, layers: tuple[tuple[int, int], ...], launch: engine.Launch) -> tuple[tuple[int, int], ...]:
        """Those experts that may go to the host: none where the user's arguments say what goes where."""
        return layers if self._site.host_experts and not engine_args.places_tensors(launch.args) else ()

    def entry(self, found: files.Found, settings: ModelSettings) -> Entry | None:
        """None: a file that is no model, an adapter beside one."""
        launch = self._launch(found, settings)
        try:
            _check_name(found)
            header = self._headers.of(_sources(found, launch))
            facts = header.facts
            if facts.kind in ("adapter", "mmproj"):
                return None
            started = launch.replace(pooling=facts.pooling)
            devices = ways.candidates(settings.device or self._site.device, self._devices)
            reckoned = self._reckon(header, started)
            layers = self._movable(facts.expert_layers, started)
            places = ways.placements(reckoned, layers, devices, self._cached_percent())
            needs = reckoned(devices[0].kind == "cuda", 0)
        except SparkguardError as error:
            code = "bad_settings" if error.status == USAGE else "bad_file"
            problem = error.problem if isinstance(error, ways.NoDevice) else Problem(500, code, error.message)
            return Entry(found, settings, _model(found, settings, launch, problem=problem), error=error.message)
        warning = "; ".join(self._warnings(settings, devices[0], places, needs)) or None
        model = _model(found, settings, launch, places)
        return Entry(found, settings, model, started, needs, facts.context, None, warning)

    def _warnings(self, settings: ModelSettings, best: Device, places: Sequence[Placement], needs: Needs) -> list[str]:
        warnings = list(needs.doubts)
        if best.kind == "cpu" and (settings.device or self._site.device) == "auto":
            unusable = next((device for device in self._devices if device.kind == "cuda"), None)
            if unusable is not None:
                warnings.insert(0, f"runs on the CPU: {unusable.name}: {unusable.reason}")
        if ways.must_move_experts(places, self._devices) and not self._server.knows(engine.EXPERT_CACHE):
            warnings.append(_NO_CACHE)
        return warnings

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


def _model(
    found: files.Found,
    settings: ModelSettings,
    launch: engine.Launch,
    places: tuple[Placement, ...] = (),
    problem: Problem | None = None,
) -> Model:
    """launch: as it was asked for, so that what a header says later on makes no other version of it."""
    version = (found.state, launch, settings.device)
    return Model(found.id, places, version, launch.parallel, not settings.unload_when_idle, problem)


def _check_name(found: files.Found) -> None:
    """No address and no JSON can name some, and the engine's answers cannot either."""
    if any(c < " " or "\ud800" <= c <= "\udfff" for c in found.id):
        raise SparkguardError(f"{found.path!r}: its name is not UTF-8 or has a control character: rename it")


def _sources(found: files.Found, launch: engine.Launch) -> headers.Sources:
    shards = tuple(path for path, *_ in found.state)
    return headers.Sources(found.path, launch.projector, launch.lora, launch.draft, shards)


def _cores(share: int) -> int:
    """Of the share that spark-runner pins itself to; hyperthreads of one core count once. 0: nobody knows."""
    usable = cores.usable()
    chosen = set(cores_for(share, usable)) if usable else set()
    return len({core.first_sibling for core in usable if core.cpu in chosen})
