"""The GGUF files under MODELS_DIR: which are models, and which belong to one."""

from __future__ import annotations

import os
import re

from sparkguard.core.record import Record
from sparkguard.supervisor.walk import File, walk

_SPLIT = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})$")
_MMPROJ = re.compile(r"(?:^|[-_.])mmproj(?:$|[-_.])", re.IGNORECASE)
_TYPE = re.compile(r"[-_.](?:f16|f32|bf16|q8_0)$", re.IGNORECASE)


class Found(Record):
    """A model: its first file, and all its files' state, which changes when one of them does."""

    id: str
    path: str
    state: tuple[tuple[str, int, int], ...]  # (path, size, mtime in ns)
    bytes: int
    projector: str | None = None


class Scan(Record):
    """bound says what was not looked at; None: all was."""

    models: tuple[Found, ...]
    bound: str | None


def scan(root: str) -> Scan:
    """Every model, in the order of ids. A split model stands once, whether all its parts are there or not."""
    walked = walk(root)
    files = sorted(walked.files, key=lambda file: file.path)
    models: dict[str, list[File]] = {}
    projectors: dict[str, list[File]] = {}
    for file in files:
        if _MMPROJ.search(file.stem):
            projectors.setdefault(file.folder, []).append(file)
            continue
        split = _SPLIT.match(file.stem)
        stem = split["stem"] if split else file.stem
        models.setdefault(f"{file.folder}/{stem}" if file.folder else stem, []).append(file)
    in_folder: dict[str, int] = {}
    for parts in models.values():
        in_folder[parts[0].folder] = in_folder.get(parts[0].folder, 0) + 1
    found = []
    for id, parts in models.items():
        folder = parts[0].folder
        alone = bool(folder) and in_folder[folder] == 1
        found.append(
            Found(
                id,
                parts[0].path,
                tuple((part.path, part.size, part.mtime) for part in parts),
                sum(part.size for part in parts),
                _projector_of(id.rpartition("/")[2], projectors.get(folder, []), alone),
            )
        )
    return Scan(tuple(sorted(found, key=lambda model: model.id)), walked.bound)


def one(id: str, path: str) -> Found:
    """A model that the settings name, wherever it is; state is empty when it is not there."""
    folder, name = os.path.split(path)
    split = _SPLIT.match(name.removesuffix(".gguf"))
    names = [name]
    if split and int(split["count"]) < 10000:
        names = [f"{split['stem']}-{number + 1:05}-of-{split['count']}.gguf" for number in range(int(split["count"]))]
    state = []
    for each in names:
        try:
            stat = os.stat(os.path.join(folder, each))
        except OSError:
            continue
        state.append((os.path.join(folder, each), stat.st_size, stat.st_mtime_ns))
    return Found(id, path, tuple(state), sum(size for _, size, _ in state))


def _projector_of(stem: str, projectors: list[File], alone: bool) -> str | None:
    """The one whose name, without 'mmproj' and its type, begins the model's; in a folder with one model, the first."""
    best = None
    for file in projectors:
        key = _TYPE.sub("", _MMPROJ.sub("-", file.stem)).strip("-_.").lower()
        if key and stem.lower().startswith(key) and (best is None or len(key) > best[0]):
            best = (len(key), file.path)
    if best is not None:
        return best[1]
    return projectors[0].path if alone and projectors else None
