"""Waiting for a state of things that a step may bring about."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sparkguard.core import events


class Conditions:
    def __init__(self, post: Callable[[events.Event], None]) -> None:
        self._post = post
        self._watchers: list[_Watcher] = []

    async def until(self, holds: Callable[[], bool]) -> None:
        """Returns when it holds, and not before all that is posted now is done."""
        watcher = _Watcher(holds)
        self._watchers.append(watcher)
        self._post(watcher.mark)
        await watcher.done

    def look(self, event: events.Event) -> None:
        """After each step."""
        self._watchers = [watcher for watcher in self._watchers if not watcher.look(event)]


class _Watcher:
    def __init__(self, holds: Callable[[], bool]) -> None:
        self.holds = holds
        self.mark = events.Tick()  # what was posted before it has been done when it comes
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._armed = False

    def look(self, event: events.Event) -> bool:
        """Whether it is over: it holds, or nobody waits any more."""
        self._armed = self._armed or event is self.mark
        if not self.done.done() and self._armed and self.holds():
            self.done.set_result(None)
        return self.done.done()
