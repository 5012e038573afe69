"""Sets of units against the budget: the mission's table, a brute force over all sets, and the edges."""

from __future__ import annotations

from itertools import chain, combinations, permutations

from hypothesis import given
from hypothesis import strategies as st

from sparkguard.core.plan import MOST_UNITS, Member, Plan, plan
from sparkguard.core.share import WHOLE, parse_share

CENT = WHOLE // 100


def members(budget: str = "0.80", pool: str = "ram", **shares: str) -> list[Member]:
    return [Member(unit, {pool: parse_share(share)}, parse_share(budget)) for unit, share in shares.items()]


def test_a_configuration_that_was_in_use() -> None:
    """0.10, 0.65, 0.75 and 0.95 under 0.80: one unit fits nowhere, and the always-on one excludes another."""
    found = plan(members(embeddings="0.10", gemma4="0.65", vision_agent="0.75", longcontext="0.95"), {}, [])
    assert found == Plan(
        maximal_sets=(("vision_agent",), ("embeddings", "gemma4")),
        never_together=(("longcontext",), ("embeddings", "vision_agent"), ("gemma4", "vision_agent")),
    )


def test_equality_with_the_budget_fits() -> None:
    """0.10 + 0.70 is 0.80 exactly."""
    assert plan(members(a="0.10", b="0.70"), {}, []).maximal_sets == (("a", "b"),)


def test_what_conflicts_is_in_no_set() -> None:
    """Units that Conflicts= keeps apart are neither together in a set that fits nor named as too much."""
    found = plan(members(a="0.70", b="0.65", c="0.10"), {}, [("b", "a")])
    assert found == Plan(maximal_sets=(("a", "c"), ("b", "c")), never_together=())


def test_each_device_is_added_up_alone() -> None:
    """Two servers on two GPUs fit; a third one on both fits beside neither."""
    half = {"gpu0": 60 * CENT}
    both = {"gpu0": 50 * CENT, "gpu1": 50 * CENT}
    found = plan(
        [Member("a", half, 80 * CENT), Member("b", {"gpu1": 60 * CENT}, 80 * CENT), Member("c", both, 80 * CENT)], {}, []
    )
    assert found == Plan(maximal_sets=(("c",), ("a", "b")), never_together=(("a", "c"), ("b", "c")))


def test_a_pool_gives_no_more_than_its_cap() -> None:
    """A budget of 1.00 does not reach into the reserve."""
    assert plan(members("1.00", a="0.50", b="0.48"), {"ram": 95 * CENT}, []).never_together == (("a", "b"),)


def test_a_unit_with_a_smaller_budget_can_go_first() -> None:
    """A start is judged by its own budget: under 0.55 the small one fits only while it is the first."""
    small, large = Member("small", {"ram": 10 * CENT}, 55 * CENT), Member("large", {"ram": 60 * CENT}, 80 * CENT)
    assert plan([large, small], {}, []).maximal_sets == (("large", "small"),)
    assert plan([large, small.replace(budget=5 * CENT)], {}, []).never_together == (("small",),)


def test_nothing_makes_no_sets() -> None:
    """No units, no sets, not even an empty one."""
    assert plan([], {}, []) == Plan((), ())


def test_alike_units_make_every_set_of_one_size() -> None:
    """Twelve units of 0.10 make all 495 sets of eight, and none of nine."""
    found = plan(members(**{f"u{i:02}": "0.10" for i in range(12)}), {}, [])
    assert (len(found.maximal_sets), {len(units) for units in found.maximal_sets}) == (495, {8})
    assert (len(found.never_together), {len(units) for units in found.never_together}) == (220, {9})


SIZES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60), st.sampled_from([55, 80, 100])), min_size=1, max_size=6)


@given(SIZES, st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=4), st.sampled_from([70, 95]))
def test_the_sets_are_those_of_a_brute_force(sizes: list[tuple[int, int, int]], pairs: set[tuple[int, int]], cap: int) -> None:
    """Over all sets and all orders of starts: the largest that fit, and the smallest that do not."""
    every = [
        Member(f"u{i}", {pool: share * CENT for pool, share in (("gpu0", a), ("gpu1", b)) if share}, budget * CENT)
        for i, (a, b, budget) in enumerate(sizes)
    ]
    conflicts = [(f"u{a}", f"u{b}") for a, b in pairs if a != b]
    limits = {"gpu0": cap * CENT}

    def admitted(order: tuple[Member, ...]) -> bool:
        sums: dict[str, int] = {}
        for member in order:
            for pool, share in member.shares.items():
                sums[pool] = sums.get(pool, 0) + share
                if sums[pool] > min(member.budget, limits.get(pool, WHOLE)):
                    return False
        return True

    barred = [{*pair} for pair in conflicts]
    sets = chain.from_iterable(combinations(every, n) for n in range(1, len(every) + 1))
    peaceful = [chosen for chosen in sets if not any(pair <= {member.unit for member in chosen} for pair in barred)]
    fit = {tuple(member.unit for member in chosen): any(admitted(order) for order in permutations(chosen)) for chosen in peaceful}
    fitting = {units for units in fit if fit[units]}
    largest = {units for units in fitting if not any({*units} < {*others} for others in fitting)}
    smallest = {
        units for units in set(fit) - fitting if all(rest in fitting for rest in combinations(units, len(units) - 1) if rest)
    }

    found = plan(every, limits, conflicts)

    assert set(found.maximal_sets) == largest
    assert set(found.never_together) == smallest


def test_units_that_all_fit_together() -> None:
    """Twenty small ones make one set, and its million subsets are not tried one by one."""
    found = plan(members(**{f"u{i:02}": "0.01" for i in range(MOST_UNITS)}), {}, [])
    assert [len(units) for units in found.maximal_sets] == [MOST_UNITS]
