"""What each kind of step does. A step that raises ends the transition; run.py then keeps evidence and cleans up."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Any

from sparkguard.cluster import commands
from sparkguard.cluster.bench import leases
from sparkguard.cluster.transition import discovery, power, ready, startup, state, wanted, yue
from sparkguard.cluster.transition.turn import Refused
from sparkguard.core.cluster import READY, STARTING, STOPPED, YUE
from sparkguard.core.ownership import ALIVE, ours
from sparkguard.core.preflight import memory
from sparkguard.core.transition import KILL_SECONDS, verify_idle
from sparkguard.errors import CONFIG, SparkguardError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from sparkguard.cluster.transition.turn import Work
    from sparkguard.core.cluster import Blocked, Step

POLL_SECONDS = 1.0
# After docker says that a container is gone, the driver still gives its memory back.
SETTLE_SECONDS = 30.0
LEFTOVER_GRACE_SECONDS = 10


async def _fence(step: Step, work: Work) -> None:
    node = str(step.node)
    before = work.views[node].generation
    await commands.fence(work.fleet[node], work.turn, [before] if before is not None else [])


async def _preflight(step: Step, work: Work) -> None:
    assert step.rank is not None
    node = str(step.node)
    content, words = await commands.check(work.fleet[node], work.turn, step.rank.preflight, step.seconds)
    if not content:
        raise SparkguardError(f"{node}: the recipe's own check says no: {words}", "nothing was stopped", CONFIG)


async def _leases(step: Step, work: Work) -> None:
    which = leases.concerning(set(work.nodes))
    await asyncio.to_thread(leases.revoke_all, work.state_dir, step.seconds, reason=f"`{work.verb}` came", which=which)


async def _state(step: Step, work: Work) -> None:
    work.record(step.target)
    if step.target == STOPPED:
        work.emit("stopped", text=f"{', '.join(work.nodes)}: stopped")


async def _revoke(step: Step, work: Work) -> None:
    discovery.revoke(work.state_dir, work.nodes)


async def _drain(step: Step, work: Work) -> None:
    """Waits for running requests as the engine counts them. One that does not count them has its SIGTERM alone."""
    allocation = wanted.running_of(work.catalog, step.target, str(step.node))
    if allocation is None:
        return
    last = time.monotonic() + step.seconds
    said = None
    while True:
        left = ready.in_flight(await ready.metrics(allocation))
        if left == 0:
            return
        if left is None:
            work.emit("drain", node=step.node, text=f"{step.target} does not say how many requests it has", requests=None)
            return
        if time.monotonic() > last:
            work.emit("drain", node=step.node, text=f"{left} requests still run: SIGTERM now", requests=left)
            return
        if left != said:
            work.emit("drain", node=step.node, text=f"{left} requests run", requests=left)
            said = left
        await asyncio.sleep(POLL_SECONDS)


async def _stop(step: Step, work: Work) -> None:
    grace = int(step.seconds - KILL_SECONDS)
    await commands.stop(work.fleet[str(step.node)], work.turn, step.target, grace, work.catalog.stop_names)


async def _remove(step: Step, work: Work) -> None:
    await commands.remove(work.fleet[str(step.node)], work.turn, step.target, work.catalog.stop_names)


async def _verify(step: Step, work: Work) -> None:
    """Looks until nothing of ours is left, nothing foreign is met, and the memory is there; Refused when it stays so."""
    nodes = tuple(node for node in work.nodes if node in step.target.split(","))
    last = time.monotonic() + SETTLE_SECONDS
    while True:
        views = await work.look(nodes)
        for node in nodes:
            await _end_late(work, node)
        blocked: Blocked | None = verify_idle(views, work.rules, nodes, work.wanted)
        if blocked is None and work.wanted is not None and work.wanted.ranks:
            blocked = memory(views, work.rules, work.wanted)
        if blocked is None:
            return
        if time.monotonic() > last:
            raise Refused(work.verb, blocked)
        await asyncio.sleep(POLL_SECONDS)


async def _end_late(work: Work, node: str) -> None:
    """A container of ours that no plan knew: created by a command of a killed transition that came through before the fence."""
    for container in ours(work.views[node], work.rules):
        if container.state in ALIVE:
            await commands.stop(work.fleet[node], work.turn, container.id, LEFTOVER_GRACE_SECONDS, work.catalog.stop_names)
        await commands.remove(work.fleet[node], work.turn, container.id, work.catalog.stop_names)


async def _drop_caches(step: Step, work: Work) -> None:
    if not await commands.drop_caches(work.fleet[str(step.node)], work.turn):
        work.emit("drop_caches", node=step.node, text="page caches stay: sudo asks for a password", dropped=False)


async def _create(step: Step, work: Work) -> None:
    assert step.rank is not None and work.wanted is not None
    rank = startup.told(step.rank, work)
    secrets = {name: os.environ[name] for name in rank.secrets}
    container = await commands.create(work.fleet[rank.node], work.turn, rank, work.wanted.model, secrets=secrets)
    work.created[(rank.node, rank.rank)] = container


async def _start(step: Step, work: Work) -> None:
    assert step.rank is not None
    key = (step.rank.node, step.rank.rank)
    work.created[key] = await commands.start(work.fleet[step.rank.node], work.turn, work.created[key].id)


async def _ready(step: Step, work: Work) -> None:
    await startup.wait(work, step.seconds)


async def _adopt(step: Step, work: Work) -> None:
    """What runs becomes this laptop's to announce, under the generation that it was started with."""
    assert work.wanted is not None
    for node in work.wanted.nodes:
        view = work.views[node]
        if work.wanted.mode == YUE:
            work.generations[node] = (view.yue.generation if view.yue is not None else None) or ""
    for rank in work.wanted.ranks:
        found = (one for one in work.views[rank.node].containers or () if one.owned and one.name == rank.name)
        container = next(found)
        work.created[(rank.node, rank.rank)] = container
        work.generations[rank.node] = container.generation
    controller = state.load(work.state_dir)
    known = [(controller.of(node), work.generation_on(node)) for node in work.wanted.nodes]
    if any(placed.phase != READY or placed.generation != generation for placed, generation in known):
        work.record(STARTING)


async def _publish(step: Step, work: Work) -> None:
    found = work.wanted
    assert found is not None
    if found.mode == YUE:
        discovery.publish_workers(work.state_dir, work.workers)
        return
    discovery.publish_endpoint(work.state_dir, discovery.endpoint_of(found, work.generation_on(found.nodes[0])))


async def _client(step: Step, work: Work) -> None:
    """The model is ready whatever becomes of this: a client that cannot be told is a warning."""
    from sparkguard.cluster import clients

    assert work.wanted is not None
    try:
        words = await clients.use(work.catalog, work.wanted, work.client_target, work.fleet)
        work.emit("hermes", text=words, ok=True)
    except SparkguardError as error:
        work.warnings.append(error)
        work.emit("hermes", text=f"{error.message}\n{error.hint}" if error.hint else error.message, ok=False)


async def _launched(step: Step, work: Work) -> None:
    await startup.watch(work, {})


async def _unknown(step: Step, work: Work) -> None:
    work.lost[str(step.node)] = step.text


EFFECTS: dict[str, Callable[[Step, Work], Awaitable[Any]]] = {
    "fence": _fence,
    "preflight": _preflight,
    "leases": _leases,
    "state": _state,
    "revoke": _revoke,
    "yue_drain": yue.drain,
    "yue_cancel": yue.cancel,
    "yue_idle": yue.idle,
    "drain": _drain,
    "stop": _stop,
    "remove": _remove,
    "verify": _verify,
    "drop_caches": _drop_caches,
    "create": _create,
    "start": _start,
    "learn": startup.learn,
    "yue_start": yue.start,
    "yue_admit": yue.admit,
    "yue_ready": yue.ready,
    "ready": _ready,
    "adopt": _adopt,
    "publish": _publish,
    "client": _client,
    "launched": _launched,
    "unknown": _unknown,
    "reboot": power.send,
    "poweroff": power.send,
    "host_down": power.wait_down,
    "host_up": power.wait_up,
    "powered": power.done,
}
# Steps of these kinds that follow each other are of different nodes, and are done at once.
TOGETHER = (
    "fence", "preflight", "yue_drain", "yue_idle", "remove", "drop_caches", "create", "yue_start", "yue_admit", "host_down",
    "host_up",
)  # fmt: skip
