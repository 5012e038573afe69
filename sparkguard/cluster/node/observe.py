"""A node at one moment: what runs, what holds the GPU, who is at work, and what a plan asks for. Changes nothing.

Each part that cannot be told says so itself, and hides no other.
"""

from __future__ import annotations

import os
import re

from sparkguard.cluster.node import docker, records, yue
from sparkguard.cluster.node.base import Fault, proc_root, read, run, sys_root, together

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from sparkguard.cluster.node.base import Reply

# The desktop's remote session, which encodes on the GPU: what it holds is no workload, when it is what it says it is.
_DESKTOP = "/usr/libexec/gnome-remote-desktop-daemon"
_DESKTOP_CGROUP = re.compile(r"/gnome-remote-desktop[^/]*\.service$")
_DESKTOP_BYTES = 1 << 30


def main(request: dict[str, Any], reply: Reply) -> None:
    works = {
        "containers": docker.containers,
        "gpu": gpu_holders,
        "images": lambda: [[reference, docker.image_id(reference)] for reference in request.get("images", ())],
        "yue": lambda: yue.look(request["yue"]) if request.get("yue") else None,
        "rest": lambda: rest(request),
    }
    seen = dict(zip(works, together(*works.values())))
    answer = seen.pop("rest")
    if isinstance(answer, Fault):
        raise answer
    for name, found in seen.items():
        if isinstance(found, Fault):
            answer[name], answer[name + "_error"] = None, found.message
        else:
            answer[name] = found
    try:
        record = records.load()
        answer["generation"] = record.generation
        for container in answer["containers"] or ():
            container["owned"] = record.owns(container)
    except Fault as fault:
        answer["state_error"] = fault.message
    reply(answer)


def rest(request: dict[str, Any]) -> dict[str, Any]:
    """All that files tell."""
    holder = records.holder_of("hold.lock")
    return {
        "boot_id": read(proc_root() + "/sys/kernel/random/boot_id"),
        "meminfo": meminfo(),
        "missing": [path for path in request.get("paths", ()) if not os.path.exists(os.path.expanduser(path))],
        "interfaces": [[name, interface(name)] for name in request.get("interfaces", ())],
        "hcas": [[name, hca(name)] for name in request.get("hcas", ())],
        "listeners": listeners(request.get("ports")),
        "lock": holder if holder is not None else records.holder_of("node.lock"),
    }


def meminfo() -> dict[str, int]:
    """In bytes."""
    found = {}
    for line in (read(proc_root() + "/meminfo") or "").splitlines():
        words = line.replace(":", " ").split()
        if len(words) == 3 and words[1].isdigit():
            found[words[0]] = int(words[1]) * 1024
    return found


def interface(name: str) -> str:
    folder = f"{sys_root()}/class/net/{name}"
    if "/" in name or not os.path.isdir(folder):
        return "absent"
    # Some drivers leave operstate at "unknown"; carrier tells then.
    state = read(folder + "/operstate")
    return "up" if state == "up" or (state == "unknown" and read(folder + "/carrier") == "1") else "down"


def hca(name: str) -> str:
    """NAME or NAME:PORT; without a port, any port that is active."""
    device, _, port = name.partition(":")
    ports = f"{sys_root()}/class/infiniband/{device}/ports"
    if "/" in name or not os.path.isdir(ports):
        return "absent"
    states = [read(f"{ports}/{number}/state") or "" for number in ([port] if port else sorted(os.listdir(ports)))]
    return "active" if any("ACTIVE" in state for state in states) else "down"


def gpu_holders() -> list[dict[str, Any]]:
    """Processes that compute on a GPU. Fault "gpu" when nvidia-smi does not say."""
    query = "--query-compute-apps=pid,process_name,used_gpu_memory"
    done = run(("nvidia-smi", query, "--format=csv,noheader,nounits"), 15)
    if done.status != 0:
        words = "no answer within 15 s" if done.status is None else done.err or done.out.strip() or "it failed"
        raise Fault("gpu", "nvidia-smi: " + words)
    return [_holder(line) for line in done.out.splitlines() if line.strip()]


def _holder(line: str) -> dict[str, Any]:
    words = [word.strip() for word in line.split(",")]
    if len(words) < 3 or not words[0].isdigit():
        raise Fault("gpu", f"nvidia-smi answers what is no process: {line[:200]!r}")
    pid, name, used = int(words[0]), ",".join(words[1:-1]), words[-1]
    used_bytes = int(used) << 20 if used.isdigit() else None
    cgroup = read(f"{proc_root()}/{pid}/cgroup") or ""
    return {
        "pid": pid,
        "name": name,
        "used_bytes": used_bytes,
        "container": docker.container_of(cgroup),
        "exempt": _is_desktop(pid, used_bytes, cgroup),
    }


def _is_desktop(pid: int, used_bytes: int | None, cgroup: str) -> bool:
    try:
        program = os.readlink(f"{proc_root()}/{pid}/exe")
    except OSError:
        return False
    units = [line.rpartition(":")[2] for line in cgroup.splitlines()]
    is_unit = any(_DESKTOP_CGROUP.search(unit) for unit in units)
    return program == _DESKTOP and is_unit and used_bytes is not None and used_bytes <= _DESKTOP_BYTES


def listeners(ports: list[int] | None) -> list[dict[str, Any]]:
    """Who listens on the ports asked for; without any, on all of them. A process of another user's has no pid here."""
    inodes: dict[int, str] = {}
    for name in ("tcp", "tcp6"):
        for line in (read(f"{proc_root()}/net/{name}", 16 << 20) or "").splitlines()[1:]:
            words = line.split()
            if len(words) > 9 and words[3] == "0A":
                port = int(words[1].rpartition(":")[2], 16)
                if ports is None or port in ports:
                    inodes.setdefault(port, words[9])
    owners = _owners(set(inodes.values())) if inodes else {}
    found = []
    for port, inode in sorted(inodes.items()):
        pid = owners.get(inode)
        found.append({"port": port, "pid": pid, "name": (read(f"{proc_root()}/{pid}/comm") or "") if pid else ""})
    return found


def _owners(inodes: set[str]) -> dict[str, int]:
    owners: dict[str, int] = {}
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    for pid in os.listdir(proc_root()):
        if not pid.isdigit() or len(owners) == len(inodes):
            continue
        folder = f"{proc_root()}/{pid}/fd"
        try:
            for descriptor in os.listdir(folder):
                inode = wanted.get(os.readlink(f"{folder}/{descriptor}"))
                if inode is not None:
                    owners.setdefault(inode, int(pid))
        except OSError:
            continue
    return owners
