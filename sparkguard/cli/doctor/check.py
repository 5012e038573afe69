"""The result of one look."""

from __future__ import annotations

from sparkguard.core.record import Record


class Check(Record):
    """ok None: it cannot be told, or is a matter of choice. remedy is a command to paste."""

    id: str
    ok: bool | None
    message: str
    remedy: str | None = None
