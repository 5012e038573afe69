"""What the page is told, and when: one feed, any number of viewers, none of whom can hold up another."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from sparkguard.cluster.deadline import within

if TYPE_CHECKING:
    from collections.abc import Iterator

# A viewer that has not read this many messages is cut off; its page connects again and asks for everything.
QUEUE_LIMIT = 500


class Viewer:
    """One who looks: messages wait here until they are read."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    async def get(self, seconds: float) -> dict[str, Any] | None:
        """The next message, or a beat when none comes for so long; None: this viewer was too slow, or the feed is closed."""
        try:
            return await within(seconds, self._queue.get())
        except asyncio.TimeoutError:
            return {"type": "beat"}

    def offer(self, message: dict[str, Any]) -> bool:
        """Whether there was room."""
        if self._queue.qsize() >= QUEUE_LIMIT:
            return False
        self._queue.put_nowait(message)
        return True

    def end(self) -> None:
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(None)


class Feed:
    """put() to all viewers; `watched` is set while there is one, `unwatched` while there is none."""

    def __init__(self) -> None:
        self._viewers: set[Viewer] = set()
        self.watched = asyncio.Event()
        self.unwatched = asyncio.Event()
        self.unwatched.set()

    def put(self, message: dict[str, Any]) -> None:
        for viewer in tuple(self._viewers):
            if not viewer.offer(message):
                self._leave(viewer)
                viewer.end()

    @contextmanager
    def viewer(self) -> Iterator[Viewer]:
        """One who gets all messages from now on."""
        viewer = Viewer()
        self._viewers.add(viewer)
        self.watched.set()
        self.unwatched.clear()
        try:
            yield viewer
        finally:
            self._leave(viewer)

    def close(self) -> None:
        for viewer in tuple(self._viewers):
            self._leave(viewer)
            viewer.end()

    def _leave(self, viewer: Viewer) -> None:
        self._viewers.discard(viewer)
        if not self._viewers:
            self.watched.clear()
            self.unwatched.set()


class Ring:
    """The last so many of something, oldest first."""

    def __init__(self, length: int) -> None:
        self._items: deque[dict[str, Any]] = deque(maxlen=length)

    def add(self, item: dict[str, Any]) -> None:
        self._items.append(item)

    def supersede(self, item: dict[str, Any], keys: tuple[str, ...]) -> None:
        """In place of those that are alike in these keys: a figure that comes each second would push all else out."""
        alike = [old for old in self._items if all(old.get(key) == item.get(key) for key in keys)]
        for old in alike:
            self._items.remove(old)
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
