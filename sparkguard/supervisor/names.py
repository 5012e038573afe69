"""Which model a name means."""

from __future__ import annotations

import os
from collections.abc import Iterable


def names_of(models: Iterable[tuple[str, str, tuple[str, ...]]]) -> dict[str, str]:
    """Of (id, path, aliases): ids, then aliases, then names of files as long as they mean one model."""
    models = tuple(models)
    names = {id: id for id, _, _ in models}
    for id, _, aliases in models:
        for alias in aliases:
            names.setdefault(alias, id)
    stems: dict[str, set[str]] = {}
    for id, path, _ in models:
        name = os.path.basename(path)
        for stem in (name, name.removesuffix(".gguf"), id.rpartition("/")[2]):
            stems.setdefault(stem, set()).add(id)
    for stem, ids in stems.items():
        if len(ids) == 1:
            names.setdefault(stem, next(iter(ids)))
    return names
