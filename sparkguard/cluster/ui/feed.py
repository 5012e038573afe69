"""What the page is told, and when: one feed, any number of viewers, none of whom can hold up another."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

# A viewer that has not read this many messages is cut off; its page connects again and asks for everything.
QUEUE_LIMIT = 500


class Feed:
    """put() to all viewers; `watched` is set while there is one."""

    def __init__(self) -> None:
        self._queues: set[asyncio.Queue[dict[str, Any] | None]] = set()
        self.watched = asyncio.Event()
        self.unwatched = asyncio.Event()
        self.unwatched.set()

    def put(self, message: dict[str, Any]) -> None:
        for queue in tuple(self._queues):
            if queue.qsize() >= QUEUE_LIMIT:
                self._leave(queue)
                while not queue.empty():
                    queue.get_nowait()
                queue.put_nowait(None)
            else:
                queue.put_nowait(message)

    async def follow(self) -> AsyncIterator[dict[str, Any]]:
        """Messages from now on; ends when this viewer is too slow, or the feed is closed."""
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._queues.add(queue)
        self.watched.set()
        self.unwatched.clear()
        try:
            while (message := await queue.get()) is not None:
                yield message
        finally:
            self._leave(queue)

    def close(self) -> None:
        for queue in tuple(self._queues):
            self._leave(queue)
            queue.put_nowait(None)

    def _leave(self, queue: asyncio.Queue[dict[str, Any] | None]) -> None:
        self._queues.discard(queue)
        if not self._queues:
            self.watched.clear()
            self.unwatched.set()


class Ring:
    """The last so many of something, oldest first."""

    def __init__(self, length: int) -> None:
        self._items: deque[dict[str, Any]] = deque(maxlen=length)

    def add(self, item: dict[str, Any]) -> None:
        self._items.append(item)

    def items(self) -> list[dict[str, Any]]:
        return list(self._items)


async def cancelled(task: asyncio.Task[Any] | None) -> None:
    """Cancels a task and waits for its end."""
    if task is None:
        return
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
