"""Holds hold.lock for as long as the laptop's channel is open, so that everybody is told who is at work here."""

from __future__ import annotations

import threading

from sparkguard.cluster.node import records

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from sparkguard.cluster.node.base import Reply


def main(request: dict[str, Any], reply: Reply) -> None:
    """One reply when it is held; "locked" (75) with the holder when it is another's."""
    records.take("hold.lock", request["holder"], request.get("lock_seconds", 0))
    reply({"held": True})
    threading.Event().wait()
