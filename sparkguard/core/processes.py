"""Runners: what follows when one has started, is ready or has ended, and when a hand, the library or the end wants it gone."""

from __future__ import annotations

from sparkguard.core import events, lifecycle, rooms
from sparkguard.core.events import (
    Changed,
    Close,
    Exited,
    Halt,
    Kill,
    MadeRoom,
    MakeRoom,
    Placement,
    Ready,
    Spawn,
    Started,
    Unload,
)
from sparkguard.core.lifecycle import BACKOFF, DRAINING, FAILED, HAS_PROCESS, READY, STARTING, STOPPED, Runner
from sparkguard.core.requests import failed, no_device
from sparkguard.core.roster import SHUTTING_DOWN, Refusal, Roster, waiting


class Processes:
    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._generations = 0

    def spawn(self, runner: Runner, placement: Placement, now: float) -> None:
        assert runner.model is not None
        self._generations += 1
        runner.generation = self._generations
        runner.placement = placement
        runner.held = dict(placement.amounts)
        runner.version = runner.model.version
        runner.parallel = runner.model.parallel
        runner.started_at = runner.used_at = now
        runner.killed = False
        self._roster.go(runner, STARTING)
        self._roster.effects.append(Spawn(runner.id, runner.generation, placement))

    def started(self, event: Started, now: float) -> None:
        runner = self._of(event)
        if runner is not None:
            runner.pid = event.pid
            self._roster.turn(runner)

    def ready(self, event: Ready, now: float) -> None:
        runner = self._of(event)
        if runner is None or runner.state != STARTING:
            return  # it was told to stop meanwhile
        self._roster.go(runner, READY)
        runner.ready_at = runner.used_at = now
        runner.failed_starts = 0
        runner.ran_out.clear()
        runner.restart = None
        if event.measured is not None:
            runner.held = dict(event.measured)
        self._roster.answer_loads(runner)

    def exited(self, event: Exited, now: float) -> bool:
        """Whether a process of ours has ended, and so memory comes back."""
        runner = self._of(event)
        if runner is None:
            return False
        was, cause = runner.state, event.cause
        if was == READY and now - runner.ready_at >= lifecycle.HEALTHY_SECONDS:
            runner.deaths = 0
        if was == STARTING:
            runner.failed_starts += 1
            if runner.placement is not None and cause == events.OUT_OF_MEMORY:
                runner.ran_out.add(runner.placement)
        elsewhere = runner.model is not None and any(way not in runner.ran_out for way in runner.model.placements)
        after = lifecycle.after_exit(was, cause, runner.killed, runner.failed_starts, elsewhere)
        self._roster.go(runner, after.state)
        runner.pid, runner.held, runner.killed, runner.suspect_until = None, {}, False, 0.0
        runner.leases = set()  # their Done will come, and finds that the runner is gone
        if after.then == lifecycle.END:
            return True
        runner.words, runner.cause = event.words, cause
        if after.state == BACKOFF:
            runner.deaths += 1
            runner.retry_at = now + lifecycle.backoff_seconds(runner.deaths)
        if after.then == lifecycle.GIVE_UP:
            runner.restart = None
            self._roster.refuse(self._given_up(runner, now), *waiting(runner))
        elif runner.model is not None and not self._roster.closing:
            runner.restart = self._roster.next_order()
        return True

    def _given_up(self, runner: Runner, now: float) -> Refusal:
        if runner.state == FAILED:
            return failed(runner)
        runner.ran_out.clear()
        code = "out_of_memory" if runner.cause == events.OUT_OF_MEMORY else "cannot_start"
        seconds = int(runner.retry_at - now) + 1
        return Refusal(503, code, f"{runner.id} could not be started: {runner.words}", seconds)

    def _of(self, event: Started | Ready | Exited) -> Runner | None:
        runner = self._roster.runners.get(event.model)
        if runner is None or runner.generation != event.generation or runner.state not in HAS_PROCESS:
            return None
        return runner

    def unload(self, event: Unload, now: float) -> None:
        runner = self._roster.runners.get(event.model)
        if runner is not None:
            self._let_go(runner, Refusal(503, "unloaded", f"{event.model} was unloaded by hand", 1))

    def kill(self, event: Kill, now: float) -> None:
        runner = self._roster.runners.get(event.model)
        if runner is None:
            return
        runner.deaths = runner.failed_starts = 0
        if runner.state in HAS_PROCESS:
            runner.killed = runner.killed or runner.state in (STARTING, READY)
            self._roster.stop(runner, 0.0)
        elif runner.state == BACKOFF:
            runner.retry_at = now

    def make_room(self, event: MakeRoom, now: float) -> None:
        roster = self._roster
        roster.enter(event.ticket, "")
        if roster.closing:
            roster.refuse(SHUTTING_DOWN, event.ticket)
            return
        holders = roster.holders(now)
        leaving = rooms.whose_end_frees(dict(event.amounts), holders)
        if not leaving:
            roster.refuse(Refusal(503, "busy", rooms.too_little(dict(event.amounts), holders)), event.ticket)
            return
        for holder in leaving:
            roster.stop(roster.runners[holder.model], roster.limits.stop_seconds)
        roster.leave(event.ticket)
        roster.effects.append(MadeRoom(event.ticket, tuple((holder.model, holder.generation) for holder in leaving)))

    def changed(self, event: Changed, now: float) -> None:
        roster = self._roster
        roster.models = {model.id: model for model in event.models}
        for runner in tuple(roster.runners.values()):
            model = runner.model = roster.models.get(runner.id)
            roster.turn(runner)
            if model is None:
                self._let_go(runner, Refusal(404, "model_not_found", f"{runner.id} is not in the library any more"))
            elif model.problem:
                self._let_go(runner, Refusal(model.problem.status, model.problem.code, model.problem.message))
            elif not model.placements:
                self._let_go(runner, no_device(runner.id))
            elif runner.version != model.version:
                self._renew(runner, now)

    def _renew(self, runner: Runner, now: float) -> None:
        """Its file or its settings are others now."""
        runner.deaths = runner.failed_starts = 0
        if runner.state == FAILED:
            self._roster.go(runner, STOPPED)
        elif runner.state == BACKOFF:
            runner.retry_at = now
        elif runner.state in (STARTING, READY):
            self._roster.end(runner)
            if (runner.model is not None and runner.model.pinned) or runner.waits():
                runner.restart = self._roster.next_order()

    def close(self, event: Close, now: float) -> None:
        self._roster.closing = True
        for runner in self._roster.runners.values():
            self._let_go(runner, SHUTTING_DOWN)

    def halt(self, event: Halt, now: float) -> None:
        for runner in self._roster.runners.values():
            if runner.state in HAS_PROCESS:
                self._roster.stop(runner, 0.0)

    def _let_go(self, runner: Runner, refusal: Refusal) -> None:
        """Who has it may finish; who waits is refused, and it is not started again."""
        runner.restart = None
        self._roster.refuse(refusal, *waiting(runner))
        self._roster.end(runner)

    def settle(self, runner: Runner, now: float) -> None:
        """What time and the end of requests bring about."""
        roster = self._roster
        drained = runner.state == DRAINING and not runner.leases
        if drained or (runner.state == READY and self.idle_until(runner) <= now):
            roster.stop(runner, roster.limits.stop_seconds)
        elif runner.state == BACKOFF and runner.wants_since() is None and runner.retry_at <= now:
            roster.go(runner, STOPPED)

    def idle_until(self, runner: Runner) -> float:
        pinned = runner.model is not None and runner.model.pinned
        seconds = self._roster.limits.idle_seconds
        if pinned or not seconds or runner.leases or runner.queue:
            return float("inf")
        return runner.used_at + seconds
