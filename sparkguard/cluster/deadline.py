"""A deadline for a wait that may be cancelled.

asyncio.wait_for of Python 3.10 and 3.11 swallows a cancellation that comes in the same turn as the result (CPython issue 86296):
a Ctrl-C then does nothing, once in some hundred times.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def within(seconds: float | None, work: Awaitable[T]) -> T:
    """Its result; asyncio.TimeoutError after that many seconds (None: never), when it has been cancelled."""
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait((task,), timeout=None if seconds is None else max(0.0, seconds))
        if not done:
            raise asyncio.TimeoutError
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
