"""What a transition tells while it works: an event a line for programs, words for people. docs/schemas/events.json."""

from __future__ import annotations

import time
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Protocol

from sparkguard.errors import SparkguardError

if TYPE_CHECKING:
    from collections.abc import Callable

SCHEMA_VERSION = 1


class Emit(Protocol):
    def __call__(self, event: str, **fields: Any) -> None: ...


class Events:
    """Numbers the seconds since it was made, and outlives its reader: a transition ends well when nobody listens any more."""

    def __init__(self, put: Callable[[dict[str, Any]], None]) -> None:
        self._put: Callable[[dict[str, Any]], None] | None = put
        self._begin = time.monotonic()

    def __call__(self, event: str, **fields: Any) -> None:
        if self._put is None:
            return
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        elapsed = round(time.monotonic() - self._begin, 3)
        try:
            self._put({"schema_version": SCHEMA_VERSION, "event": event, "at": now, "elapsed_s": elapsed, **fields})
        except (OSError, SparkguardError):
            self._put = None


def words(event: dict[str, Any]) -> str:
    """One line, or several, for people."""
    elapsed = int(event["elapsed_s"])
    clock = f"{elapsed // 60}:{elapsed % 60:02}"
    where = f"{event['node']}: " if event.get("node") else ""
    first, *rest = str(event.get("text") or event["event"]).split("\n")
    return "\n".join([f"{clock:>6}  {where}{first}", *(f"        {line}" for line in rest)])
