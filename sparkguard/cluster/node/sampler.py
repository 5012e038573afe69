"""A node's readings, for as long as the laptop listens.

Runs on a node: Linux, Python 3.8, the standard library. One process over one held channel; its end is stdin's (base.py).
Lines: {"hello": ...} first, {"tick": ...} at each interval, and whenever they are there {"slow": ...}, {"holders": ...} and
{"containers": ...}: these come apart, since a docker daemon that hangs must not hold up the rest. No wall clock is in them.
"""

from __future__ import annotations

import resource
import threading
import time

from sparkguard.cluster.node.base import Fault, proc_root, sys_root
from sparkguard.cluster.node.docker import inspect
from sparkguard.cluster.node.gpu import Gpus
from sparkguard.cluster.node.host import Host
from sparkguard.cluster.node.observe import gpu_holders
from sparkguard.cluster.node.records import load

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from sparkguard.cluster.node.base import Reply

SLOW_SECONDS = 5.0  # a rank that died is seen within twice this


def main(request: dict[str, Any], reply: Reply) -> None:
    """request: interval in seconds; paths, whose file systems are looked at; slow_interval for all but the ticks."""
    interval = max(0.25, float(request["interval"]))
    rare = float(request.get("slow_interval") or SLOW_SECONDS)
    paths = list(request.get("paths") or ())
    host = Host(proc_root(), sys_root())
    reply({"hello": host.about()})
    gpus = Gpus(interval)
    _start(rare, lambda: reply({"slow": host.slow(paths)}))
    _start(rare, lambda: reply({"containers": _told(owned)}))
    _start(rare, lambda: reply({"holders": _told(gpu_holders)}))
    _every(interval, lambda: reply({"tick": tick(host, gpus)}))


def _start(seconds: float, work: Callable[[], None]) -> None:
    threading.Thread(target=_every, args=(seconds, work), daemon=True).start()


def _every(seconds: float, work: Callable[[], None]) -> None:
    due = time.monotonic()
    while True:
        work()
        due = max(due + seconds, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))


def tick(host: Host, gpus: Gpus) -> dict[str, Any]:
    found = host.quick()
    found["steady_s"] = time.monotonic()  # of this machine: to compare with itself
    found["gpus"] = gpus.now()
    found["gpu_error"] = gpus.error
    found["cost"] = {"own_s": _used(resource.RUSAGE_SELF), "children_s": _used(resource.RUSAGE_CHILDREN)}
    return found


def _used(whose: int) -> float:
    used = resource.getrusage(whose)
    return used.ru_utime + used.ru_stime


def _told(work: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"found": work(), "error": None}
    except Fault as fault:
        return {"found": None, "error": fault.message}


def owned() -> list[dict[str, Any]]:
    """The containers in this node's receipts, which say more exactly than any list from the laptop what is ours now."""
    receipts = load().receipts
    found = {container["id"]: container for container in inspect(list(receipts))} if receipts else {}
    gone = {"state": "gone", "exit_code": None, "oom_killed": False}
    return [found.get(identity) or {**receipt, **gone, "id": identity} for identity, receipt in receipts.items()]
