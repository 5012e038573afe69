"""Who gets memory next: the wishes for a runner, oldest first, against what the pools have and what runners give back.

Two sums are kept of each pool, and both must have room. Accounted: its size, less what others claim and what runners were
promised. Live: what is free now, less what all of them have been promised but not taken yet. The first does not believe that
memory which happens to be free will stay so (a file that is only mapped shows as free); the second sees who claims nothing.
"""

from __future__ import annotations

from sparkguard.core.events import Pool, Reading
from sparkguard.core.ggml import MIB
from sparkguard.core.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from sparkguard.core.events import Placement

# The cap on loaded models is one more pool: each runner takes 1 of it, but for those that are ending. What was told to stop is
# loaded no more, though its process and its memory are there for a moment. As many of these as the cap allows loaded ones:
# should they be stuck, twice the cap is all that there ever is.
COUNT = "runners"

_EVERYTHING = 1 << 62

# Leaving: it answers what it has, and then ends. Ending: it was told to stop.
IDLE, BUSY, LEAVING, ENDING = "idle", "busy", "leaving", "ending"


class Holder(Record):
    """A runner that holds memory. Busy ones, those that are starting included, can only be waited for."""

    model: str
    generation: int
    kind: str
    amounts: Mapping[str, int]
    used_at: float = 0.0  # when its last request ended
    pinned: bool = False


class Want(Record):
    """A model that should have a runner and has none. order: smaller was asked for earlier."""

    model: str
    order: int
    placements: tuple[Placement, ...]
    may_evict: bool = True


class Start(Record):
    """At once, beside these idle runners, which are stopped for their places alone: there is memory for all."""

    want: Want
    placement: Placement
    evict: tuple[Holder, ...] = ()


class Wait(Record):
    """Room will come: stop these idle runners now, and let those busy ones take nothing that was asked for later."""

    want: Want
    evict: tuple[Holder, ...] = ()
    bar: tuple[Holder, ...] = ()
    settling: bool = False  # the memory of one that has ended is still coming back


class Never(Record):
    """It fits nowhere, not even if every runner ended. rooms: what each placement's pools would have then."""

    want: Want
    rooms: tuple[Mapping[str, int], ...]


class Room:
    """What the pools have left, reserves already taken off: [accounted, live] by pool."""

    def __init__(self, reading: Reading, most_loaded: int, holders: Iterable[Holder]) -> None:
        self._taken = reading.taken
        self._most_loaded = most_loaded
        self._without_place: set[tuple[str, int]] = set()
        self._left = {
            pool.id: [pool.total_bytes - pool.others_bytes, pool.available_bytes - pool.outstanding_bytes]
            for pool in reading.pools
        }
        for pool in reading.pools:
            self.take({pool.id: _EVERYTHING if pool.blocked else pool.reserve_bytes})
        if most_loaded:
            self._left[COUNT] = [most_loaded, most_loaded]
        for holder in holders:
            taken = self._taken_by(holder)
            for pool_id, amount in [*holder.amounts.items(), (COUNT, 1)]:
                if pool_id in self._left:
                    self._left[pool_id][0] -= amount
                    # The cap knows no difference between promised and taken.
                    self._left[pool_id][1] -= max(0, amount - taken.get(pool_id, 0))
            if holder.kind == ENDING:
                self.give_up_place(holder)

    def copy(self) -> Room:
        twin = Room.__new__(Room)
        twin._taken = self._taken
        twin._most_loaded = self._most_loaded
        twin._without_place = set(self._without_place)
        twin._left = {pool: list(left) for pool, left in self._left.items()}
        return twin

    def _taken_by(self, holder: Holder) -> Mapping[str, int]:
        return self._taken.get((holder.model, holder.generation), {})

    def take(self, amounts: Mapping[str, int]) -> None:
        for pool, amount in amounts.items():
            if pool in self._left:
                self._left[pool][0] -= amount
                self._left[pool][1] -= amount

    def give_up_place(self, holder: Holder) -> None:
        """As if the runner had been told to stop: its memory is still taken."""
        if len(self._without_place) < self._most_loaded:
            self._without_place.add((holder.model, holder.generation))
            self.take({COUNT: -1})

    def give_back(self, holder: Holder) -> None:
        """As if the runner had ended."""
        taken = self._taken_by(holder)
        place = 0 if (holder.model, holder.generation) in self._without_place else 1
        for pool, amount in [*holder.amounts.items(), (COUNT, place)]:
            if pool in self._left:
                self._left[pool][0] += amount
                self._left[pool][1] += max(amount, taken.get(pool, 0))

    def fits(self, amounts: Mapping[str, int], live: bool = True) -> bool:
        """live False: by what is accounted alone. A pool that was not read has no room; no cap has."""
        for pool, amount in amounts.items():
            left = self._left.get(pool)
            if left is None:
                if pool != COUNT:
                    return False
            elif amount > left[0] or (live and amount > left[1]):
                return False
        return True

    def of(self, pool: str) -> int:
        return max(0, min(self._left.get(pool, [0])))

    def lacks(self, amounts: Mapping[str, int]) -> set[str]:
        return {pool for pool, amount in amounts.items() if not self.fits({pool: amount})}


def empty_room(reading: Reading, holders: Iterable[Holder]) -> Room:
    """What the pools have left if every runner ended."""
    holders = tuple(holders)
    room = Room(reading, 0, holders)
    for holder in holders:
        room.give_back(holder)
    return room


def never_in(room: Room, want: Want) -> Never | None:
    """The refusal of a want that no placement has room for; None: one has."""
    if any(room.fits(dict(way.amounts)) for way in want.placements):
        return None
    return Never(want, tuple({pool: room.of(pool) for pool, _ in way.amounts} for way in want.placements))


def needs_of(placement: Placement) -> dict[str, int]:
    """Its amounts, and its place under the cap on runners."""
    return {**dict(placement.amounts), COUNT: 1}


def plan(
    reading: Reading, most_loaded: int, holders: tuple[Holder, ...], wants: tuple[Want, ...], settling: bool = False
) -> tuple[Start | Wait | Never, ...]:
    """One answer for each want, the oldest want first.

    What an older want waits for is set aside: a younger one starts beside it only with memory that the older does not
    need (else a stream of small models would keep a large one out for ever). settling: a runner ended a moment ago, and a
    driver may take a second to give its memory back.
    """
    now = Room(reading, most_loaded, holders)
    later, empty = now.copy(), now.copy()
    free_to_go = []
    for holder in holders:
        empty.give_back(holder)
        if holder.kind in (LEAVING, ENDING):
            later.give_back(holder)
        else:
            free_to_go.append(holder)
    return tuple(_answer(want, now, later, empty, free_to_go, settling) for want in sorted(wants, key=lambda want: want.order))


def _answer(want: Want, now: Room, later: Room, empty: Room, holders: list[Holder], settling: bool) -> Start | Wait | Never:
    """now: as things are. later: when all that has been decided has come about. empty: without any runner.

    holders: those of whose end nobody has decided; the ones that this want needs are taken out.
    """
    for rank in sorted({placement.rank for placement in want.placements}):
        ways = [placement for placement in want.placements if placement.rank == rank]
        for way in ways:
            needs = needs_of(way)
            if now.fits(needs) and later.fits(needs):
                now.take(needs)
                later.take(needs)
                return Start(want, way)
        for way in ways:
            needs = needs_of(way)
            there = later.fits(needs)
            if there or (settling and later.fits(needs, live=False)):
                later.take(needs)
                return Wait(want, settling=not there)
        if not want.may_evict:
            continue
        idle = [holder for holder in holders if holder.kind == IDLE]
        for some in (idle, holders):
            choices = [(victims, way) for way in ways if (victims := victims_for(needs_of(way), later, some))]
            if choices:
                victims, way = min(choices, key=lambda choice: (sum(victim.pinned for victim in choice[0]), len(choice[0])))
                needs = needs_of(way)
                for victim in victims:
                    later.give_back(victim)
                    holders.remove(victim)
                later.take(needs)
                if some is holders:
                    return Wait(want, bar=victims)
                for victim in victims:
                    now.give_up_place(victim)
                if not now.fits(needs):
                    return Wait(want, evict=victims)
                now.take(needs)
                return Start(want, way, victims)
        if any(empty.fits(needs_of(way)) for way in ways):
            return Wait(want)  # older wants come first
    return Never(want, tuple({pool: empty.of(pool) for pool, _ in way.amounts} for way in want.placements))


def victims_for(needs: Mapping[str, int], room: Room, holders: Iterable[Holder]) -> tuple[Holder, ...]:
    """Whose end makes room: idle ones first, least recently used first, pinned last, and nobody who is not needed.

    None: not even the end of all would do.
    """
    order = sorted(holders, key=lambda holder: (holder.kind == BUSY, holder.pinned, holder.used_at))
    chosen: list[Holder] = []
    trial = room.copy()
    for holder in order:
        lacking = trial.lacks(needs)
        if not lacking:
            break
        if lacking.intersection([*holder.amounts, COUNT]):
            trial.give_back(holder)
            chosen.append(holder)
    if not trial.fits(needs):
        return ()
    for holder in reversed(chosen[:]):
        others = [other for other in chosen if other is not holder]
        trial = room.copy()
        for other in others:
            trial.give_back(other)
        if trial.fits(needs):
            chosen = others
    return tuple(chosen)


def whose_end_frees(amounts: Mapping[str, int], holders: Iterable[Holder]) -> tuple[Holder, ...]:
    """The idle ones that hold so much together and are not pinned, chosen as victims_for() does. None: all hold too little."""
    nothing = Room(Reading(tuple(Pool(pool, 0, 0, 0) for pool in amounts)), 0, ())
    return victims_for(amounts, nothing, [holder for holder in holders if holder.kind == IDLE and not holder.pinned])


def too_little(amounts: Mapping[str, int], holders: Iterable[Holder]) -> str:
    """Why whose_end_frees() found none; MB is 2^20 bytes."""
    holders = tuple(holders)
    kept = {holder.model: holder.kind for holder in holders if holder.kind != IDLE}
    kept |= {holder.model: "pinned" for holder in holders if holder.kind == IDLE and holder.pinned}
    sums = []
    for pool, amount in sorted(amounts.items()):
        idle = sum(holder.amounts.get(pool, 0) for holder in holders if holder.model not in kept)
        sums.append(f"idle models hold {idle // MIB} MB of {pool}, and {-(-amount // MIB)} MB are wanted")
    names = ", ".join(f"{model} is {why}" for model, why in kept.items())
    return "; ".join(sums) + (f" ({names})" if names else "")


def shortage(model: str, placements: tuple[Placement, ...], never: Never, pools: tuple[Pool, ...]) -> str:
    """The arithmetic of a refusal, for the placement that comes nearest. MB is 2^20 bytes; needs round up, room rounds down."""
    by_id = {pool.id: pool for pool in pools}
    short, pool_id, amount, room, device = min(
        max((amount - rooms[pool_id], pool_id, amount, rooms[pool_id], placement.device) for pool_id, amount in placement.amounts)
        for placement, rooms in zip(placements, never.rooms)
        if placement.amounts
    )
    needs = f"{model} needs {-(-amount // MIB)} MB of {pool_id}" + (f" to run on {device}" if device else "")
    pool = by_id.get(pool_id)
    if pool is None:
        return f"{needs}, and there is no such memory"
    if pool.blocked:
        return f"{needs}, and nothing can be started there: {pool.blocked}"
    parts = [f"{pool.reserve_bytes // MIB} MB stay free"]
    if pool.others_bytes:
        parts.append(f"others hold {pool.others_bytes // MIB} MB")
    accounted = pool.total_bytes - pool.reserve_bytes - pool.others_bytes
    if room < accounted:
        parts.append(f"{pool.available_bytes // MIB} MB are free now")
    return (
        f"{needs}, and at most {room // MIB} MB of its {pool.total_bytes // MIB} MB could be had ({', '.join(parts)}): "
        f"{-(-short // MIB)} MB too little"
    )


def may_come(placements: tuple[Placement, ...], reading: Reading) -> bool:
    """Whether one of them would fit if everybody else let go: then it is worth asking again."""
    sizes = {pool.id: pool.total_bytes - pool.reserve_bytes for pool in reading.pools}
    return any(all(amount <= sizes.get(pool, -1) for pool, amount in way.amounts) for way in placements)
