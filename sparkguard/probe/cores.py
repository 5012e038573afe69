"""The CPUs this process may use, and of which kind each is."""

from __future__ import annotations

import os

from sparkguard.core.affinity import Core, parse_cpus


def usable(sys_root: str = "/sys") -> tuple[Core, ...]:
    """The present affinity, so that a share of a share stays inside it. Empty where the system has none (macOS)."""
    if not hasattr(os, "sched_getaffinity"):
        return ()
    root = f"{sys_root}/devices/system/cpu"
    # x86 tells mixed cores by the PMUs, Arm by cpu_capacity (0 to 1024; GB10: two values).
    slow = _cpus(f"{sys_root}/devices/cpu_atom/cpus")
    cores = []
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = _cpus(f"{root}/cpu{cpu}/topology/thread_siblings_list")
        capacity = _text(f"{root}/cpu{cpu}/cpu_capacity")
        kind = int(capacity) if capacity.isdigit() else 0 if cpu in slow else 1
        cores.append(Core(cpu, kind, min(siblings) if siblings else cpu))
    return tuple(cores)


def _cpus(path: str) -> tuple[int, ...]:
    try:
        return parse_cpus(_text(path))
    except ValueError:
        return ()


def _text(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""
