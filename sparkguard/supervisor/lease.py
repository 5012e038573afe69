"""A request's hold on a runner, from its turn until it ends."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from sparkguard.core import events
from sparkguard.supervisor.protocol import Refused, RunnerDied

if TYPE_CHECKING:
    from types import TracebackType

    from sparkguard.supervisor.turnstile import Turnstile
    from sparkguard.supervisor.view import View


class RunnerLease:
    """The Lease of supervisor/protocol.py."""

    socket = ""
    key: str | None = None

    def __init__(self, turnstile: Turnstile, view: View, model: str) -> None:
        self.model = model
        self.generation = 0
        self.ticket = turnstile.number()
        self._turnstile = turnstile
        self._view = view
        self.death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._sent = self._failed = self._over = False
        self._generated = 0
        self._granted_at = 0.0

    async def __aenter__(self) -> RunnerLease:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._over:
            return
        self._over = True
        self._turnstile.leases.pop(self.ticket, None)
        ok = kind is None and not self._failed
        self._view.count_request(self.model, ok, asyncio.get_running_loop().time() - self._granted_at)
        if kind is not None and issubclass(kind, asyncio.CancelledError):
            self._turnstile.post(events.Gone(self.ticket))
        else:
            self._turnstile.post(events.Done(self.ticket, ok, self._generated))

    def first_byte(self) -> None:
        self._sent = True

    def tokens(self, prompt: int, generated: int) -> None:
        self._generated += generated
        counts = self._view.counts(self.model)
        counts["prompt_tokens"] += prompt
        counts["generated_tokens"] += generated

    def failed(self) -> None:
        self._failed = True

    async def replay(self) -> None:
        if self._sent:
            raise RunnerDied(f"the runner of {self.model} died in the middle of an answer")
        self._turnstile.leases.pop(self.ticket, None)
        self.death = asyncio.get_running_loop().create_future()
        try:
            await self._turnstile.wait(self.ticket, events.Done(self.ticket, ok=False, replay=True), self)
        except (Refused, asyncio.CancelledError):
            self._over = True
            raise

    def give(self, generation: int, endpoint: tuple[str, str | None]) -> None:
        self.generation = generation
        self.socket, self.key = endpoint
        self._granted_at = asyncio.get_running_loop().time()

    def end(self, why: str) -> None:
        if not self.death.done():
            self.death.set_result(why)
