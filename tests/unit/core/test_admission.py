"""The decision: every reason, every pool, and what must hold for any machine."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sparkguard.core.admission import admit, missing_bytes
from sparkguard.core.share import WHOLE, bytes_of, format_share, parse_share
from sparkguard.core.types import DISCRETE, RAM, UNIFIED, UNKNOWN, Budget, Claim, Hold, MemoryPool, Verdict, Wanted

GIB = 1 << 30
TOTAL = 100 * GIB
BUDGET = Budget(parse_share("0.80"))
ALLOW = BUDGET.replace(allow_unknown=True)


def pool(id: str = "ram", available_gib: float | None = 100, total_gib: int | None = 100, kind: str = UNIFIED) -> MemoryPool:
    available = None if available_gib is None else int(available_gib * GIB)
    return MemoryPool(id, kind, None if total_gib is None else total_gib * GIB, available)


def hold(share: str | None, pool: str = "ram", taken: str = "1") -> Hold:
    """taken is of the hold itself: a loaded server has taken all of it."""
    if share is None:
        return Hold(pool, None, None)
    amount = bytes_of(parse_share(share), TOTAL)
    return Hold(pool, parse_share(share), amount, bytes_of(parse_share(taken), amount))


def claim(pid: int, *holds: Hold, grows: bool = True, orphan: bool = False) -> Claim:
    return Claim(pid, "vllm", holds, "argument", grows=grows, orphan=orphan)


def wanted(*holds: Hold) -> Wanted:
    return Wanted("new", holds)


GPU0, GPU1 = pool("gpu0", kind=DISCRETE), pool("gpu1", kind=DISCRETE)
ORPHAN = claim(7, hold(None), orphan=True)
NOBODY_KNOWS = claim(8, hold(None))
IDLE_OLLAMA = claim(9, hold(None), grows=False)

VERDICTS = {
    "nothing else runs": (BUDGET, (pool(),), (), (hold("0.70"),), "fits"),
    "exactly the budget": (BUDGET, (pool(),), (claim(1, hold("0.10")),), (hold("0.70"),), "fits"),
    "a billionth over": (BUDGET, (pool(),), (claim(1, hold("0.10")),), (hold("0.700000001"),), "over_budget"),
    "exactly the budget alone": (BUDGET, (pool(),), (), (hold("0.80"),), "fits"),
    "the mission's retune beside embeddings": (BUDGET, (pool(),), (claim(1, hold("0.10")),), (hold("0.75"),), "over_budget"),
    "the mission's retune alone": (BUDGET, (pool(),), (), (hold("0.75"),), "fits"),
    "more than the budget alone": (BUDGET, (pool(),), (), (hold("0.95"),), "never_fits"),
    "more bytes than the pool": (Budget(WHOLE), (pool(),), (), (hold("0.96"),), "never_fits"),
    "never, whoever else is unknown": (BUDGET, (pool(),), (ORPHAN,), (hold("0.95"),), "never_fits"),
    "0.9 on each of two GPUs": (
        Budget(parse_share("0.9")), (GPU0, GPU1), (claim(1, hold("0.9", "gpu0")),), (hold("0.9", "gpu1"),), "fits"
    ),
    "0.9 twice on one GPU": (
        Budget(parse_share("0.9")), (GPU0, GPU1), (claim(1, hold("0.9", "gpu0")),), (hold("0.9", "gpu0"),), "over_budget"
    ),
    "one of two GPUs is full": (
        BUDGET, (GPU0, GPU1), (claim(1, hold("0.5", "gpu1")),), (hold("0.4", "gpu0"), hold("0.4", "gpu1")), "over_budget"
    ),
    "an orphan": (BUDGET, (pool(),), (ORPHAN,), (hold("0.10"),), "orphan"),
    "an orphan that is measured": (
        BUDGET, (pool(),), (claim(7, hold("0.10"), orphan=True),), (hold("0.10"),), "orphan"
    ),
    "an orphan, overridden": (ALLOW, (pool(),), (ORPHAN,), (hold("0.10"),), "fits"),
    "an orphan on another GPU": (
        BUDGET, (GPU0, GPU1), (claim(7, hold(None, "gpu1"), orphan=True),), (hold("0.10", "gpu0"),), "fits"
    ),
    "an unknown holder": (BUDGET, (pool(),), (NOBODY_KNOWS,), (hold("0.10"),), "unknown_holder"),
    "an unknown holder, overridden": (ALLOW, (pool(),), (NOBODY_KNOWS,), (hold("0.10"),), "fits"),
    "overridden, but over the budget": (
        ALLOW, (pool(),), (NOBODY_KNOWS, claim(1, hold("0.75"))), (hold("0.10"),), "over_budget"
    ),
    "overridden, but the memory is taken": (ALLOW, (pool(available_gib=10),), (NOBODY_KNOWS,), (hold("0.10"),), "memory_taken"),
    "an orphan before an unknown": (BUDGET, (pool(),), (NOBODY_KNOWS, ORPHAN), (hold("0.10"),), "orphan"),
    "an unknown that is known on the GPU wanted": (
        BUDGET, (GPU0, GPU1), (claim(8, hold("0.1", "gpu0"), hold(None, "gpu1")),), (hold("0.10", "gpu0"),), "fits"
    ),
    "an idle Ollama": (BUDGET, (pool(),), (IDLE_OLLAMA,), (hold("0.70"),), "fits"),
    "an Ollama that has loaded": (BUDGET, (pool(available_gib=60),), (IDLE_OLLAMA,), (hold("0.70"),), "memory_taken"),
    "a GPU that says nothing": (
        BUDGET, (pool("gpu0", None, None, UNKNOWN),), (), (Hold("gpu0", parse_share("0.1"), None),), "unknown_pool"
    ),
    "a GPU whose free memory nobody tells": (BUDGET, (pool("gpu0", None),), (), (hold("0.1", "gpu0"),), "unknown_pool"),
    "a GPU that says nothing, overridden: shares decide": (
        ALLOW, (pool("gpu0", None, None, UNKNOWN),), (), (Hold("gpu0", parse_share("0.1"), None),), "fits"
    ),
    "a GPU that says nothing, overridden, and over the budget": (
        ALLOW, (pool("gpu0", None, None, UNKNOWN),), (claim(1, Hold("gpu0", parse_share("0.75"), None)),),
        (Hold("gpu0", parse_share("0.1"), None),), "over_budget",
    ),
    "the desktop has it": (BUDGET, (pool(available_gib=50),), (), (hold("0.50"),), "memory_taken"),
    "to the last byte, with 5 % kept": (BUDGET, (pool(available_gib=55),), (), (hold("0.50"),), "fits"),
    "a loading server has not taken its part yet": (
        BUDGET, (pool(available_gib=74),), (claim(1, hold("0.40", taken="0.25")),), (hold("0.40"),), "memory_taken"
    ),
    "the same, loaded": (BUDGET, (pool(available_gib=60),), (claim(1, hold("0.40")),), (hold("0.40"),), "fits"),
    "one of two GPUs is taken by something else": (
        BUDGET, (GPU0, GPU1.replace(available_bytes=30 * GIB)), (), (hold("0.4", "gpu0"), hold("0.4", "gpu1")), "memory_taken"
    ),
    "a machine without a GPU": (BUDGET, (pool(kind=RAM),), (claim(1, hold("0.10")),), (hold("0.70"),), "fits"),
}  # fmt: skip


@pytest.mark.parametrize(("budget", "pools", "claims", "holds", "reason"), VERDICTS.values(), ids=VERDICTS)
def test_verdict(
    budget: Budget, pools: tuple[MemoryPool, ...], claims: tuple[Claim, ...], holds: tuple[Hold, ...], reason: str
) -> None:
    """A machine, what runs on it and a start give this reason, and only 'fits' is admitted."""
    verdict = admit(budget, pools, claims, wanted(*holds))
    assert verdict.reason == reason
    assert verdict.admitted == (reason == "fits")


def test_the_deciding_pool_is_named() -> None:
    """Of two GPUs the full one is the one that the verdict speaks of."""
    verdict = admit(BUDGET, (GPU0, GPU1), (claim(1, hold("0.5", "gpu1")),), wanted(hold("0.4", "gpu0"), hold("0.4", "gpu1")))
    assert verdict.pool == "gpu1"


def test_who_is_overridden_stands_in_the_verdict() -> None:
    """VLLM_MEM_ALLOW_UNKNOWN leaves a trace: whom it counted as nothing. An idle Ollama needs no override."""
    assert admit(ALLOW, (pool(),), (NOBODY_KNOWS, IDLE_OLLAMA), wanted(hold("0.1"))).overridden == (NOBODY_KNOWS,)
    assert admit(BUDGET, (pool(),), (NOBODY_KNOWS,), wanted(hold("0.1"))).overridden == ()


RESERVES = {
    "5 % of a large pool": (None, 100, 5 * GIB),
    "1024 MB of a small one": (None, 16, GIB),
    "as large at 20 GiB": (None, 20, GIB),
    "SPARK_MEMORY_RESERVE_MB": (3 << 20, 100, 3 << 20),
    "SPARK_MEMORY_RESERVE_MB=0": (0, 100, 0),
}


@pytest.mark.parametrize(("reserve", "total", "kept"), RESERVES.values(), ids=RESERVES)
def test_reserve(reserve: int | None, total: int, kept: int) -> None:
    """What stays free: the setting, else the larger of 1024 MB and 5 % of the pool; a byte more is refused."""
    budget = Budget(WHOLE, reserve)
    small = Hold("ram", 1, GIB)
    machine = MemoryPool("ram", UNIFIED, total * GIB, GIB + kept)
    verdict = admit(budget, (machine,), (), wanted(small))
    assert verdict.sums[0].reserve_bytes == kept
    assert verdict.admitted
    assert admit(budget, (machine.replace(available_bytes=GIB + kept - 1),), (), wanted(small)).reason == "memory_taken"


SIX = tuple(claim(pid, hold(share)) for pid, share in ((1, "0.05"), (2, "0.15"), (3, "0.20"), (4, "0.10"), (5, "0.25")))
WHOM = {
    "the smallest that is enough": (SIX, "0.15", [4]),
    "one that is exactly enough": (SIX, "0.20", [2]),
    "the largest when one is not enough": (SIX, "0.50", [5, 3]),
    "all but none too many": (SIX, "0.75", [5, 3, 2, 4]),
}


@pytest.mark.parametrize(("claims", "share", "pids"), WHOM.values(), ids=WHOM)
def test_whom_to_stop(claims: tuple[Claim, ...], share: str, pids: list[int]) -> None:
    """A refusal over the budget names the smallest holder whose end is enough, else the largest until it is."""
    verdict = admit(BUDGET, (pool(),), claims, wanted(hold(share)))
    assert [culprit.pid for culprit in verdict.culprits] == pids
    left = tuple(one for one in claims if one not in verdict.culprits)
    assert admit(BUDGET, (pool(),), left, wanted(hold(share))).admitted


def test_whom_to_stop_on_two_gpus() -> None:
    """Where two GPUs are over the budget by two servers, both must end."""
    one, other = claim(1, hold("0.5", "gpu0")), claim(2, hold("0.6", "gpu1"))
    verdict = admit(BUDGET, (GPU0, GPU1), (one, other), wanted(hold("0.4", "gpu0"), hold("0.4", "gpu1")))
    assert verdict.culprits == (one, other)


def test_whom_to_stop_for_memory() -> None:
    """Where bytes are missing, the holder whose end would bring them is named; nobody, where all would not be enough."""
    claims = (claim(1, hold("0.05")), claim(2, hold("0.20")))
    short = admit(BUDGET, (pool(available_gib=50),), claims, wanted(hold("0.50")))
    assert (short.reason, [culprit.pid for culprit in short.culprits]) == ("memory_taken", [1])
    hopeless = admit(BUDGET, (pool(available_gib=10),), claims, wanted(hold("0.50")))
    assert (hopeless.reason, hopeless.culprits) == ("memory_taken", ())


def test_missing_bytes() -> None:
    """What a waiting start waits for: wanted, what others have yet to take, and the reserve, less what there is."""
    verdict = admit(BUDGET, (pool(available_gib=50),), (claim(1, hold("0.10", taken="0.5")),), wanted(hold("0.50")))
    assert missing_bytes(verdict.sums[0]) == (50 + 5 + 5 - 50) * GIB


# From here: any machine. Totals and shares are odd on purpose, so that every rounding is met.
SHARES = st.integers(1, WHOLE)
SMALL_SHARES = st.integers(1, WHOLE // 5)


@st.composite
def machines(draw: st.DrawFn, idle: bool = False) -> tuple[MemoryPool, ...]:
    pools = []
    for number in range(draw(st.integers(1, 3))):
        total = draw(st.integers(GIB, 200 * GIB))
        pools.append(MemoryPool(f"gpu{number}", DISCRETE, total, total if idle else draw(st.integers(0, total))))
    return tuple(pools)


@st.composite
def holds_on(draw: st.DrawFn, pools: tuple[MemoryPool, ...], shares: st.SearchStrategy[int] = SHARES) -> tuple[Hold, ...]:
    chosen = draw(st.sets(st.sampled_from(pools), min_size=1))
    share = draw(shares)
    holds = []
    for one in sorted(chosen, key=lambda pool: pool.id):
        amount = bytes_of(share, one.total_bytes or 0)
        holds.append(Hold(one.id, share, amount, draw(st.integers(0, amount))))
    return tuple(holds)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Budget, tuple[MemoryPool, ...], tuple[Claim, ...], Wanted]:
    pools = draw(machines())
    claims = []
    for pid in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["declared", "declared", "declared", "unknown", "orphan", "idle"]))
        holds = draw(holds_on(pools))
        if kind != "declared":
            holds = tuple(Hold(one.pool, None, None) for one in holds)
        claims.append(claim(pid, *holds, grows=kind != "idle", orphan=kind == "orphan"))
    budget = Budget(draw(SHARES), draw(st.none() | st.integers(0, 4 * GIB)), draw(st.booleans()))
    return budget, pools, tuple(claims), wanted(*draw(holds_on(pools)))


@st.composite
def likely_cases(draw: st.DrawFn) -> tuple[Budget, tuple[MemoryPool, ...], tuple[Claim, ...], Wanted]:
    """Small servers of known size on an idle machine: about half are admitted, and the others are over the budget."""
    pools = draw(machines(idle=True))
    claims = tuple(claim(pid, *draw(holds_on(pools, SMALL_SHARES))) for pid in range(draw(st.integers(0, 4))))
    budget = Budget(draw(st.integers(WHOLE // 5, WHOLE // 2)), 0)
    return budget, pools, claims, wanted(*draw(holds_on(pools, SMALL_SHARES)))


def summed(claims: tuple[Claim, ...], pool: str) -> int:
    return sum(hold.share or 0 for claim in claims for hold in claim.holds if hold.pool == pool)


@given(likely_cases())
def test_what_is_admitted_is_within_budget_and_memory(
    case: tuple[Budget, tuple[MemoryPool, ...], tuple[Claim, ...], Wanted],
) -> None:
    """Worked out a second way: an admitted start's sum is within the budget, and its bytes are there, on every pool."""
    budget, pools, claims, start = case
    assume(admit(budget, pools, claims, start).admitted)
    for hold in start.holds:
        one = next(pool for pool in pools if pool.id == hold.pool)
        assert summed(claims, one.id) + (hold.share or 0) <= budget.share
        to_come = sum(max(0, (held.bytes or 0) - held.taken_bytes) for c in claims for held in c.holds if held.pool == one.id)
        assert (one.available_bytes or 0) >= (hold.bytes or 0) + to_come + (budget.reserve_bytes or 0)


@given(cases(), st.data())
def test_one_more_claim_never_admits(
    case: tuple[Budget, tuple[MemoryPool, ...], tuple[Claim, ...], Wanted], data: st.DataObject
) -> None:
    """Whatever joins, a refusal stays a refusal."""
    budget, pools, claims, start = case
    assume(not admit(budget, pools, claims, start).admitted)
    more = claim(99, *data.draw(holds_on(pools)))
    assert not admit(budget, pools, (*claims, more), start).admitted


@given(machines(), SHARES, st.data())
def test_starts_one_after_another_never_exceed_the_budget(pools: tuple[MemoryPool, ...], share: int, data: st.DataObject) -> None:
    """However many ask, those admitted stay within the budget on every pool."""
    admitted: tuple[Claim, ...] = ()
    for pid in range(data.draw(st.integers(1, 6))):
        holds = data.draw(holds_on(pools))
        if admit(Budget(share), pools, admitted, wanted(*holds)).admitted:
            admitted = (*admitted, claim(pid, *(hold.replace(taken_bytes=0) for hold in holds)))
    for one in pools:
        assert summed(admitted, one.id) <= share


@given(cases())
def test_the_room_that_is_told_is_the_room(case: tuple[Budget, tuple[MemoryPool, ...], tuple[Claim, ...], Wanted]) -> None:
    """The largest share that would fit, as told, is admitted, and a hundredth more is not."""
    budget, pools, claims, start = case
    declared = tuple(one for one in claims if not one.orphan and all(hold.share is not None for hold in one.holds))

    def ask(share: int) -> Verdict:
        sized = {pool.id: bytes_of(share, pool.total_bytes or 0) for pool in pools}
        return admit(budget, pools, declared, wanted(*(Hold(h.pool, share, sized[h.pool]) for h in start.holds)))

    room = min(total.room_share for total in ask(WHOLE).sums)
    assert room % (WHOLE // 100) == 0
    assert not ask(max(0, room) + WHOLE // 100).admitted, format_share(room)
    if room > 0:
        assert ask(room).admitted, format_share(room)


@given(st.lists(SHARES, min_size=1, max_size=8), SHARES, st.data())
def test_ending_whom_it_names_is_enough(shares: list[int], share: int, data: st.DataObject) -> None:
    """After the end of those that a refusal over the budget names, the start is admitted, and no one of them is needless."""
    budget = Budget(sum(shares) + share - data.draw(st.integers(1, sum(shares))), 0)
    claims = tuple(claim(pid, Hold("ram", held, 1)) for pid, held in enumerate(shares))
    start = wanted(Hold("ram", share, 1))
    culprits = admit(budget, (pool(),), claims, start).culprits
    assert culprits
    for needed in ((), *((one,) for one in culprits)):
        left = tuple(one for one in claims if one not in culprits or one in needed)
        assert admit(budget, (pool(),), left, start).admitted == (not needed)
