"""The walk through MODELS_DIR: what people put there may be a link to /, a circle of links, or a data set of a million files.

Folders are read breadth first, and those behind links last, so that what is reached before a bound is what lies nearest.
"""

from __future__ import annotations

import os
from collections import deque
from itertools import islice

from sparkguard.core.record import Record

MOST_DEPTH = 8  # folders below MODELS_DIR
MOST_ENTRIES = 100_000  # files and folders; the walk is repeated every two seconds, and takes 0.1 s for so many


class File(Record):
    path: str
    folder: str  # below MODELS_DIR, '' for itself
    stem: str
    size: int
    mtime: int


class Walk(Record):
    """bound says what was not looked at; None: all was."""

    files: tuple[File, ...]
    bound: str | None


def walk(root: str) -> Walk:
    """All GGUF files. Names that begin with a dot are left out; a folder that links lead to twice is read once."""
    files: list[File] = []
    seen: set[tuple[int, int]] = set()
    folders = deque([(root, "", 0)])
    linked: deque[tuple[str, str, int]] = deque()
    left = MOST_ENTRIES
    too_deep = None
    while folders or linked:
        folder, below, depth = (folders or linked).popleft()
        try:
            stat = os.stat(folder)
            if (stat.st_dev, stat.st_ino) in seen:
                continue
            seen.add((stat.st_dev, stat.st_ino))
            with os.scandir(folder) as entries:
                listed = list(islice(entries, left + 1))
        except OSError as error:
            if not depth:
                return Walk((), f"{root or 'MODELS_DIR'} cannot be read: {error.strerror}")
            continue
        if len(listed) > left:
            return Walk(tuple(files), f"{root} has more than {MOST_ENTRIES} files and folders: not all of them were looked at")
        left -= len(listed)
        for entry in sorted(listed, key=lambda entry: entry.name):
            if entry.name.startswith("."):
                continue
            try:
                if entry.is_dir():
                    if depth < MOST_DEPTH:
                        next_one = (entry.path, os.path.join(below, entry.name), depth + 1)
                        (linked if entry.is_symlink() else folders).append(next_one)
                    else:
                        too_deep = too_deep or entry.path
                elif entry.name.lower().endswith(".gguf"):
                    stat = entry.stat()
                    files.append(File(entry.path, below, entry.name[:-5], stat.st_size, stat.st_mtime_ns))
            except OSError:  # a link to nowhere
                continue
    return Walk(tuple(files), too_deep and f"folders more than {MOST_DEPTH} deep were not looked at, as {too_deep}")
