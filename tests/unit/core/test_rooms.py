"""Who gets memory, and who has to go for it."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkguard.core.events import Placement, Pool, Reading
from sparkguard.core.rooms import (
    BUSY,
    ENDING,
    IDLE,
    LEAVING,
    Holder,
    Never,
    Room,
    Start,
    Wait,
    Want,
    needs_of,
    plan,
    shortage,
    victims_for,
)

MIB = 1 << 20


def reading(total: int = 1000, free: int | None = None, reserve: int = 0, others: int = 0, outstanding: int = 0) -> Reading:
    free = total - others if free is None else free
    return Reading((Pool("ram", total * MIB, free * MIB, reserve * MIB, others * MIB, outstanding * MIB),))


def holder(name: str, mib: int, kind: str = IDLE, used_at: float = 0, pinned: bool = False, pool: str = "ram") -> Holder:
    return Holder(name, 1, kind, {pool: mib * MIB}, used_at, pinned)


def want(mib: int, order: int = 1, name: str = "new", may_evict: bool = True) -> Want:
    return Want(name, order, (Placement("cpu", (("ram", mib * MIB),)),), may_evict)


def names(holders: tuple[Holder, ...]) -> list[str]:
    return [holder.model for holder in holders]


@pytest.mark.parametrize(
    ("read", "mib", "fits"),
    [
        (reading(), 1000, True),
        (reading(), 1001, False),
        (reading(reserve=24), 976, True),
        (reading(reserve=24), 977, False),
        (reading(others=400), 601, False),
        (reading(free=300), 301, False),  # somebody who claims nothing has the rest
        (reading(free=1000, others=400, outstanding=400), 601, False),  # claimed, though not taken yet
        (reading(free=600, others=400), 600, True),
    ],
)
def test_both_sums_must_have_room(read: Reading, mib: int, fits: bool) -> None:
    """What is claimed counts before it is taken, and what is taken counts although nobody claims it."""
    (answer,) = plan(read, 0, (), (want(mib),))
    assert isinstance(answer, Start) is fits
    assert isinstance(answer, Never) is not fits


def test_a_runner_counts_once() -> None:
    """What it has taken is out of the free memory already; only the rest of its promise is still to come."""
    read = reading(free=900).replace(taken={("a", 1): {"ram": 100 * MIB}})
    runner = holder("a", 400, BUSY)
    assert isinstance(plan(read, 0, (runner,), (want(600),))[0], Start)
    assert not isinstance(plan(read, 0, (runner,), (want(601),))[0], Start)


@pytest.mark.parametrize("kind", [LEAVING, ENDING])
def test_what_is_leaving_is_waited_for(kind: str) -> None:
    """Nobody else is evicted for room that is coming."""
    answer = plan(reading(), 0, (holder("a", 600, kind), holder("b", 400)), (want(500),))[0]
    assert isinstance(answer, Wait)
    assert answer.evict == answer.bar == ()


def test_the_least_recently_used_goes_first() -> None:
    """Idle ones in the order of their last use."""
    holders = (holder("new", 300, used_at=3), holder("old", 300, used_at=1), holder("middle", 300, used_at=2))
    answer = plan(reading(900), 0, holders, (want(500),))[0]
    assert isinstance(answer, Wait)
    assert sorted(names(answer.evict)) == ["middle", "old"]


def test_nobody_goes_in_vain() -> None:
    """A small one that is older stays when the large one after it is enough alone."""
    answer = plan(reading(900), 0, (holder("small", 100, used_at=1), holder("large", 800, used_at=2)), (want(700),))[0]
    assert isinstance(answer, Wait)
    assert names(answer.evict) == ["large"]


def test_pinned_ones_go_last() -> None:
    """Although they were used longest ago."""
    holders = (holder("pinned", 500, used_at=1, pinned=True), holder("other", 500, used_at=2))
    answer = plan(reading(), 0, holders, (want(500),))[0]
    assert isinstance(answer, Wait)
    assert names(answer.evict) == ["other"]


def test_busy_ones_are_waited_for() -> None:
    """They are told to take nothing younger, and nothing is stopped."""
    answer = plan(reading(), 0, (holder("busy", 900, BUSY),), (want(500),))[0]
    assert isinstance(answer, Wait)
    assert answer.evict == ()
    assert names(answer.bar) == ["busy"]


def test_the_cap_is_a_pool_of_its_own() -> None:
    """At SPARK_MAX_LOADED_MODELS an idle one goes although there is memory for both, and so its end is not waited for."""
    answer = plan(reading(), 1, (holder("a", 500),), (want(500),))[0]
    assert isinstance(answer, Start)
    assert names(answer.evict) == ["a"]


@pytest.mark.parametrize(
    ("free", "taken", "mib"),
    [
        (1000, 0, 501),  # accounted: 500 and 501 are more than there is
        (400, 100, 1),  # live: the one that leaves was promised 400 more
    ],
)
def test_the_memory_of_a_leaving_one_counts_until_it_has_ended(free: int, taken: int, mib: int) -> None:
    """Only its place is free when it is told to stop."""
    read = reading(free=free).replace(taken={("a", 1): {"ram": taken * MIB}})
    answer = plan(read, 1, (holder("a", 500),), (want(mib),))[0]
    assert isinstance(answer, Wait)
    assert names(answer.evict) == ["a"]


@pytest.mark.parametrize(("kind", "starts"), [(ENDING, True), (LEAVING, False), (BUSY, False)])
def test_only_what_was_told_to_stop_has_no_place(kind: str, starts: bool) -> None:
    """A model that still answers a request is loaded, though it takes no other."""
    answer = plan(reading(), 1, (holder("a", 10, kind),), (want(10),))[0]
    assert isinstance(answer, Start) is starts


def test_stuck_ones_do_not_pile_up() -> None:
    """One place, one that does not end: the next one is waited for, until any of them has ended."""
    stuck, used = holder("stuck", 10, ENDING), holder("used", 10)
    answer = plan(reading(), 1, (stuck, used), (want(10),))[0]
    assert isinstance(answer, Wait)
    assert names(answer.evict) == ["used"]
    ending = used.replace(kind=ENDING)
    assert plan(reading(), 1, (stuck, ending), (want(10),))[0] == Wait(want(10))
    assert plan(reading(), 1, (ending,), (want(10),))[0] == Start(want(10), want(10).placements[0])


def test_a_place_that_is_given_up_is_not_for_the_younger() -> None:
    """The older wish, for which the idle one had to go, waits for its memory; a small one would fit beside all of them."""
    answers = plan(reading(), 1, (holder("a", 500),), (want(600, 1, "large"), want(10, 2, "small")))
    assert [(type(answer), answer.want.model) for answer in answers] == [(Wait, "large"), (Wait, "small")]


def test_a_younger_wish_does_not_take_what_an_older_waits_for() -> None:
    """Else small models would keep a large one out for ever; what the older does not need may be had."""
    holders = (holder("busy", 600, BUSY),)
    large, small, smaller = want(900, 1, "large"), want(200, 2, "small"), want(100, 3, "smaller")
    answers = {answer.want.model: answer for answer in plan(reading(), 0, holders, (small, large, smaller))}
    assert isinstance(answers["large"], Wait)
    assert not isinstance(answers["small"], Start)
    assert isinstance(answers["smaller"], Start)


def test_a_restart_that_nobody_waits_for_evicts_nobody() -> None:
    """It is given up instead."""
    assert isinstance(plan(reading(), 0, (holder("a", 900),), (want(500, may_evict=False),))[0], Never)


def test_a_second_device_is_as_good() -> None:
    """Within a rank the one with room is taken before anybody has to go."""
    pools = tuple(Pool(id, 1000 * MIB, 1000 * MIB, 0) for id in ("gpu0", "gpu1"))
    ways = tuple(Placement(f"cuda:{n}", ((f"gpu{n}", 500 * MIB),)) for n in (0, 1))
    answer = plan(Reading(pools), 0, (holder("a", 900, pool="gpu0"),), (Want("new", 1, ways),))[0]
    assert answer == Start(Want("new", 1, ways), ways[1])


def test_a_later_rank_is_for_what_can_never_fit() -> None:
    """Experts go to the host's memory when the GPU is too small, not when somebody idle is on it."""
    pools = (Pool("gpu0", 1000 * MIB, 1000 * MIB, 0), Pool("ram", 4000 * MIB, 4000 * MIB, 0))
    whole = Placement("cuda:0", (("gpu0", 900 * MIB),))
    split = Placement("cuda:0", (("gpu0", 100 * MIB), ("ram", 800 * MIB)), 1, 4)
    wish = Want("new", 1, (whole, split))
    assert isinstance(plan(Reading(pools), 0, (holder("a", 500, pool="gpu0"),), (wish,))[0], Wait)
    smaller = (pools[0].replace(others_bytes=200 * MIB), pools[1])
    assert plan(Reading(smaller), 0, (), (wish,))[0] == Start(wish, split)


def test_memory_that_is_coming_back_is_waited_for() -> None:
    """A driver lags behind the end of a process: for a while the accounts are believed, and nobody is evicted or refused."""
    read = reading(free=300)
    assert plan(read, 0, (), (want(500),), settling=True)[0] == Wait(want(500), settling=True)
    assert isinstance(plan(read, 0, (), (want(500),))[0], Never)


def test_a_pool_of_unknown_holders_has_no_room() -> None:
    """Nobody can say what will be left of it."""
    read = Reading((Pool("ram", 1000 * MIB, 1000 * MIB, 0, blocked="pid 7 (vllm) does not say what it takes"),))
    answer = plan(read, 0, (), (want(1),))[0]
    assert isinstance(answer, Never)
    assert "pid 7 (vllm)" in shortage("new", want(1).placements, answer, read.pools)


def test_a_refusal_is_arithmetic() -> None:
    """Every number of the sum is in the text."""
    read = reading(8192, reserve=1024, others=5000)
    answer = plan(read, 0, (), (want(3000),))[0]
    assert isinstance(answer, Never)
    assert shortage("new", want(3000).placements, answer, read.pools) == (
        "new needs 3000 MB of ram to run on cpu, and at most 2168 MB of its 8192 MB could be had "
        "(1024 MB stay free, others hold 5000 MB): 832 MB too little"
    )


HOLDERS = st.lists(
    st.builds(
        lambda mib, kind, used, pinned: (mib, kind, used, pinned),
        st.integers(1, 500),
        st.sampled_from([IDLE, BUSY]),
        st.integers(0, 5),
        st.booleans(),
    ),
    max_size=6,
)


@given(HOLDERS, st.integers(1, 1500), st.integers(0, 3))
def test_victims_are_all_needed(described: list[tuple[int, str, int, bool]], mib: int, cap: int) -> None:
    """With them it fits, without any one of them it would not; a pinned or busy one only if the others are not enough."""
    holders = tuple(holder(str(at), *rest) for at, rest in enumerate(described))
    room = Room(reading(2000), cap, holders)
    needs = needs_of(want(mib).placements[0])

    def enough(victims: tuple[Holder, ...]) -> bool:
        trial = room.copy()
        for victim in victims:
            trial.give_back(victim)
        return trial.fits(needs)

    victims = victims_for(needs, room, holders)
    if enough(()):
        assert victims == ()
        return
    assert bool(victims) == enough(holders)
    if victims:
        assert enough(victims)
        assert not any(enough(fewer) for fewer in combinations(victims, len(victims) - 1))
        for better in (lambda one: one.kind == IDLE, lambda one: one.kind == IDLE and not one.pinned):
            if enough(tuple(filter(better, holders))):
                assert all(map(better, victims))
