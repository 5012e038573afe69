"""What runs where, and whether it can be used: the nodes as they answer now, beside what this laptop last wanted of them."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from sparkguard.cluster.bench import leases
from sparkguard.cluster.observe import look
from sparkguard.cluster.transition import lock, ready, state, wanted, yue
from sparkguard.cluster.transition.ready import Readiness
from sparkguard.cluster.transition.run import unfinished
from sparkguard.core import cluster
from sparkguard.core.cluster import GONE, RUNNING, SINGLE, UNKNOWN, UNMANAGED, YUE
from sparkguard.core.ownership import ALIVE, ours
from sparkguard.core.record import Record

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from sparkguard.cluster.catalog.read import Catalog
    from sparkguard.cluster.ssh import Fleet
    from sparkguard.cluster.transition.discovery import Worker
    from sparkguard.cluster.transition.state import Controller, Placed
    from sparkguard.core.cluster import Allocation, Container, Holder, NodeView

SCHEMA_VERSION = 1
NOBODY, MIXED = "none", "mixed"
_UNFINISHED = (cluster.DRAINING, cluster.STARTING, cluster.REBOOTING, cluster.POWERING_OFF)


class NodeStatus(Record):
    """state: running, gone or unknown. can_use: whether a client gets an answer there now; None: nobody can tell."""

    node: str
    host: str
    state: str
    phase: str
    mode: str
    model: str | None
    served: str | None
    url: str | None
    can_use: bool | None
    generation: str | None
    error: str | None
    age_s: float
    slow_fabric: bool = False  # its ranks talk over sockets, not RDMA


class SongStatus(Record):
    """A song worker by its control interface; None: it does not say."""

    node: str
    worker: Worker | None  # when it is ready
    reason: str  # why it is not
    accepting: bool | None
    busy: bool | None
    jobs: tuple[str, ...]
    generation: str | None

    @property
    def works(self) -> bool:
        """One that is drained, and renders its last song, works all the same."""
        return self.worker is not None or bool(self.accepting or self.busy or self.jobs)


class Status(Record):
    nodes: tuple[NodeStatus, ...]
    yue_workers: tuple[SongStatus, ...]
    transition_error: str | None
    at_work: Holder | None


async def see(catalog: Catalog, fleet: Fleet, state_dir: Path, *, canary: bool = True) -> Status:
    """Raises SparkguardError for a record that cannot be understood; a node that cannot be asked is in the answer."""
    controller = state.load(state_dir)
    names = tuple(node.name for node in catalog.nodes)
    asked = time.monotonic()
    views = await look(fleet, wanted.questions(catalog, names))
    at_work = lock.holder_of(state_dir)
    running = _allocations(catalog, views)
    probed = dict(zip(running, await asyncio.gather(*(_readiness(running[key], views, state_dir, canary) for key in running))))
    songs = await asyncio.gather(*(_song_worker(catalog, views[name]) for name in names))
    workers = {found.node: found for found in songs if found is not None}
    age = round(time.monotonic() - asked, 3)
    by_node = {node: key for key, allocation in running.items() for node in allocation.nodes}
    nodes = tuple(
        _node(
            catalog,
            views[name],
            controller.of(name),
            running.get(by_node.get(name, "")),
            probed.get(by_node.get(name, "")),
            workers.get(name),
            age,
        )
        for name in names
    )
    return Status(nodes, tuple(workers.values()), _transition_error(controller, at_work), at_work)


def as_json(status: Status) -> dict[str, Any]:
    """docs/schemas/status.json."""
    usable = [node for node in status.nodes if node.can_use]
    modes = {node.mode for node in status.nodes if node.mode != NOBODY}
    phases = {node.phase for node in status.nodes}
    return {
        "schema_version": SCHEMA_VERSION,
        "nodes": [dict(node.__dict__) for node in status.nodes],
        "active_node": usable[0].node if usable else None,
        "mode": modes.pop() if len(modes) == 1 else MIXED if modes else NOBODY,
        "phase": phases.pop() if len(phases) == 1 else MIXED,
        "transition_error": status.transition_error,
        "at_work": None if status.at_work is None else dict(status.at_work.__dict__),
        "yue_workers": [_song_json(song) for song in status.yue_workers],
        "ready_workers": sum(song.worker is not None for song in status.yue_workers),
    }


def _song_json(song: SongStatus) -> dict[str, Any]:
    worker = song.worker
    return {
        "node": song.node,
        "id": worker.id if worker is not None else None,
        "url": worker.url if worker is not None else None,
        "generation": worker.generation if worker is not None else None,
        "runtime_manifest": worker.runtime_manifest if worker is not None else None,
        "ready": worker is not None,
        "reason": song.reason or None,
        "accepting": song.accepting,
        "busy": song.busy,
        "jobs": list(song.jobs),
    }


def _allocations(catalog: Catalog, views: Mapping[str, NodeView]) -> dict[str, Allocation]:
    """What runs, by the labels of our containers; a model that the catalog no longer has is told by its node alone."""
    rules = wanted.rules_of(catalog)
    found: dict[str, Allocation] = {}
    for name, view in views.items():
        for container in ours(view, rules):
            allocation = (
                wanted.running_of(catalog, container.model, name) if container.model and container.state in ALIVE else None
            )
            if allocation is not None:
                found[f"{allocation.model} {','.join(allocation.nodes)}"] = allocation
    return found


async def _readiness(allocation: Allocation, views: Mapping[str, NodeView], state_dir: Path, canary: bool) -> Readiness:
    """One probe. The token is asked for only where it costs nobody anything: an idle engine, and no benchmark."""
    dead = ready.alive(views, allocation)
    if dead is not None:
        return dead
    answer = await ready.probe(allocation, canary=False)
    if not answer.ready or not canary:
        return answer
    if ready.in_flight(await ready.metrics(allocation)) or leases.living(state_dir):
        return answer
    return await ready.probe(allocation, canary=True)


async def _song_worker(catalog: Catalog, view: NodeView) -> SongStatus | None:
    """None: there is no factory on the node."""
    seen = view.yue
    if seen is None or (seen.error is not None and not seen.active):
        return None
    worker, reason = await yue.agreed(catalog.node(view.node), seen, None)
    return SongStatus(view.node, worker, reason, seen.accepting, seen.busy, seen.jobs, seen.generation)


def _node(
    catalog: Catalog,
    view: NodeView,
    placed: Placed,
    allocation: Allocation | None,
    readiness: Readiness | None,
    song: SongStatus | None,
    age: float,
) -> NodeStatus:
    idle = NodeStatus(
        view.node,
        catalog.node(view.node).ssh,
        GONE,
        placed.phase,
        NOBODY,
        model=None,
        served=None,
        url=None,
        can_use=False,
        generation=placed.generation or None,
        error=placed.error,
        age_s=age,
    )
    if view.error is not None or view.containers is None:
        why = view.error or f"docker does not answer: {view.daemon_error or view.daemon}"
        meant = placed.phase not in (UNMANAGED, cluster.STOPPED)
        mode = (placed.mode if meant else "") or NOBODY
        return idle.replace(state=UNKNOWN, mode=mode, model=placed.model or None, can_use=None, error=why)
    alive = [one for one in ours(view, wanted.rules_of(catalog)) if one.state in ALIVE]
    if alive and allocation is not None and readiness is not None:
        return _serving(idle, placed, alive[0], allocation, readiness)
    if alive:
        model = alive[0].model or alive[0].name
        why = f"{model} is not in {catalog.path}"
        generation = alive[0].generation or None
        return idle.replace(state=RUNNING, mode=SINGLE, model=model, can_use=None, generation=generation, error=why)
    if song is not None and song.works:
        return _singing(idle, song)
    if placed.phase == cluster.READY and placed.mode != YUE and view.generation not in (None, placed.generation):
        error = f"{placed.model} was ready, and a command of another laptop has ended it"
        return idle.replace(phase=cluster.STOPPED, generation=None, error=error)
    if placed.phase == cluster.READY:
        error = f"{placed.model} was ready and is gone"
        return idle.replace(phase=cluster.FAILED, model=placed.model, generation=None, error=error)
    return idle.replace(model=placed.model or None) if placed.phase in (*_UNFINISHED, cluster.FAILED) else idle


def _serving(idle: NodeStatus, placed: Placed, container: Container, allocation: Allocation, found: Readiness) -> NodeStatus:
    fabric = placed.fabric if placed.generation == container.generation else ""
    return idle.replace(
        state=RUNNING,
        slow_fabric=(fabric or allocation.fabric) == "socket",
        phase=_phase(placed, container, found.ready),
        mode=allocation.mode,
        model=allocation.model,
        served=found.served,
        url=allocation.url if found.ready else None,
        can_use=found.ready,
        generation=container.generation or None,
        error=placed.error if found.ready else found.reason,
    )


def _phase(placed: Placed, container: Container, is_ready: bool | None) -> str:
    """Never "ready" for what is not. A record of another generation is older than what runs: another laptop started it."""
    if placed.phase == cluster.DRAINING or (placed.phase in _UNFINISHED and placed.generation == container.generation):
        return placed.phase
    if is_ready:
        return cluster.READY
    if placed.generation != container.generation:
        return cluster.STARTING
    return cluster.FAILED if is_ready is False and placed.phase == cluster.READY else placed.phase


def _singing(idle: NodeStatus, song: SongStatus) -> NodeStatus:
    is_ready = song.worker is not None
    phase = cluster.READY if is_ready and idle.phase not in _UNFINISHED else idle.phase
    return idle.replace(
        state=RUNNING,
        phase=cluster.FAILED if phase == cluster.READY and not is_ready else phase,
        mode=YUE,
        model="yue",
        served="yue",
        url=song.worker.url if song.worker is not None else None,
        can_use=is_ready,
        generation=song.generation,
        error=idle.error if is_ready else idle.error or song.reason,
    )


def _transition_error(controller: Controller, at_work: Holder | None) -> str | None:
    if at_work is not None:
        return None
    last = controller.transition
    if (words := unfinished(controller)) is not None:
        return words
    if last is None or last.error is None:
        return None
    return last.error if last.cleanup_error is None else f"{last.error}; the clean-up failed: {last.cleanup_error}"


def reachable(status: Status) -> bool:
    return all(node.state != UNKNOWN for node in status.nodes)
