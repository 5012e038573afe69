"""Which units can run side by side, and which never can, whatever the order of their starts."""

from __future__ import annotations

from sparkguard.core.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Twenty units make a million sets, some seconds' work; each one more doubles it.
MOST_UNITS = 20


class Member(Record):
    """One unit's share of each pool that it uses, and the budget under which its own start is judged."""

    unit: str
    shares: dict[str, int]
    budget: int


class Plan(Record):
    """maximal_sets: what fits, and with any further unit would not. never_together: too much, and with any one less not.

    Sets that a Conflicts= keeps apart are in neither: systemd never runs them.
    """

    maximal_sets: tuple[tuple[str, ...], ...]
    never_together: tuple[tuple[str, ...], ...]


def plan(members: Sequence[Member], caps: Mapping[str, int], conflicts: Sequence[tuple[str, str]]) -> Plan:
    """Exact for at most MOST_UNITS members; caps is what a pool can give at most, whatever the budget.

    Each start is judged by its own unit's budget, so a set fits when some order of the starts is admitted: the one in
    which budgets rise, if any. Hence the members are taken in that order, and a set grows only at its end.
    """
    order = sorted(members, key=lambda member: member.budget)
    apart = [
        sum(1 << j for j, other in enumerate(order) if (one.unit, other.unit) in conflicts or (other.unit, one.unit) in conflicts)
        for one in order
    ]
    # For each pool, its users: (bit, share, limit).
    users = [
        [
            (1 << i, member.shares[pool], min(member.budget, caps.get(pool, member.budget)))
            for i, member in enumerate(order)
            if member.shares.get(pool)
        ]
        for pool in sorted({pool for member in order for pool in member.shares})
    ]

    def fits(chosen: int) -> bool:
        for pool in users:
            total = 0
            for bit, share, limit in pool:
                if chosen & bit:
                    total += share
                    if total > limit:
                        return False
        return True

    maximal: list[int] = []
    never: list[int] = []

    def grow(chosen: int, start: int, barred: int) -> None:
        """barred: the members that conflict with a chosen one."""
        rest = sum(1 << j for j in range(start, len(order)) if not barred >> j & 1)
        if not any(apart[j] & rest for j in _bits(rest)) and fits(chosen | rest):
            if is_maximal(chosen | rest):
                maximal.append(chosen | rest)
            return  # every smaller set in this branch fits as well
        if is_maximal(chosen):
            maximal.append(chosen)
        for j in _bits(rest):
            bigger = chosen | 1 << j
            if fits(bigger):
                grow(bigger, j + 1, barred | apart[j])
            elif all(fits(bigger & ~(1 << i)) for i in _bits(chosen)):
                never.append(bigger)

    def is_maximal(chosen: int) -> bool:
        return all(chosen >> j & 1 or apart[j] & chosen or not fits(chosen | 1 << j) for j in range(len(order)))

    grow(0, 0, 0)
    position = {member.unit: at for at, member in enumerate(members)}

    def named(sets: Sequence[int]) -> tuple[tuple[str, ...], ...]:
        names = [tuple(sorted((order[i].unit for i in _bits(chosen)), key=position.__getitem__)) for chosen in sets if chosen]
        return tuple(sorted(names, key=lambda units: (len(units), [position[unit] for unit in units])))

    return Plan(named(maximal), named(never))


def _bits(chosen: int) -> list[int]:
    return [i for i in range(chosen.bit_length()) if chosen >> i & 1]
