"""The heart: does a start fit beside everything that holds, or will hold, memory on this machine?"""

from __future__ import annotations

from sparkguard.core.relief import whose_end_helps
from sparkguard.core.reserve import usual_reserve
from sparkguard.core.share import WHOLE, floor_share
from sparkguard.core.types import Budget, Claim, Hold, MemoryPool, PoolSum, Verdict, Wanted


def admit(budget: Budget, pools: tuple[MemoryPool, ...], claims: tuple[Claim, ...], wanted: Wanted) -> Verdict:
    """Admits when, on every pool wanted, the shares add up to at most the budget and the bytes are there now.

    claims must not contain the start itself. Equality is admitted. The order of the refusals is from what can never
    change to what passes by itself, so that the first reason found is the one worth reading.
    """
    by_id = {pool.id: pool for pool in pools}
    sums = tuple(_sum(budget, by_id[hold.pool], claims, hold) for hold in wanted.holds)
    unknown = tuple(claim for claim in claims if any(_is_unknown(claim, total.pool) for total in sums))

    def verdict(reason: str, decided: PoolSum | None = None, culprits: tuple[Claim, ...] = ()) -> Verdict:
        overridden = unknown if budget.allow_unknown else ()
        pool = None if decided is None else decided.pool.id
        return Verdict(reason == "fits", reason, wanted, budget, sums, claims, culprits, overridden, pool)

    for total in sums:
        if _never_fits(budget, total):
            return verdict("never_fits", total)
    if unknown and not budget.allow_unknown:
        orphans = tuple(claim for claim in unknown if claim.orphan)
        return verdict("orphan" if orphans else "unknown_holder", culprits=orphans or unknown)
    for total in sums:
        if (total.pool.total_bytes is None or total.pool.available_bytes is None) and not budget.allow_unknown:
            return verdict("unknown_pool", total)
    if over := [(total, excess) for total in sums if (excess := excess_share(budget, total)) > 0]:
        return verdict("over_budget", over[0][0], whose_end_helps(claims, over, lambda hold: hold.share))
    if short := [(total, missing) for total in sums if (missing := missing_bytes(total)) > 0]:
        return verdict("memory_taken", short[0][0], whose_end_helps(claims, short, lambda hold: hold.bytes))
    return verdict("fits")


def excess_share(budget: Budget, total: PoolSum) -> int:
    """By how much the shares of a pool would exceed the budget; 0 or less: they fit."""
    return total.claimed_share + (total.wanted_share or 0) - budget.share


def missing_bytes(total: PoolSum) -> int:
    """How much must become available in a pool before the start fits; 0 or less: it is there, or nobody can tell."""
    if total.pool.available_bytes is None or total.wanted_bytes is None:
        return 0
    return total.wanted_bytes + total.outstanding_bytes + total.reserve_bytes - total.pool.available_bytes


def _sum(budget: Budget, pool: MemoryPool, claims: tuple[Claim, ...], wanted: Hold) -> PoolSum:
    held = [hold for claim in claims for hold in claim.holds if hold.pool == pool.id]
    claimed = sum(hold.share or 0 for hold in held)
    outstanding = sum(max(0, (hold.bytes or 0) - hold.taken_bytes) for hold in held)
    total, available = pool.total_bytes or 0, pool.available_bytes
    reserve = usual_reserve(total) if budget.reserve_bytes is None else budget.reserve_bytes
    room = budget.share - claimed
    if total and available is not None:
        room = min(room, (min(available, total) - reserve - outstanding) * WHOLE // total)
    return PoolSum(pool, claimed, outstanding, reserve, wanted.share, wanted.bytes, floor_share(room))


def _is_unknown(claim: Claim, pool: MemoryPool) -> bool:
    """Whether a claim holds, or may yet take, memory of the pool that no sum contains."""
    holds = [hold for hold in claim.holds if hold.pool == pool.id]
    return bool(holds) and (claim.orphan or (claim.grows and any(hold.share is None for hold in holds)))


def _never_fits(budget: Budget, total: PoolSum) -> bool:
    """Refused on this pool even if it were empty."""
    size = total.pool.total_bytes
    too_large = size is not None and total.wanted_bytes is not None and total.wanted_bytes + total.reserve_bytes > size
    return too_large or (total.wanted_share or 0) > budget.share
