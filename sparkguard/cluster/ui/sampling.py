"""`spark-serve watch`, run while somebody looks and no longer."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from sparkguard.cluster.deadline import within
from sparkguard.cluster.ui.children import Child
from sparkguard.cluster.ui.feed import Ring, cancelled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparkguard.cluster.ui.feed import Feed

RING = 900  # samples: half an hour at 2 s, so that a page that is opened again has its charts at once
# A reload closes the old page's stream before the new one opens its own.
GRACE_SECONDS = 3.0
FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 1.0, 30.0


class Sampling:
    """Starts with the first viewer of the feed and ends with the last."""

    def __init__(self, program: Sequence[str], feed: Feed, interval: float) -> None:
        self._argv = ("watch", "--json", "--interval", str(interval))
        self._program = program
        self._feed = feed
        self._ring = Ring(RING)
        self._task: asyncio.Task[None] | None = None
        self.error: str | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    def samples(self) -> list[dict[str, Any]]:
        return self._ring.items()

    async def close(self) -> None:
        await cancelled(self._task)

    async def _run(self) -> None:
        pause = FIRST_RETRY_SECONDS
        while True:
            await self._feed.watched.wait()
            begun = time.monotonic()
            await self._sample()
            if self._feed.watched.is_set():  # it ended by itself: the catalog is broken, or it was killed
                lived = time.monotonic() - begun > LAST_RETRY_SECONDS
                pause = FIRST_RETRY_SECONDS if lived else min(pause * 2, LAST_RETRY_SECONDS)
                await asyncio.sleep(pause)

    async def _sample(self) -> None:
        child = await Child.start(self._program, self._argv)
        leaving = asyncio.create_task(self._left())
        reading = asyncio.create_task(self._read(child))
        try:
            await asyncio.wait((leaving, reading), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancelled(leaving)
            await cancelled(reading)
            await child.stop(5.0)

    async def _left(self) -> None:
        """Ends when nobody has looked for a while."""
        while True:
            await self._feed.unwatched.wait()
            try:
                await within(GRACE_SECONDS, self._feed.watched.wait())
            except asyncio.TimeoutError:
                return

    async def _read(self, child: Child) -> None:
        async for sample in child.lines():
            self._tell(None)
            self._ring.add(sample)
            self._feed.put({"type": "sample", "sample": sample})
        ended = await child.ended()
        self._tell(ended.said.strip() or f"spark-serve watch ended with status {ended.status}")

    def _tell(self, error: str | None) -> None:
        if error != self.error:
            self.error = error
            self._feed.put({"type": "sampling", "error": error})
