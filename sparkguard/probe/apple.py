"""Apple Silicon: its memory from sysctl and vm_stat, its processes from ps. There is no /proc.

The parsers take text and run anywhere; memory() and processes() ask the machine.
"""

from __future__ import annotations

from sparkguard.errors import OSERR, SparkguardError
from sparkguard.probe import bounded

_MB = 1 << 20
_GIB = 1 << 30
_SECONDS = 2.0


def memory() -> tuple[int, dict[str, int]]:
    """What Metal may use of the RAM (the pool), and MemTotal and MemAvailable under the names of /proc/meminfo."""
    ram, limit = parse_sysctl(_ask("/usr/sbin/sysctl", "hw.memsize", "iogpu.wired_limit_mb"))
    return working_set_bytes(ram, limit), {"MemTotal": ram, "MemAvailable": min(ram, parse_vm_stat(_ask("/usr/bin/vm_stat")))}


def processes() -> list[tuple[int, int, str]]:
    """Every process: pid, parent, command line."""
    return parse_ps(_ask("/bin/ps", "-axo", "pid=,ppid=,args="))


def process(pid: int) -> tuple[str, int, int, int, int] | None:
    """State, parent, process group, session and start of one process; None when there is none.

    ps gives the start as a date to the second. Only its digits are kept: they tell a reused pid from the old process, which is
    all that anybody asks of them. macOS has no session ids in ps: the group stands in.
    """
    return parse_process(_ask("/bin/ps", "-o", "state=,ppid=,pgid=,lstart=", "-p", str(pid)))


def parse_process(text: str) -> tuple[str, int, int, int, int] | None:
    """One row of `ps -o state=,ppid=,pgid=,lstart=`: 'S+   1   501 Sun Nov 29 22:34:01 2026'."""
    fields = text.split()
    if len(fields) < 4 or not (fields[1].isdecimal() and fields[2].isdecimal()):
        return None
    digits = "".join(char for char in "".join(fields[3:]) if char.isdecimal())
    return fields[0][0], int(fields[1]), int(fields[2]), int(fields[2]), int(digits or 0)


def working_set_bytes(ram_bytes: int, wired_limit_mb: int | None) -> int:
    """Metal's recommendedMaxWorkingSetSize, which is the part of the RAM that models fit in.

    It follows iogpu.wired_limit_mb where that is set. Its default was measured as 11.84 of 16 GiB and 17.76 of 24
    (0.74), and as 107.5 of 128 GiB (0.84), older systems giving 0.75 there; a plan for 108 of those 107.5 went wrong
    (llmfit PR 754, ds4 PR 909). Where they differ, the smaller is taken: beyond the working set the kernel may panic.
    """
    if wired_limit_mb:
        return min(ram_bytes, wired_limit_mb * _MB)
    return ram_bytes * (75 if ram_bytes >= 64 * _GIB else 74) // 100


def parse_sysctl(text: str) -> tuple[int, int | None]:
    """hw.memsize in bytes, and iogpu.wired_limit_mb (None: an older system has no such key; 0: not set)."""
    values = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if value.strip().isdecimal():
            values[key.strip()] = int(value)
    if not values.get("hw.memsize"):
        raise SparkguardError("sysctl does not tell hw.memsize", "run: sysctl hw.memsize", OSERR)
    return values["hw.memsize"], values.get("iogpu.wired_limit_mb")


def parse_vm_stat(text: str) -> int:
    """Bytes that can be had without swapping: free, speculative and inactive pages, as Activity Monitor's kin count them."""
    page = 0
    pages = 0
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key == "Mach Virtual Memory Statistics":
            page = next((int(word) for word in value.split() if word.isdecimal()), 0)
        elif key in ("Pages free", "Pages speculative", "Pages inactive") and value.strip(" .").isdecimal():
            pages += int(value.strip(" ."))
    if not page or not pages:
        raise SparkguardError("vm_stat does not tell the free pages", "run: vm_stat", OSERR)
    return page * pages


def parse_ps(text: str) -> list[tuple[int, int, str]]:
    """Rows of `ps -axo pid=,ppid=,args=`. Blanks within the command line are kept; where a word ends, ps does not say."""
    rows = []
    for line in text.split("\n"):
        pid, _, rest = line.lstrip(" ").partition(" ")
        ppid, _, args = rest.lstrip(" ").partition(" ")
        if pid.isdecimal() and ppid.isdecimal():
            rows.append((int(pid), int(ppid), args))
    return rows


def _ask(*argv: str) -> str:
    try:
        status, output = bounded.run(argv, _SECONDS)
    except OSError as error:
        raise SparkguardError(f"{argv[0]} cannot be run: {error.strerror}", status=OSERR) from None
    if status is None:
        raise SparkguardError(f"{argv[0]} did not answer within {_SECONDS:g} s", status=OSERR)
    # sysctl fails when one key of several is unknown, and still prints the others.
    return output.decode("utf-8", "replace")
