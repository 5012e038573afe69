"""Song workers, watched by their own /health: whether they take songs, and which they render."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from sparkguard.cluster.http import Unanswered, ask
from sparkguard.cluster.observe import yue_view
from sparkguard.core.cluster import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Callable

    from sparkguard.core.cluster import YueView

LOOK_SECONDS, STALE_SECONDS, DEADLINE_SECONDS = 5.0, 15.0, 3.0


class Songs:
    """The worker of one node."""

    def __init__(self, node: str, url: str, clock: Callable[[], float]) -> None:
        self._node = node
        self._url = url
        self._clock = clock
        self._seen: YueView | None = None
        self._at = 0.0
        self._error: str | None = None

    async def watch(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        try:
            answer = await ask(f"{self._url}/health", seconds=DEADLINE_SECONDS)
        except Unanswered as error:
            self._error = error.message
            return
        status = answer.json()
        if answer.status != 200 or not isinstance(status, dict):
            self._error = f"{self._url}/health answers {answer.status}"
            return
        self._seen, self._at, self._error = yue_view(status, True), self._clock(), None

    def view(self) -> dict[str, Any]:
        age = None if self._seen is None else max(0.0, self._clock() - self._at)
        seen = self._seen if age is not None and age <= STALE_SECONDS else None
        return {
            "node": self._node,
            "worker": seen.worker if seen else None,
            "state": _state(seen),
            "age_s": None if age is None else round(age, 3),
            "error": self._error,
            "accepting": seen.accepting if seen else None,
            "busy": seen.busy if seen else None,
            "jobs": list(seen.jobs) if seen else [],
        }


def _state(seen: YueView | None) -> str:
    """Whether it is to be trusted with songs, `status` says: that asks its control, too."""
    if seen is None or seen.accepting is None:
        return UNKNOWN
    return "busy" if seen.busy else "ready" if seen.accepting else "draining"
