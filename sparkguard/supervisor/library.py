"""The models: what lies under MODELS_DIR, what a person has set for each, and what each would take on each device."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sparkguard.core import engine_args
from sparkguard.core.affinity import cores_for
from sparkguard.core.architectures import shape_of
from sparkguard.core.estimate import DEVICE, HOST, DeviceNeeds, Needs, estimate
from sparkguard.core.events import Model, Placement, Problem
from sparkguard.core.ggml import ModelFile
from sparkguard.core.placement import in_words
from sparkguard.core.record import Record
from sparkguard.errors import SparkguardError
from sparkguard.probe import cores
from sparkguard.probe.gguf import read_model
from sparkguard.probe.llama_server import LlamaServer
from sparkguard.supervisor import engine, files, runners_toml
from sparkguard.supervisor.devices import Device
from sparkguard.supervisor.effects import Start
from sparkguard.supervisor.runner_settings import RunnerSettings
from sparkguard.supervisor.runners_toml import ModelSettings

log = logging.getLogger("sparkguard.library")
DEFAULT_CONTEXT = 4096
WATCH_SECONDS = 2.0
# Of reading headers and estimating, before what there is is shown: 500 models are listed at once, and read one after the other.
SLICE_SECONDS = 0.25
_NEEDS = tuple(field for field in DeviceNeeds._fields if field != "device")
_STEP = 256  # tokens: llama.cpp rounds contexts up to it
# A cap is for what nobody counted; what was counted wrong by a little must not be killed for it.
_LEAST_SLACK_BYTES = 1 << 30
_NO_CACHE = "this engine has no cache on the GPU for experts in host memory, so SPARK_EXPERT_CACHE_PERCENT changes nothing"
_RANK = 4  # pooling_type of a model that ranks (llama.h)


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


class ModelLibrary:
    """The Library of supervisor/protocol.py. settings() and devices() are asked anew at each scan."""

    def __init__(
        self,
        settings: Callable[[], RunnerSettings],
        toml: str,
        server: LlamaServer,
        devices: Callable[[], tuple[Device, ...]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._settings = settings
        self._toml = toml
        self._server = server
        self._find_devices = devices
        self._devices: tuple[Device, ...] = ()
        self._entries: dict[str, Entry] = {}
        self._names: dict[str, str] = {}
        self._known: dict[str, tuple[object, Entry | None]] = {}  # what an entry was made of, and the entry
        self._unread = False  # whether some headers are not read yet
        self._asked_for: set[str] = set()  # to be read first
        self._seen: object = None

    async def scan(self) -> tuple[Model, ...]:
        self._seen = await asyncio.to_thread(self._look)
        entries = await asyncio.to_thread(self._scan)
        self._entries = entries
        self._names = self._name(entries)
        return tuple(entry.model for entry in entries.values())

    async def watch(self) -> None:
        """A file that grows still is waited for: changed, and the same at two looks."""
        if self._unread:
            return
        before = self._seen
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            now = await asyncio.to_thread(self._look)
            if now != self._seen and now == before:
                return
            before = now

    def resolve(self, name: str) -> str | None:
        id = self._names.get(name)
        if id is not None and self._unread:
            self._asked_for.add(id)
        return id

    def describe(self, id: str) -> dict[str, Any]:
        entry = self._entries[id]
        settings = entry.settings
        needs = entry.needs
        return {
            "id": id,
            "aliases": list(settings.aliases),
            "file": entry.found.path,
            "bytes": entry.found.bytes,
            "pinned": not settings.unload_when_idle,
            "context": needs.context if needs else settings.context or DEFAULT_CONTEXT,
            "needs": None
            if needs is None
            else {
                "text": in_words(needs),
                "total_bytes": needs.total_bytes,
                **{field: needs.sum_of(field) for field in _NEEDS},
            },
            "settings": {
                key: list(value) if isinstance(value := getattr(settings, key), tuple) else value for key in ModelSettings._fields
            },
            "error": entry.error,
            "warning": entry.warning,
        }

    def devices(self) -> list[dict[str, Any]]:
        return [
            {
                "id": device.id,
                "name": device.name,
                "kind": device.kind,
                "pool": device.pool,
                "total_bytes": device.total_bytes,
                "available_bytes": None,
                "compute_capability": device.compute_capability,
                "uuid": device.uuid,
                "usable": device.usable,
                "reason": device.reason,
            }
            for device in self._devices
        ]

    def largest_context(self, id: str, rooms: Sequence[Mapping[str, int]]) -> int | None:
        """By halving: what a model takes grows with its context."""
        entry = self._entries[id]
        if entry.launch is None:
            return None
        try:
            read = _Files(entry.found.path, entry.launch, self._server)
            low, high = 0, max(_STEP, entry.trained_context or entry.launch.context) // _STEP
            while low < high:
                middle = (low + high + 1) // 2
                ways = self._placements(read, entry.launch.replace(context=middle * _STEP), self._candidates(entry.settings))
                if any(all(room.get(pool, 0) >= amount for pool, amount in way.amounts) for way in ways for room in rooms):
                    low = middle
                else:
                    high = middle - 1
        except SparkguardError:
            return None
        return low * _STEP or None

    async def patch(self, id: str, changes: dict[str, Any]) -> None:
        if id not in self._entries:
            raise SparkguardError(f"there is no model {id!r}")
        for key, value in changes.items():
            if value is None:
                continue
            checked = runners_toml.check(id, key, value, self._toml)
            if key != "args" or checked == self._entries[id].settings.args:
                continue
            if reaching := runners_toml.reaching(checked):
                message = f"args has {reaching[0]}, which reaches files or machines"
                raise runners_toml.BadSetting("args", message, f"change them in {self._toml}, not from here")
        for alias in changes.get("aliases") or ():
            if self._names.get(alias, id) != id:
                raise runners_toml.BadSetting("aliases", f"{alias!r} is a name of {self._names[alias]!r} already")
        await asyncio.to_thread(runners_toml.change, self._toml, id, changes)

    def start(self, id: str, placement: Placement) -> Start:
        """What RealEffects is to start."""
        entry = self._entries[id]
        if entry.launch is None:
            raise SparkguardError(entry.error or f"{id} cannot be started")
        device = next(device for device in self._devices if device.id == placement.device)
        launch = entry.launch.replace(
            on_gpu=device.kind == "cuda",
            host_expert_layers=placement.host_expert_layers,
            threads=entry.launch.threads or _cores(self._settings().cpu_share),
        )
        if placement.host_expert_layers and not _caches_experts(self._server):
            log.info("%s: %s", id, _NO_CACHE)
        arguments = tuple(engine.arguments(self._server, id, launch))
        pools = {engine.HOST: "ram", engine.DEVICE: device.pool}
        host = dict(placement.amounts).get("ram", 0)
        cap = host + max(_LEAST_SLACK_BYTES, host // 4)
        return Start(id, entry.found.path, device.target, self._server.path, arguments, pools, entry.found.bytes, cap)

    # In a thread.

    def _look(self) -> object:
        found = tuple((model.id, model.state, model.projector) for model in files.scan(self._settings().models_dir))
        try:
            stat = os.stat(self._toml)
            return found, stat.st_mtime_ns, stat.st_size
        except OSError:
            return found, None, None

    def _scan(self) -> dict[str, Entry]:
        site = self._settings()
        self._devices = self._find_devices()
        chosen = runners_toml.read(self._toml)
        found = {model.id: model for model in files.scan(site.models_dir)}
        for id, settings in chosen.items():
            if settings.file is not None:
                found[id] = files.one(id, os.path.join(site.models_dir, os.path.expanduser(settings.file)))
        entries = {}
        deadline = self._clock() + SLICE_SECONDS
        self._unread = False
        newest = sorted(found, key=lambda id: max((mtime for *_, mtime in found[id].state), default=0), reverse=True)
        for id in sorted(newest, key=lambda id: (id not in self._asked_for, id not in chosen)):
            settings = chosen.get(id, ModelSettings())
            made_of = (found[id], settings, site, self._devices)
            if id not in self._known or self._known[id][0] != made_of:
                if self._clock() > deadline:
                    self._unread = True
                    entries[id] = self._later(found[id], settings, site)
                    continue
                self._known[id] = (made_of, self._entry(found[id], settings, site))
            entry = self._known[id][1]
            if entry is not None:
                entries[id] = entry
        for id in self._known.keys() - found.keys():
            del self._known[id]
        return dict(sorted(entries.items()))

    def _later(self, found: files.Found, settings: ModelSettings, site: RunnerSettings) -> Entry:
        """As it is listed until its header is read, a moment later."""
        launch = self._launch(found, settings, site)
        problem = Problem(503, "not_read_yet", f"the header of {found.id} is being read; ask again in a moment")
        version = (found.state, launch, settings.device)
        model = Model(found.id, (), version, launch.parallel, not settings.unload_when_idle, problem)
        return Entry(found, settings, model, warning="its header is not read yet")

    def _launch(self, found: files.Found, settings: ModelSettings, site: RunnerSettings) -> engine.Launch:
        folder = os.path.dirname(found.path)

        def path(name: str) -> str:
            """Beside the model, or under MODELS_DIR."""
            name = os.path.expanduser(name)
            beside = os.path.join(folder, name)
            return beside if os.path.exists(beside) else os.path.join(site.models_dir, name)

        projector = found.projector if settings.projector is None else settings.projector or None
        return engine.Launch(
            context=DEFAULT_CONTEXT if settings.context is None else settings.context,
            parallel=settings.parallel or 1,
            threads=site.threads if settings.threads is None else settings.threads,
            key_type=settings.kv_type or "f16",
            value_type=settings.kv_type or "f16",
            projector=path(projector) if isinstance(projector, str) else None,
            draft=path(settings.draft) if settings.draft else None,
            lora=tuple(path(adapter) for adapter in settings.lora),
            args=settings.args,
        )

    def _entry(self, found: files.Found, settings: ModelSettings, site: RunnerSettings) -> Entry | None:
        """None: a file that is no model, an adapter beside one."""
        launch = self._launch(found, settings, site)
        version = (found.state, launch, settings.device)
        pinned = not settings.unload_when_idle
        try:
            if any(c < " " or "\ud800" <= c <= "\udfff" for c in found.id):
                # No address and no JSON can name it, and the engine's answers cannot either.
                raise SparkguardError(f"{found.path!r}: its name is not UTF-8 or has a control character: rename it")
            read = _Files(found.path, launch, self._server)
            if read.model.metadata.get("general.type") in ("adapter", "mmproj"):
                return None
            launch = launch.replace(pooling=_pooling(read.model))
            shape = shape_of(read.model)
            candidates = self._candidates(settings, site)
            ways = self._placements(read, launch, candidates)
            needs = read.needs(launch, candidates[0].kind == "cuda")
        except SparkguardError as error:
            problem = getattr(error, "problem", None) or Problem(500, "bad_file", error.message)
            broken = Model(found.id, (), version, launch.parallel, pinned, problem)
            return Entry(found, settings, broken, None, error=error.message)
        warning = "; ".join(needs.doubts) or None
        if candidates[0].kind == "cpu" and (settings.device or site.device) == "auto":
            unusable = next((device for device in self._devices if device.kind == "cuda"), None)
            if unusable is not None:
                warning = f"runs on the CPU: {unusable.name}: {unusable.reason}" + (f"; {warning}" if warning else "")
        if _needs_host_experts(ways, self._devices) and not _caches_experts(self._server):
            warning = f"{warning}; {_NO_CACHE}" if warning else _NO_CACHE
        model = Model(found.id, ways, version, launch.parallel, pinned)
        return Entry(found, settings, model, launch, needs, shape.context, None, warning)

    def _candidates(self, settings: ModelSettings, site: RunnerSettings | None = None) -> tuple[Device, ...]:
        """The devices that a model may run on, best first. Raises SparkguardError with a problem when there is none."""
        wanted = settings.device or (site or self._settings()).device
        cpu, *gpus = self._devices
        usable = tuple(gpu for gpu in gpus if gpu.usable)
        if wanted == "cpu":
            chosen: tuple[Device, ...] = (cpu,) if cpu.usable else ()
            reason = cpu.reason
        elif wanted in ("auto", "cuda"):
            chosen = usable if wanted == "cuda" or not cpu.usable else (*usable, cpu)
            reason = gpus[0].reason if gpus else "there is no CUDA device"
            reason = f"{reason}, and {cpu.reason}" if wanted == "auto" and cpu.reason else reason
        else:
            device = next((gpu for gpu in gpus if gpu.id == wanted), None)
            chosen = (device,) if device and device.usable else ()
            reason = device.reason if device else f"there is no {wanted}"
        if not chosen:
            error = SparkguardError(f"it is set to {wanted}, but {reason}")
            error.problem = Problem(503, "no_device", error.message)  # type: ignore[attr-defined]
            raise error
        return chosen

    def _placements(self, read: _Files, launch: engine.Launch, candidates: Sequence[Device]) -> tuple[Placement, ...]:
        """All GPUs alike first; then with experts on the host, the fewest layers first; then the CPU."""
        ways = []
        chosen = engine_args.places_tensors(launch.args)
        layers = read.expert_layers() if self._settings().host_experts and not chosen else {}
        for device in candidates:
            on_gpu = device.kind == "cuda"
            rank = 0 if on_gpu or len(candidates) == 1 else len(layers) + 1
            needs = read.needs(launch, on_gpu)
            ways.append(Placement(device.id, _amounts(needs, device), rank))
            if not (on_gpu and device.discrete and layers):
                continue  # on unified memory there is nothing to be gained
            first = read.needs(launch, True, 1)
            amounts = dict(_amounts(first, device))
            moved = 0
            for count, (layer, size) in enumerate(sorted(layers.items()), 1):
                if count > 1:
                    moved += size
                shifted = {**amounts, "ram": amounts.get("ram", 0) + moved, device.pool: amounts[device.pool] - moved}
                ways.append(Placement(device.id, tuple(sorted(shifted.items())), count, layer + 1))
        return tuple(sorted(ways, key=lambda way: way.rank))

    def _name(self, entries: Mapping[str, Entry]) -> dict[str, str]:
        """Ids, then aliases, then names of files as long as they mean one model."""
        names = {id: id for id in entries}
        for id, entry in entries.items():
            for alias in entry.settings.aliases:
                names.setdefault(alias, id)
        stems: dict[str, set[str]] = {}
        for id, entry in entries.items():
            name = os.path.basename(entry.found.path)
            for stem in (name, name.removesuffix(".gguf"), id.rpartition("/")[2]):
                stems.setdefault(stem, set()).add(id)
        for stem, ids in stems.items():
            if len(ids) == 1:
                names.setdefault(stem, next(iter(ids)))
        return names


class _Files:
    """The headers that one start reads. Let go after use: the tables of a large model's tensors take megabytes."""

    def __init__(self, path: str, launch: engine.Launch, server: LlamaServer) -> None:
        self._server = server
        self.model = read_model(path)
        self._projector = read_model(launch.projector) if launch.projector else None
        self._adapters = tuple(read_model(adapter) for adapter in launch.lora)
        self._draft = read_model(launch.draft) if launch.draft else None
        self._known: dict[tuple[engine.Launch, bool, int], Needs] = {}  # an estimate lays out a graph: tens of milliseconds

    def needs(self, launch: engine.Launch, on_gpu: bool, host_expert_layers: int = 0) -> Needs:
        key = (launch, on_gpu, host_expert_layers)
        if key not in self._known:
            self._known[key] = self._estimate(*key)
        return self._known[key]

    def _estimate(self, launch: engine.Launch, on_gpu: bool, host_expert_layers: int) -> Needs:
        launch = launch.replace(on_gpu=on_gpu, host_expert_layers=host_expert_layers)
        ask = engine.ask_of(self._server, launch)
        return estimate(self.model, ask, self._projector, self._adapters, self._draft)

    def expert_layers(self) -> dict[int, int]:
        """Bytes of the routed experts of each layer that has some."""
        layers: dict[int, int] = {}
        for tensor in self.model.tensors:
            parts = tensor.name.split(".")
            if len(parts) > 2 and parts[0] == "blk" and "exps" in parts[2] and parts[1].isdecimal():
                layers[int(parts[1])] = layers.get(int(parts[1]), 0) + tensor.bytes
        return layers


def _amounts(needs: Needs, device: Device) -> tuple[tuple[str, int], ...]:
    amounts: dict[str, int] = {}
    for part in needs.devices:
        pool = device.pool if part.device == DEVICE else "ram"
        amounts[pool] = amounts.get(pool, 0) + part.total_bytes
    assert part.device in (HOST, DEVICE)
    return tuple(sorted(amounts.items()))


def _cores(share: int) -> int:
    """Of the share that spark-runner pins itself to; hyperthreads of one core count once. 0: nobody knows."""
    usable = cores.usable()
    chosen = set(cores_for(share, usable)) if usable else set()
    return len({core.first_sibling for core in usable if core.cpu in chosen})


def _caches_experts(server: LlamaServer) -> bool:
    """No build known to us does; one that will names a flag for it."""
    return any("expert-cache" in flag for flag in server.flags)


def _needs_host_experts(ways: Sequence[Placement], devices: Sequence[Device]) -> bool:
    """Whether no GPU could ever hold the whole."""
    sizes = {device.pool: device.total_bytes or 0 for device in devices}
    whole = [way for way in ways if way.device != "cpu" and not way.host_expert_layers]
    return any(way.host_expert_layers for way in ways) and not any(
        all(amount <= sizes.get(pool, 0) for pool, amount in way.amounts) for way in whole
    )


def _pooling(model: ModelFile) -> str:
    kind = model.metadata.get(f"{model.architecture}.pooling_type")
    if kind == _RANK:
        return "rerank"
    return "embeddings" if kind in (1, 2, 3) or not shape_of(model).causal else ""
