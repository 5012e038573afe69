"""Runs a transition: lock, look, plan, do; and when it fails, evidence first, then the clean-up, then the record of both.

perform() is the only way in which a step is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from typing import TYPE_CHECKING, Any

from sparkguard.cluster import commands
from sparkguard.cluster.ssh import Fleet
from sparkguard.cluster.transition import discovery, lock, state
from sparkguard.cluster.transition.effects import EFFECTS, TOGETHER
from sparkguard.cluster.transition.failure import clean_up, collect
from sparkguard.cluster.transition.turn import JobsActive, Refused, Work
from sparkguard.core.cluster import DRAINING, FAILED, Blocked, NodeView, Plan
from sparkguard.core.ownership import strange
from sparkguard.core.record import Record
from sparkguard.errors import CONFIG, OK, UNAVAILABLE, SparkguardError
from sparkguard.errors import FAILED as FAILED_STATUS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from sparkguard.cluster.catalog.read import Catalog
    from sparkguard.cluster.events import Emit
    from sparkguard.cluster.transition.power import Power
    from sparkguard.core.cluster import Allocation, Step
    from sparkguard.core.ownership import Rules

    Planner = Callable[[Mapping[str, NodeView], Rules], Plan | Blocked]

# What people and programs are told when a step begins; the others say nothing, or speak for themselves.
EVENTS = {
    "fence": "fence",
    "preflight": "preflight",
    "leases": "leases",
    "yue_drain": "drain",
    "yue_cancel": "drain",
    "yue_idle": "drain",
    "drain": "drain",
    "stop": "stop",
    "remove": "remove",
    "verify": "verify",
    "drop_caches": "drop_caches",
    "create": "create",
    "learn": "waiting",
    "yue_start": "worker_start",
    "yue_admit": "worker_start",
    "yue_ready": "waiting",
    "ready": "waiting",
    "publish": "publish",
    "launched": "launched",
    "unknown": "error",
    "reboot": "waiting",
    "poweroff": "waiting",
}


class Asked(Record):
    """A transition, as a verb asks for it."""

    verb: str  # with its model: it stands in the locks
    nodes: tuple[str, ...]
    planner: Planner
    wanted: Allocation | None = None
    client_target: str = "local"
    power: Power | None = None


async def plan_of(asked: Asked, catalog: Catalog, state_dir: Path, emit: Emit) -> Plan | Blocked:
    """Only looks and decides: for --dry-run."""
    async with fleet_of(catalog, state_dir, emit) as fleet:
        work = Work(catalog, state_dir, fleet, emit, lock.myself(asked.verb), asked.nodes, asked.wanted)
        return asked.planner(await _seen(work), work.rules)


async def transition(asked: Asked, catalog: Catalog, state_dir: Path, emit: Emit) -> int:
    """The status to exit with. Raises SparkguardError when it is refused or has failed; what it began is cleaned up then."""
    holder = lock.myself(asked.verb)
    _secrets_are_there(asked)
    with lock.held(state_dir, holder):
        before = state.load(state_dir)
        async with fleet_of(catalog, state_dir, emit) as fleet:
            work = Work(catalog, state_dir, fleet, emit, holder, asked.nodes, asked.wanted, asked.client_target)
            work.power = asked.power
            emit("start", text=_opening(asked), verb=asked.verb, nodes=list(asked.nodes), generation=work.generation)
            if words := unfinished(before):
                emit("reconcile", text=words)
            plan = asked.planner(await _seen(work), work.rules)
            if isinstance(plan, Blocked):
                raise Refused(asked.verb, plan)
            for note in plan.notes:
                emit("note", text=note)
            return await _run(plan, work)


async def _seen(work: Work) -> dict[str, NodeView]:
    """The nodes that a plan is about, and the others where one of these runs what this catalog does not know."""
    views = await work.look()
    others = tuple(node for node in work.rules.nodes if node not in work.nodes)
    if others and strange(views, work.rules, work.nodes):
        views = await work.look(others)
    return _without_the_dead(views)


def _secrets_are_there(asked: Asked) -> None:
    names = {name for rank in (asked.wanted.ranks if asked.wanted is not None else ()) for name in rank.secrets}
    if missing := sorted(name for name in names if not os.environ.get(name)):
        hint = "export it in this shell; it is passed on for this call and kept nowhere"
        wants = f"{asked.wanted.model if asked.wanted is not None else asked.verb} wants {', '.join(missing)}"
        raise SparkguardError(f"{wants}, which is not set here", hint, CONFIG)


def unfinished(controller: state.Controller) -> str | None:
    """What a transition left that was killed; asked under the lock, or when nobody holds it."""
    last = controller.transition
    if last is None or last.ended:
        return None
    return (
        f"`{last.verb}` (pid {last.pid} on {last.host}) was killed while it was {last.phase} on {', '.join(last.nodes)}: "
        "what it left is taken from the nodes themselves"
    )


async def _run(plan: Plan, work: Work) -> int:
    async with contextlib.AsyncExitStack() as holds:
        try:
            for node in dict.fromkeys(step.node for step in plan.steps if step.kind == "fence"):
                await holds.enter_async_context(commands.hold(work.fleet[str(node)], work.turn))
            for group in groups(plan.steps):
                await _together(group, work)
        except JobsActive as error:
            work.record(DRAINING, error.message)
            work.end()
            raise
        except BaseException as error:
            if plan.unchanged and work.created:
                await _not_ready(work, error)
            elif work.begun or work.created:
                await _fail(work, error)
            raise
        return _end(plan, work)


def groups(steps: tuple[Step, ...]) -> Iterator[tuple[Step, ...]]:
    """Steps that are done at once."""
    group: list[Step] = []
    for step in steps:
        if group and (step.kind != group[0].kind or step.kind not in TOGETHER):
            yield tuple(group)
            group = []
        group.append(step)
    if group:
        yield tuple(group)


async def _together(steps: tuple[Step, ...], work: Work) -> None:
    """All of them have ended afterwards, also when one fails or Ctrl-C comes."""
    results = await asyncio.gather(*(perform(step, work) for step in steps), return_exceptions=True)
    faults = [result for result in results if isinstance(result, BaseException)]
    songs = [fault for fault in faults if isinstance(fault, JobsActive)]
    if faults and len(songs) == len(faults):
        raise JobsActive({node: jobs for fault in songs for node, jobs in fault.jobs.items()})
    for fault in faults:
        if not isinstance(fault, JobsActive):
            raise fault


async def perform(step: Step, work: Work) -> None:
    event = EVENTS.get(step.kind)
    if step.kind == "start" and step.rank is not None:
        event = "worker_start" if step.rank.rank else "head_start"
    if event is not None:
        work.emit(event, node=step.node, text=step.text, target=step.target)
    await EFFECTS[step.kind](step, work)


def _end(plan: Plan, work: Work) -> int:
    if work.lost:
        work.record(work.phase)
        work.end()
        reasons = "; ".join(f"{node}: {text}" for node, text in work.lost.items())
        raise SparkguardError(reasons, "repeat the command when it can be reached", UNAVAILABLE)
    work.end()
    wanted = work.wanted
    if wanted is not None and work.phase == "ready":
        slow = "; the ranks talk over sockets, not RDMA: see docs/cluster/recovery.md" if work.fabric == "socket" else ""
        text = f"{wanted.model} is ready at {wanted.url or 'its workers'}{slow}"
        work.emit("ready", text=text, **work.ready_facts(plan.unchanged))
    return FAILED_STATUS if work.warnings else OK


async def _not_ready(work: Work, error: BaseException) -> None:
    """What ran before stays, whatever is wrong with it; who only looked at it stops nothing."""
    if not isinstance(error, SparkguardError):
        return
    with contextlib.suppress(SparkguardError):
        discovery.revoke(work.state_dir, work.nodes)
        work.record(FAILED, error.message)
        work.end(error.message)
    hint = "it still runs: see `spark-serve logs`, then `spark-serve stop` and up again"
    work.emit("error", text=f"{error.message}\n{hint}", error=error.message, cleanup_error=None, evidence=None)


async def _fail(work: Work, error: BaseException) -> None:
    """Evidence, clean-up and record. Nothing here raises: the first error is the one to tell."""
    words = _words(error)
    evidence = None
    try:
        if work.created or work.phase in ("starting", "ready"):
            evidence = await collect(work, words)
    finally:  # whatever keeps the evidence from being kept, nothing that was started stays
        cleaned = await clean_up(work)
    with contextlib.suppress(SparkguardError):
        work.record(FAILED, words, cleaned, None if evidence is None else str(evidence))
        work.end(words)
    text = words if cleaned is None else f"{words}\nand the clean-up failed: {cleaned}"
    work.emit("error", text=text, error=words, cleanup_error=cleaned, evidence=None if evidence is None else str(evidence))


def _words(error: BaseException) -> str:
    if isinstance(error, SparkguardError):
        return error.message
    if isinstance(error, (asyncio.CancelledError, KeyboardInterrupt)):
        return "interrupted"
    return f"a bug: {type(error).__name__}: {error}"


def _opening(asked: Asked) -> str:
    return f"{asked.verb} on {', '.join(asked.nodes)}"


def fleet_of(catalog: Catalog, state_dir: Path, emit: Emit) -> Fleet:
    return Fleet(catalog.nodes, catalog.ssh_opts, str(state_dir), notice=lambda text: emit("note", text=text))


def _without_the_dead(views: Mapping[str, NodeView]) -> dict[str, NodeView]:
    """A node whose lock still names a process of this laptop that is dead is finishing its last deed: the fence waits for it."""
    return {name: view.replace(lock=None) if _is_dead(view) else view for name, view in views.items()}


def _is_dead(view: NodeView) -> bool:
    holder = view.lock
    if holder is None or holder.host != socket.gethostname() or holder.pid <= 0:
        return False
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def plan_json(plan: Plan, asked: Asked) -> dict[str, Any]:
    """For --dry-run --json."""
    steps = [
        {"kind": step.kind, "node": step.node, "target": step.target, "seconds": step.seconds, "text": step.text}
        for step in plan.steps
    ]
    return {
        "schema_version": 1,
        "event": "plan",
        "verb": asked.verb,
        "nodes": list(asked.nodes),
        "unchanged": plan.unchanged,
        "notes": list(plan.notes),
        "steps": steps,
    }
