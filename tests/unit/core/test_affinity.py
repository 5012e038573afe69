"""Which cores a server gets: the share's floor, at least one, some of each kind left to the desktop."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkguard.core.affinity import Core, cores_for, format_cpus, parse_cpus
from sparkguard.core.share import WHOLE, parse_share

# DGX Spark: CPUs 0-4 and 10-14 are A725, 5-9 and 15-19 are X925 (cpu_capacity of the kernel).
GB10 = tuple(Core(cpu, 718 if cpu % 10 < 5 else 1024) for cpu in range(20))
HYPERTHREADS = tuple(Core(cpu, 1, cpu % 16) for cpu in range(32))
P_AND_E = (*(Core(cpu, 1, cpu - cpu % 2) for cpu in range(16)), *(Core(cpu, 0) for cpu in range(16, 24)))


def alike(count: int) -> tuple[Core, ...]:
    return tuple(Core(cpu, 1) for cpu in range(count))


CHOSEN = {
    "1 core": (alike(1), "0.80", "0"),
    "2 cores": (alike(2), "0.80", "0"),
    "4 cores": (alike(4), "0.80", "0-2"),
    "8 cores": (alike(8), "0.80", "0-5"),
    "20 cores": (alike(20), "0.80", "0-15"),
    "at least one": (alike(20), "0.01", "0"),
    "floor": (alike(20), "0.8499", "0-15"),
    "exactly 0.70 of 10, which is 6.99 as floats": (alike(10), "0.70", "0-6"),
    "all": (alike(20), "1.0", "0-19"),
    "GB10": (GB10, "0.80", "0-12,15-17"),
    "GB10, an odd number: the server gets the fast one": (GB10, "0.85", "0-12,15-18"),
    "GB10, all but one: no kind can keep a core each": (GB10, "0.95", "0-13,15-19"),
    "GB10, half": (GB10, "0.50", "0-9"),
    "GB10, all": (GB10, "1", "0-19"),
    "GB10, one": (GB10, "0.05", "5"),
    "hyperthreads of a core go together": (HYPERTHREADS, "0.75", "0-11,16-27"),
    "hyperthreads, an odd number splits one core": (HYPERTHREADS, "0.80", "0-12,16-27"),
    "fast cores with threads and slow ones without": (P_AND_E, "0.80", "0-12,16-21"),
    "what is left of an affinity": ((Core(3), Core(7), Core(11), Core(15)), "0.50", "3,7"),
}


@pytest.mark.parametrize(("cores", "share", "chosen"), CHOSEN.values(), ids=CHOSEN)
def test_cores_of_a_share(cores: tuple[Core, ...], share: str, chosen: str) -> None:
    """A machine and a share give these CPUs."""
    assert format_cpus(cores_for(parse_share(share), cores)) == chosen


MACHINES = st.lists(st.integers(0, 2), min_size=1, max_size=24).map(
    lambda kinds: tuple(Core(cpu, kind) for cpu, kind in enumerate(kinds))
)


@given(MACHINES, st.integers(1, WHOLE))
def test_the_desktop_keeps_some_of_each_kind(cores: tuple[Core, ...], share: int) -> None:
    """The number is exact, and as long as enough cores are left, each kind keeps one."""
    chosen = set(cores_for(share, cores))
    assert len(chosen) == max(1, share * len(cores) // WHOLE)
    assert chosen <= {core.cpu for core in cores}
    kinds = {core.capacity for core in cores}
    left = [core.capacity for core in cores if core.cpu not in chosen]
    if len(left) >= len(kinds):
        assert set(left) == kinds


@given(st.sets(st.integers(0, 300)))
def test_the_kernels_list_format_reads_back(cpus: set[int]) -> None:
    """format_cpus() and parse_cpus() are inverse, the empty list included."""
    assert set(parse_cpus(format_cpus(tuple(cpus)))) == cpus


def test_no_list_of_cpus() -> None:
    """parse_cpus() raises ValueError for what the kernel would not write."""
    with pytest.raises(ValueError, match="invalid literal"):
        parse_cpus("0-x")
