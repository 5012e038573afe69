"""Where a model may run, the best place first, and what it takes of each pool there."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from sparkguard.core.estimate import DEVICE, HOST, Needs
from sparkguard.core.events import Placement, Problem
from sparkguard.errors import SparkguardError
from sparkguard.supervisor.devices import Device

_MIB = 1 << 20
# llama-server ends where its cache cannot hold the experts of one token in any group of like layers (llama-moe-cache.cpp). No
# model uses more than a quarter of a layer's experts for a token; half a layer holds them, and the one that it keeps spare.
_LEAST_CACHED_LAYERS = 0.5


class NoDevice(SparkguardError):
    """There is none that it may run on."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.problem = Problem(503, "no_device", message)


def candidates(wanted: str, devices: Sequence[Device]) -> tuple[Device, ...]:
    """The devices of a model that is set to `wanted` (auto, cpu, cuda, cuda:N), best first. Raises NoDevice."""
    cpu, *gpus = devices
    usable = tuple(gpu for gpu in gpus if gpu.usable)
    if wanted == "cpu":
        chosen: tuple[Device, ...] = (cpu,) if cpu.usable else ()
        reason = cpu.reason
    elif wanted in ("auto", "cuda"):
        chosen = usable if wanted == "cuda" or not cpu.usable else (*usable, cpu)
        reason = gpus[0].reason if gpus else "there is no CUDA device"
        reason = f"{reason}, and {cpu.reason}" if wanted == "auto" and cpu.reason else reason
    else:
        device = next((gpu for gpu in gpus if gpu.id == wanted), None)
        chosen = (device,) if device and device.usable else ()
        reason = device.reason if device else f"there is no {wanted}"
    if not chosen:
        raise NoDevice(f"it is set to {wanted}, but {reason}")
    return chosen


def placements(
    needs: Callable[[bool, int], Needs],
    expert_layers: Sequence[tuple[int, int]],
    devices: Sequence[Device],
    cache_percent: float = 0.0,
) -> tuple[Placement, ...]:
    """All GPUs alike first; then with experts on the host, the fewest layers first; then the CPU.

    needs(on a GPU, layers of experts on the host); expert_layers: (layer, bytes), none where no expert may move.
    cache_percent: of the experts on the host, for an engine that caches so many on the GPU.
    """
    ways = []
    for device in devices:
        on_gpu = device.kind == "cuda"
        rank = 0 if on_gpu or len(devices) == 1 else len(expert_layers) + 1
        ways.append(Placement(device.id, _amounts(needs(on_gpu, 0), device), rank))
        if not (on_gpu and device.discrete and expert_layers):
            continue  # on unified memory there is nothing to be gained
        amounts = dict(_amounts(needs(True, 1), device))
        moved = 0
        for count, (layer, size) in enumerate(expert_layers, 1):
            if count > 1:
                moved += size
            cached = _cache_mib([bytes for _, bytes in expert_layers[:count]], cache_percent)
            on_device = amounts[device.pool] - moved + cached * _MIB
            shifted = {**amounts, "ram": amounts.get("ram", 0) + moved, device.pool: on_device}
            ways.append(Placement(device.id, tuple(sorted(shifted.items())), count, layer + 1, cached))
    return tuple(sorted(ways, key=lambda way: way.rank))


def _cache_mib(layers: Sequence[int], percent: float) -> int:
    """MiB of the GPU's cache for layers of so many bytes; 0: too small to be of use."""
    alike = max(Counter(layers).values())
    if alike * percent / 100 < _LEAST_CACHED_LAYERS:
        return 0
    return math.ceil(sum(layers) * percent / 100 / _MIB)


def must_move_experts(ways: Sequence[Placement], devices: Sequence[Device]) -> bool:
    """Whether no GPU could ever hold the whole."""
    sizes = {device.pool: device.total_bytes or 0 for device in devices}
    whole = [way for way in ways if way.device != "cpu" and not way.host_expert_layers]
    return any(way.host_expert_layers for way in ways) and not any(
        all(amount <= sizes.get(pool, 0) for pool, amount in way.amounts) for way in whole
    )


def _amounts(needs: Needs, device: Device) -> tuple[tuple[str, int], ...]:
    amounts: dict[str, int] = {}
    for part in needs.devices:
        assert part.device in (HOST, DEVICE)
        pool = device.pool if part.device == DEVICE else "ram"
        amounts[pool] = amounts.get(pool, 0) + part.total_bytes
    return tuple(sorted(amounts.items()))
