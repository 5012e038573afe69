"""The models: what lies under MODELS_DIR, what a person has set for each, and what each would take on each device."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from sparkguard.core.estimate import DeviceNeeds
from sparkguard.core.events import Model, Placement
from sparkguard.core.placement import in_words
from sparkguard.errors import SparkguardError
from sparkguard.probe.llama_server import LlamaServer
from sparkguard.supervisor import entries, files, headers, runners_toml
from sparkguard.supervisor.devices import Device
from sparkguard.supervisor.effects import Start
from sparkguard.supervisor.entries import Entry
from sparkguard.supervisor.names import names_of
from sparkguard.supervisor.runner_settings import RunnerSettings
from sparkguard.supervisor.runners_toml import ModelSettings

log = logging.getLogger("sparkguard.library")
WATCH_SECONDS = 2.0
# Of reading headers, before what there is is shown. Hundreds of models take less; what is not read even then has a problem that
# passes, and is read in the next slice.
LIST_SECONDS = 0.9
_NEEDS = tuple(field for field in DeviceNeeds._fields if field != "device")


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
        self._changing, self._reading = threading.Lock(), threading.Lock()

    async def scan(self) -> tuple[Model, ...]:
        # Together and last, so that a scan that nobody waits for any more is made up for by the next look.
        self._seen, self._entries = await asyncio.to_thread(self._read)
        self._names = names_of((id, entry.found.path, entry.settings.aliases) for id, entry in self._entries.items())
        return tuple(entry.model for entry in self._entries.values())

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
            "context": needs.context if needs else settings.context or entries.DEFAULT_CONTEXT,
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
        return self._maker().largest_context(self._entries[id], rooms)

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
        await asyncio.to_thread(self._change, id, changes)

    def start(self, id: str, placement: Placement) -> Start:
        """What RealEffects is to start."""
        return self._maker().start(self._entries[id], placement)

    def _maker(self) -> entries.Maker:
        return entries.Maker(self._settings(), self._devices, self._server, self._headers)

    # In a thread: one at a time, and the locks are threads' since these go on when whoever waits for them has left.

    def _change(self, id: str, changes: dict[str, Any]) -> None:
        with self._changing:
            runners_toml.change(self._toml, id, changes)

    def _read(self) -> tuple[object, dict[str, Entry]]:
        with self._reading:
            seen = self._look()
            try:
                return seen, self._scan()
            except SparkguardError:
                self._seen = seen  # told once, and again when it changes
                raise

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
        found = self._find(site.models_dir, chosen)
        maker = self._maker()
        began = self._clock()
        made = {}
        self._unread = False
        for id in self._by_urgency(found, chosen):
            settings = chosen.get(id, ModelSettings())
            made_of = (found[id], settings, site, self._devices)
            if id not in self._known or self._known[id][0] != made_of:
                if self._clock() - began > LIST_SECONDS:
                    self._known.pop(id, None)
                    self._unread = True
                    made[id] = maker.later(found[id], settings)
                    continue
                self._known[id] = (made_of, maker.entry(found[id], settings))
            entry = self._known[id][1]
            if entry is not None:
                made[id] = entry
        self._keep_only(found)
        return dict(sorted(made.items()))

    def _find(self, folder: str, chosen: Mapping[str, ModelSettings]) -> dict[str, files.Found]:
        """What lies in the folder, and what the settings name elsewhere."""
        scanned = files.scan(folder)
        if scanned.bound and scanned.bound != self._bound:
            log.warning("%s", scanned.bound)
        self._bound = scanned.bound
        found = {model.id: model for model in scanned.models}
        for id, settings in chosen.items():
            if settings.file is not None:
                found[id] = files.one(id, os.path.join(folder, os.path.expanduser(settings.file)))
        return found

    def _by_urgency(self, found: Mapping[str, files.Found], chosen: Container[str]) -> list[str]:
        """Whoever is asked for first, then those that somebody has set something for, then the newest."""

        def urgency(id: str) -> tuple[bool, bool, int]:
            return id not in self._asked_for, id not in chosen, -max((mtime for *_, mtime in found[id].state), default=0)

        return sorted(found, key=urgency)

    def _keep_only(self, found: Mapping[str, files.Found]) -> None:
        for id in self._known.keys() - found.keys():
            del self._known[id]
        self._headers.keep_only([model.path for model in found.values()])
        if not self._unread:
            self._headers.save()
