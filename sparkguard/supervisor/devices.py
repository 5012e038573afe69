"""The devices that runners may use: those the driver shows, the engine was built for, and the settings allow."""

from __future__ import annotations

from collections.abc import Mapping, Set

from sparkguard.core.record import Record
from sparkguard.core.types import DISCRETE, UNIFIED, UNKNOWN, Machine, MemoryPool
from sparkguard.probe.llama_server import EngineDevice, LlamaServer
from sparkguard.supervisor.runner_settings import RunnerSettings

_BUILD = "install a llama-server built for CUDA and set SPARK_LLAMA_SERVER to it"


class Device(Record):
    """pool is whose memory it takes: on unified memory the host's."""

    id: str  # cpu, cuda:0
    kind: str  # cpu, cuda
    name: str
    pool: str
    total_bytes: int | None
    discrete: bool
    uuid: str | None = None
    compute_capability: str | None = None
    usable: bool = True
    reason: str | None = None  # why not

    @property
    def target(self) -> str:
        """As spark-runner takes it: pinned by UUID, because numbers change when a GPU falls out."""
        return f"cuda:{self.uuid}" if self.uuid else self.id


def find(machine: Machine, server: LlamaServer, settings: RunnerSettings, capabilities: Mapping[str, str]) -> tuple[Device, ...]:
    """The CPU first. capabilities: compute capability by the GPU's name, as the engine prints it."""
    ram = next(pool for pool in machine.pools if pool.id == "ram")
    pools = tuple(filter(_is_nvidia, machine.pools))
    listed = {device.name for device in server.devices if _is_cuda(device)}
    # Names that are told apart in the same way on both sides; without one in common they prove nothing.
    unlisted = {pool.name for pool in pools} - listed if listed.intersection(pool.name for pool in pools) else set()
    gpus = []
    for number, pool in enumerate(pools):
        reason = _why_not(number, pool, server, settings, unlisted)
        gpus.append(
            Device(
                f"cuda:{number}", "cuda", pool.name, pool.id, pool.total_bytes, pool.kind == DISCRETE, pool.uuid,
                capabilities.get(pool.name), reason is None, reason,
            )
        )  # fmt: skip
    usable = any(gpu.usable for gpu in gpus)
    if settings.cpu_runners is None:
        reason = "there is a CUDA device, and SPARK_CPU_RUNNERS is auto" if usable else None
    else:
        reason = None if settings.cpu_runners else "SPARK_CPU_RUNNERS is false"
    cpu = Device("cpu", "cpu", "CPU", ram.id, ram.total_bytes, False, usable=reason is None, reason=reason)
    return (cpu, *gpus)


def _is_nvidia(pool: MemoryPool) -> bool:
    return pool.kind in (DISCRETE, UNIFIED, UNKNOWN) and (
        pool.name.startswith("NVIDIA") or (pool.uuid or "").startswith(("GPU-", "MIG-"))
    )


def _why_not(number: int, pool: MemoryPool, server: LlamaServer, settings: RunnerSettings, unlisted: Set[str]) -> str | None:
    if settings.cuda_devices is not None and number not in settings.cuda_devices:
        return "SPARK_CUDA_DEVICES leaves it out"
    if not has_cuda(server):
        return f"{server.path} cannot use it: {_BUILD}"
    if pool.name in unlisted:
        return f"{server.path} --list-devices does not have it"
    return "nobody knows how much memory it has" if pool.total_bytes is None else None


def has_cuda(server: LlamaServer) -> bool:
    """Whether the engine was built for CUDA and sees a GPU."""
    return any(map(_is_cuda, server.devices))


def _is_cuda(device: EngineDevice) -> bool:
    return device.id.startswith("CUDA")
