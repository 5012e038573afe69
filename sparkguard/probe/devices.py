"""On which pools a server counts, and how much of each it takes."""

from __future__ import annotations

from sparkguard.core.share import bytes_of, share_of
from sparkguard.core.types import DISCRETE, RAM, UNKNOWN, Hold, Machine, MemoryPool
from sparkguard.probe.vllm_argv import GIB, Declared

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
_EVERY = "devices not known, counted on all"


def pools_of(
    machine: Machine, env: Mapping[str, str] | None, device_ids: str | None = None, gpus: int | None = None
) -> tuple[tuple[MemoryPool, ...], str]:
    """The pools that a server with this environment and these options uses, and a remark for people.

    env None: another user's, unreadable. gpus: how many it uses, of those it sees; None: as many as it sees.
    """
    cards = [pool for pool in machine.pools if pool.kind in (DISCRETE, UNKNOWN)]
    if not cards:
        return machine.pools[:1], ""
    if env is None:
        return tuple(cards), _EVERY
    variable = next((name for name in _VISIBLE if name in env and env[name] not in ("all", "void")), None)
    visible: list[MemoryPool] | None = cards
    if variable is not None:
        words = [word.strip() for word in env[variable].split(",")]
        if words[0] in ("", "-1", "none", "NoDevFiles"):
            return tuple(pool for pool in machine.pools if pool.kind == RAM) or tuple(cards), ""
        visible = _select(cards, words, cards, _orderly(cards, env))
    if visible and device_ids:
        visible = _select(
            visible, [word.strip() for word in device_ids.split(",")], cards, variable is not None or _orderly(cards, env)
        )
    if not visible:
        return tuple(cards), _EVERY
    if gpus is not None and gpus < len(visible):
        if variable is None and not _orderly(cards, env):
            return tuple(cards), _EVERY
        visible = visible[:gpus]
    return tuple(visible), ""


def _orderly(cards: Sequence[MemoryPool], env: Mapping[str, str]) -> bool:
    """CUDA counts the fastest card first unless told otherwise, NVML by bus: only alike cards count alike."""
    return env.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({card.name for card in cards}) < 2


def _select(
    among: Sequence[MemoryPool], words: Sequence[str], cards: Sequence[MemoryPool], orderly: bool
) -> list[MemoryPool] | None:
    """The pools that the words (indices into among, or UUIDs) name; None when one cannot be told."""
    tops = list(dict.fromkeys(pool.id.partition("/")[0] for pool in among))
    chosen: list[MemoryPool] = []
    for word in words:
        if word.isascii() and word.isdigit():
            if not orderly or int(word) >= len(tops):
                return None
            chosen += [pool for pool in among if pool.id.partition("/")[0] == tops[int(word)]]
        else:
            named = [pool for pool in cards if pool.uuid and word and pool.uuid.startswith(word)]
            if not named:
                return None
            chosen += named
    return list(dict.fromkeys(chosen))


def hold(declared: Declared, pool: MemoryPool, default_share: int, cpu_kv_gib: str | None) -> Hold:
    """What a declared server takes of one pool: its fraction, or its absolute figure, and never less than its KV cache.

    vLLM checks at its start that the fraction is free, the default one too, even where --kv-cache-memory-bytes sizes the
    cache; only its CPU backend lets a given cache size (VLLM_CPU_KVCACHE_SPACE, in GiB) replace the fraction.
    """
    total = pool.total_bytes
    kv = declared.kv_bytes
    if kv is None and pool.kind == RAM and cpu_kv_gib and cpu_kv_gib.isascii() and cpu_kv_gib.isdigit():
        kv = int(cpu_kv_gib) * GIB
    if declared.total_bytes is not None:
        amount = max(declared.total_bytes, kv or 0)
        return Hold(pool.id, share_of(amount, total) if total else None, amount)
    share = declared.share
    if share is None and not (pool.kind == RAM and kv):
        share = default_share
    amount = max(bytes_of(share, total) if share is not None and total else 0, kv or 0)
    if share is None or (total and amount > bytes_of(share, total)):
        share = share_of(amount, total) if total else None
    return Hold(pool.id, share, amount or None)
