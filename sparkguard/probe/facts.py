"""The memory pools of this machine.

A unified machine has one pool, "ram". A machine with cards of their own memory has "gpu0", "gpu1", ... and, last, "ram",
which CPU-only servers use. What NVML said about a boot is kept in a file, because asking takes longer than the whole
guard; a report that leaves anything open is asked for again every time, since a lingering unit may start before the
driver does.
"""

from __future__ import annotations

import os
import sys

from sparkguard.core.types import DISCRETE, RAM, UNIFIED, UNKNOWN, GpuProcess, Machine, MemoryPool
from sparkguard.errors import OSERR, SparkguardError
from sparkguard.probe import amdgpu, nvml
from sparkguard.probe.nvml import Gpu, Report

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sparkguard.probe.amdgpu import Card

# These share the CPU's memory, whatever number they report: an N1X says 8128 MiB, its carve-out, of 45 GiB.
_UNIFIED_WORDS = {"GB10", "ORIN", "XAVIER", "THOR", "TEGRA", "NVGPU", "N1X"}
# These have memory of their own (HBM) beside the CPU's, however their totals compare.
_SUPERCHIPS = {"GH200", "GB200", "GB300"}
_CARD_WORDS = {"GEFORCE", "RTX", "GTX", "QUADRO", "TESLA", "TITAN"}
# Data-centre cards: a generation's letter and a number (A100, H200, L40S, T4). GB10 and N1X are none.
_GENERATIONS = "ABHLPTV"

_CACHE_HEAD = "sparkguard facts 1"
_MOST_CACHE_BYTES = 1 << 16


def detect(
    proc_root: str = "/proc",
    sys_root: str = "/sys",
    dev_root: str = "/dev",
    cache_dir: str | None = None,
    pool_setting: str = "auto",
    env: Mapping[str, str] | None = None,
) -> Machine:
    """The machine's pools. Raises SparkguardError (71) when the RAM's size cannot be read."""
    return survey(proc_root, sys_root, dev_root, cache_dir, pool_setting, env)[0]


def survey(
    proc_root: str = "/proc",
    sys_root: str = "/sys",
    dev_root: str = "/dev",
    cache_dir: str | None = None,
    pool_setting: str = "auto",
    env: Mapping[str, str] | None = None,
) -> tuple[Machine, Report | None]:
    """detect(), and NVML's report where it had to be asked just now: nobody needs to ask twice."""
    if sys.platform == "darwin" and proc_root == "/proc":
        from sparkguard.probe import apple

        return Machine((MemoryPool("ram", UNIFIED, apple.memory()[0], name="Apple"),)), None
    ram = read_meminfo(proc_root)["MemTotal"]
    if pool_setting in (UNIFIED, RAM):
        return Machine((MemoryPool("ram", pool_setting, ram),)), None
    cards = amdgpu.cards(sys_root)
    if not _nvidia_may_exist(proc_root, sys_root, dev_root):
        return classify(None, ram, cards, pool_setting), None
    key = _cache_key(proc_root)
    kept = _read_cache(cache_dir, key)
    if kept is not None:
        return classify(kept, ram, cards, pool_setting), None
    report = nvml.ask(env=env)
    if not report.library:
        if os.path.exists(f"{dev_root}/nvmap"):  # a Tegra, whose older systems have no NVML
            report = Report(count=1, gpus=(Gpu("gpu0", name="NVIDIA Tegra", error=nvml.NOT_SUPPORTED, listed=False),))
        elif not _driver_is_loaded(proc_root, sys_root, dev_root):  # only /dev/dxg: WSL on a machine without NVIDIA
            report = Report(count=0)
    machine = classify(report, ram, cards, pool_setting)
    if _is_lasting(report, ram):
        _write_cache(cache_dir, key, report)
    return machine, report


def classify(report: Report | None, ram_bytes: int, cards: Sequence[Card] = (), pool_setting: str = "auto") -> Machine:
    """The pools that a report of NVML and the AMD cards make, with system RAM of ram_bytes.

    pool_setting "discrete" takes every GPU's own figure at its word, and misses one where none is found.
    """
    forced = pool_setting == DISCRETE
    apart: list[MemoryPool] = []
    notes: list[str] = []
    unified: MemoryPool | None = None
    for gpu in report.gpus if report else ():
        if gpu.mig:
            continue  # its slices follow
        kind = _kind(gpu, ram_bytes, forced)
        if kind == UNIFIED:
            unified = MemoryPool("ram", UNIFIED, ram_bytes, name=gpu.name, uuid=gpu.uuid)
        else:
            total = gpu.total_bytes if kind == DISCRETE else None
            apart.append(MemoryPool(gpu.device, kind, total, name=gpu.name, uuid=gpu.uuid))
        if kind == UNKNOWN:
            notes.append(f"{gpu.device}: {nvml.in_words(gpu.error or nvml.NOT_SUPPORTED)}")
    if report is not None:
        missing = _missing(report)
        apart += missing
        notes += [f"{pool.id}: {report.error or 'it is cut by MIG, and no slice of it can be read'}" for pool in missing]
    first = (report.count or 0) if report else 0
    for card in cards:
        if card.integrated and not card.carved_apart() and not forced:
            unified = unified or MemoryPool("ram", UNIFIED, card.shared_bytes(ram_bytes), name=card.name, uuid=card.uuid)
            continue
        name = card.name
        if card.carved_apart():
            name += " carve-out"
            notes.append(f"gpu{first}: the BIOS carves it out of the RAM, so it is a pool apart and not in the RAM's total")
        apart.append(MemoryPool(f"gpu{first}", DISCRETE, card.vram_total_bytes, name=name, uuid=card.uuid))
        first += 1
    if forced and not apart:
        apart.append(MemoryPool("gpu0", UNKNOWN, None))
        notes.append("SPARK_MEMORY_POOL=discrete, but no GPU with memory of its own is found")
    if apart and unified and unified.name.startswith("NVIDIA"):
        notes.append(f"{unified.name} shares the RAM; servers on it cannot be told from those on the CPU")
    ram = unified if unified and not apart else MemoryPool("ram", RAM, ram_bytes)
    return Machine((*apart, ram), (report.driver or None) if report else None, "; ".join(notes) or None)


def _kind(gpu: Gpu, ram_bytes: int, forced: bool) -> str:
    words = "".join(c if c.isalnum() else " " for c in gpu.name.upper()).split()
    known_unified = bool(_UNIFIED_WORDS.intersection(words)) or "RTX SPARK" in " ".join(words)
    known_discrete = not known_unified and any(
        word in _CARD_WORDS or word in _SUPERCHIPS or (word[0] in _GENERATIONS and word[1:].rstrip("GSX").isdigit())
        for word in words
    )
    is_slice = "/" in gpu.device
    if gpu.total_bytes is None:
        # Silence alone proves nothing: a MIG slice, missing rights and a broken driver are as silent as a GB10.
        silent = gpu.error == nvml.NOT_SUPPORTED and not (known_discrete or is_slice)
        return UNIFIED if not forced and (silent or known_unified) and gpu.error != nvml.NO_PERMISSION else UNKNOWN
    if forced or is_slice or known_discrete:
        return DISCRETE
    # One driver was seen to report all of MemTotal; a 32 GB card in a 32 GB host does so too, hence the names above.
    near_ram = 90 * ram_bytes <= 100 * gpu.total_bytes <= 105 * ram_bytes
    return UNIFIED if known_unified or near_ram else DISCRETE


def _missing(report: Report) -> list[MemoryPool]:
    """A pool of unknown size for each GPU that the report owes: it broke off, or MIG hides the slices."""
    described = {gpu.device.partition("/")[0] for gpu in report.gpus if not gpu.mig}
    # With an error and no count, NVML failed before it could count: there is a driver, so there is a GPU.
    count = report.count if report.count is not None else int(report.error is not None)
    names = {gpu.device: gpu for gpu in report.gpus}
    owed = [f"gpu{index}" for index in range(min(count, 64)) if f"gpu{index}" not in described]
    return [MemoryPool(device, UNKNOWN, None, name=names[device].name if device in names else "") for device in owed]


def available(
    machine: Machine, meminfo: Mapping[str, int], report: Report | None = None, sys_root: str = "/sys"
) -> tuple[MemoryPool, ...]:
    """The machine's pools with what is available in each now; None where only NVML could tell, and does not."""
    free = {gpu.device: gpu.free_bytes for gpu in report.gpus} if report else {}
    cards = {card.uuid: card for card in amdgpu.cards(sys_root)} if any(_is_amd(pool) for pool in machine.pools) else {}

    def now(pool: MemoryPool) -> int | None:
        card = cards.get(pool.uuid or "")
        if pool.id == "ram":
            memory = meminfo["MemAvailable"]
            return card.shared_free_bytes(memory) if card else memory
        if pool.kind != DISCRETE:
            return None
        return (card.free_bytes() if card else None) if _is_amd(pool) else free.get(pool.id)

    return tuple(pool.replace(available_bytes=now(pool)) for pool in machine.pools)


def needs_nvml(machine: Machine) -> bool:
    """Whether what is free can only be learnt from NVML: a GPU with memory of its own, or one that nobody understood."""
    return any(pool.kind in (DISCRETE, UNKNOWN) and not _is_amd(pool) for pool in machine.pools)


def processes(machine: Machine, report: Report) -> tuple[GpuProcess, ...]:
    """Who holds GPU memory, with the pool it is of. A process on two GPUs of one pool is one row."""
    ids = {pool.id for pool in machine.pools}
    if machine.pools[0].kind == RAM:
        return ()  # SPARK_MEMORY_POOL=ram: what GPUs hold is none of it
    used: dict[tuple[int, str], int | None] = {}
    for row in report.processes:
        place = (row.pid, row.pool if row.pool in ids else "ram")
        before = used.get(place, 0)
        used[place] = None if before is None or row.used_bytes is None else before + row.used_bytes
    return tuple(GpuProcess(pid, pool, amount) for (pid, pool), amount in used.items())


def read_meminfo(proc_root: str = "/proc") -> dict[str, int]:
    """Every line of it that is in kB, in bytes (on macOS: MemTotal and MemAvailable).

    Raises SparkguardError (71) when the file cannot be read or lacks MemTotal or MemAvailable. A part that is larger
    than its whole is cut to it: lxcfs has been seen to report a SwapFree of 2^64 - 256 kB (earlyoom issue 378).
    """
    if sys.platform == "darwin" and proc_root == "/proc":
        from sparkguard.probe import apple

        return apple.memory()[1]
    path = f"{proc_root}/meminfo"
    try:
        with open(path, "rb", buffering=0) as file:
            text = file.read(1 << 16)
    except OSError as error:
        raise SparkguardError(f"{path} cannot be read: {error.strerror}", status=OSERR) from None
    values = {}
    for line in text.split(b"\n"):
        key, _, rest = line.partition(b":")
        number, _, unit = rest.strip().partition(b" ")
        if number.isdigit() and len(number) < 30 and unit == b"kB":
            values[key.decode("ascii", "replace")] = int(number) << 10
    total = values.get("MemTotal")
    if not total or "MemAvailable" not in values:
        lacking = "MemAvailable" if total else "MemTotal"
        raise SparkguardError(f"{path} does not tell {lacking}", f"run: grep -a {lacking} {path}", OSERR)
    for part, whole in (("MemFree", total), ("MemAvailable", total), ("SwapFree", values.get("SwapTotal", 0))):
        if part in values:
            values[part] = min(values[part], whole)
    return values


def _is_amd(pool: MemoryPool) -> bool:
    return pool.name.startswith("AMD ")


def _nvidia_may_exist(proc_root: str, sys_root: str, dev_root: str) -> bool:
    """nvmap is of Tegras, dxg of WSL: neither has the other files."""
    others = (f"{dev_root}/nvmap", f"{dev_root}/dxg")
    return _driver_is_loaded(proc_root, sys_root, dev_root) or any(os.path.exists(sign) for sign in others)


def _driver_is_loaded(proc_root: str, sys_root: str, dev_root: str) -> bool:
    signs = (f"{proc_root}/driver/nvidia/version", f"{dev_root}/nvidiactl", f"{dev_root}/nvidia0", f"{sys_root}/module/nvidia")
    return any(os.path.exists(sign) for sign in signs)


def _is_lasting(report: Report, ram_bytes: int) -> bool:
    """Whether the report will hold until the next boot: complete and without a doubt.

    MIG is cut anew at any time; its slices make more entries than there are GPUs.
    """
    known = not any(pool.kind == UNKNOWN for pool in classify(report, ram_bytes).pools)
    return known and report.error is None and report.count == len(report.gpus) > 0


def _cache_key(proc_root: str) -> str | None:
    """This boot, this driver, these GPUs; None where the boot has no name, and so nothing can be kept."""
    boot = _line(f"{proc_root}/sys/kernel/random/boot_id")
    try:
        gpus = sorted(os.listdir(f"{proc_root}/driver/nvidia/gpus"))
    except OSError:
        gpus = []
    return "\t".join((_CACHE_HEAD, boot, _line(f"{proc_root}/driver/nvidia/version"), *gpus)) if boot else None


def _line(path: str) -> str:
    """A file's first line, or "" where it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            return " ".join(file.read(1000).partition(b"\n")[0].decode("ascii", "replace").split())
    except OSError:
        return ""


def _read_cache(folder: str | None, key: str | None) -> Report | None:
    """The report kept under this key. Whatever is not exactly what _write_cache() writes is as good as nothing."""
    if folder is None or key is None:
        return None
    try:
        # A link or a fifo of somebody else's must neither be followed nor waited for.
        file = os.open(f"{folder}/facts", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(file)
        if status.st_uid != os.geteuid() or status.st_mode & 0o170022 != 0o100000 or status.st_size > _MOST_CACHE_BYTES:
            return None
        text = os.read(file, _MOST_CACHE_BYTES)
    except OSError:
        return None
    finally:
        os.close(file)
    lines = text.decode("utf-8", "replace").split("\n")
    if len(lines) < 4 or lines[0] != key or lines[-2:] != ["end", ""]:
        return None
    report = nvml.parse(lines[1:-2])
    return report if nvml.lines(report) == lines[1:-2] and report.count == len(report.gpus) > 0 else None


def _write_cache(folder: str | None, key: str | None, report: Report) -> None:
    """Keeps the report for the next start. A folder that cannot be written only costs the next start its time."""
    if folder is None or key is None:
        return
    draft = f"{folder}/.facts.{os.getpid()}"
    try:
        os.makedirs(folder, 0o700, exist_ok=True)
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(file, "\n".join((key, *nvml.lines(report), "end", "")).encode())
        finally:
            os.close(file)
        os.replace(draft, f"{folder}/facts")
    except OSError:
        # Also after O_EXCL has met the draft of a killed guard with the same pid.
        try:
            os.unlink(draft)
        except OSError:
            pass
