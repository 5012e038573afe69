"""Turns of memory: when it is read, for whom, and what a reading leads to. rooms.py has the arithmetic.

The wishes of different models are heard in the order of arrival, and a runner that somebody has, or that is starting, is never
evicted. When another model waits for its memory, a runner answers what came before that wish, or within as much time as its own
load took: a change of models for each request would cost more than all the answers, and so nobody waits more than twice as long.
"""

from __future__ import annotations

from sparkguard.core import rooms
from sparkguard.core.events import Free, Measure, Reading, Unread
from sparkguard.core.lifecycle import BACKOFF, STOPPED, Runner
from sparkguard.core.roster import Refusal, Roster, waiting

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sparkguard.core.processes import Processes

# A driver gives memory back up to 1.5 s after the process has gone (ollama waits up to 5 s for it, every 250 ms).
SETTLE_SECONDS, SETTLE_POLL_SECONDS = 5.0, 0.25


class Turns:
    def __init__(self, roster: Roster, processes: Processes) -> None:
        self.reading: Reading | None = None
        self.look_again_at: float | None = None
        self._roster = roster
        self._processes = processes
        self._bars: dict[str, tuple[str, int]] = {}  # runner's model -> (who waits for it, since when)
        self._measuring = False
        self._planned: object = None  # what the last plan was made for
        self._settles_until = 0.0

    def renew(self) -> None:
        """The same situation is to be planned once more: limits have changed, or memory may have come back."""
        self._planned = None

    def gave_back(self, now: float) -> None:
        self._settles_until = now + SETTLE_SECONDS

    def tick(self, now: float) -> None:
        if self.look_again_at is not None and now >= self.look_again_at:
            self.look_again_at = None
            self._planned = None

    def free(self, event: Free, now: float) -> None:
        self._measuring = False
        self.look_again_at = None
        self.reading = event.reading
        wants, holders = self._wants(now), self._roster.holders(now)
        self._bars = {}
        settling = now < self._settles_until
        answers = rooms.plan(event.reading, self._roster.limits.most_loaded, holders, wants, settling)
        for answer in answers:
            if isinstance(answer, rooms.Never):
                self._does_not_fit(self._roster.runners[answer.want.model], answer, event.reading)
                continue
            self._make_way(answer.evict)
            if isinstance(answer, rooms.Start):
                self._processes.spawn(self._roster.runners[answer.want.model], answer.placement, now)
            else:
                self._wait(answer, now)
        # A wish may have to wait for a runner that the plan did not know yet. That somebody has to go, it knew.
        started = any(isinstance(answer, rooms.Start) for answer in answers)
        self._planned = None if started else self._situation(now)

    def _make_way(self, leaving: tuple[rooms.Holder, ...]) -> None:
        for holder in leaving:
            self._roster.stop(self._roster.runners[holder.model], self._roster.limits.stop_seconds)

    def _wait(self, answer: rooms.Wait, now: float) -> None:
        for holder in answer.bar:
            self._bars[holder.model] = (answer.want.model, answer.want.order)
        if answer.settling:
            self.look_again_at = now + SETTLE_POLL_SECONDS

    def _does_not_fit(self, runner: Runner, never: rooms.Never, reading: Reading) -> None:
        runner.restart = None
        if runner.state == BACKOFF:
            self._roster.go(runner, STOPPED)
        ways = never.want.placements
        text = rooms.shortage(runner.id, ways, never, reading.pools) if runner.waits() else ""
        retry = 30 if rooms.may_come(ways, reading) else None
        self._roster.refuse(Refusal(503, "does_not_fit", text, retry, never.rooms), *waiting(runner))

    def unread(self, event: Unread, now: float) -> None:
        self._measuring = False
        self.look_again_at = now + SETTLE_SECONDS
        refusal = Refusal(503, "memory_unknown", event.message, int(SETTLE_SECONDS))
        for want in self._wants(now):
            self._roster.refuse(refusal, *waiting(self._roster.runners[want.model]))
        self._planned = self._situation(now)

    def settle(self, now: float) -> None:
        """Reads the memory where somebody wants some and things are not as they were at the last plan."""
        if not self._wants(now):
            self.look_again_at = None
        elif not self._measuring and self._planned != self._situation(now):
            self._measuring = True
            self._roster.effects.append(Measure())

    def may_take(self, runner: Runner, order: int, now: float) -> bool:
        """Whether a runner that another model waits for takes one more request."""
        waiter, since = self._bars.get(runner.id, ("", 0))
        return not waiter or order <= since or now < runner.own_until() or not self._still_wants(waiter, since)

    def _still_wants(self, model: str, since: int) -> bool:
        runner = self._roster.runners.get(model)
        return runner is not None and runner.state in (STOPPED, BACKOFF) and runner.wants_since() == since

    def _wants(self, now: float) -> tuple[rooms.Want, ...]:
        found = []
        for runner in self._roster.runners.values():
            since = runner.wants_since()
            if since is None or runner.model is None or self._roster.closing:
                continue
            if runner.state == STOPPED or (runner.state == BACKOFF and runner.retry_at <= now):
                ways = tuple(way for way in runner.model.placements if way not in runner.ran_out) or runner.model.placements
                found.append(rooms.Want(runner.id, since, ways, runner.waits()))
        return tuple(found)

    def _situation(self, now: float) -> object:
        """All that a plan depends on, but for the memory: the same situation needs no new plan."""
        wants, holders = self._wants(now), self._roster.holders(now)
        return (
            tuple((want.model, want.order, want.placements) for want in wants),
            tuple((holder.generation, holder.kind, tuple(holder.amounts.items())) for holder in holders),
        )
