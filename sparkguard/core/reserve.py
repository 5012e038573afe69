"""What stays free of a pool after a start, where no setting says it: what the guard leaves, and what a runner leaves."""

from __future__ import annotations

from sparkguard.core.share import WHOLE, bytes_of
from sparkguard.core.types import DISCRETE, MemoryPool

MIB = 1 << 20
# 1024 MiB are the specification's figure for host memory; 5 % of a 121 GiB GB10 is 6.1 GiB, near the 5.4 to 6.7 GiB that
# vLLM was measured to take beyond its fraction there. A fraction is no ceiling (vllm issue 46307).
LEAST_BYTES, SHARE = 1024 * MIB, WHOLE // 20
_LEAST_CARD_BYTES = 512 * MIB


def usual_reserve(total_bytes: int) -> int:
    """What the guard keeps of a pool of this size: the larger of 1024 MB and 5 %."""
    return max(LEAST_BYTES, bytes_of(SHARE, total_bytes))


def runner_reserve(pool: MemoryPool, host_bytes: int | None = None, card_bytes: int | None = None) -> int:
    """What a runner leaves: of the host's memory 1024 MB, of a GPU's own the larger of 512 MB and a sixteenth.

    The other two are SPARK_MEMORY_RESERVE_MB and SPARK_VRAM_RESERVE_MB, which beat it. A runner is counted to the byte before
    it starts, and so leaves no 5 % for what it may take beyond that. Unified memory is the host's, and keeps one reserve.
    """
    if pool.kind == DISCRETE:
        return max(_LEAST_CARD_BYTES, (pool.total_bytes or 0) // 16) if card_bytes is None else card_bytes
    return LEAST_BYTES if host_bytes is None else host_bytes
