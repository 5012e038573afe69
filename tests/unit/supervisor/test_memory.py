"""What the supervisor reads of the machine and keeps in the guard's ledger: real files, a real lock, made-up processes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from process_tree import ProcessTree

from sparkguard import guard
from sparkguard.core.events import Pool, Reading
from sparkguard.core.types import DISCRETE, RAM, UNKNOWN, Claim, Hold, MemoryPool
from sparkguard.errors import SparkguardError
from sparkguard.ledger import Ledger, Reservation, directory
from sparkguard.settings import load
from sparkguard.supervisor.memory import MachineMemory, pool_of

GIB = 1 << 30
BOOT = "11111111-2222-3333-4444-555555555555"


class Machine:
    """100 GiB without a GPU; process 50 is this one, as far as /proc tells."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.tree = ProcessTree(folder / "proc", meminfo={"MemTotal": 100 << 20, "MemAvailable": 95 << 20})
        for name in ("sys", "dev"):
            (folder / name).mkdir()
        self.roots = guard.Roots(str(self.tree.root), str(folder / "sys"), str(folder / "dev"))
        self.env = {"HOME": str(home), "XDG_RUNTIME_DIR": str(home / "run"), "PATH": "/nowhere"}
        self.tree.add(os.getpid(), ["python3", "sparkguard", "serve"])
        self.memory = MachineMemory(lambda: load(self.env), lambda pool: GIB, self.env, self.roots)

    def ledger(self, seconds: float = 10.0) -> Ledger:
        return Ledger(directory(self.env), self.roots.proc, seconds)

    def read(self, amounts: Mapping[str, int], pids: Mapping[tuple[str, int], int] | None = None) -> Reading:
        readings: list[Reading] = []

        def decide(reading: Reading) -> Mapping[str, int]:
            readings.append(reading)
            with pytest.raises(SparkguardError, match="has been held"), self.ledger(0.0):
                pass  # nobody else gets in while it decides
            return amounts

        asyncio.run(self.memory.read(pids or {}, decide))
        return readings[0]

    def reservations(self) -> list[tuple[int, tuple[Hold, ...]]]:
        with self.ledger() as held:
            return [(reservation.pid, reservation.holds) for reservation in held.live()]


@pytest.fixture
def machine(tmp_path: Path, home: Path) -> Machine:
    return Machine(tmp_path, home)


def test_an_idle_machine(machine: Machine) -> None:
    """All is there but the reserve."""
    reading = machine.read({})
    assert reading.pools == (Pool("ram", 100 * GIB, 95 * GIB, GIB),)
    assert machine.reservations() == []


def test_the_runners_are_one_reservation(machine: Machine) -> None:
    """Of the supervisor's own process; it follows what they hold."""
    machine.read({"ram": 10 * GIB})
    assert machine.reservations() == [(os.getpid(), (Hold("ram", 100_000_000, 10 * GIB),))]
    asyncio.run(machine.memory.hold(lambda: {"ram": 5 * GIB}))
    assert machine.reservations() == [(os.getpid(), (Hold("ram", 50_000_000, 5 * GIB),))]
    asyncio.run(machine.memory.hold(dict))
    assert machine.reservations() == []


def test_its_own_runners_are_not_others(machine: Machine) -> None:
    """They and its reservation are what the dispatcher accounts for; only what they have taken is read."""
    machine.tree.add(900, ["llama-server", "--port", "9000"], ppid=os.getpid(), anonymous_bytes=4 << 20)
    machine.read({"ram": 10 * GIB})
    reading = machine.read({"ram": 10 * GIB}, {("a", 1): 900})
    assert (reading.pools[0].others_bytes, reading.pools[0].blocked) == (0, None)
    assert reading.taken == {("a", 1): {"ram": 4 << 20}}


def test_all_claims_count(machine: Machine) -> None:
    """A vLLM by its share, and a start that the guard has admitted and nobody sees yet."""
    machine.tree.add(700, ["python3", "/v/bin/vllm", "serve", "o/n", "--gpu-memory-utilization", "0.30"])
    machine.tree.add(500, ["guard"])
    with machine.ledger() as held:
        held.hold(Reservation("other", 500, 1_000, BOOT, (Hold("ram", 200_000_000, 20 * GIB),)))
    (pool,) = machine.read({}).pools
    assert pool.others_bytes == 50 * GIB
    assert 49 * GIB < pool.outstanding_bytes <= 50 * GIB


def test_a_lock_that_is_held_is_an_error(machine: Machine) -> None:
    """Nothing is decided."""
    machine.memory._ledger = lambda: machine.ledger(0.0)  # type: ignore[method-assign]
    with machine.ledger(), pytest.raises(SparkguardError, match="has been held"):
        machine.read({})


def test_hidden_processes_are_an_error(machine: Machine) -> None:
    """As for the guard: who cannot see cannot count."""
    machine.tree.remove(1)
    with pytest.raises(SparkguardError, match="hidepid"):
        machine.read({})


HOST = MemoryPool("ram", RAM, 100 * GIB, 90 * GIB)


def claim(*holds: Hold, grows: bool = True, orphan: bool = False) -> Claim:
    return Claim(7, "vllm", holds, "argument", grows=grows, orphan=orphan)


@pytest.mark.parametrize(
    ("claims", "others", "outstanding", "blocked"),
    [
        ((), 0, 0, None),
        ((claim(Hold("ram", 1, 8 * GIB, 3 * GIB)),), 8 * GIB, 5 * GIB, None),
        ((claim(Hold("gpu0", 1, 8 * GIB)),), 0, 0, None),
        ((claim(Hold("ram", None, None)),), 0, 0, "nobody knows how much pid 7 (vllm) will hold"),
        ((claim(Hold("ram", None, None), grows=False),), 0, 0, None),  # what it has taken is not free any more
        ((claim(Hold("ram", 1, GIB, GIB), orphan=True),), GIB, 0, "pid 7 (vllm) still holds memory although its server is gone"),
    ],
)
def test_what_others_hold(claims: tuple[Claim, ...], others: int, outstanding: int, blocked: str | None) -> None:
    """Claimed, not yet taken, and unknown."""
    expected = Pool("ram", 100 * GIB, 90 * GIB, GIB, others, outstanding, blocked)
    assert pool_of(HOST, claims, GIB) == expected
    assert pool_of(HOST, claims, GIB, allow_unknown=True) == expected.replace(blocked=None)


@pytest.mark.parametrize(
    ("pool", "words"),
    [
        (MemoryPool("gpu0", UNKNOWN, None), "nobody knows how large it is"),
        (MemoryPool("gpu0", DISCRETE, 8 * GIB), "nobody knows how much of it is free"),
    ],
)
def test_a_pool_that_nobody_can_read_is_not_used(pool: MemoryPool, words: str) -> None:
    """Not even with VLLM_MEM_ALLOW_UNKNOWN=1: there is nothing to compute with."""
    assert pool_of(pool, (), 0).blocked == pool_of(pool, (), 0, allow_unknown=True).blocked == words
