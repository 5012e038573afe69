"""A closed loop: so many streams at once, each asking again as soon as it has its answer, until the batch is through."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from sparkguard.core.measure import Timeline

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence


async def batch(
    ask: Callable[[int], Awaitable[Timeline]],
    numbers: Sequence[int],
    streams: int,
    done: Callable[[int, Timeline], None],
) -> None:
    """Calls done() with each request as it ends, the cancelled ones included. Returns, or is cancelled, with none running."""
    waiting = iter(numbers)
    workers = [asyncio.ensure_future(_worker(ask, waiting, done)) for _ in range(min(streams, len(numbers)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        # Until every connection is closed: who revoked a lease goes on when this has returned.
        await asyncio.gather(*workers, return_exceptions=True)


async def _worker(
    ask: Callable[[int], Awaitable[Timeline]], waiting: Iterator[int], done: Callable[[int, Timeline], None]
) -> None:
    for number in waiting:
        began = time.perf_counter()
        try:
            line = await ask(number)
        except asyncio.CancelledError:
            done(number, Timeline(began=began, ended=time.perf_counter(), cancelled=True))
            raise
        done(number, line)
