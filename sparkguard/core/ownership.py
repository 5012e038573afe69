"""Whose is what on a node: what may be stopped, what must not be met, and what nobody can tell."""

from __future__ import annotations

from sparkguard.core.cluster import GONE, RUNNING, UNKNOWN, YUE, Allocation, Blocked, Container, NodeView, Rank
from sparkguard.core.record import Record
from sparkguard.core.share import WHOLE
from sparkguard.core.types import Budget
from sparkguard.errors import TEMPFAIL, UNAVAILABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    Views = Mapping[str, NodeView]

# A container in one of these states computes, or may at any moment.
ALIVE = ("running", "paused", "restarting", "removing")


class Known(Record):
    """What the catalog knows of a model that may run already."""

    model: str
    span: tuple[str, ...] = ()  # the nodes that it needs together; empty: each alone
    ports: tuple[int, ...] = ()
    drain_seconds: int = 120


class Rules(Record):
    """The catalog, as far as it decides what may be touched."""

    nodes: tuple[str, ...]  # the head first
    models: tuple[Known, ...] = ()
    keep: tuple[str, ...] = ()  # names of containers that are never stopped
    stop_names: tuple[str, ...] = ()  # names of containers that count as ours although no receipt names them
    master_port: int | None = None
    # The recipes' shares were chosen for a Spark on its own: the whole pool may be claimed, and the reserve stays free.
    budget: Budget = Budget(WHOLE)
    yue_ready_seconds: int = 180

    def of(self, model: str) -> Known | None:
        return next((known for known in self.models if known.model == model), None)


def ours(view: NodeView, rules: Rules) -> tuple[Container, ...]:
    """The containers that may be stopped: those of the node's receipts, and those of stop_names; never a kept one."""
    return tuple(
        container
        for container in view.containers or ()
        if container.name not in rules.keep and (container.owned or container.name in rules.stop_names)
    )


def rank_states(views: Views, wanted: Allocation) -> tuple[tuple[Rank, str, Container | None], ...]:
    """Each rank with RUNNING, GONE or UNKNOWN, and its container when there is one."""
    found: list[tuple[Rank, str, Container | None]] = []
    for rank in wanted.ranks:
        view = views.get(rank.node)
        if view is None or view.error is not None or view.containers is None:
            found.append((rank, UNKNOWN, None))
            continue
        container = next((one for one in view.containers if one.owned and one.name == rank.name), None)
        state = RUNNING if container is not None and container.state == "running" else GONE
        found.append((rank, state, container))
    return tuple(found)


def runs_as_wanted(views: Views, rules: Rules, wanted: Allocation) -> bool:
    """Every rank runs from the same digest, of one generation, and nothing else of ours is alive on these nodes."""
    if wanted.mode == YUE:
        return all(_yue_admitted(views[node]) and not ours(views[node], rules) for node in wanted.nodes)
    ids, generations = set(), set()
    for rank, state, container in rank_states(views, wanted):
        if state != RUNNING or container is None or container.digest != rank.digest or container.model != wanted.model:
            return False  # under another name of the catalog it would run for no other verb
        ids.add(container.id)
        generations.add(container.generation)
    others = [one for node in wanted.nodes for one in ours(views[node], rules) if one.id not in ids and one.state in ALIVE]
    return len(generations) == 1 and not others and not any(yue_works(views[node]) for node in wanted.nodes)


# Refusals, in the order in which they are worth reading.


def askable(views: Views, nodes: tuple[str, ...], locks: bool = True) -> Blocked | None:
    lost = tuple(node for node in nodes if lost_because(views, node))
    if lost:
        return unreachable(views, lost)
    return busy(views, nodes) if locks else None


def lost_because(views: Views, node: str) -> str | None:
    """Why nobody can tell what runs on a node; None: it can be told."""
    view = views.get(node)
    if view is None:
        return "was not asked"
    if view.error is not None:
        return f"cannot be asked: {view.error.removeprefix(f'{node}: ')}"
    if view.containers is None:
        return f"docker does not answer: {view.daemon_error or view.daemon}"
    return None


def unreachable(views: Views, lost: tuple[str, ...]) -> Blocked:
    reasons = tuple(f"{node} {lost_because(views, node)}" for node in lost)
    return Blocked(
        UNAVAILABLE, reasons, "what runs there is unknown, so nothing was touched; `spark-serve status` asks again", "unreachable"
    )


def busy(views: Views, nodes: tuple[str, ...]) -> Blocked | None:
    held = [(node, views[node].lock) for node in nodes]
    reasons = tuple(
        f"{node} is held by `{lock.verb}`{f' of {lock.user}' if lock.user else ''} on {lock.host}, pid {lock.pid}"
        for node, lock in held
        if lock is not None
    )
    return Blocked(TEMPFAIL, reasons, "wait until that has ended", "busy") if reasons else None


def whole(views: Views, rules: Rules, nodes: tuple[str, ...], verb: str) -> Blocked | None:
    """A model that is spread over nodes is stopped on all of them or on none."""
    reasons = []
    span: tuple[str, ...] = ()
    for node, container in _alive(views, rules, nodes):
        spread = _span(views, rules, container)
        outside = tuple(name for name in spread if name not in nodes)
        if outside:
            span = spread
            reasons.append(f"{node}: {who(container)} is one part of {container.model}, which also runs on {', '.join(outside)}")
    if not reasons:
        return None
    hint = f"stop it whole first: spark-serve stop --node {','.join(span)}; then spark-serve {verb}"
    return Blocked(TEMPFAIL, tuple(reasons), hint, "scope")


def strange(views: Views, rules: Rules, nodes: tuple[str, ...]) -> bool:
    """Whether a model runs there that this catalog does not have: which nodes it needs, only a look at all of them tells."""
    return any(container.model and rules.of(container.model) is None for _, container in _alive(views, rules, nodes))


def _alive(views: Views, rules: Rules, nodes: tuple[str, ...]) -> list[tuple[str, Container]]:
    return [
        (node, container) for node in nodes if node in views for container in ours(views[node], rules) if container.state in ALIVE
    ]


def _span(views: Views, rules: Rules, container: Container) -> tuple[str, ...]:
    """The nodes that a running model needs together: by the catalog, and by what was started with it, since the model may
    be another laptop's or the catalog may be newer. A follower whose first rank nobody sees needs them all."""
    known = rules.of(container.model)
    started = {
        node
        for node, other in _alive(views, rules, rules.nodes)
        if container.generation and (other.generation, other.model) == (container.generation, container.model)
    }
    needed = (started if len(started) > 1 else set()) | set(known.span if known else ())
    if not needed and container.rank:
        return rules.nodes
    return tuple(node for node in rules.nodes if node in needed)


def foreign(
    views: Views, rules: Rules, nodes: tuple[str, ...], wanted: Allocation | None, stopped: bool = False
) -> Blocked | None:
    """What is not ours and would be met: GPU containers, compute processes, a taken name, a taken port."""
    reasons: list[str] = []
    for node in nodes:
        view = views[node]
        if view.gpu is None:
            reason = f"{node}: its GPU cannot be asked: {view.gpu_error or 'nobody says why'}"
            return Blocked(UNAVAILABLE, (reason,), "what computes there is unknown; see nvidia-smi on that machine", "unknown")
        mine = {container.id for container in ours(view, rules)}
        kept = {container.id for container in view.containers or () if container.name in rules.keep}
        songs = set(view.yue.containers) if view.yue is not None else set()
        ranks = [rank for rank in wanted.ranks if rank.node == node] if wanted is not None else []
        names = {rank.name for rank in ranks}
        reported = set()
        for container in view.containers or ():
            known = container.id in mine | kept | songs
            if container.gpu and container.state in ALIVE and not known:
                reported.add(container.id)
                reasons.append(f"{node}: foreign container {who(container)} uses the GPU")
            elif container.name in names and container.id not in mine:
                why = "keep_containers holds it" if container.id in kept else "no receipt here names it"
                reasons.append(f"{node}: the name {container.name} is taken by {container.id[:12]} ({container.state}): {why}")
        for holder in view.gpu:
            if not holder.exempt and (holder.container is None or holder.container not in mine | kept | songs | reported):
                where = f" in container {holder.container[:12]}" if holder.container else ""
                reasons.append(f"{node}: foreign process {holder.name}, pid {holder.pid}{where}, computes on the GPU")
        reasons += [f"{node}: {text}" for text in _ports(view, rules, wanted, ranks, stopped)]
    if not reasons:
        return None
    hint = "stop it yourself, or name it in keep_containers or stop_names of the catalog if that is what it is"
    return Blocked(TEMPFAIL, tuple(reasons), hint, "foreign")


def _ports(view: NodeView, rules: Rules, wanted: Allocation | None, ranks: list[Rank], stopped: bool) -> list[str]:
    ports = {rank.port for rank in ranks if rank.port is not None}
    if wanted is not None and len(wanted.ranks) > 1 and rules.master_port is not None and any(rank.rank == 0 for rank in ranks):
        ports.add(rules.master_port)
    taken = [listener for listener in view.listeners or () if listener.port in ports]
    if not stopped:
        # Whose socket it is only root can see. One of ours may have it; whether it had is seen again after the stop.
        alive = [container for container in ours(view, rules) if container.state in ALIVE]
        taken = [listener for listener in taken if not any(_may_listen(one, rules, listener.port) for one in alive)]
    return [
        f"port {listener.port} is taken by {listener.name or 'a program of another user'}"
        + (f", pid {listener.pid}" if listener.pid is not None else "")
        for listener in taken
    ]


def _may_listen(container: Container, rules: Rules, port: int) -> bool:
    known = rules.of(container.model)
    return known is None or port in known.ports or port == rules.master_port


def yue_works(view: NodeView) -> bool:
    """Whether there is something to drain: it takes songs, renders one, or has containers."""
    yue = view.yue
    return (
        yue is not None
        and yue.active
        and (yue.accepting is not False or yue.busy is not False or bool(yue.jobs or yue.containers))
    )


def _yue_admitted(view: NodeView) -> bool:
    yue = view.yue
    return (
        yue is not None
        and yue.error is None
        and yue.active
        and (yue.accepting, yue.cuda, yue.runtime_ok, yue.assets_ok, yue.ownership_ok) == (True,) * 5
        and yue.mock is False
        and bool(yue.generation)
    )


def who(container: Container) -> str:
    model = f", {container.model}" + (f" rank {container.rank}" if container.rank is not None else "") if container.model else ""
    return f"{container.name} ({container.id[:12]}{model})"
