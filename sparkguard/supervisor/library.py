"""The models: what lies under MODELS_DIR, what a person has set for each, and what each would take on each device."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from sparkguard.core import engine_args
from sparkguard.core.affinity import cores_for
from sparkguard.core.estimate import DeviceNeeds, Needs
from sparkguard.core.events import Model, Placement, Problem
from sparkguard.core.placement import in_words
from sparkguard.core.record import Record
from sparkguard.errors import USAGE, SparkguardError
from sparkguard.probe import cores, llama_server
from sparkguard.probe.llama_server import LlamaServer
from sparkguard.supervisor import engine, files, headers, runners_toml, ways
from sparkguard.supervisor.devices import Device
from sparkguard.supervisor.effects import Start
from sparkguard.supervisor.names import names_of
from sparkguard.supervisor.runner_settings import RunnerSettings
from sparkguard.supervisor.runners_toml import ModelSettings

log = logging.getLogger("sparkguard.library")
DEFAULT_CONTEXT = 4096
WATCH_SECONDS = 2.0
# Of exact estimates, before what there is is shown; then of quick ones. Hundreds of models are listed at once with what they
# need, and become exact one slice after the other; what is not read even then has a problem that passes.
SLICE_SECONDS, LIST_SECONDS = 0.25, 0.9
_FEW = 50
_NEEDS = tuple(field for field in DeviceNeeds._fields if field != "device")
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


class ModelLibrary:
    """The Library of supervisor/protocol.py. settings() and devices() are asked anew at each scan.

    kept_in: a file that keeps for the next start what the headers say.
    """

    def __init__(
        self,
        settings: Callable[[], RunnerSettings],
        toml: str,
        server: LlamaServer,
        devices: Callable[[], tuple[Device, ...]],
        clock: Callable[[], float] = time.monotonic,
        kept_in: str | None = None,
    ) -> None:
        self._headers = headers.Headers(kept_in)
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
        self._bound: str | None = None

    async def scan(self) -> tuple[Model, ...]:
        self._seen = await asyncio.to_thread(self._look)
        entries = await asyncio.to_thread(self._scan)
        self._entries = entries
        self._names = names_of((id, entry.found.path, entry.settings.aliases) for id, entry in entries.items())
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

    def warning(self) -> str | None:
        """What to know about the list as a whole."""
        return self._bound

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
        site = self._settings()
        try:
            # By itself: what is kept of each model are the few answers of its settings, not those of a search.
            header = headers.Header(_sources(entry.found, entry.launch))
            devices = ways.candidates(entry.settings.device or site.device, self._devices)
            layers = self._movable(header.facts.expert_layers, entry.launch, site)
            low, high = 0, max(_STEP, entry.trained_context or entry.launch.context) // _STEP
            while low < high:
                middle = (low + high + 1) // 2
                reckoned = self._reckon(header, entry.launch.replace(context=middle * _STEP))
                places = ways.placements(reckoned, layers, devices, self._cached_percent(site))
                if any(all(room.get(pool, 0) >= amount for pool, amount in place.amounts) for place in places for room in rooms):
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
            expert_cache_mib=placement.expert_cache_mib,
            threads=entry.launch.threads or _cores(self._settings().cpu_share),
        )
        if placement.host_expert_layers and not self._server.knows(engine.EXPERT_CACHE):
            log.info("%s: %s", id, _NO_CACHE)
        arguments = tuple(engine.arguments(self._server, id, launch))
        pools = {engine.HOST: "ram", engine.DEVICE: device.pool}
        host = dict(placement.amounts).get("ram", 0)
        cap = host + max(_LEAST_SLACK_BYTES, host // 4)
        port = not self._server.knows(llama_server.SOCKETS)
        return Start(id, entry.found.path, device.target, self._server.path, arguments, pools, entry.found.bytes, cap, port)

    # In a thread.

    def _look(self) -> object:
        found = tuple((model.id, model.state, model.projector) for model in files.scan(self._settings().models_dir).models)
        try:
            stat = os.stat(self._toml)
            return found, stat.st_mtime_ns, stat.st_size
        except OSError:
            return found, None, None

    def _scan(self) -> dict[str, Entry]:
        site = self._settings()
        self._devices = self._find_devices()
        chosen = runners_toml.read(self._toml)
        scanned = files.scan(site.models_dir)
        if scanned.bound and scanned.bound != self._bound:
            log.warning("%s", scanned.bound)
        self._bound = scanned.bound
        found = {model.id: model for model in scanned.models}
        for id, settings in chosen.items():
            if settings.file is not None:
                found[id] = files.one(id, os.path.join(site.models_dir, os.path.expanduser(settings.file)))
        entries = {}
        began = self._clock()
        # So many that exact ones first would leave no time for the rest of the list.
        exact_seconds = SLICE_SECONDS if len(found.keys() - self._known.keys()) <= _FEW else 0.0
        self._unread = False
        newest = sorted(found, key=lambda id: max((mtime for *_, mtime in found[id].state), default=0), reverse=True)
        for id in sorted(newest, key=lambda id: (id not in self._asked_for, id not in chosen)):
            settings = chosen.get(id, ModelSettings())
            made_of = (found[id], settings, site, self._devices)
            known = self._known.get(id)
            if known is None or known[0] != made_of or (known[1] is not None and known[1].quick):
                spent = self._clock() - began
                if spent <= exact_seconds:
                    self._known[id] = (made_of, self._entry(found[id], settings, site))
                elif known is None or known[0] != made_of:
                    if spent <= LIST_SECONDS:
                        self._known[id] = (made_of, self._entry(found[id], settings, site, quick=True))
                    else:
                        self._known.pop(id, None)
                        self._unread = True
                        entries[id] = self._later(found[id], settings, site)
                        continue
            entry = self._known[id][1]
            if entry is not None:
                self._unread = self._unread or entry.quick
                entries[id] = entry
        for id in self._known.keys() - found.keys():
            del self._known[id]
        self._headers.keep_only([model.path for model in found.values()])
        if not self._unread:
            self._headers.save()
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

    def _reckon(self, header: headers.Header, launch: engine.Launch, quick: bool = False) -> Callable[[bool, int], Needs]:
        @cache
        def needs(on_gpu: bool, host_expert_layers: int) -> Needs:
            asked = engine.ask_of(self._server, launch.replace(on_gpu=on_gpu, host_expert_layers=host_expert_layers))
            return header.needs(asked, quick)

        return needs

    def _cached_percent(self, site: RunnerSettings) -> float:
        return site.expert_cache_percent if self._server.knows(engine.EXPERT_CACHE) else 0.0

    @staticmethod
    def _movable(layers: tuple[tuple[int, int], ...], launch: engine.Launch, site: RunnerSettings) -> tuple[tuple[int, int], ...]:
        """Those experts that may go to the host: none where the user's arguments say what goes where."""
        return layers if site.host_experts and not engine_args.places_tensors(launch.args) else ()

    def _entry(self, found: files.Found, settings: ModelSettings, site: RunnerSettings, quick: bool = False) -> Entry | None:
        """None: a file that is no model, an adapter beside one. quick: what is not known already may be a few MB off."""
        launch = self._launch(found, settings, site)
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
            devices = ways.candidates(settings.device or site.device, self._devices)
            reckoned = self._reckon(header, launch, quick)
            layers = self._movable(facts.expert_layers, launch, site)
            places = ways.placements(reckoned, layers, devices, self._cached_percent(site))
            needs = reckoned(devices[0].kind == "cuda", 0)
        except SparkguardError as error:
            code = "bad_settings" if error.status == USAGE else "bad_file"
            problem = error.problem if isinstance(error, ways.NoDevice) else Problem(500, code, error.message)
            broken = Model(found.id, (), version, launch.parallel, pinned, problem)
            return Entry(found, settings, broken, None, error=error.message)
        warning = "; ".join(needs.doubts) or None
        if devices[0].kind == "cpu" and (settings.device or site.device) == "auto":
            unusable = next((device for device in self._devices if device.kind == "cuda"), None)
            if unusable is not None:
                warning = f"runs on the CPU: {unusable.name}: {unusable.reason}" + (f"; {warning}" if warning else "")
        if ways.must_move_experts(places, self._devices) and not self._server.knows(engine.EXPERT_CACHE):
            warning = f"{warning}; {_NO_CACHE}" if warning else _NO_CACHE
        model = Model(found.id, places, version, launch.parallel, pinned)
        return Entry(found, settings, model, launch, needs, facts.context, None, warning, quick)


def _sources(found: files.Found, launch: engine.Launch) -> headers.Sources:
    shards = tuple(path for path, *_ in found.state)
    return headers.Sources(found.path, launch.projector, launch.lora, launch.draft, shards)


def _cores(share: int) -> int:
    """Of the share that spark-runner pins itself to; hyperthreads of one core count once. 0: nobody knows."""
    usable = cores.usable()
    chosen = set(cores_for(share, usable)) if usable else set()
    return len({core.first_sibling for core in usable if core.cpu in chosen})
