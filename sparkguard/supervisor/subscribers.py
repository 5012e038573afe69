"""Who follows what happens: bounded, so that a slow reader costs nobody anything but itself."""

from __future__ import annotations

import asyncio
from weakref import WeakSet

from sparkguard.supervisor.protocol import Json

_MOST_EVENTS = 1000  # that one reader may be behind


class Subscribers:
    """All readers there are."""

    def __init__(self) -> None:
        self._readers: WeakSet[Subscriber] = WeakSet()

    def __len__(self) -> int:
        return len(self._readers)

    def new(self) -> Subscriber:
        reader = Subscriber()
        self._readers.add(reader)
        return reader

    def tell(self, event: Json) -> None:
        for reader in self._readers:
            reader.put(event)


class Subscriber:
    """One reader of events: bounded, and never waited for. Whoever drops it has unsubscribed."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[Json] = asyncio.Queue(_MOST_EVENTS)
        self._dropped = 0

    def put(self, event: Json) -> None:
        try:
            self._events.put_nowait(event)
        except asyncio.QueueFull:
            self._dropped += 1

    def __aiter__(self) -> Subscriber:
        return self

    async def __anext__(self) -> Json:
        if self._dropped and self._events.empty():
            count, self._dropped = self._dropped, 0
            return {"type": "dropped", "count": count}
        return await self._events.get()
