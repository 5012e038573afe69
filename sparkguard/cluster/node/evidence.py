"""What explains a failed start, bounded: containers and the ends of their logs, memory, pressure, and the kernel's last words.

Runs on a node: Linux, Python 3.8, the standard library. Each part that cannot be told says so itself.
"""

from __future__ import annotations

import os

from sparkguard.cluster.node import docker
from sparkguard.cluster.node.base import Fault, proc_root, read, run, together

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from sparkguard.cluster.node.base import Reply

LOG_LINES, LOG_BYTES = 160, 32 << 10
_KERNEL_BYTES = 16 << 10
_KERNEL_LINES = 80
# Memory, the GPU's driver, and the fabric: what takes a Spark down while a model loads.
_TELLING = "nvrm|xid|nv_err|oom|out of memory|killed process|hung task|mlx5|ibv|page allocation|thermal|mce|segfault|i/o error"


def main(request: dict[str, Any], reply: Reply) -> None:
    works = {
        "containers": lambda: _containers(request["ids"]),
        "nvidia_smi": lambda: _said("nvidia-smi"),
        "kernel": lambda: _kernel("0"),
        "kernel_previous_boot": lambda: _kernel("-1"),
    }
    answer: dict[str, Any] = {
        "boot_id": read(proc_root() + "/sys/kernel/random/boot_id"),
        "uptime": read(proc_root() + "/uptime"),
        "version": read(proc_root() + "/version"),
        "loadavg": read(proc_root() + "/loadavg"),
        "meminfo": read(proc_root() + "/meminfo", 4096),
        "pressure": {name: read(f"{proc_root()}/pressure/{name}") for name in ("cpu", "memory", "io")},
    }
    for name, found in zip(works, together(*works.values())):
        answer[name] = {"error": found.message} if isinstance(found, Fault) else found
    reply(answer)


def _containers(ids: list[str]) -> list[dict[str, Any]]:
    found = docker.inspect(ids) if ids else []
    for each in found:
        done = run(("docker", "logs", "--tail", str(LOG_LINES), each["id"]), 20, LOG_BYTES, tail=True)
        # docker keeps the two apart, and engines write nearly all of it to stderr.
        each["log"] = {"stdout": done.out.splitlines()[-LOG_LINES:], "stderr": done.err.splitlines()[-LOG_LINES:]}
    return found


def _kernel(boot: str) -> list[str]:
    """Lines about memory, driver and fabric; without any, the last ones. No root needed where the user may read the journal."""
    words = ("journalctl", "--dmesg", "--boot", boot, "--no-pager", "--output", "short-iso", "--lines", "2000")
    done = run(words, 15, 1 << 20, env=dict(os.environ, LC_ALL="C"), tail=True)
    if done.status:
        raise Fault("journal", done.err or f"journalctl ended with status {done.status}")
    telling = [line for line in done.out.splitlines() if any(word in line.lower() for word in _TELLING.split("|"))]
    lines = (telling or done.out.splitlines()[-20:])[-_KERNEL_LINES:]
    while sum(map(len, lines)) > _KERNEL_BYTES:
        del lines[0]
    return lines


def _said(*argv: str) -> str:
    done = run(argv, 15, 8 << 10)
    return done.out or done.err
