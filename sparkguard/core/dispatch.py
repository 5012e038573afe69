"""The supervisor's mind: which request runs where, and which runner comes and goes. No clock, no process, no memory but its own.

Each event goes to who decides it: requests.py, processes.py or turns.py. Then what follows from where things stand is done.
"""

from __future__ import annotations

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
    Halt,
    Kill,
    Limits,
    Load,
    MakeRoom,
    Model,
    Reading,
    Ready,
    Started,
    Tick,
    Turned,
    Unload,
    Unread,
    Wake,
)
from sparkguard.core.lifecycle import BACKOFF, HAS_PROCESS, READY, STOPPED, Runner
from sparkguard.core.processes import Processes
from sparkguard.core.requests import Requests
from sparkguard.core.roster import Roster
from sparkguard.core.turns import Turns

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from sparkguard.core import rooms


class Dispatch:
    """`step()` takes what happened and says what is to be done; everything else here is for looking at."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._roster = Roster(limits or Limits())
        self._processes = Processes(self._roster)
        self._turns = Turns(self._roster, self._processes)
        self._requests = Requests(self._roster, self._turns)
        self._wake: float | None = None
        self._handlers: dict[type[Event], Callable[[Any, float], object]] = {
            Asked: self._requests.asked,
            Load: self._requests.load,
            Gone: self._requests.gone,
            Done: self._requests.done,
            Started: self._processes.started,
            Ready: self._processes.ready,
            Exited: self._exited,
            Unload: self._processes.unload,
            Kill: self._processes.kill,
            Changed: self._processes.changed,
            MakeRoom: self._processes.make_room,
            Close: self._processes.close,
            Halt: self._processes.halt,
            Free: self._turns.free,
            Unread: self._turns.unread,
            Limits: self._limits,
            Tick: self._tick,
        }

    @property
    def models(self) -> Mapping[str, Model]:
        return self._roster.models

    @property
    def runners(self) -> Mapping[str, Runner]:
        """Of models that have, want or had trouble with a process."""
        return self._roster.runners

    @property
    def tickets(self) -> Mapping[int, object]:
        return self._roster.tickets

    @property
    def limits(self) -> Limits:
        return self._roster.limits

    @property
    def closing(self) -> bool:
        return self._roster.closing

    @property
    def reading(self) -> Reading | None:
        return self._turns.reading

    def held(self) -> dict[str, int]:
        return self._roster.held()

    def holders(self, now: float) -> tuple[rooms.Holder, ...]:
        return self._roster.holders(now)

    def step(self, event: Event, now: float) -> tuple[Effect, ...]:
        """now: seconds of a clock that never goes back."""
        roster = self._roster
        roster.effects, roster.turned = [], {}
        self._handlers[type(event)](event, now)
        for runner in tuple(roster.runners.values()):
            self._settle(runner, now)
        self._turns.settle(now)
        self._set_alarm(now)
        return (*roster.effects, *(Turned(model) for model in roster.turned))

    def _exited(self, event: Exited, now: float) -> None:
        if self._processes.exited(event, now):
            self._turns.gave_back(now)

    def _limits(self, event: Limits, now: float) -> None:
        self._roster.limits = event
        self._turns.renew()

    def _tick(self, event: Tick, now: float) -> None:
        self._wake = None
        self._turns.tick(now)

    def _settle(self, runner: Runner, now: float) -> None:
        if runner.state == READY:
            self._roster.answer_loads(runner)
            self._requests.grant(runner, now)
        self._processes.settle(runner, now)
        if runner.id in self._roster.turned:
            self._requests.tell_places(runner)
            if _is_nothing(runner):
                del self._roster.runners[runner.id]

    def _set_alarm(self, now: float) -> None:
        times = [] if self._turns.look_again_at is None else [self._turns.look_again_at]
        for runner in self._roster.runners.values():
            if runner.state == READY:
                times.append(self._processes.idle_until(runner))
                if runner.queue and runner.suspect_until > now:
                    times.append(runner.suspect_until)
            elif runner.state == BACKOFF and runner.retry_at > now:
                times.append(runner.retry_at)
        at = min(times, default=float("inf"))
        wake = None if at == float("inf") else at
        if wake != self._wake:
            self._wake = wake
            self._roster.effects.append(Wake(wake))


def _is_nothing(runner: Runner) -> bool:
    """Whether there is no more to know of it."""
    if runner.state in HAS_PROCESS or runner.wants_since() is not None:
        return False
    return runner.model is None or (runner.state == STOPPED and not runner.words)
