"""What a client is pointed at."""

from __future__ import annotations

from sparkguard.core.record import Record


class Target(Record):
    provider: str  # the name under which clients keep this endpoint
    base_url: str  # ends in /v1
    served: str  # the model's id there
    context: int | None = None  # tokens
    vision: bool = False
