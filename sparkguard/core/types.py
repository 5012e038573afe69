"""The words of the house: machine, pool, claim, wanted, budget, verdict.

Bytes are ints named *_bytes; shares are ints of billionths (core/share.py). Unknown is None, never 0.
"""

from __future__ import annotations

from sparkguard.core.record import Record

# Kinds of pool. Unified: CPU and GPU share it, so it is the system RAM. Discrete: one GPU's (or MIG slice's) own
# memory. RAM: a machine without an accelerator. Unknown: there is a GPU, but nothing will say how large it is.
UNIFIED, DISCRETE, RAM, UNKNOWN = "unified", "discrete", "ram", "unknown"


class MemoryPool(Record):
    """Memory that shares are taken of."""

    id: str  # "ram", "gpu0", "gpu1", "gpu0/mig1"
    kind: str
    total_bytes: int | None
    available_bytes: int | None = None  # MemAvailable, or free VRAM; None: not asked, or nobody says
    name: str = ""  # "NVIDIA GB10"
    uuid: str | None = None


class Machine(Record):
    """What does not change between two boots of one driver; available_bytes is None in its pools."""

    pools: tuple[MemoryPool, ...]
    driver: str | None = None  # version of the NVIDIA driver
    note: str | None = None  # why a fact is unknown, for people


class GpuProcess(Record):
    """One process that holds memory on one GPU, as NVML tells it."""

    pid: int
    pool: str
    used_bytes: int | None


class Hold(Record):
    """What one claim takes of one pool. share and bytes are None together when nobody knows.

    taken_bytes is how much of it is in use already, and so no longer part of what the pool has available.
    """

    pool: str
    share: int | None
    bytes: int | None
    taken_bytes: int = 0


class Claim(Record):
    """One server, or one start under way, and what it holds or will hold."""

    pid: int | None
    engine: str
    holds: tuple[Hold, ...]
    source: str  # argument, config, environment, default, measured, reservation, unknown
    unit: str | None = None
    port: int | None = None
    grows: bool = True  # unknown and may still grow into memory that it has not taken: refuse beside it
    orphan: bool = False  # an engine whose server is gone
    note: str = ""  # for people: "devices unknown, counted on all", "config x.yaml cannot be read"
    service: str | None = None  # unit, as systemd names it and commands must: 'vllm-model@my\x2dmodel.service'
    manager: str | None = "user"  # whose unit it is: "user" (this user's), "system"; None: another user's

    @property
    def is_runners(self) -> bool:
        """Whether it is what `sparkguard serve` has reserved, for all its models together."""
        return self.source == "reservation" and self.engine == "llama-server"


class Wanted(Record):
    """What a start asks for."""

    name: str
    holds: tuple[Hold, ...]
    source: str = "argument"
    port: int | None = None
    note: str = ""
    flag: str = "--gpu-memory-utilization"  # how it was asked for


class Budget(Record):
    """How much of each pool all claims together may hold."""

    share: int
    reserve_bytes: int | None = None  # None: the larger of 1024 MiB and 5 % of the pool
    allow_unknown: bool = False


class PoolSum(Record):
    """One pool's arithmetic in a verdict."""

    pool: MemoryPool
    claimed_share: int
    outstanding_bytes: int  # claimed, not yet taken
    reserve_bytes: int
    wanted_share: int | None
    wanted_bytes: int | None
    room_share: int  # the largest share that would be admitted now; <= 0: none


class Verdict(Record):
    """The answer of admit(): the same facts for the FATAL text and for --json."""

    admitted: bool
    reason: str  # fits, over_budget, memory_taken, never_fits, orphan, unknown_holder, unknown_pool, port_taken
    wanted: Wanted
    budget: Budget
    sums: tuple[PoolSum, ...]
    claims: tuple[Claim, ...]
    culprits: tuple[Claim, ...] = ()  # whom to stop, or who is unknown
    overridden: tuple[Claim, ...] = ()  # unknown holders that VLLM_MEM_ALLOW_UNKNOWN=1 let pass
    pool: str | None = None  # the pool that decided
