"""The supervisor's mind: which request runs where, and which runner comes and goes. No clock, no process, no memory but its own.

Requests of one model are answered in the order of arrival, and so are the wishes of different models for memory. A request
has its runner from Grant to its Done or Gone, and a runner that somebody has, or that is starting, is never evicted. When
another model waits for its memory, a runner answers what came before that wish, or within as much time as its own load took:
a change of models for each request would cost more than all the answers, and so nobody waits more than twice as long.
"""

from __future__ import annotations

from bisect import insort

from sparkguard.core import events, lifecycle, rooms
from sparkguard.core.events import (
    Asked,
    Changed,
    Close,
    Done,
    Effect,
    Event,
    Exited,
    Free,
    Gone,
    Grant,
    Halt,
    Kill,
    Limits,
    Load,
    Loaded,
    MadeRoom,
    MakeRoom,
    Measure,
    Model,
    Placement,
    Position,
    Ready,
    Refuse,
    Spawn,
    Started,
    Stop,
    Tick,
    Turned,
    Unload,
    Unread,
    Wake,
)
from sparkguard.core.lifecycle import BACKOFF, DRAINING, FAILED, HAS_PROCESS, READY, STARTING, STOPPED, STOPPING, Runner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, ClassVar

# A driver gives memory back up to 1.5 s after the process has gone (ollama waits up to 5 s for it, every 250 ms).
SETTLE_SECONDS, SETTLE_POLL_SECONDS = 5.0, 0.25
# A lost connection is known before the death of the process that had it; for so long nobody else is sent there.
SUSPECT_SECONDS = 1.0
# A request that its runner did not survive so often is taken for the cause.
MOST_ATTEMPTS = 3
MOST_RETRY_SECONDS = 60


class _Ticket:
    __slots__ = ("attempts", "generation", "granted_at", "model", "order", "place")

    def __init__(self, order: int, model: str) -> None:
        self.order = order
        self.model = model
        self.generation: int | None = None  # None: it waits
        self.attempts = 0
        self.granted_at = 0.0
        self.place = 0


class Dispatch:
    """`step()` takes what happened and says what is to be done; everything else here is for looking at."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.models: dict[str, Model] = {}
        self.runners: dict[str, Runner] = {}  # of models that have, want or had trouble with a process
        self.reading: events.Reading | None = None
        self.closing = False
        self._tickets: dict[int, _Ticket] = {}
        self._generations = 0
        self._order = 0
        self._bars: dict[str, tuple[str, int]] = {}  # runner's model -> (who waits for it, since when)
        self._measuring = False
        self._planned: object = None  # what the last plan was made for
        self._look_again_at: float | None = None
        self._settles_until = 0.0
        self._wake: float | None = None
        self._out: list[Effect] = []
        self._turned: dict[str, None] = {}

    def step(self, event: Event, now: float) -> tuple[Effect, ...]:
        """now: seconds of a clock that never goes back."""
        self._out, self._turned = [], {}
        self._handlers[type(event)](self, event, now)
        self._settle(now)
        self._out += [Turned(model) for model in self._turned]
        return tuple(self._out)

    def held(self) -> dict[str, int]:
        """What all runners together were promised, by pool."""
        total: dict[str, int] = {}
        for runner in self.runners.values():
            for pool, amount in runner.held.items():
                total[pool] = total.get(pool, 0) + amount
        return total

    def holders(self, now: float) -> tuple[rooms.Holder, ...]:
        """The runners as those who make room see them."""
        found = []
        for runner in self.runners.values():
            if runner.state in HAS_PROCESS:
                leaving = runner.state in (DRAINING, STOPPING)
                busy = runner.state == STARTING or bool(runner.leases) or (bool(runner.queue) and now < runner.suspect_until)
                kind = rooms.LEAVING if leaving else rooms.BUSY if busy else rooms.IDLE
                pinned = runner.model is not None and runner.model.pinned
                found.append(rooms.Holder(runner.id, runner.generation, kind, runner.held, runner.used_at, pinned))
        return tuple(found)

    # Requests

    def _asked(self, event: Asked, now: float) -> None:
        model = self.models.get(event.model)
        self._tickets[event.ticket] = _Ticket(self._next_order(), event.model)
        if not self._may_wait(event.ticket, model):
            return
        runner = self._runner(event.model)
        if len(runner.queue) >= self.limits.queue_limit and not self._has_place(runner, now):
            each = runner.seconds_each * len(runner.queue) / max(1, runner.parallel)
            seconds = min(MOST_RETRY_SECONDS, max(1, int(each) + 1))
            text = f"{len(runner.queue)} requests wait for {event.model} already"
            self._refuse(event.ticket, 429, "queue_full", text, seconds)
            return
        self._enqueue(runner, event.ticket)

    def _load(self, event: Load, now: float) -> None:
        model = self.models.get(event.model)
        self._tickets[event.ticket] = _Ticket(self._next_order(), event.model)
        if not self._may_wait(event.ticket, model):
            return
        runner = self._runner(event.model)
        runner.loads.append((self._tickets[event.ticket].order, event.ticket))
        runner.deaths = runner.failed_starts = 0
        runner.retry_at = now
        self._turned[event.model] = None

    def _make_room(self, event: MakeRoom, now: float) -> None:
        self._tickets[event.ticket] = _Ticket(self._next_order(), "")
        if self.closing:
            self._refuse(event.ticket, 503, "shutting_down", "the supervisor is shutting down", 5)
            return
        holders = self.holders(now)
        leaving = rooms.whose_end_frees(dict(event.amounts), holders)
        if not leaving:
            self._refuse(event.ticket, 503, "busy", rooms.too_little(dict(event.amounts), holders))
            return
        for holder in leaving:
            self._stop(self.runners[holder.model], self.limits.stop_seconds)
        del self._tickets[event.ticket]
        self._out.append(MadeRoom(event.ticket, tuple((holder.model, holder.generation) for holder in leaving)))

    def _may_wait(self, ticket: int, model: Model | None) -> bool:
        """False: refused. What no waiting would change is said at once."""
        name = self._tickets[ticket].model
        runner = self.runners.get(name)
        if self.closing:
            self._refuse(ticket, 503, "shutting_down", "the supervisor is shutting down", 5)
        elif model is None:
            self._refuse(ticket, 404, "model_not_found", f"there is no model {name}")
        elif model.problem:
            self._refuse(ticket, model.problem.status, model.problem.code, model.problem.message)
        elif not model.placements:
            self._refuse(ticket, 503, "no_device", f"there is no device that {name} may run on")
        elif runner is not None and runner.state == FAILED and runner.version == model.version:
            self._refuse(ticket, 500, "bad_file", f"{name} cannot be loaded until its file or settings change: {runner.words}")
        else:
            return True
        return False

    def _done(self, event: Done, now: float) -> None:
        ticket = self._tickets.get(event.ticket)
        if ticket is None or ticket.generation is None:
            return
        runner = self.runners.get(ticket.model)
        alive = runner is not None and self._end_lease(runner, event.ticket, ticket, now)
        if not event.replay:
            if runner is not None and event.ok:
                spent = now - ticket.granted_at
                runner.seconds_each += (spent - runner.seconds_each) * (0.2 if runner.seconds_each else 1.0)
            del self._tickets[event.ticket]
            return
        ticket.generation = None
        ticket.attempts += 1
        if ticket.attempts >= MOST_ATTEMPTS:
            text = f"{ticket.attempts} runners of {ticket.model} ended under this request; it is not tried again"
            self._refuse(event.ticket, 502, "runner_died", text)
        elif self._may_wait(event.ticket, self.models.get(ticket.model)):
            if alive and runner is not None and runner.state == READY:
                runner.suspect_until = now + SUSPECT_SECONDS
            self._enqueue(self._runner(ticket.model), event.ticket)

    def _gone(self, event: Gone, now: float) -> None:
        ticket = self._tickets.pop(event.ticket, None)
        if ticket is None:
            return
        runner = self.runners.get(ticket.model)
        if runner is not None:
            if ticket.generation is not None:
                self._end_lease(runner, event.ticket, ticket, now)
            else:
                runner.queue = [pair for pair in runner.queue if pair[1] != event.ticket]
                runner.loads = [pair for pair in runner.loads if pair[1] != event.ticket]
                self._turned[runner.id] = None

    def _end_lease(self, runner: Runner, name: int, ticket: _Ticket, now: float) -> bool:
        """False: the runner that it had is not there any more."""
        if ticket.generation != runner.generation or name not in runner.leases:
            return False
        runner.leases.discard(name)
        runner.used_at = now
        self._turned[runner.id] = None
        return True

    def _enqueue(self, runner: Runner, ticket: int) -> None:
        insort(runner.queue, (self._tickets[ticket].order, ticket))
        self._turned[runner.id] = None

    def _refuse(
        self,
        name: int,
        status: int,
        code: str,
        message: str,
        retry_after: int | None = None,
        there: tuple[Mapping[str, int], ...] = (),
    ) -> None:
        ticket = self._tickets.pop(name)
        self._out.append(Refuse(name, status, code, message, retry_after, ticket.model, there))

    def _refuse_waiting(
        self,
        runner: Runner,
        status: int,
        code: str,
        message: str,
        retry_after: int | None = None,
        there: tuple[Mapping[str, int], ...] = (),
    ) -> None:
        for _, ticket in (*runner.queue, *runner.loads):
            self._refuse(ticket, status, code, message, retry_after, there)
        runner.queue, runner.loads = [], []
        self._turned[runner.id] = None

    # Processes

    def _started(self, event: Started, now: float) -> None:
        runner = self._of(event)
        if runner is not None:
            runner.pid = event.pid
            self._turned[runner.id] = None

    def _ready(self, event: Ready, now: float) -> None:
        runner = self._of(event)
        if runner is None or runner.state != STARTING:
            return  # it was told to stop meanwhile
        self._go(runner, READY)
        runner.ready_at = runner.used_at = now
        runner.failed_starts = 0
        runner.ran_out.clear()
        runner.restart = None
        if event.measured is not None:
            runner.held = dict(event.measured)
        for _, ticket in runner.loads:
            del self._tickets[ticket]
            self._out.append(Loaded(ticket, runner.id))
        runner.loads = []

    def _exited(self, event: Exited, now: float) -> None:
        runner = self._of(event)
        if runner is None:
            return
        was, cause = runner.state, event.cause
        if was == READY and now - runner.ready_at >= lifecycle.HEALTHY_SECONDS:
            runner.deaths = 0
        if was == STARTING:
            runner.failed_starts += 1
            if runner.placement is not None and cause == events.OUT_OF_MEMORY:
                runner.ran_out.add(runner.placement)
        elsewhere = runner.model is not None and any(way not in runner.ran_out for way in runner.model.placements)
        after = lifecycle.after_exit(was, cause, runner.killed, runner.failed_starts, elsewhere)
        self._go(runner, after.state)
        self._settles_until = now + SETTLE_SECONDS
        runner.pid, runner.held, runner.killed, runner.suspect_until = None, {}, False, 0.0
        runner.leases = set()  # their Done will come, and finds that the runner is gone
        if after.then == lifecycle.END:
            return
        runner.words, runner.cause = event.words, cause
        if after.state == BACKOFF:
            runner.deaths += 1
            runner.retry_at = now + lifecycle.backoff_seconds(runner.deaths)
        if after.then == lifecycle.GIVE_UP:
            runner.restart = None
            if after.state == FAILED:
                text = f"{runner.id} cannot be loaded until its file or settings change: {event.words}"
                self._refuse_waiting(runner, 500, "bad_file", text)
            else:
                runner.ran_out.clear()
                code = "out_of_memory" if cause == events.OUT_OF_MEMORY else "cannot_start"
                seconds = int(runner.retry_at - now) + 1
                self._refuse_waiting(runner, 503, code, f"{runner.id} could not be started: {event.words}", seconds)
        elif runner.model is not None and not self.closing:
            runner.restart = self._next_order()

    def _of(self, event: Started | Ready | Exited) -> Runner | None:
        runner = self.runners.get(event.model)
        if runner is None or runner.generation != event.generation or runner.state not in HAS_PROCESS:
            return None
        return runner

    def _unload(self, event: Unload, now: float) -> None:
        runner = self.runners.get(event.model)
        if runner is not None:
            runner.restart = None
            self._refuse_waiting(runner, 503, "unloaded", f"{event.model} was unloaded by hand", 1)
            self._end(runner)

    def _kill(self, event: Kill, now: float) -> None:
        runner = self.runners.get(event.model)
        if runner is None:
            return
        runner.deaths = runner.failed_starts = 0
        if runner.state in (STARTING, READY):
            runner.killed = True
            self._stop(runner, 0.0)
        elif runner.state in HAS_PROCESS:
            self._stop(runner, 0.0)
        elif runner.state == BACKOFF:
            runner.retry_at = now

    def _end(self, runner: Runner) -> None:
        """Stops it as soon as nobody has it."""
        if runner.state == READY and runner.leases:
            self._go(runner, DRAINING)
        elif runner.state in (STARTING, READY):
            self._stop(runner, self.limits.stop_seconds)
        elif runner.state == BACKOFF:
            self._go(runner, STOPPED)

    def _stop(self, runner: Runner, grace_seconds: float) -> None:
        if runner.state != STOPPING:
            self._go(runner, STOPPING)
        self._out.append(Stop(runner.id, runner.generation, grace_seconds))

    def _go(self, runner: Runner, state: str) -> None:
        runner.state = state
        self._turned[runner.id] = None

    # The library, the settings, the machine

    def _changed(self, event: Changed, now: float) -> None:
        self.models = {model.id: model for model in event.models}
        for runner in tuple(self.runners.values()):
            model = runner.model = self.models.get(runner.id)
            self._turned[runner.id] = None
            if model is None:
                runner.restart = None
                self._refuse_waiting(runner, 404, "model_not_found", f"{runner.id} is not in the library any more")
                self._end(runner)
            elif model.problem or not model.placements:
                runner.restart = None
                problem = model.problem or events.Problem(503, "no_device", f"there is no device that {runner.id} may run on")
                self._refuse_waiting(runner, problem.status, problem.code, problem.message)
                self._end(runner)
            elif runner.version != model.version:
                runner.deaths = runner.failed_starts = 0
                if runner.state == FAILED:
                    self._go(runner, STOPPED)
                elif runner.state == BACKOFF:
                    runner.retry_at = now
                elif runner.state in (STARTING, READY):
                    self._end(runner)
                    if model.pinned or runner.waits():
                        runner.restart = self._next_order()

    def _limits(self, event: Limits, now: float) -> None:
        self.limits = event
        self._planned = None

    def _free(self, event: Free, now: float) -> None:
        self._measuring = False
        self._look_again_at = None
        self.reading = event.reading
        wants = self._wants(now)
        holders = self.holders(now)
        self._planned = self._situation(now)
        settling = now < self._settles_until
        self._bars = {}
        for answer in rooms.plan(event.reading, self.limits.most_loaded, holders, wants, settling):
            want = answer.want
            if isinstance(answer, rooms.Start):
                self._spawn(self.runners[want.model], answer.placement, now)
                self._planned = None  # another wish may have to wait for this one
            elif isinstance(answer, rooms.Never):
                self._does_not_fit(self.runners[want.model], answer, event.reading)
            if isinstance(answer, rooms.Wait):
                if answer.evict:
                    self._planned = None
                for holder in answer.evict:
                    self._stop(self.runners[holder.model], self.limits.stop_seconds)
                for holder in answer.bar:
                    self._bars[holder.model] = (want.model, want.order)
                if answer.settling:
                    self._look_again_at = now + SETTLE_POLL_SECONDS

    def _unread(self, event: Unread, now: float) -> None:
        self._measuring = False
        self._look_again_at = now + SETTLE_SECONDS
        for want in self._wants(now):
            self._refuse_waiting(self.runners[want.model], 503, "memory_unknown", event.message, int(SETTLE_SECONDS))
        self._planned = self._situation(now)

    def _tick(self, event: Tick, now: float) -> None:
        self._wake = None
        if self._look_again_at is not None and now >= self._look_again_at:
            self._look_again_at = None
            self._planned = None

    def _close(self, event: Close, now: float) -> None:
        self.closing = True
        for runner in self.runners.values():
            runner.restart = None
            self._refuse_waiting(runner, 503, "shutting_down", "the supervisor is shutting down", 5)
            self._end(runner)

    def _halt(self, event: Halt, now: float) -> None:
        for runner in self.runners.values():
            if runner.state in HAS_PROCESS:
                self._stop(runner, 0.0)

    def _spawn(self, runner: Runner, placement: Placement, now: float) -> None:
        assert runner.model is not None
        self._generations += 1
        runner.generation = self._generations
        runner.placement = placement
        runner.held = dict(placement.amounts)
        runner.version = runner.model.version
        runner.parallel = runner.model.parallel
        runner.started_at = runner.used_at = now
        runner.killed = False
        self._go(runner, STARTING)
        self._out.append(Spawn(runner.id, runner.generation, placement))

    def _does_not_fit(self, runner: Runner, never: rooms.Never, reading: events.Reading) -> None:
        runner.restart = None
        if runner.state == BACKOFF:
            self._go(runner, STOPPED)
        if runner.waits():
            ways = never.want.placements
            text = rooms.shortage(runner.id, ways, never, reading.pools)
            retry = 30 if rooms.may_come(ways, reading) else None
            self._refuse_waiting(runner, 503, "does_not_fit", text, retry, never.rooms)

    # What follows from where things stand

    def _settle(self, now: float) -> None:
        for runner in tuple(self.runners.values()):
            if runner.state == DRAINING and not runner.leases:
                self._stop(runner, self.limits.stop_seconds)
            elif runner.state == READY:
                for _, ticket in runner.loads:
                    del self._tickets[ticket]
                    self._out.append(Loaded(ticket, runner.id))
                runner.loads = []
                self._grant(runner, now)
                if self._idle_until(runner) <= now:
                    self._stop(runner, self.limits.stop_seconds)
            elif runner.state == BACKOFF and runner.wants_since() is None and runner.retry_at <= now:
                self._go(runner, STOPPED)
            if runner.id in self._turned:
                self._tell_places(runner)
                if self._is_nothing(runner):
                    del self.runners[runner.id]
        wants = self._wants(now)
        if not wants:
            self._look_again_at = None
        elif not self._measuring and self._planned != self._situation(now):
            self._measuring = True
            self._out.append(Measure())
        self._set_alarm(now)

    def _is_nothing(self, runner: Runner) -> bool:
        """Whether there is no more to know of it."""
        if runner.state in HAS_PROCESS or runner.wants_since() is not None:
            return False
        return runner.model is None or (runner.state == STOPPED and not runner.words)

    def _grant(self, runner: Runner, now: float) -> None:
        while runner.queue and self._has_place(runner, now):
            order, name = runner.queue[0]
            waiter, since = self._bars.get(runner.id, ("", 0))
            if waiter and order > since and now >= runner.own_until() and self._still_wants(waiter, since):
                return
            runner.queue.pop(0)
            runner.leases.add(name)
            ticket = self._tickets[name]
            ticket.generation, ticket.granted_at = runner.generation, now
            self._out.append(Grant(name, runner.id, runner.generation))
            self._turned[runner.id] = None

    def _has_place(self, runner: Runner, now: float) -> bool:
        return runner.state == READY and len(runner.leases) < runner.parallel and now >= runner.suspect_until

    def _still_wants(self, model: str, since: int) -> bool:
        runner = self.runners.get(model)
        return runner is not None and runner.state in (STOPPED, BACKOFF) and runner.wants_since() == since

    def _tell_places(self, runner: Runner) -> None:
        for place, (_, name) in enumerate(runner.queue, 1):
            ticket = self._tickets[name]
            if ticket.place != place:
                ticket.place = place
                self._out.append(Position(name, place))

    def _wants(self, now: float) -> tuple[rooms.Want, ...]:
        found = []
        for runner in self.runners.values():
            since = runner.wants_since()
            if since is None or runner.model is None or self.closing:
                continue
            if runner.state == STOPPED or (runner.state == BACKOFF and runner.retry_at <= now):
                ways = tuple(way for way in runner.model.placements if way not in runner.ran_out) or runner.model.placements
                found.append(rooms.Want(runner.id, since, ways, runner.waits()))
        return tuple(found)

    def _situation(self, now: float) -> object:
        """All that a plan depends on, but for the memory: the same situation needs no new plan."""
        wants, holders = self._wants(now), self.holders(now)
        return (
            tuple((want.model, want.order, want.placements) for want in wants),
            tuple((holder.generation, holder.kind, tuple(holder.amounts.items())) for holder in holders),
        )

    def _idle_until(self, runner: Runner) -> float:
        pinned = runner.model is not None and runner.model.pinned
        if pinned or not self.limits.idle_seconds or runner.leases or runner.queue:
            return float("inf")
        return runner.used_at + self.limits.idle_seconds

    def _set_alarm(self, now: float) -> None:
        times = [] if self._look_again_at is None else [self._look_again_at]
        for runner in self.runners.values():
            if runner.state == READY:
                times.append(self._idle_until(runner))
                if runner.queue and runner.suspect_until > now:
                    times.append(runner.suspect_until)
            elif runner.state == BACKOFF and runner.retry_at > now:
                times.append(runner.retry_at)
        at = min(times, default=float("inf"))
        wake = None if at == float("inf") else at
        if wake != self._wake:
            self._wake = wake
            self._out.append(Wake(wake))

    def _runner(self, id: str) -> Runner:
        if id not in self.runners:
            self.runners[id] = Runner(self.models[id])
        return self.runners[id]

    def _next_order(self) -> int:
        self._order += 1
        return self._order

    _handlers: ClassVar[dict[type[Event], Callable[[Dispatch, Any, float], None]]] = {
        Asked: _asked,
        Load: _load,
        MakeRoom: _make_room,
        Gone: _gone,
        Done: _done,
        Started: _started,
        Ready: _ready,
        Exited: _exited,
        Unload: _unload,
        Kill: _kill,
        Changed: _changed,
        Limits: _limits,
        Free: _free,
        Unread: _unread,
        Tick: _tick,
        Close: _close,
        Halt: _halt,
    }
