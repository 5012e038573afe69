"""Whether a process has let a GPU compute lately, as NVML's samples tell; asked in a child that has two seconds."""

from __future__ import annotations

import os
import sys
import time

from sparkguard.probe import bounded

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

SECONDS = 2.0


def has_worked(pid: int, within_seconds: float, env: Mapping[str, str] | None = None, seconds: float = SECONDS) -> bool:
    """False where nobody can tell: no NVML, a GPU that keeps no samples (MIG, GB10), a driver that does not answer."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    since = int((time.time() - within_seconds) * 1e6)  # NVML's samples are of the wall clock, in microseconds
    run = f"from sparkguard.probe.gpu_work import main; sys.exit(main({pid}, {since}, {seconds!r}))"
    code = f"import sys; sys.path.append({root!r}); {run}"
    try:
        status, text = bounded.run((sys.executable, "-I", "-c", code), seconds, env)
    except OSError:
        return False
    return status == 0 and b"worked" in text


def main(pid: int, since: int, seconds: float) -> int:
    """The child: says 'worked' for the first sample of the process in which a GPU computed."""
    import signal

    # Where the parent is killed while NVML hangs, nobody else would end this process.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(seconds) + 1)
    try:
        import pynvml
    except ImportError:
        return 1
    try:
        pynvml.nvmlInitWithFlags(0)
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError:
        return 1
    for index in range(count):
        try:
            samples = pynvml.nvmlDeviceGetProcessUtilization(pynvml.nvmlDeviceGetHandleByIndex(index), since)
        except pynvml.NVMLError:
            continue  # NotFound: nobody has worked there; NotSupported: nobody counts it
        # The oldest samples of the ring come whatever is asked for.
        if any(sample.pid == pid and sample.smUtil and sample.timeStamp >= since for sample in samples):
            os.write(1, b"worked\n")
            return 0
    return 0
