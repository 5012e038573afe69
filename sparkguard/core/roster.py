"""What the dispatcher knows: models, their runners, who waits or runs, and what is to be done as it comes up in a step.

It has the few moves that every decision is made of. Who moves when is decided in requests.py, processes.py and turns.py.
"""

from __future__ import annotations

from bisect import insort

from sparkguard.core import rooms
from sparkguard.core.events import Effect, Limits, Loaded, Model, Refuse, Stop
from sparkguard.core.lifecycle import BACKOFF, DRAINING, HAS_PROCESS, READY, STARTING, STOPPED, STOPPING, Runner
from sparkguard.core.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class Refusal(Record):
    """Why somebody gets no runner. status is HTTP's; rooms as in events.Refuse."""

    status: int
    code: str
    message: str
    retry_after: int | None = None
    rooms: tuple[Mapping[str, int], ...] = ()


SHUTTING_DOWN = Refusal(503, "shutting_down", "the supervisor is shutting down", 5)


class Ticket:
    """One request, one load by hand, or one wish for memory (model '')."""

    __slots__ = ("attempts", "generation", "granted_at", "model", "order", "place")

    def __init__(self, order: int, model: str) -> None:
        self.order = order
        self.model = model
        self.generation: int | None = None  # None: it waits
        self.attempts = 0
        self.granted_at = 0.0
        self.place = 0


class Roster:
    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.models: dict[str, Model] = {}
        self.runners: dict[str, Runner] = {}  # of models that have, want or had trouble with a process
        self.tickets: dict[int, Ticket] = {}
        self.closing = False
        self.effects: list[Effect] = []  # of this step
        self.turned: dict[str, None] = {}  # models of which people see something else after this step
        self._order = 0

    def next_order(self) -> int:
        self._order += 1
        return self._order

    def runner(self, id: str) -> Runner:
        if id not in self.runners:
            self.runners[id] = Runner(self.models[id])
        return self.runners[id]

    def turn(self, runner: Runner) -> None:
        self.turned[runner.id] = None

    # Those who wait

    def enter(self, name: int, model: str) -> Ticket:
        ticket = self.tickets[name] = Ticket(self.next_order(), model)
        return ticket

    def enqueue(self, runner: Runner, name: int) -> None:
        insort(runner.queue, (self.tickets[name].order, name))
        self.turn(runner)

    def leave(self, name: int) -> Ticket | None:
        """The ticket is over, wherever it waits."""
        ticket = self.tickets.pop(name, None)
        runner = self.runners.get(ticket.model) if ticket is not None else None
        if ticket is not None and runner is not None and ticket.generation is None:
            runner.queue = [pair for pair in runner.queue if pair[1] != name]
            runner.loads = [pair for pair in runner.loads if pair[1] != name]
            self.turn(runner)
        return ticket

    def refuse(self, refusal: Refusal, *names: int) -> None:
        for name in names:
            ticket = self.leave(name)
            assert ticket is not None
            model = ticket.model
            effect = Refuse(name, refusal.status, refusal.code, refusal.message, refusal.retry_after, model, refusal.rooms)
            self.effects.append(effect)

    def answer_loads(self, runner: Runner) -> None:
        for _, name in runner.loads:
            del self.tickets[name]
            self.effects.append(Loaded(name, runner.id))
        runner.loads = []

    # Processes

    def go(self, runner: Runner, state: str) -> None:
        runner.state = state
        self.turn(runner)

    def stop(self, runner: Runner, grace_seconds: float) -> None:
        if runner.state != STOPPING:
            self.go(runner, STOPPING)
        self.effects.append(Stop(runner.id, runner.generation, grace_seconds))

    def end(self, runner: Runner) -> None:
        """Stops it as soon as nobody has it."""
        if runner.state == READY and runner.leases:
            self.go(runner, DRAINING)
        elif runner.state in (STARTING, READY):
            self.stop(runner, self.limits.stop_seconds)
        elif runner.state == BACKOFF:
            self.go(runner, STOPPED)

    # Memory

    def held(self) -> dict[str, int]:
        """What all runners together were promised, by pool."""
        total: dict[str, int] = {}
        for runner in self.runners.values():
            for pool, amount in runner.held.items():
                total[pool] = total.get(pool, 0) + amount
        return total

    def holders(self, now: float) -> tuple[rooms.Holder, ...]:
        """The runners as those who make room see them."""
        return tuple(_holder(runner, now) for runner in self.runners.values() if runner.state in HAS_PROCESS)


def waiting(runner: Runner) -> Iterable[int]:
    """The tickets that a model's runner is waited for with."""
    return [name for _, name in (*runner.queue, *runner.loads)]


def _holder(runner: Runner, now: float) -> rooms.Holder:
    busy = runner.state == STARTING or bool(runner.leases) or (bool(runner.queue) and now < runner.suspect_until)
    going = {DRAINING: rooms.LEAVING, STOPPING: rooms.ENDING}
    kind = going.get(runner.state, rooms.BUSY if busy else rooms.IDLE)
    pinned = runner.model is not None and runner.model.pinned
    return rooms.Holder(runner.id, runner.generation, kind, runner.held, runner.used_at, pinned)
