"""From what was seen and what is wanted to steps, or to why nothing is done. Everything that can refuse does so here,
before the first step: a refusal leaves what runs as it is.
"""

from __future__ import annotations

from sparkguard.core.cluster import (
    DRAINING,
    POWERING_OFF,
    READY,
    REBOOTING,
    STARTING,
    STOPPED,
    YUE,
    Allocation,
    Blocked,
    Container,
    NodeView,
    Plan,
    Rank,
    Step,
)
from sparkguard.core.ownership import (
    ALIVE,
    Rules,
    askable,
    busy,
    foreign,
    lost_because,
    ours,
    runs_as_wanted,
    unreachable,
    who,
    whole,
    yue_works,
)
from sparkguard.core.preflight import memory, prepared, yue_unfit
from sparkguard.errors import TEMPFAIL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    Views = Mapping[str, NodeView]

STEP_SECONDS = 60.0  # for what only writes a file or asks docker for an answer
# After the engine's own time: docker kills, the driver gives the memory back.
KILL_SECONDS = 60.0
# Of a machine: until its SSH drops, and until it is a new boot; a Spark's memory training takes minutes.
DOWN_SECONDS = 90.0
UP_SECONDS = 600.0
YUE_CANCEL_SECONDS = 120.0


def plan_up(
    views: Views, rules: Rules, wanted: Allocation, *, cancel_jobs: bool = False, client: bool = True, wait: bool = True
) -> Plan | Blocked:
    """Steps to have `wanted` alone on its nodes, with what is kept."""
    nodes = wanted.nodes
    if blocked := askable(views, nodes) or whole(views, rules, nodes, f"up {wanted.model}"):
        return blocked
    ending = _ready(wanted, client and wanted.client is not None, wait)
    if runs_as_wanted(views, rules, wanted):
        notes = (f"{wanted.model} runs as wanted: nothing is stopped or started",)
        adopt = Step("adopt", "take what runs for ours", target=",".join(nodes))
        return Plan((adopt, *ending, _state(READY)) if wait else (), True, notes)
    blocked = foreign(views, rules, nodes, wanted) or yue_unfit(views, nodes, wanted.mode == YUE)
    blocked = blocked or prepared(views, wanted) or memory(views, rules, wanted)
    if blocked:
        return blocked
    steps = _release(views, rules, nodes, cancel_jobs)
    fenced = next(i for i, step in enumerate(steps) if step.kind != "fence")
    steps[fenced:fenced] = [
        Step("preflight", f"check the recipe in {rank.image}", rank.node, "", rank.preflight_seconds, rank)
        for rank in wanted.ranks
        if rank.preflight
    ]
    steps.append(_state(STARTING))
    steps += _start_yue(nodes, rules) if wanted.mode == YUE else _start(wanted)
    steps += ending
    if wait:
        steps.append(_state(READY))
    return Plan(tuple(steps))


def plan_stop(views: Views, rules: Rules, nodes: tuple[str, ...], *, cancel_jobs: bool = False) -> Plan | Blocked:
    """Steps to release the nodes. A node that cannot be asked is said at the end; the others are released before that."""
    lost = tuple(node for node in nodes if lost_because(views, node))
    if len(lost) == len(nodes):
        return unreachable(views, lost)
    reached = tuple(node for node in nodes if node not in lost)
    if blocked := busy(views, reached) or whole(views, rules, nodes, "stop") or yue_unfit(views, reached, False):
        return blocked
    idle = not lost and all(not ours(views[node], rules) and not yue_works(views[node]) for node in reached)
    steps = _release(views, rules, reached, cancel_jobs)
    steps += [
        Step("unknown", f"{lost_because(views, node)}: what runs there is unknown, and was not stopped", node) for node in lost
    ]
    return Plan(tuple(steps), idle, ("nothing of the catalog runs there",) if idle else ())


def plan_power(
    views: Views, rules: Rules, nodes: tuple[str, ...], verb: str, *, cancel_jobs: bool = False, wait: bool = True
) -> Plan | Blocked:
    """Steps to drain the nodes and then reboot them or power them off (`verb`: what systemctl calls it), the head last."""
    said = "shutdown" if verb == "poweroff" else verb
    if blocked := askable(views, nodes) or whole(views, rules, nodes, said) or foreign(views, rules, nodes, None):
        return blocked
    if blocked := yue_unfit(views, nodes, False):
        return blocked
    steps = _release(views, rules, nodes, cancel_jobs)
    last = [node for node in rules.nodes if node in nodes]
    steps.append(_state(REBOOTING if verb == "reboot" else POWERING_OFF))
    steps += [Step(verb, f"{verb} the machine", node, seconds=STEP_SECONDS) for node in reversed(last)]
    if wait:
        steps += [Step("host_down", "wait until its SSH drops", node, seconds=DOWN_SECONDS) for node in reversed(last)]
        if verb == "reboot":
            steps += [Step("host_up", "wait for a new boot", node, seconds=UP_SECONDS) for node in reversed(last)]
        steps.append(Step("powered", "record: stopped", target=verb))
    return Plan(tuple(steps))


def verify_idle(views: Views, rules: Rules, nodes: tuple[str, ...], wanted: Allocation | None) -> Blocked | None:
    """After the stop: is anything left that a start would meet, or that a stop should have ended?"""
    if blocked := askable(views, nodes, locks=False):
        return blocked
    left = [
        f"{node}: {who(one)} is still {one.state}" for node in nodes for one in ours(views[node], rules) if one.state in ALIVE
    ]
    left += [f"{node}: YuE still works" for node in nodes if yue_works(views[node])]
    if left:
        return Blocked(TEMPFAIL, tuple(left), "run the command again; `spark-serve logs` tells what it does", "leftover")
    return None if wanted is None else foreign(views, rules, nodes, wanted, stopped=True)


# Steps.


def _release(views: Views, rules: Rules, nodes: tuple[str, ...], cancel_jobs: bool) -> list[Step]:
    """Everything from the first deed to "stopped", in the order that loses no request and no song."""
    steps = [Step("fence", "let no command of an older transition act any more", node, seconds=STEP_SECONDS) for node in nodes]
    steps += [
        Step("leases", "end benchmarks on these nodes", target=",".join(nodes), seconds=5),
        _state(DRAINING),
        _revoke(nodes),
    ]
    singing = [node for node in nodes if yue_works(views[node])]
    steps += [Step("yue_drain", "YuE takes no more songs", node, seconds=STEP_SECONDS) for node in singing]
    for node in singing if cancel_jobs else ():
        yue = views[node].yue
        steps += [
            Step("yue_cancel", f"cancel song {job}", node, job, STEP_SECONDS) for job in (yue.jobs if yue is not None else ())
        ]
    for node in singing:
        yue = views[node].yue
        jobs = ", ".join(yue.jobs) if yue is not None else ""
        text = f"song {jobs} renders: end here with status 75, YuE drained (--cancel-jobs ends it)" if jobs else "no song renders"
        cancelled = f"wait until {jobs or 'every song'} is gone"
        steps.append(
            Step("yue_idle", cancelled if cancel_jobs else text, node, "cancel" if cancel_jobs else "", YUE_CANCEL_SECONDS)
        )
    serving = [(node, one) for node in nodes for one in ours(views[node], rules) if one.state == "running" and not one.rank]
    steps += [
        Step("drain", f"wait until {one.model} has answered its requests, up to {wait} s", node, one.model, wait)
        for node, one in serving
        if one.model and (wait := _drain_seconds(one, rules))
    ]
    # The rank that serves first: a follower that goes away under it would end its requests with an error.
    containers = [(node, one) for node in nodes for one in ours(views[node], rules)]
    containers.sort(key=lambda pair: pair[1].rank or 0)
    for node, one in containers:
        if one.state in ALIVE:
            wait = _drain_seconds(one, rules)
            text = f"stop {who(one)}: SIGTERM, up to {wait} s for the engine, then SIGKILL"
            steps.append(Step("stop", text, node, one.id, wait + KILL_SECONDS))
    steps += [Step("remove", f"remove {who(one)}", node, one.id, STEP_SECONDS) for node, one in containers]
    steps.append(
        Step(
            "verify",
            "look again: nothing of ours is left, and nothing foreign came",
            target=",".join(nodes),
            seconds=STEP_SECONDS,
        )
    )
    steps.append(_state(STOPPED))
    return steps


def _start(wanted: Allocation) -> list[Step]:
    steps = []
    if wanted.drop_caches:
        steps += [
            Step("drop_caches", "drop page caches, if sudo asks for no password", node, seconds=STEP_SECONDS)
            for node in wanted.nodes
        ]
    told = [rank for rank in wanted.ranks if rank.learns]
    known = [rank for rank in wanted.ranks if not rank.learns]
    steps += [_create(rank) for rank in known]
    # No source prescribes an order, PyTorch's store retries both ways. Followers first: the head's port answers last.
    steps += [_begin(rank) for rank in sorted(known, key=lambda rank: -rank.rank)]
    for rank in told:
        text = f"wait until rank 0 has printed {rank.learns}"
        steps += [Step("learn", text, rank.node, rank.learns, rank.learn_seconds, rank), _create(rank), _begin(rank)]
    return steps


def _create(rank: Rank) -> Step:
    return Step("create", f"create {rank.name} from {rank.image}", rank.node, rank.name, STEP_SECONDS, rank)


def _begin(rank: Rank) -> Step:
    return Step("start", f"start {rank.name} (rank {rank.rank})", rank.node, rank.name, STEP_SECONDS, rank)


def _start_yue(nodes: tuple[str, ...], rules: Rules) -> list[Step]:
    steps = [Step("yue_start", "start YuE's service, drained", node, seconds=STEP_SECONDS) for node in nodes]
    return [
        *steps,
        *[Step("yue_admit", "check its assets, and let YuE take songs", node, seconds=rules.yue_ready_seconds) for node in nodes],
    ]


def _ready(wanted: Allocation, client: bool, wait: bool) -> list[Step]:
    if not wait:
        return [Step("launched", f"do not wait for {wanted.model}; `spark-serve wait` does", target=wanted.model)]
    if wanted.mode == YUE:
        text = "wait until control and HTTP of every worker agree that it is ready"
        return [
            Step("yue_ready", text, seconds=wanted.ready_seconds),
            Step("publish", "announce the workers", target=",".join(wanted.nodes)),
        ]
    text = f"watch the containers, until {wanted.served} has answered from here with a token, up to {wanted.ready_seconds} s"
    steps = [
        Step("ready", text, target=wanted.url or "", seconds=wanted.ready_seconds),
        Step("publish", f"announce {wanted.served} at {wanted.url}", target=",".join(wanted.nodes)),
    ]
    return [*steps, Step("client", f"point the client at {wanted.served}", target=wanted.url or "")] if client else steps


def _state(phase: str) -> Step:
    return Step("state", f"record: {phase}", target=phase)


def _revoke(nodes: tuple[str, ...]) -> Step:
    return Step("revoke", "announce nothing on these nodes any more", target=",".join(nodes))


def _drain_seconds(container: Container, rules: Rules) -> int:
    known = rules.of(container.model)
    return known.drain_seconds if known is not None else 30
