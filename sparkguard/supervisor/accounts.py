"""Memory in the supervisor: when the machine is read for the dispatcher, and when the ledger hears what runners hold."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from sparkguard.core import events, lifecycle
from sparkguard.core.dispatch import Dispatch
from sparkguard.errors import SparkguardError
from sparkguard.supervisor.protocol import Memory
from sparkguard.supervisor.tasks import Tasks

log = logging.getLogger("sparkguard.supervisor")
_REFRESH_SECONDS = 5.0


class Accounts:
    """handle: one step of the dispatcher, at once; post: one in its turn."""

    def __init__(
        self,
        memory: Memory,
        dispatch: Dispatch,
        handle: Callable[[events.Event], None],
        post: Callable[[events.Event], None],
    ) -> None:
        self._memory = memory
        self._dispatch = dispatch
        self._handle = handle
        self._post = post
        self._reserved: dict[str, int] = {}
        self._reserving = False
        self._measures = 0

    async def measure(self, asked: bool = True) -> None:
        """asked: by the dispatcher, which then also wants to hear that it was not possible."""
        decided = False
        self._measures += 1

        def decide(reading: events.Reading) -> Mapping[str, int]:
            nonlocal decided
            decided = True
            self._handle(events.Free(reading))  # a step like any other: nothing else runs in this thread meanwhile
            return self._hold_now()

        try:
            await self._memory.read(self._pids(), decide)
        except SparkguardError as error:
            if decided:
                log.warning("what the runners hold is not reserved: %s", error.message)
            elif asked:
                self._post(events.Unread(error.message))
            else:
                log.warning("%s", error.message)
        finally:
            self._measures -= 1

    def settle(self, tasks: Tasks) -> None:
        """After a step: the ledger is told where less, or more, is held than when it was last told."""
        if self._dispatch.held() != self._reserved and not self._measures and not self._reserving:
            self._reserving = True
            tasks.brief(self._reserve())

    async def _reserve(self) -> None:
        try:
            while self._dispatch.held() != self._reserved:
                await self.tell()
        except SparkguardError as error:
            log.warning("what the runners hold is not reserved: %s", error.message)
        finally:
            self._reserving = False

    async def tell(self) -> None:
        """Raises SparkguardError."""
        await self._memory.hold(self._hold_now)

    async def close(self) -> None:
        """Nothing is held any more."""
        try:
            await self._memory.hold(dict)
        except SparkguardError as error:
            log.warning("%s", error.message)

    async def refresh(self, tasks: Tasks, watched: Callable[[], bool]) -> None:
        """Looks again while somebody watches the devices."""
        while True:
            await asyncio.sleep(_REFRESH_SECONDS)
            if watched() and not self._measures:
                tasks.brief(self.measure(asked=False))

    def _hold_now(self) -> Mapping[str, int]:
        self._reserved = self._dispatch.held()
        return self._reserved

    def _pids(self) -> dict[tuple[str, int], int]:
        return {
            (id, runner.generation): runner.pid
            for id, runner in self._dispatch.runners.items()
            if runner.pid is not None and runner.state in lifecycle.HAS_PROCESS
        }
