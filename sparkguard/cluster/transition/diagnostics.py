"""Evidence of a failed start, kept before anything is cleaned up: diagnostics/startup-*/failure.json."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

from sparkguard.cluster.transition import state
from sparkguard.errors import OSERR, SparkguardError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from sparkguard.cluster.ssh import Fleet

SECONDS = 45.0
KEPT = 50  # folders; the oldest go


async def collect(fleet: Fleet, ids: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """What each node tells of these containers and of itself; a node that cannot be asked says why."""

    async def one(node: str) -> dict[str, Any]:
        try:
            return await fleet[node].call("evidence", {"ids": list(ids[node])}, seconds=SECONDS, repeatable=True)
        except SparkguardError as error:
            return {"error": error.message}

    return dict(zip(ids, await asyncio.gather(*(one(node) for node in ids))))


def without(found: Any, secrets: Mapping[str, str]) -> Any:
    """With a credential's name in place of it, wherever an engine printed it: evidence is what people send to each other."""
    if isinstance(found, str):
        for value, name in secrets.items():
            found = found.replace(value, f"[{name}]")
        return found
    if isinstance(found, dict):
        return {key: without(value, secrets) for key, value in found.items()}
    return [without(each, secrets) for each in found] if isinstance(found, list) else found


def keep(state_dir: Path, model: str, facts: Mapping[str, Any], nodes: Mapping[str, Any]) -> Path:
    """Writes failure.json in a folder of its own, and returns the folder."""
    folder = state_dir / "diagnostics"
    try:
        path = _new_folder(folder, model)
    except OSError as error:
        raise SparkguardError(f"no evidence can be kept in {folder}: {error.strerror}", None, OSERR) from None
    state.write(path / "failure.json", json.dumps({"schema_version": 1, **facts, "nodes": nodes}, indent=1) + "\n")
    _forget_the_oldest(folder)
    return path


def _new_folder(folder: Path, model: str) -> Path:
    name = f"startup-{time.strftime('%Y%m%d-%H%M%S')}-{model}"
    path = folder / name
    number = 1
    while path.exists():
        number += 1
        path = folder / f"{name}-{number}"
    path.mkdir(mode=0o700, parents=True)
    return path


def _forget_the_oldest(folder: Path) -> None:
    """What cannot be removed stays, and a link is never followed: it may lead to what is somebody's."""
    import shutil

    for old in sorted(entry for entry in folder.glob("startup-*") if entry.is_dir() and not entry.is_symlink())[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)


def summary(nodes: Mapping[str, Any], lines: int = 12) -> str:
    """The ends of the logs, for the terminal and the boot log of the dashboard."""
    parts = []
    for node, facts in nodes.items():
        if "error" in facts:
            parts.append(f"{node}: {facts['error']}")
            continue
        containers = facts.get("containers")
        for one in containers if isinstance(containers, list) else ():
            if not isinstance(one, dict):
                continue
            killed = ", killed for memory" if one.get("oom_killed") else ""
            exit_code = f" with {one['exit_code']}" if one.get("state") == "exited" else ""
            parts.append(f"{node}: {one.get('name')} {one.get('state')}{exit_code}{killed}")
            log = one.get("log")
            said = [*log.get("stdout", ()), *log.get("stderr", ())] if isinstance(log, dict) else []
            parts += [f"  {str(line)[:300]}" for line in said[-lines:]]
    return "\n".join(parts)
