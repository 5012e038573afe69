"""Requests: who may wait, whose turn it is on a runner, and what becomes of one whose runner has died.

Requests of one model are answered in the order of arrival. A request has its runner from Grant to its Done or Gone.
"""

from __future__ import annotations

from sparkguard.core.events import Asked, Done, Gone, Grant, Load, Position
from sparkguard.core.lifecycle import FAILED, READY, Runner
from sparkguard.core.roster import SHUTTING_DOWN, Refusal, Roster, Ticket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sparkguard.core.turns import Turns

# A lost connection is known before the death of the process that had it; for so long nobody else is sent there.
SUSPECT_SECONDS = 1.0
# A request that its runner did not survive so often is taken for the cause.
MOST_ATTEMPTS = 3
MOST_RETRY_SECONDS = 60


class Requests:
    def __init__(self, roster: Roster, turns: Turns) -> None:
        self._roster = roster
        self._turns = turns

    def asked(self, event: Asked, now: float) -> None:
        roster = self._roster
        roster.enter(event.ticket, event.model)
        if refusal := self._refusal(event.model):
            roster.refuse(refusal, event.ticket)
            return
        runner = roster.runner(event.model)
        if len(runner.queue) < roster.limits.queue_limit or has_place(runner, now):
            roster.enqueue(runner, event.ticket)
            return
        each = runner.seconds_each * len(runner.queue) / max(1, runner.parallel)
        seconds = min(MOST_RETRY_SECONDS, max(1, int(each) + 1))
        text = f"{len(runner.queue)} requests wait for {event.model} already"
        roster.refuse(Refusal(429, "queue_full", text, seconds), event.ticket)

    def load(self, event: Load, now: float) -> None:
        roster = self._roster
        ticket = roster.enter(event.ticket, event.model)
        if refusal := self._refusal(event.model):
            roster.refuse(refusal, event.ticket)
            return
        runner = roster.runner(event.model)
        runner.loads.append((ticket.order, event.ticket))
        runner.deaths = runner.failed_starts = 0
        runner.retry_at = now
        roster.turn(runner)

    def done(self, event: Done, now: float) -> None:
        roster = self._roster
        ticket = roster.tickets.get(event.ticket)
        if ticket is None or ticket.generation is None:
            return
        runner = roster.runners.get(ticket.model)
        alive = runner is not None and self._end_lease(runner, event.ticket, ticket, now)
        if not event.replay:
            if runner is not None and event.ok:
                spent = now - ticket.granted_at
                runner.seconds_each += (spent - runner.seconds_each) * (0.2 if runner.seconds_each else 1.0)
            del roster.tickets[event.ticket]
            return
        ticket.generation = None
        ticket.attempts += 1
        refusal = self._refusal(ticket.model)
        if ticket.attempts >= MOST_ATTEMPTS:
            text = f"{ticket.attempts} runners of {ticket.model} ended under this request; it is not tried again"
            refusal = Refusal(502, "runner_died", text)
        if refusal:
            roster.refuse(refusal, event.ticket)
            return
        if alive and runner is not None and runner.state == READY:
            runner.suspect_until = now + SUSPECT_SECONDS
        roster.enqueue(roster.runner(ticket.model), event.ticket)

    def gone(self, event: Gone, now: float) -> None:
        ticket = self._roster.leave(event.ticket)
        runner = self._roster.runners.get(ticket.model) if ticket is not None else None
        if ticket is not None and runner is not None and ticket.generation is not None:
            self._end_lease(runner, event.ticket, ticket, now)

    def grant(self, runner: Runner, now: float) -> None:
        """A runner that is ready takes as many as it may."""
        while runner.queue and has_place(runner, now) and self._turns.may_take(runner, runner.queue[0][0], now):
            _, name = runner.queue.pop(0)
            runner.leases.add(name)
            ticket = self._roster.tickets[name]
            ticket.generation, ticket.granted_at = runner.generation, now
            self._roster.effects.append(Grant(name, runner.id, runner.generation))
            self._roster.turn(runner)

    def tell_places(self, runner: Runner) -> None:
        for place, (_, name) in enumerate(runner.queue, 1):
            ticket = self._roster.tickets[name]
            if ticket.place != place:
                ticket.place = place
                self._roster.effects.append(Position(name, place))

    def _refusal(self, name: str) -> Refusal | None:
        """What no waiting would change is said at once."""
        model = self._roster.models.get(name)
        runner = self._roster.runners.get(name)
        if self._roster.closing:
            return SHUTTING_DOWN
        if model is None:
            return Refusal(404, "model_not_found", f"there is no model {name}")
        if model.problem:
            return Refusal(model.problem.status, model.problem.code, model.problem.message)
        if not model.placements:
            return no_device(name)
        if runner is not None and runner.state == FAILED and runner.version == model.version:
            return failed(runner)
        return None

    def _end_lease(self, runner: Runner, name: int, ticket: Ticket, now: float) -> bool:
        """False: the runner that it had is not there any more."""
        if ticket.generation != runner.generation or name not in runner.leases:
            return False
        runner.leases.discard(name)
        runner.used_at = now
        self._roster.turn(runner)
        return True


def has_place(runner: Runner, now: float) -> bool:
    return runner.state == READY and len(runner.leases) < runner.parallel and now >= runner.suspect_until


def no_device(name: str) -> Refusal:
    return Refusal(503, "no_device", f"there is no device that {name} may run on")


def failed(runner: Runner) -> Refusal:
    """cause: the file, or the settings."""
    return Refusal(500, runner.cause, f"{runner.id} cannot be loaded until its file or settings change: {runner.words}")
