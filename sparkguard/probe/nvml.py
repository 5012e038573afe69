"""Asks the NVIDIA driver, in a child that has two seconds.

NVML may be missing, hang in the kernel, crash, fail for one GPU of several, or fail first and work later. So the child
(main) only writes down what each call said, a line per fact and at once; the parent (ask) judges nothing either:
which memory is unified is decided in probe/facts.py.
"""

from __future__ import annotations

import os
import sys

from sparkguard.core.record import Record
from sparkguard.core.types import GpuProcess
from sparkguard.probe import bounded

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

NOT_SUPPORTED, NO_PERMISSION, LIBRARY_NOT_FOUND = "NotSupported", "NoPermission", "LibraryNotFound"

# NVML's own words for people, by the name of its error; whatever is not here is shown by that name.
_IN_WORDS = {
    LIBRARY_NOT_FOUND: "libnvidia-ml.so.1 is not there",
    "DriverNotLoaded": "the NVIDIA driver is not loaded",
    "LibRmVersionMismatch": "the NVIDIA driver and its library are of two versions; a reboot ends that",
    "GpuIsLost": "the GPU is lost: it fell off the bus",
    "ResetRequired": "the GPU needs a reset",
    NO_PERMISSION: "no permission to read its memory",
    NOT_SUPPORTED: "the driver names no memory size",
    "FunctionNotFound": "the NVIDIA driver is too old for this question",
    "NotInstalled": "nvidia-ml-py is not installed beside sparkguard",
}


class Gpu(Record):
    """One GPU, or one MIG slice of it, as NVML describes it."""

    device: str  # "gpu0"; "gpu0/mig1" for a slice
    uuid: str | None = None
    name: str = ""
    total_bytes: int | None = None
    free_bytes: int | None = None
    error: str | None = None  # why there is no total: the name of NVML's error
    mig: bool = False  # cut into slices, which follow as devices of their own
    listed: bool = True  # its processes could be read


class Report(Record):
    """What NVML said. error and gpus may both be there: the driver hung or crashed on the way."""

    driver: str | None = None
    count: int | None = None  # how many GPUs there should be; more than gpus when the answer broke off
    gpus: tuple[Gpu, ...] = ()
    processes: tuple[GpuProcess, ...] = ()  # pool is the device here; facts.processes() gives it its pool
    error: str | None = None  # for people
    library: bool = True  # there is a libnvidia-ml.so.1


def in_words(error: str) -> str:
    """An error of NVML for people."""
    return _IN_WORDS.get(error, f"NVML says {error}")


def ask(seconds: float = 2.0, env: Mapping[str, str] | None = None) -> Report:
    """Everything NVML can tell now. Never raises, and never takes noticeably longer than it may.

    The child sees the caller's environment, so that LD_LIBRARY_PATH may name another libnvidia-ml.so.1.
    """
    # -I: no PYTHON* variable and no folder of the caller's may replace a module of ours.
    code = f"import sys; sys.path.append({_root()!r}); from sparkguard.probe.nvml import main; sys.exit(main({seconds!r}))"
    try:
        status, text = bounded.run((sys.executable, "-I", "-c", code), seconds, env)
    except OSError as error:
        return Report(error=f"NVML could not be asked: {error.strerror}")
    report = parse(text.decode("utf-8", "replace").split("\n"))
    if status is None:
        return report.replace(error=f"the NVIDIA driver did not answer within {seconds:g} s")
    if status < 0:
        return report.replace(error=f"NVML died of signal {-status}")
    if status > 0:
        return report.replace(error=f"the NVML child failed with status {status}")
    return report


def parse(lines: Iterable[str]) -> Report:
    """Reads the child's lines, and passes over what is none: the child may have died within one."""
    report = Report()
    gpus: list[Gpu] = []
    processes: list[GpuProcess] = []
    for line in lines:
        word, *fields = line.split("\t")
        if word == "driver" and len(fields) == 1:
            report = report.replace(driver=fields[0])
        elif word == "count" and len(fields) == 1:
            report = report.replace(count=_number(fields[0]))
        elif word == "gpu" and len(fields) == 8:
            device, uuid, name, total, free, error, mig, listed = fields
            sizes = _number(total), _number(free)
            gpus.append(Gpu(device, uuid or None, name, *sizes, error or None, mig == "mig", listed == "listed"))
        elif word == "process" and len(fields) == 3 and fields[1].isdecimal():
            processes.append(GpuProcess(int(fields[1]), fields[0], _number(fields[2])))
        elif word == "error" and len(fields) == 1:
            report = report.replace(error=in_words(fields[0]), library=fields[0] != LIBRARY_NOT_FOUND)
    return report.replace(gpus=tuple(gpus), processes=tuple(processes))


def lines(report: Report) -> list[str]:
    """The lasting part of a report (no free memory, no processes), as lines that parse() reads."""
    return [
        f"driver\t{report.driver or ''}",
        f"count\t{report.count}",
        *(_gpu_line(gpu.replace(free_bytes=None)) for gpu in report.gpus),
    ]


def _gpu_line(gpu: Gpu) -> str:
    numbers = ("" if number is None else str(number) for number in (gpu.total_bytes, gpu.free_bytes))
    flags = "mig" if gpu.mig else "", "listed" if gpu.listed else ""
    return "\t".join(("gpu", gpu.device, gpu.uuid or "", " ".join(gpu.name.split()), *numbers, gpu.error or "", *flags))


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


def _root() -> str:
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def main(seconds: float) -> int:
    """The child: prints what NVML says."""
    import signal

    # Where the parent is killed while NVML hangs, nobody else would end this process.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(seconds) + 1)
    try:
        import pynvml
    except ImportError:
        _say("error\tNotInstalled")
        return 0
    try:
        pynvml.nvmlInitWithFlags(0)
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        _say(f"error\t{_name(error)}")
        return 0
    driver, _ = _try(pynvml, pynvml.nvmlSystemGetDriverVersion)
    _say(f"driver\t{driver or ''}")
    _say(f"count\t{count}")
    for index in range(count):
        handle, closed = _try(pynvml, pynvml.nvmlDeviceGetHandleByIndex, index)
        if closed:
            _say(_gpu_line(Gpu(f"gpu{index}", error=closed, listed=False)))
        else:
            _describe(pynvml, handle, f"gpu{index}")
    return 0


def _describe(pynvml: Any, handle: Any, device: str) -> None:
    """Prints one GPU, then its slices or its processes."""
    name, _ = _try(pynvml, pynvml.nvmlDeviceGetName, handle)
    uuid, _ = _try(pynvml, pynvml.nvmlDeviceGetUUID, handle)
    modes, _ = _try(pynvml, pynvml.nvmlDeviceGetMigMode, handle)
    mig = modes is not None and modes[0] == 1
    memory, error = _try(pynvml, pynvml.nvmlDeviceGetMemoryInfo, handle)
    used: dict[int, int | None] = {}
    listed = True
    # A process that computes and draws stands in both lists with the same memory.
    for question in (pynvml.nvmlDeviceGetComputeRunningProcesses_v3, pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3):
        # A MIG GPU's processes are asked of its slices: of the whole GPU only root may ask.
        rows, unread = ([], None) if mig else _try(pynvml, question, handle)
        listed = listed and unread is None
        for row in rows or ():
            known = [amount for amount in (row.usedGpuMemory, used.get(row.pid)) if amount is not None]
            used[row.pid] = max(known, default=None)
    total, free = (memory.total, memory.free) if memory else (None, None)
    if total == 0:
        total, free, error = None, None, NOT_SUPPORTED
    _say(_gpu_line(Gpu(device, uuid, name or "", total, free, error, mig, listed)))
    for pid, amount in used.items():
        _say(f"process\t{device}\t{pid}\t{'' if amount is None else amount}")
    if mig:
        places, _ = _try(pynvml, pynvml.nvmlDeviceGetMaxMigDeviceCount, handle)
        for place in range(places or 0):
            part, closed = _try(pynvml, pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, place)
            if closed is None:
                _describe(pynvml, part, f"{device}/mig{place}")
            elif closed != "NotFound":
                _say(_gpu_line(Gpu(f"{device}/mig{place}", error=closed, listed=False)))


def _try(pynvml: Any, question: Callable[..., Any], *arguments: Any) -> tuple[Any, str | None]:
    try:
        return question(*arguments), None
    except pynvml.NVMLError as error:
        return None, _name(error)
    except UnicodeDecodeError:
        return None, "nonsense"


def _name(error: Any) -> str:
    """'GpuIsLost' for NVMLError_GpuIsLost; the number where NVML has grown a new error."""
    return type(error).__name__.partition("_")[2] or f"error {error.value}"


def _say(line: str) -> None:
    """At once, so that what is known survives a call that never returns."""
    os.write(1, f"{line}\n".encode())
