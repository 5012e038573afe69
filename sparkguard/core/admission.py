"""The heart: does a start fit beside everything that holds, or will hold, memory on this machine?"""

from __future__ import annotations

from sparkguard.core.share import WHOLE, bytes_of, floor_share
from sparkguard.core.types import Budget, Claim, Hold, MemoryPool, PoolSum, Verdict, Wanted

MIB = 1 << 20
# 1024 MiB is the customer's figure for host memory; 5 % of a 121 GiB GB10 is 6.1 GiB, near the 5.4 to 6.7 GiB that
# vLLM was measured to take beyond its fraction there. A fraction is no ceiling (vllm issue 46307).
MIN_RESERVE_BYTES = 1024 * MIB
RESERVE_SHARE = WHOLE // 20


def admit(budget: Budget, pools: tuple[MemoryPool, ...], claims: tuple[Claim, ...], wanted: Wanted) -> Verdict:
    """Admits when, on every pool wanted, the shares add up to at most the budget and the bytes are there now.

    claims must not contain the start itself. Equality is admitted. The order of the refusals is from what can never
    change to what passes by itself, so that the first reason found is the one worth reading.
    """
    by_id = {pool.id: pool for pool in pools}
    sums = tuple(_sum(budget, by_id[hold.pool], claims, hold) for hold in wanted.holds)
    beside = [claim for claim in claims if any(_meets(claim, total.pool) for total in sums)]
    unknown = tuple(
        claim for claim in beside if claim.orphan or (claim.grows and any(hold.share is None for hold in claim.holds))
    )
    blind = tuple(total for total in sums if total.pool.total_bytes is None or total.pool.available_bytes is None)

    def verdict(reason: str, pool: str | None = None, culprits: tuple[Claim, ...] = ()) -> Verdict:
        overridden = unknown if budget.allow_unknown else ()
        return Verdict(reason == "fits", reason, wanted, budget, sums, claims, culprits, overridden, pool)

    for total in sums:
        if _never(budget, total):
            return verdict("never_fits", total.pool.id)
    if unknown and not budget.allow_unknown:
        orphans = tuple(claim for claim in unknown if claim.orphan)
        return verdict("orphan" if orphans else "unknown_holder", culprits=orphans or unknown)
    if blind and not budget.allow_unknown:
        return verdict("unknown_pool", blind[0].pool.id)
    for total in sums:
        if total.wanted_share is not None and total.claimed_share + total.wanted_share > budget.share:
            return verdict(
                "over_budget", total.pool.id, _to_stop(total, beside, total.claimed_share + total.wanted_share - budget.share)
            )
    for total in sums:
        available = total.pool.available_bytes
        if available is None or total.wanted_bytes is None:
            continue
        if total.wanted_bytes + total.outstanding_bytes > available - total.reserve_bytes:
            return verdict("memory_taken", total.pool.id)
    return verdict("fits")


def _sum(budget: Budget, pool: MemoryPool, claims: tuple[Claim, ...], wanted: Hold) -> PoolSum:
    held = [hold for claim in claims for hold in claim.holds if hold.pool == pool.id]
    claimed = sum(hold.share for hold in held if hold.share is not None)
    outstanding = sum(max(0, hold.bytes - hold.taken_bytes) for hold in held if hold.bytes is not None)
    total = pool.total_bytes
    reserve = (
        budget.reserve_bytes if budget.reserve_bytes is not None else max(MIN_RESERVE_BYTES, bytes_of(RESERVE_SHARE, total or 0))
    )
    room = budget.share - claimed
    if total and pool.available_bytes is not None:
        room = min(room, floor_share((pool.available_bytes - reserve - outstanding) * WHOLE // total))
    return PoolSum(pool, claimed, outstanding, reserve, wanted.share, wanted.bytes, room)


def _meets(claim: Claim, pool: MemoryPool) -> bool:
    return any(hold.pool == pool.id for hold in claim.holds)


def _never(budget: Budget, total: PoolSum) -> bool:
    """Refused on this pool even if it were empty."""
    if total.wanted_share is not None and total.wanted_share > budget.share:
        return True
    size = total.pool.total_bytes
    return size is not None and total.wanted_bytes is not None and total.wanted_bytes + total.reserve_bytes > size


def _to_stop(total: PoolSum, claims: list[Claim], excess_share: int) -> tuple[Claim, ...]:
    """The single smallest holder whose end is enough; else the largest ones until it is."""
    shares = {claim: sum(hold.share or 0 for hold in claim.holds if hold.pool == total.pool.id) for claim in claims}
    enough = [claim for claim in claims if shares[claim] >= excess_share]
    if enough:
        return (min(enough, key=lambda claim: shares[claim]),)
    chosen: list[Claim] = []
    for claim in sorted(shares, key=lambda claim: -shares[claim]):
        chosen.append(claim)
        excess_share -= shares[claim]
        if excess_share <= 0:
            break
    return tuple(chosen)
