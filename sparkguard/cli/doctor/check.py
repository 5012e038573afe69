"""The result of one look."""

from __future__ import annotations

from sparkguard.core.record import Record
from sparkguard.errors import SparkguardError


class Check(Record):
    """ok None: it cannot be told, or is a matter of choice. remedy is a command to paste."""

    id: str
    ok: bool | None
    message: str
    remedy: str | None = None


def spoken(error: SparkguardError) -> str:
    """An error in one line; its hint is for people, and no command to paste."""
    return f"{error.message}; {error.hint}" if error.hint else error.message
