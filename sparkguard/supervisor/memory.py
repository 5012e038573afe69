"""The machine's memory as the supervisor sees it: what everybody else claims, what its runners have taken, and what it reserves.

All runners together are one reservation in the guard's ledger, held by the supervisor's own process, so that it ends with it
however that dies. It says what the runners may hold, which no llama-server says of itself; so whoever counts must count the
reservation and not the servers below its process.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping

from sparkguard import guard, ledger
from sparkguard.core.events import Pool, Reading
from sparkguard.core.share import share_of
from sparkguard.core.types import DISCRETE, Claim, Hold, MemoryPool
from sparkguard.errors import OSERR, SparkguardError
from sparkguard.probe import procfs
from sparkguard.settings import Settings

NAME = "runners"
ENGINE = "llama-server"


class MachineMemory:
    """The Memory of supervisor/protocol.py. settings() and reserve_of() are asked anew each time, so a reload needs nothing."""

    def __init__(
        self,
        settings: Callable[[], Settings],
        reserve_of: Callable[[MemoryPool], int],
        env: Mapping[str, str],
        roots: guard.Roots | None = None,
    ) -> None:
        self._settings = settings
        self._reserve_of = reserve_of
        self._env = env
        self._roots = roots or guard.Roots()
        self._totals: dict[str, int] = {}

    async def read(self, pids: Mapping[tuple[str, int], int], decide: Callable[[Reading], Mapping[str, int]]) -> None:
        held = self._ledger()
        # Waiting for the lock, NVML and /proc may take seconds; the answers to requests must not.
        reading = await asyncio.to_thread(self._lock_and_look, held, pids)
        try:
            self._reserve(held, decide(reading))
        finally:
            held.__exit__(None, None, None)

    async def hold(self, amounts: Callable[[], Mapping[str, int]]) -> None:
        held = self._ledger()
        await asyncio.to_thread(held.__enter__)
        try:
            self._reserve(held, amounts())
        finally:
            held.__exit__(None, None, None)

    def _ledger(self) -> ledger.Ledger:
        return ledger.Ledger(ledger.directory(self._env), self._roots.proc)

    def _lock_and_look(self, held: ledger.Ledger, pids: Mapping[tuple[str, int], int]) -> Reading:
        held.__enter__()
        try:
            return self._look(held, pids)
        except BaseException:
            held.__exit__(None, None, None)
            raise

    def _look(self, held: ledger.Ledger, pids: Mapping[tuple[str, int], int]) -> Reading:
        settings, roots = self._settings(), self._roots
        budget = guard.budget_of(settings)
        view = guard.look(settings, self._env, roots)
        if view.hidden and not budget.allow_unknown:
            raise SparkguardError(
                f"{roots.proc} hides other users' processes (hidepid=), and with them their servers",
                "mount it with gid= of a group of yours; or VLLM_MEM_ALLOW_UNKNOWN=1, and the live check alone sees them",
                OSERR,
            )
        ours = {os.getpid(), *pids.values()}
        mine = [entry for entry in view.seen if self._below(ours, entry.pids)]
        starts = tuple(start for start in held.live() if start.pid != os.getpid())
        claims = guard.count(tuple(entry for entry in view.seen if entry not in mine), starts, roots)
        self._totals = {pool.id: pool.total_bytes for pool in view.pools if pool.total_bytes}
        taken: dict[tuple[str, int], dict[str, int]] = {}
        for key, pid in pids.items():
            below = procfs.descendants(roots.proc, pid)
            amounts = taken[key] = {}
            if "ram" in self._totals:
                amounts["ram"] = procfs.private_bytes(roots.proc, below)
            for entry in mine:
                if set(below).intersection(entry.pids):
                    for hold in entry.claim.holds:
                        if hold.bytes is not None:
                            # A unified pool's CUDA memory shows in no process, a discrete one's is its own pool: no overlap.
                            amounts[hold.pool] = amounts.get(hold.pool, 0) + hold.taken_bytes
        pools = (pool_of(pool, claims, self._reserve_of(pool), budget.allow_unknown) for pool in view.pools)
        return Reading(tuple(pools), taken)

    def _below(self, ours: set[int], pids: Iterable[int]) -> bool:
        return any(ours.intersection((pid, *procfs.ancestors(self._roots.proc, pid))) for pid in pids)

    def _reserve(self, held: ledger.Ledger, amounts: Mapping[str, int]) -> None:
        pid, proc = os.getpid(), self._roots.proc
        holds = tuple(
            Hold(pool, share_of(amount, self._totals[pool]) if pool in self._totals else None, amount)
            for pool, amount in sorted(amounts.items())
            if amount
        )
        if not holds:
            held.release(None, pid)
            return
        stat = procfs.read_stat(proc, pid)
        held.hold(ledger.Reservation(NAME, pid, stat.start_time if stat else 0, procfs.boot_id(proc), holds, engine=ENGINE))


def pool_of(pool: MemoryPool, claims: tuple[Claim, ...], reserve_bytes: int, allow_unknown: bool = False) -> Pool:
    """What everybody else claims of a pool. One who holds it and says not how much blocks it, as it does for the guard."""
    others = outstanding = 0
    blocked = None
    for claim in claims:
        for hold in claim.holds:
            if hold.pool == pool.id:
                others += hold.bytes or 0
                outstanding += max(0, (hold.bytes or 0) - hold.taken_bytes)
                if claim.orphan:
                    blocked = f"pid {claim.pid} ({claim.engine}) still holds memory although its server is gone"
                elif hold.bytes is None and claim.grows:
                    blocked = f"nobody knows how much pid {claim.pid} ({claim.engine}) will hold"
    if pool.total_bytes is None or pool.available_bytes is None:
        what = "how large it is" if pool.total_bytes is None else "how much of it is free"
        blocked = f"nobody knows {what}"
        allow_unknown = allow_unknown and pool.kind != DISCRETE and pool.total_bytes is not None
    total = pool.total_bytes or 0
    available = total if pool.available_bytes is None else pool.available_bytes
    return Pool(pool.id, total, available, reserve_bytes, others, outstanding, None if allow_unknown else blocked)
