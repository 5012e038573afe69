"""What serves on a node of the catalog, as a target: the allocation, and who it is while it is measured."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from sparkguard.cluster.bench.counters import PATHS
from sparkguard.cluster.bench.run import Target
from sparkguard.cluster.causes import NodeError, Unreachable
from sparkguard.cluster.observe import look
from sparkguard.cluster.ssh import Fleet
from sparkguard.cluster.transition import ready, wanted
from sparkguard.core import ownership
from sparkguard.core.cluster import RUNNING
from sparkguard.core.record import Record
from sparkguard.errors import FAILED, UNAVAILABLE, USAGE, SparkguardError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from pathlib import Path

    from sparkguard.cluster.catalog.read import Catalog
    from sparkguard.cluster.ssh import Link
    from sparkguard.core.cluster import Allocation, Container, NodeView

SECONDS = 10.0
TICKS = 8  # of half a second: nvidia-smi takes its time for the first answer


class Subject(Record):
    """What is measured. identity and environment are asked anew at each call."""

    target: Target
    identity: Callable[[], Awaitable[str | None]]
    environment: Callable[[], Awaitable[dict[str, Any]]]


async def at_node(catalog: Catalog, node: str, state_dir: Path) -> Subject:
    """Raises SparkguardError: nothing serves there 1, nobody can tell 69."""
    chosen = [one.name for one in catalog.select(node, None)]

    async def views() -> dict[str, NodeView]:
        async with Fleet(catalog.nodes, catalog.ssh_opts, str(state_dir)) as fleet:
            return await look(fleet)

    seen = await views()
    allocation = _serving(catalog, seen, chosen, node)
    not_alive = ready.alive(seen, allocation)
    if not_alive is not None:
        status = UNAVAILABLE if not_alive.ready is None else FAILED
        raise SparkguardError(f"{allocation.model} is not ready: {not_alive.reason}", "see spark-serve status", status)

    async def identity() -> str | None:
        return who(await views(), allocation)

    async def environment() -> dict[str, Any]:
        async with Fleet(catalog.nodes, catalog.ssh_opts, str(state_dir)) as fleet:
            found = await asyncio.gather(*(_environment(fleet[name]) for name in allocation.nodes))
        return dict(zip(allocation.nodes, found))

    return Subject(_target(seen, allocation), identity, environment)


async def _environment(link: Link) -> dict[str, Any]:
    """What may explain a number: kernel, load, memory, and the GPU's temperature, clocks and reasons for low ones."""
    found: dict[str, Any] = {"error": None}
    ticks = 0
    try:
        async with contextlib.aclosing(link.stream("sampler", {"interval": 0.5}, quiet_seconds=SECONDS)) as readings:
            async for reading in readings:
                if "hello" in reading:
                    found |= {key: reading["hello"][key] for key in ("boot_id", "kernel")}
                if "tick" in reading:
                    found |= {key: reading["tick"][key] for key in ("load", "memory", "gpus", "gpu_error")}
                    ticks += 1
                    if found["gpus"] or ticks == TICKS:
                        break
    except (Unreachable, NodeError, KeyError) as error:
        found["error"] = str(error)
    return found


def who(views: Mapping[str, NodeView], allocation: Allocation) -> str | None:
    """The containers of all ranks and when each began; None: a node cannot be asked now."""
    found = []
    for rank, state, container in ownership.rank_states(views, allocation):
        if state not in (RUNNING, "gone"):
            return None
        found.append(
            f"{rank.node} {container.id} {container.started_at}" if container and state == RUNNING else f"{rank.node} gone"
        )
    return "; ".join(found)


def _serving(catalog: Catalog, views: Mapping[str, NodeView], nodes: list[str], asked: str) -> Allocation:
    rules = wanted.rules_of(catalog)
    lost = [f"{name}: {views[name].error or views[name].daemon_error}" for name in nodes if views[name].containers is None]
    models = {
        container.model: name
        for name in nodes
        if views[name].containers is not None
        for container in ownership.ours(views[name], rules)
        if container.state == RUNNING and container.model
    }
    if lost and not models:
        raise SparkguardError(f"what serves there cannot be seen: {'; '.join(lost)}", None, UNAVAILABLE)
    if len(models) > 1:
        raise SparkguardError(f"--node {asked} means {' and '.join(models)}", "name the node of one of them", USAGE)
    for model, name in models.items():
        allocation = wanted.running_of(catalog, model, name)
        if allocation is not None and allocation.url:
            return allocation
    raise SparkguardError(f"no model of {catalog.path} serves on {', '.join(nodes)}", "see spark-serve status", FAILED)


def _target(views: Mapping[str, NodeView], allocation: Allocation) -> Target:
    containers = [container for _, _, container in ownership.rank_states(views, allocation) if container is not None]
    return Target(
        url=str(allocation.url),
        model=allocation.served,
        name=allocation.model,
        nodes=allocation.nodes,
        digest=allocation.digest,
        image=_image(containers),
        containers=tuple(container.id for container in containers),
        generation=containers[0].generation if containers else None,
        engine=allocation.engine,
        metrics_paths=(*allocation.metrics_paths, *(path for path in PATHS if path not in allocation.metrics_paths)),
    )


def _image(containers: list[Container]) -> str | None:
    """All ranks run one image: preflight saw to it."""
    return containers[0].image if containers else None
