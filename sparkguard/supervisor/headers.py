"""What the headers of models' files say, and what the models need by them: reckoned once, and kept on disk for the next start.

To read a header and to lay out its graph takes milliseconds, and there are libraries of hundreds of models. What is kept counts
for exactly these files (size, time, inode) and exactly this program; anything else, and anything damaged, is reckoned anew.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any

from sparkguard import core
from sparkguard.core.architectures import shape_of
from sparkguard.core.estimate import Ask, DeviceNeeds, Needs, estimate
from sparkguard.core.ggml import ModelFile
from sparkguard.core.record import Record
from sparkguard.probe import gguf
from sparkguard.probe.gguf import read_model

_MOST_BYTES = 64 << 20  # of the file; a model takes some 600 bytes
_SEAL_BYTES = 65
_MOST_NEEDS = 16  # kept of one model: a handful of devices and settings
_RANK = 4  # pooling_type of a model that ranks (llama.h)

FileState = tuple[str, int, int, int]  # path, size, mtime in ns, inode


class Facts(Record):
    """What a listing says of a model beside its needs."""

    kind: str  # general.type: model, adapter, mmproj
    pooling: str  # "embeddings" or "rerank", for a model that does only that
    context: int  # tokens that it was trained for
    expert_layers: tuple[tuple[int, int], ...]  # (layer, bytes of its routed experts)


class Sources(Record):
    """The files that one start reads."""

    model: str
    projector: str | None = None
    adapters: tuple[str, ...] = ()
    draft: str | None = None
    shards: tuple[str, ...] = ()  # all parts of the model


class Header:
    """One model with what belongs to it. Raises SparkguardError.

    Its files are read when something is asked that is not known yet. The tables of a large model's tensors take megabytes: let
    go after use.
    """

    def __init__(self, sources: Sources, kept: _Kept | None = None) -> None:
        self._sources = sources
        self._kept = kept or _Kept(lambda: None)

    @cached_property
    def _read(self) -> tuple[ModelFile, ModelFile | None, tuple[ModelFile, ...], ModelFile | None]:
        sources = self._sources
        return (
            read_model(sources.model),
            read_model(sources.projector) if sources.projector else None,
            tuple(read_model(adapter) for adapter in sources.adapters),
            read_model(sources.draft) if sources.draft else None,
        )

    @property
    def facts(self) -> Facts:
        if self._kept.facts is None:
            model = self._read[0]
            kind = str(model.metadata.get("general.type") or "model")
            if kind in ("adapter", "mmproj"):
                self._kept.put_facts(Facts(kind, "", 0, ()))
            else:
                shape = shape_of(model)
                self._kept.put_facts(Facts(kind, _pooling(model, shape.causal), shape.context, _expert_layers(model)))
        assert self._kept.facts is not None
        return self._kept.facts

    def needs(self, ask: Ask) -> Needs:
        key = repr(ask)
        found = self._kept.needs.get(key)
        if found is None:
            model, projector, adapters, draft = self._read
            found = estimate(model, ask, projector, adapters, draft)
            self._kept.put_needs(key, found)
        return found


class _Kept:
    """Of one model."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self.facts: Facts | None = None
        self.needs: dict[str, Needs] = {}
        self._changed = changed

    def put_facts(self, facts: Facts) -> None:
        self.facts = facts
        self._changed()

    def put_needs(self, key: str, needs: Needs) -> None:
        while len(self.needs) >= _MOST_NEEDS:
            del self.needs[next(iter(self.needs))]
        self.needs[key] = needs
        self._changed()


class Headers:
    """All models'. path: of the file; None: nothing is kept beyond this process."""

    def __init__(self, path: str | None = None) -> None:
        self._path = path
        self._known: dict[str, tuple[list[FileState], _Kept]] = {}
        self._changed = False
        if path is not None:
            self._load(path)

    def of(self, sources: Sources) -> Header:
        states = _states(sources)
        known = self._known.get(sources.model)
        if known is None or known[0] != states:
            known = self._known[sources.model] = (states, _Kept(self._note))
        return Header(sources, known[1])

    def keep_only(self, models: Sequence[str]) -> None:
        for path in self._known.keys() - set(models):
            del self._known[path]

    def save(self) -> None:
        """Whole or not at all; where it cannot be written, the next start is slower, and that is all."""
        if self._path is None or not self._changed:
            return
        self._changed = False
        models = {path: _to_json(states, kept) for path, (states, kept) in self._known.items() if kept.facts is not None}
        draft = f"{self._path}.{os.getpid()}.new"
        try:
            os.makedirs(os.path.dirname(self._path), 0o700, exist_ok=True)
            file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with os.fdopen(file, "wb") as out:
                raw = json.dumps({"version": version(), "models": models}).encode("ascii")  # names that are not UTF-8 are escaped
                out.write(_seal(raw) + raw)
            os.replace(draft, self._path)
        except OSError:
            try:
                os.unlink(draft)
            except OSError:
                pass

    def _note(self) -> None:
        self._changed = True

    def _load(self, path: str) -> None:
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(file, "rb") as opened:
                stat = os.fstat(file)
                if stat.st_uid != os.getuid() or stat.st_size > _MOST_BYTES:
                    return
                seal, raw = opened.read(_SEAL_BYTES), opened.read(_MOST_BYTES)
            if seal != _seal(raw):
                return
            read = json.loads(raw)
            if read["version"] == version():
                self._known = {model: self._from_json(each) for model, each in read["models"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self._known = {}

    def _from_json(self, read: Any) -> tuple[list[FileState], _Kept]:
        kept = _Kept(self._note)
        kind, pooling, context, layers = read["facts"]
        kept.facts = Facts(str(kind), str(pooling), _int(context), tuple((_int(layer), _int(size)) for layer, size in layers))
        for key, (tokens, devices, doubts, build) in read["needs"].items():
            parts = tuple(DeviceNeeds(str(device), *map(_int, amounts)) for device, *amounts in devices)
            kept.needs[key] = Needs(_int(tokens), parts, tuple(map(str, doubts)), _int(build))
        return [(str(path), *map(_int, state)) for path, *state in read["files"]], kept  # type: ignore[misc]


def _to_json(states: list[FileState], kept: _Kept) -> dict[str, Any]:
    facts = kept.facts
    assert facts is not None
    return {
        "files": states,
        "facts": [facts.kind, facts.pooling, facts.context, facts.expert_layers],
        "needs": {
            key: [
                needs.context,
                [[getattr(part, field) for field in part._fields] for part in needs.devices],
                needs.doubts,
                needs.build,
            ]
            for key, needs in kept.needs.items()
        },
    }


def _seal(raw: bytes) -> bytes:
    """A number that one bit has changed is a number all the same, and a start would be admitted by it."""
    return hashlib.sha256(raw).hexdigest().encode() + b"\n"


def _int(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(value)
    return value


@lru_cache(maxsize=1)
def version() -> str:
    """Of the code that reads and reckons: another one may come to other numbers."""
    states = []
    for folder, _, names in sorted(os.walk(os.path.dirname(core.__file__))):
        states += [os.path.join(folder, name) for name in sorted(names) if name.endswith(".py")]
    digest = hashlib.sha256()
    for path in (*states, gguf.__file__, __file__):
        stat = os.stat(path)
        digest.update(f"{path} {stat.st_size} {stat.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _states(sources: Sources) -> list[FileState]:
    states = []
    for path in (*(sources.shards or (sources.model,)), sources.projector, *sources.adapters, sources.draft):
        if path is not None:
            try:
                stat = os.stat(path)
                states.append((path, stat.st_size, stat.st_mtime_ns, stat.st_ino))
            except (OSError, ValueError):  # ValueError: a zero byte in the name
                states.append((path, -1, -1, -1))
    return states


def _expert_layers(model: ModelFile) -> tuple[tuple[int, int], ...]:
    sizes: dict[int, int] = {}
    layers: dict[int, int] = {}
    for number, tensors in model.table.layers:
        if id(tensors) not in sizes:
            sizes[id(tensors)] = sum(stored.bytes for rest, stored in tensors.items() if _of_experts(rest))
        if sizes[id(tensors)]:
            layers[number] = layers.get(number, 0) + sizes[id(tensors)]
    return tuple(sorted(layers.items()))


def _of_experts(rest: str) -> bool:
    return "exps" in rest and "exps" in rest.split(".")[1]


def _pooling(model: ModelFile, causal: bool) -> str:
    kind = model.metadata.get(f"{model.architecture}.pooling_type")
    if kind == _RANK:
        return "rerank"
    return "embeddings" if kind in (1, 2, 3) or not causal else ""
