"""What the parts of a pull share: where they tell what happens, whether they shall stop, and how much room is left.

Runs on a node: Linux, Python 3.8, the standard library.
"""

from __future__ import annotations

import json
import os
import threading
import time

from sparkguard.cluster.node.base import FAILED, Fault

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Job:
    """What its parts share: where to tell, whether to stop, how much room is left."""

    def __init__(self, folder: str, order: dict[str, Any], secrets: dict[str, str]) -> None:
        self.folder = folder
        self.order = order
        self.secrets = secrets
        self.stopped = threading.Event()
        self._seq = 0
        self._lock = threading.Lock()
        self._events = open(os.path.join(folder, "events.jsonl"), "ab", buffering=0)  # noqa: SIM115

    def tell(self, event: str, **fields: Any) -> None:
        with self._lock:
            self._seq += 1
            line = {"seq": self._seq, "event": event, "time": time.time(), **fields}
            try:
                self._events.write(json.dumps(line).encode() + b"\n")
            except OSError:  # a full disk must not keep it from ending well
                self._seq -= 1

    def check(self) -> None:
        if self.stopped.is_set():
            raise Cancelled

    def check_room(self, path: str, wanted: int = 0) -> None:
        """Fault "disk" when less than the reserve would be free after `wanted` more bytes."""
        while not os.path.isdir(path):
            path = os.path.dirname(path) or "/"
        room = os.statvfs(path)
        free = room.f_bavail * room.f_frsize
        reserve = self.order["reserve_bytes"]
        if free - wanted < reserve:
            what = f"{gib(wanted)} more, and {gib(free)} are free" if wanted else f"{gib(free)} are free"
            raise Fault("disk", f"{path}: {what}; {gib(reserve)} stay free (disk_reserve_gib)", FAILED)


class Cancelled(Exception):
    pass


def gib(amount: int) -> str:
    return f"{amount / (1 << 30):.1f} GiB"
