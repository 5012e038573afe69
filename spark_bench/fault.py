"""The one expected failure of an experiment, and its exit status."""

from __future__ import annotations


class Fault(Exception):
    """status: 2 bad arguments or files, 1 the experiment did not come to its end, 75 somebody else is at work."""

    def __init__(self, message: str, status: int = 2) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
