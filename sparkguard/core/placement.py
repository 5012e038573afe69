"""Whether what a model needs is there: its bytes against the pools of the machine, less what each keeps free."""

from __future__ import annotations

from sparkguard.core.estimate import HOST, Needs
from sparkguard.core.ggml import MIB
from sparkguard.core.record import Record
from sparkguard.core.reserve import runner_reserve
from sparkguard.core.types import DISCRETE, UNIFIED, MemoryPool


class Placed(Record):
    """What one pool would give."""

    pool: MemoryPool
    wanted_bytes: int
    reserve_bytes: int
    short_bytes: int  # how much more would have to be free; 0: it fits


def best_device(pools: tuple[MemoryPool, ...]) -> MemoryPool | None:
    """Where a model would run: the GPU with the most memory free, or the memory that CPU and GPU share; None: the CPU."""
    cards = [pool for pool in pools if pool.kind == DISCRETE and pool.available_bytes is not None]
    if cards:
        return max(cards, key=lambda pool: pool.available_bytes or 0)
    return next((pool for pool in pools if pool.kind == UNIFIED), None)


def place(
    needs: Needs,
    pools: tuple[MemoryPool, ...],
    device: MemoryPool | None,
    host_reserve_bytes: int | None = None,
    card_reserve_bytes: int | None = None,
) -> tuple[Placed, ...]:
    """Each pool that would be used. On unified memory host and device are one pool, which keeps one reserve."""
    ram = next(pool for pool in pools if pool.id == "ram")
    wanted: dict[str, int] = {}
    for part in needs.devices:
        pool = ram if part.device == HOST or device is None else device
        wanted[pool.id] = wanted.get(pool.id, 0) + part.total_bytes
    placed = []
    for pool in pools:
        if pool.id in wanted:
            reserve = runner_reserve(pool, host_reserve_bytes, card_reserve_bytes)
            short = max(0, wanted[pool.id] + reserve - (pool.available_bytes or 0))
            placed.append(Placed(pool, wanted[pool.id], reserve, short))
    return tuple(placed)


def in_words(needs: Needs) -> str:
    """'606 MB for 4096 tokens of context (weights 138 MB, KV cache 180 MB, ...)'; MB is 2^20 bytes."""
    parts = [
        (name, needs.sum_of(field))
        for name, field in (
            ("weights", "weights_bytes"),
            ("KV cache", "kv_cache_bytes"),
            ("state", "state_bytes"),
            ("work buffers", "compute_bytes"),
            ("output", "output_bytes"),
            ("projector", "projector_bytes"),
            ("prompt cache", "prompt_cache_bytes"),
        )
    ]
    listed = ", ".join(f"{name} {megabytes(amount)}" for name, amount in parts if amount)
    return f"{megabytes(needs.total_bytes)} for {needs.context} tokens of context ({listed})"


def megabytes(amount: int) -> str:
    """Rounded up: a need is never said smaller than it is."""
    return f"{-(-amount // MIB)} MB"
