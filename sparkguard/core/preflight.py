"""Can the start succeed? Images, paths, the fabric, memory and YuE's factory, judged before anything is stopped."""

from __future__ import annotations

from sparkguard.core.admission import admit
from sparkguard.core.cluster import Allocation, Blocked, NodeView
from sparkguard.core.explain import status_of, summary
from sparkguard.core.ownership import ALIVE, Rules, ours
from sparkguard.core.share import bytes_of, share_of
from sparkguard.core.types import DISCRETE, Claim, Hold, MemoryPool, Verdict, Wanted
from sparkguard.errors import CONFIG, UNAVAILABLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    Views = Mapping[str, NodeView]


def yue_unfit(views: Views, nodes: tuple[str, ...], wanted: bool) -> Blocked | None:
    reasons = []
    for node in nodes:
        yue = views[node].yue
        if wanted and yue is None:
            reasons.append(f"{node}: no YuE factory was found")
        elif yue is not None and yue.error is not None and (yue.active or wanted):
            reasons.append(f"{node}: YuE does not answer as it should: {yue.error}")
        elif yue is not None and yue.ownership_ok is False:
            reasons.append(f"{node}: YuE has lost the ownership of its containers")
        elif wanted and yue is not None and (yue.mock is True or yue.assets_ok is False or yue.api_version != 2):
            reasons.append(f"{node}: YuE is not fit to serve: {_unfit(yue.mock, yue.assets_ok, yue.api_version)}")
    return Blocked(UNAVAILABLE, tuple(reasons), "see docs/cluster/yue.md", "yue") if reasons else None


def _unfit(mock: bool | None, assets_ok: bool | None, version: int | None) -> str:
    return (
        "it is a mock"
        if mock
        else "its assets are not what its manifest says"
        if assets_ok is False
        else f"protocol {version}, not 2"
    )


def prepared(views: Views, wanted: Allocation) -> Blocked | None:
    """Images, the same everywhere; paths; the fabric."""
    reasons = []
    pull = f"prepare it first: spark-serve pull {wanted.model}"
    ids: dict[str, dict[str, str]] = {}
    for rank in wanted.ranks:
        view = views[rank.node]
        found = dict(view.images).get(rank.image)
        if found is None:
            reasons.append(f"{rank.node}: the image {rank.image} is not there")
        else:
            ids.setdefault(rank.image, {})[rank.node] = found
        reasons += [f"{rank.node}: {path} is not there" for path in rank.paths if path in view.missing]
    if reasons:
        return Blocked(CONFIG, tuple(reasons), pull, "preflight")
    for image, by_node in ids.items():
        if len(set(by_node.values())) > 1:
            each = tuple(f"{node}: {image} is {id}" for node, id in by_node.items())
            return Blocked(CONFIG, each, f"the ranks would run different code; {pull} makes them one", "image_differs")
    for rank in wanted.ranks:
        view = views[rank.node]
        states = dict(view.interfaces)
        reasons += [
            f"{rank.node}: the network interface {name} is {states.get(name, 'absent')}"
            for name in rank.interfaces
            if states.get(name) != "up"
        ]
        states = dict(view.hcas)
        reasons += [
            f"{rank.node}: the RoCE device {name} is {states.get(name, 'absent')}"
            for name in rank.hcas
            if states.get(name) != "active"
        ]
    hint = "see the cable and `ibdev2netdev` there, or the names in [cluster.nccl]"
    return Blocked(CONFIG, tuple(reasons), hint, "preflight") if reasons else None


def memory(views: Views, rules: Rules, wanted: Allocation) -> Blocked | None:
    """admit() for each rank, on the node as it will be when what is drained has given its memory back."""
    refused: list[tuple[str, Verdict]] = []
    unknown = False
    for rank in wanted.ranks:
        view = views[rank.node]
        pools = {pool.id: pool for pool in view.pools}
        if missing := [hold.pool for hold in rank.holds if hold.pool not in pools]:
            reason = f"{rank.node}: its memory ({', '.join(missing)}) cannot be read"
            return Blocked(UNAVAILABLE, (reason,), "see `spark-serve status`", "memory")
        if not rank.holds or any(hold.share is None and hold.bytes is None for hold in rank.holds):
            reason = f"{rank.node}: nobody knows how much memory {wanted.model} takes"
            return Blocked(
                CONFIG, (reason,), f"say it in [models.{wanted.model}]: memory_gib, or the engine's own flag", "memory"
            )
        freed, all_known = _freed(view, rules)
        after = tuple(_with_freed(pool, freed, view.pools) for pool in view.pools)
        holds = tuple(_sized(hold, pools[hold.pool]) for hold in rank.holds)
        verdict = admit(
            rules.budget, after, _kept_claims(view, rules, holds, pools), Wanted(f"{wanted.model} on {rank.node}", holds)
        )
        if not verdict.admitted:
            refused.append((rank.node, verdict))
            unknown = unknown or not all_known
    if not refused:
        return None
    reasons = tuple(f"{node}: {_words(verdict)}" for node, verdict in refused)
    hint = "close what holds memory there, or lower the model's share in the catalog"
    if unknown:
        hint = "what the running model will give back is unknown: `spark-serve stop` first, then its memory can be counted"
    return Blocked(status_of(refused[0][1]), reasons, hint, "memory")


def _words(verdict: Verdict) -> str:
    if verdict.reason != "unknown_holder":
        return summary(verdict)
    kept = ", ".join(claim.engine for claim in verdict.culprits)
    return f"keep_containers has {kept}, which uses the GPU, and nobody knows how much memory it holds"


def _freed(view: NodeView, rules: Rules) -> tuple[int, bool]:
    """Bytes that the drained workload holds by the driver's count, and whether that is all; the unknown counts as nothing."""
    ending = {one.id for one in ours(view, rules)} | set(view.yue.containers if view.yue is not None else ())
    amounts = [holder.used_bytes for holder in view.gpu or () if holder.container in ending]
    alive = any(one.state in ALIVE for one in ours(view, rules))
    return sum(amount or 0 for amount in amounts), None not in amounts and (bool(amounts) or not alive)


def _with_freed(pool: MemoryPool, freed: int, pools: tuple[MemoryPool, ...]) -> MemoryPool:
    several = sum(other.kind == DISCRETE for other in pools) > 1  # then nobody knows on which of them it was
    if pool.available_bytes is None or (pool.kind == DISCRETE and several):
        return pool
    total = pool.total_bytes if pool.total_bytes is not None else pool.available_bytes + freed
    return pool.replace(available_bytes=min(total, pool.available_bytes + freed))


def _sized(hold: Hold, pool: MemoryPool) -> Hold:
    """A share in bytes and bytes as a share, where the pool's size is known."""
    if pool.total_bytes is None:
        return hold
    amount = bytes_of(hold.share, pool.total_bytes) if hold.bytes is None and hold.share is not None else hold.bytes
    share = share_of(hold.bytes, pool.total_bytes) if hold.share is None and hold.bytes is not None else hold.share
    return hold.replace(bytes=amount, share=share)


def _kept_claims(view: NodeView, rules: Rules, holds: tuple[Hold, ...], pools: dict[str, MemoryPool]) -> tuple[Claim, ...]:
    """What keep_containers hold. One that uses the GPU and whose memory nobody tells may still grow: it is never nothing."""
    claims = []
    for container in view.containers or ():
        if container.name not in rules.keep or not container.gpu or container.state not in ALIVE:
            continue
        amounts = [holder.used_bytes for holder in view.gpu or () if holder.container == container.id]
        used = None if None in amounts or not amounts else sum(amount or 0 for amount in amounts)
        taken = tuple(_measured(hold.pool, used, pools[hold.pool]) for hold in holds)
        claims.append(
            Claim(None, container.name, taken, "measured", unit=container.name, grows=used is None, note=container.name)
        )
    return tuple(claims)


def _measured(id: str, used: int | None, pool: MemoryPool) -> Hold:
    share = share_of(used, pool.total_bytes) if used is not None and pool.total_bytes else None
    return Hold(id, share, used, used or 0)
