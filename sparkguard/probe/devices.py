"""On which pools a server counts, and how much of each it takes."""

from __future__ import annotations

from sparkguard.core.share import bytes_of, share_of
from sparkguard.core.types import DISCRETE, RAM, UNKNOWN, Hold, Machine, MemoryPool
from sparkguard.probe.vllm_argv import GIB, Declared

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# First what the container, or the ROCm driver, hands out; then what the CUDA or HIP runtime shows of that. The words of a
# later one count within the earlier one's list.
_HANDED_OUT = ("NVIDIA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_SHOWN = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_EVERY = "devices not known, counted on all"


def pools_of(
    machine: Machine, env: Mapping[str, str] | None, device_ids: str | None = None, gpus: int | None = None
) -> tuple[tuple[MemoryPool, ...], str]:
    """The pools that a server with this environment and these options uses, and a remark for people.

    env None: another user's, unreadable. gpus: how many it uses, of those it sees; None: as many as it sees.
    NVIDIA_VISIBLE_DEVICES means something only in a container: callers leave it out elsewhere.
    """
    cards = [pool for pool in machine.pools if pool.kind in (DISCRETE, UNKNOWN)]
    if not cards:
        return machine.pools[:1], ""
    if env is None:
        return tuple(cards), _EVERY
    visible: list[MemoryPool] = cards
    listed = False
    for names in (_HANDED_OUT, _SHOWN):
        value = next((env[name] for name in names if name in env and env[name] not in ("all", "void")), None)
        if value is None:
            continue
        words = _words(value)
        if not words:
            return tuple(pool for pool in machine.pools if pool.kind == RAM) or tuple(cards), ""
        chosen = _select(visible, words, names is _HANDED_OUT or _orderly(visible, env))
        if not chosen:
            return tuple(cards), _EVERY
        visible, listed = chosen, names is _SHOWN
    if device_ids:
        chosen = _select(visible, _words(device_ids), listed or _orderly(visible, env))
        if not chosen:
            return tuple(cards), _EVERY
        visible, listed = chosen, True
    if gpus is not None and gpus < len(visible):
        if not (listed or _orderly(visible, env)):
            return tuple(visible), _EVERY
        visible = visible[:gpus]
    return tuple(visible), ""


def _orderly(pools: Sequence[MemoryPool], env: Mapping[str, str]) -> bool:
    """CUDA counts the fastest card first unless told otherwise, NVML by bus: only alike cards count alike."""
    return env.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({pool.name for pool in pools}) < 2


def _words(value: str) -> list[str]:
    """CUDA stops reading at the first word that names nothing: '' and '-1' are no device at all, '0,-1,1' is device 0."""
    words = [word.strip() for word in value.split(",")]
    end = next((at for at, word in enumerate(words) if word in ("", "-1", "none", "NoDevFiles")), len(words))
    return words[:end]


def _select(among: Sequence[MemoryPool], words: Sequence[str], orderly: bool) -> list[MemoryPool] | None:
    """The pools that the words (indices into among, or UUIDs) name; None when one cannot be told."""
    tops = list(dict.fromkeys(pool.id.partition("/")[0] for pool in among))
    chosen: list[MemoryPool] = []
    for word in words:
        if word.isascii() and word.isdigit():
            if not orderly or int(word) >= len(tops):
                return None
            named = [pool for pool in among if pool.id.partition("/")[0] == tops[int(word)]]
        else:
            named = [pool for pool in among if pool.uuid and pool.uuid.startswith(word)]
        if not named:
            return None
        chosen += named
    return list(dict.fromkeys(chosen))


def hold(declared: Declared, pool: MemoryPool, default_share: int, cpu_kv_gib: str | None) -> Hold:
    """What a declared server takes of one pool: its fraction, or its absolute figure, and never less than its KV cache.

    vLLM checks at its start that the fraction is free, the default one too, even where --kv-cache-memory-bytes sizes the
    cache; only its CPU backend lets a given cache size replace the fraction. There VLLM_CPU_KVCACHE_SPACE (GiB) beats the
    option, and each worker has a cache of its own (vllm/platforms/cpu.py, v1/worker/cpu_worker.py of 0.32).
    """
    total = pool.total_bytes
    kv = declared.kv_bytes
    if pool.kind == RAM:
        if cpu_kv_gib and cpu_kv_gib.isascii() and cpu_kv_gib.isdigit() and cpu_kv_gib.strip("0"):
            kv = int(cpu_kv_gib.lstrip("0")[:9]) * GIB  # nine digits are beyond any machine, as more would be
        kv = kv and kv * declared.gpus
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
