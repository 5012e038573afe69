"""Whom to stop: what a refusal proposes."""

from __future__ import annotations

from sparkguard.core.types import Claim, Hold, PoolSum

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def whose_end_helps(
    claims: tuple[Claim, ...], lacking: list[tuple[PoolSum, int]], amount_of: Callable[[Hold], int | None]
) -> tuple[Claim, ...]:
    """Whom to stop so that every pool has what it lacks. None: not even the end of all would be enough."""
    chosen: list[Claim] = []
    for total, amount in lacking:
        pool = total.pool.id
        held = [(sum(amount_of(hold) or 0 for hold in claim.holds if hold.pool == pool), claim) for claim in claims]
        helpful = _fewest(held, amount)
        if not helpful:
            return ()
        chosen += helpful
    return tuple(dict.fromkeys(chosen))


def _fewest(held: list[tuple[int, Claim]], lacking: int) -> list[Claim]:
    """The single smallest holder whose end is enough; else the largest ones until it is; else none."""
    held = sorted(held, key=lambda pair: pair[0])
    for amount, claim in held:
        if amount >= lacking:
            return [claim]
    chosen = []
    while held and lacking > 0:
        amount, claim = held.pop()
        chosen.append(claim)
        lacking -= amount
    return chosen if lacking <= 0 else []
