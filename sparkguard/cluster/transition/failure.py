"""After a transition failed: what explains it is kept, then what it started is ended. Neither raises."""

from __future__ import annotations

import asyncio
import os
import uuid
from typing import TYPE_CHECKING

from sparkguard.cluster import commands
from sparkguard.cluster.commands import Turn
from sparkguard.cluster.transition import diagnostics, discovery
from sparkguard.cluster.transition.wanted import yue_settings
from sparkguard.core.ownership import ALIVE, ours
from sparkguard.errors import SparkguardError

if TYPE_CHECKING:
    from pathlib import Path

    from sparkguard.cluster.transition.turn import Work

GRACE_SECONDS = 10  # an engine that loads answers no request; some ignore SIGTERM until they serve


async def collect(work: Work, error: str) -> Path | None:
    """The folder with failure.json; None when not even that could be written."""
    ids: dict[str, list[str]] = {node: [] for node in work.nodes if node not in work.lost}
    for (node, _), container in work.created.items():
        ids.setdefault(node, []).append(container.id)
    work.emit("startup_diagnostics", text="keeping the ends of the logs before anything is removed")
    nodes = await diagnostics.collect(work.fleet, {node: tuple(found) for node, found in ids.items()})
    nodes = diagnostics.without(nodes, _secrets(work))
    model = work.wanted.model if work.wanted is not None else "stop"
    facts = {"verb": work.verb, "generation": work.generation, "phase": work.phase, "error": error, "model": model}
    try:
        folder = diagnostics.keep(work.state_dir, model, facts, nodes)
    except SparkguardError as failed:
        work.emit("startup_diagnostics", text=failed.message)
        return None
    work.emit("startup_diagnostics", text=f"{diagnostics.summary(nodes)}\nkept in {folder}", path=str(folder))
    return folder


async def clean_up(work: Work) -> str | None:
    """None when nothing that this transition started is left, and nothing of it can still come; else what is unknown."""
    turn = Turn(uuid.uuid4().hex, work.turn.holder)
    errors = []
    try:
        discovery.revoke(work.state_dir, tuple(node for node in work.nodes if node not in work.generations))
    except SparkguardError as error:
        errors.append(error.message)
    nodes = [node for node in work.nodes if node not in work.lost]
    results = await asyncio.gather(*(_one(work, turn, node) for node in nodes))
    errors += [result for result in results if result is not None]
    return "; ".join(errors) or None


async def _one(work: Work, turn: Turn, node: str) -> str | None:
    """A new generation first: a command of this transition that is still on its way then does nothing when it arrives."""
    link = work.fleet[node]
    try:
        await commands.fence(link, turn, [work.generation, *_before(work, node)])
        view = (await work.look((node,)))[node]
        if view.error is not None or view.containers is None:
            return f"{node}: {view.error or view.daemon_error}"
        if node in work.admitted:
            await commands.yue(link, turn, yue_settings(work.catalog), "drain")
        for container in ours(view, work.rules):
            if container.generation != work.generation:
                continue
            if container.state in ALIVE:
                await commands.stop(link, turn, container.id, GRACE_SECONDS)
            await commands.remove(link, turn, container.id)
    except SparkguardError as error:
        return error.message if error.message.startswith(f"{node}:") else f"{node}: {error.message}"
    return None


def _secrets(work: Work) -> dict[str, str]:
    """Value -> name, of what the ranks were given."""
    names = {name for rank in (work.wanted.ranks if work.wanted is not None else ()) for name in rank.secrets}
    return {os.environ[name]: name for name in names if os.environ.get(name)}


def _before(work: Work, node: str) -> list[str]:
    """The generation that was seen: it is still there where this transition did not come as far as its fence."""
    seen = work.views.get(node)
    return [seen.generation] if seen is not None and seen.generation is not None else []
