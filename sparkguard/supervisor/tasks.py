"""The tasks of the supervisor: a bug in any of them ends the process, and each ends in order."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine


class Tasks:
    """Made within a running loop. Lasting tasks are cancelled at the end, the others are waited for."""

    def __init__(self) -> None:
        self._brief: set[asyncio.Task[None]] = set()
        self._lasting: set[asyncio.Task[None]] = set()
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def brief(self, work: Coroutine[None, None, None]) -> None:
        """Is never cancelled: it has the ledger's lock, or an answer for somebody."""
        self._begin(self._brief, work)

    def lasting(self, work: Coroutine[None, None, None]) -> None:
        self._begin(self._lasting, work)

    async def failed(self) -> None:
        """Ends only by the exception of a bug."""
        await asyncio.shield(self._broken)

    async def end_brief(self) -> None:
        while self._brief:
            await asyncio.wait(self._brief)

    async def end_lasting(self) -> None:
        lasting = tuple(self._lasting)
        for task in lasting:
            task.cancel()
        await asyncio.gather(*lasting, return_exceptions=True)

    def _begin(self, group: set[asyncio.Task[None]], work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        group.add(task)
        task.add_done_callback(group.discard)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._broken.done():
            self._broken.set_exception(error)
