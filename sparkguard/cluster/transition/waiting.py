"""Waits for what `up --no-wait` left starting, and announces it when it is ready."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkguard.cluster.transition import discovery, lock, ready, startup, state, wanted
from sparkguard.cluster.transition.run import fleet_of
from sparkguard.cluster.transition.turn import Work
from sparkguard.core.cluster import READY, YUE
from sparkguard.core.ownership import ALIVE, ours, rank_states
from sparkguard.errors import FAILED, OK, TEMPFAIL, UNAVAILABLE, SparkguardError

if TYPE_CHECKING:
    from pathlib import Path

    from sparkguard.cluster.catalog.read import Catalog
    from sparkguard.cluster.events import Emit
    from sparkguard.core.cluster import Allocation, NodeView


async def wait(catalog: Catalog, state_dir: Path, node: str, emit: Emit, seconds: float | None) -> int:
    """Stops nothing, whatever happens: who waits may not be who started. 0 ready, 1 failed or too late, 69 unknown."""
    async with fleet_of(catalog, state_dir, emit) as fleet:
        work = Work(catalog, state_dir, fleet, emit, lock.myself("wait"), (node,))
        allocation = _running(catalog, (await work.look((node,)))[node], work)
        work.wanted, work.nodes = allocation, allocation.nodes
        emit(
            "start",
            text=f"wait for {allocation.model} on {', '.join(allocation.nodes)}",
            verb="wait",
            nodes=list(allocation.nodes),
        )
        views = await work.look()
        for rank, _, container in rank_states(views, allocation):
            if container is None:
                dead = ready.alive(views, allocation)
                raise SparkguardError(dead.reason if dead else f"rank {rank.rank} is gone", None, FAILED)
            work.created[(rank.node, rank.rank)] = container
            work.generations[rank.node] = container.generation
        await startup.wait(work, seconds if seconds is not None else allocation.ready_seconds)
        _announce(work, allocation)
        emit("ready", text=f"{allocation.model} is ready at {allocation.url}", **work.ready_facts(unchanged=True))
        return OK


def _running(catalog: Catalog, view: NodeView, work: Work) -> Allocation:
    if view.error is not None or view.containers is None:
        raise SparkguardError(f"{view.node}: {view.error or view.daemon_error}", None, UNAVAILABLE)
    for container in ours(view, work.rules):
        allocation = wanted.running_of(catalog, container.model, view.node) if container.state in ALIVE else None
        if allocation is not None and allocation.mode != YUE:
            return allocation
    raise SparkguardError(
        f"nothing of {catalog.path} runs or starts on {view.node}", "`spark-serve status` tells what is there", FAILED
    )


def _announce(work: Work, allocation: Allocation) -> None:
    """Under the lock, and only where this laptop's record is of what runs: another's start is another's to announce."""
    generation = work.generation_on(allocation.nodes[0])
    try:
        with lock.held(work.state_dir, work.turn.holder):
            controller = state.load(work.state_dir)
            if any(controller.of(node).generation != generation for node in allocation.nodes):
                return
            for node in allocation.nodes:
                controller = controller.with_node(node, controller.of(node).replace(phase=READY, fabric=work.fabric, error=None))
            state.save(work.state_dir, controller)
            discovery.publish_endpoint(work.state_dir, discovery.endpoint_of(allocation, generation))
    except SparkguardError as error:
        if error.status != TEMPFAIL:
            raise
        work.emit("note", text=f"ready, but not announced: {error.message}")
