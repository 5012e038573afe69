"""Those who wait for the dispatcher's answer: each has a ticket and a future, and whoever leaves is told of to the dispatcher."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from sparkguard.core import events
from sparkguard.supervisor.lease import RunnerLease
from sparkguard.supervisor.protocol import Refused

Key = tuple[str, int]  # a runner: its model, and its generation


class Turnstile:
    """post: for whatever has happened. ask: the same for a wish, which may be granted before it returns."""

    def __init__(self, post: Callable[[events.Event], None], ask: Callable[[events.Event], None]) -> None:
        self.leases: dict[int, RunnerLease] = {}
        self.asking: dict[int, RunnerLease] = {}
        self.waiting: dict[int, asyncio.Future[tuple[Key, ...]]] = {}
        self.post = post
        self._ask = ask
        self._positions: dict[int, Callable[[int], None]] = {}
        self._numbers = itertools.count(1)

    def number(self) -> int:
        """A ticket that nobody has had."""
        return next(self._numbers)

    async def lease(self, lease: RunnerLease, on_position: Callable[[int], None] | None) -> None:
        if on_position is not None:
            self._positions[lease.ticket] = on_position
        try:
            await self.wait(lease.ticket, events.Asked(lease.ticket, lease.model), lease)
        finally:
            self._positions.pop(lease.ticket, None)

    async def wait(self, ticket: int, event: events.Event, lease: RunnerLease | None = None) -> tuple[Key, ...]:
        """Posts the event and waits for what becomes of the ticket. Raises Refused."""
        turn: asyncio.Future[tuple[Key, ...]] = asyncio.get_running_loop().create_future()
        self.waiting[ticket] = turn
        if lease is not None:
            self.asking[ticket] = lease
        self._ask(event)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                turn.exception()  # refused at the same moment: heard
            self.waiting.pop(ticket, None)
            self.asking.pop(ticket, None)
            self.leases.pop(ticket, None)
            self.post(events.Gone(ticket))
            raise

    def grant(self, ticket: int, key: Key, endpoint: tuple[str, str | None]) -> None:
        lease = self.asking.pop(ticket, None)
        if lease is None:
            return  # it has left; its Gone is in the queue
        self.leases[ticket] = lease
        lease.give(key[1], endpoint)
        self.answer(ticket, (key,))

    def answer(self, ticket: int, answer: tuple[Key, ...]) -> None:
        turn = self.waiting.pop(ticket, None)
        if turn is not None and not turn.done():
            turn.set_result(answer)

    def refuse(self, effect: events.Refuse, more: str = "") -> None:
        self.asking.pop(effect.ticket, None)
        turn = self.waiting.pop(effect.ticket, None)
        if turn is not None and not turn.done():
            turn.set_exception(Refused(effect.status, effect.code, effect.message + more, effect.retry_after))

    def tell_position(self, ticket: int, place: int) -> None:
        if ticket in self._positions:
            # Later, so that whatever a listener does wrong is its own error.
            asyncio.get_running_loop().call_soon(self._positions[ticket], place)

    def end_leases(self, key: Key, why: str) -> None:
        for lease in self.leases.values():
            if (lease.model, lease.generation) == key:
                lease.end(why)
