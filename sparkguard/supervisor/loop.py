"""The one task that owns all state: events in, one at a time; what core/dispatch.py says is carried out, and told.

Whatever changes state is posted here and never done by whoever wants it. Reading is free to all, since all run in one thread;
but a read that decides whether to change something belongs into an event.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping

from sparkguard.core import events, lifecycle
from sparkguard.core.dispatch import Dispatch
from sparkguard.errors import SparkguardError
from sparkguard.supervisor.accounts import Accounts
from sparkguard.supervisor.conditions import Conditions
from sparkguard.supervisor.lease import RunnerLease
from sparkguard.supervisor.news import News
from sparkguard.supervisor.protocol import Effects, Json, Library, LogRing, Memory, Refused
from sparkguard.supervisor.tasks import Tasks
from sparkguard.supervisor.turnstile import Key, Turnstile
from sparkguard.supervisor.view import View

log = logging.getLogger("sparkguard.supervisor")
_END_SECONDS = 5.0  # for processes to be reaped after SIGKILL
_PROGRESS_SECONDS = 0.5  # between two looks at how far loads have come


class SupervisorLoop:
    """The Supervisor of supervisor/protocol.py. start(), then close(); a bug in the task comes out of failed()."""

    def __init__(
        self, effects: Effects, library: Library, memory: Memory, limits: Callable[[], events.Limits] = events.Limits
    ) -> None:
        self._effects = effects
        self._library = library
        self._limits = limits
        self._dispatch = Dispatch()
        self._queue: asyncio.Queue[events.Event | Exception] = asyncio.Queue()
        self._view = View(self._dispatch, library, effects)
        self._turnstile = Turnstile(self.post, self._ask)
        self._accounts = Accounts(memory, self._dispatch, self._handle, self.post)
        self._conditions = Conditions(self.post)
        self._news = News(self._dispatch, self._view)
        self._busy: dict[Key, int] = {}
        self._searches: dict[object, asyncio.Future[int | None]] = {}
        self._alarm: asyncio.TimerHandle | None = None
        self._tasks: Tasks

    async def start(self) -> None:
        """Reads the library and the machine. Raises SparkguardError when it cannot."""
        self._tasks = Tasks()
        self._effects.attach(self.post)
        self._tasks.lasting(self._run())
        await self.reload()
        await self._accounts.measure(asked=False)
        self._tasks.lasting(self._watch())
        self._tasks.lasting(self._tell_progress())
        self._tasks.lasting(self._accounts.refresh(self._tasks, lambda: bool(self._news.subscribers)))

    async def failed(self) -> None:
        """Ends only by the exception of a bug, on which the process should end too."""
        await self._tasks.failed()

    async def close(self, seconds: float) -> None:
        """Lets requests end, at most so long; then everything."""
        self.post(events.Close())
        try:
            await asyncio.wait_for(self._conditions.until(self._has_nothing), seconds)
        except asyncio.TimeoutError:
            self.post(events.Halt())
            try:
                await asyncio.wait_for(self._conditions.until(self._has_nothing), _END_SECONDS)
            except asyncio.TimeoutError:
                log.error("runners are left that even SIGKILL does not end: %s", ", ".join(self._with_process()))
        await self._effects.close()
        await self._tasks.end_brief()
        await self._tasks.end_lasting()
        self._set_alarm(None)
        await self._accounts.close()

    def post(self, event: events.Event) -> None:
        self._queue.put_nowait(event)

    async def _run(self) -> None:
        while True:
            event = await self._queue.get()
            if isinstance(event, Exception):
                raise event
            self._handle(event)

    def _ask(self, event: events.Event) -> None:
        """At once where nothing is before it, which spares the usual request two turns of the event loop.

        Not to be called within a step. A bug is the loop's, not the asking request's.
        """
        if not self._queue.empty():
            self.post(event)
            return
        try:
            self._handle(event)
        except Exception as bug:
            self._queue.put_nowait(bug)

    # Requests

    async def lease(self, model: str, on_position: Callable[[int], None] | None = None) -> RunnerLease:
        lease = RunnerLease(self._turnstile, self._view, model)
        await self._turnstile.lease(lease, on_position)
        return lease

    async def load(self, id: str) -> None:
        ticket = self._turnstile.number()
        await self._turnstile.wait(ticket, events.Load(ticket, id))

    async def make_room(self, amounts: Mapping[str, int]) -> tuple[str, ...]:
        ticket = self._turnstile.number()
        leaving = await self._turnstile.wait(ticket, events.MakeRoom(ticket, tuple(sorted(amounts.items()))))
        await self._conditions.until(lambda: all(self._process(model) != generation for model, generation in leaving))
        await self._accounts.tell()
        return tuple(model for model, _ in leaving)

    async def unload(self, id: str) -> None:
        if id not in self._dispatch.models and id not in self._dispatch.runners:
            raise _no_model(id)
        here = self._process(id)
        self.post(events.Unload(id))
        await self._conditions.until(lambda: self._process(id) != here or here is None)

    async def kill(self, runner_id: str) -> None:
        here = self._process(runner_id)
        if here is None:
            raise Refused(404, "runner_not_found", f"there is no runner of {runner_id}")
        self.post(events.Kill(runner_id))
        await self._conditions.until(lambda: self._process(runner_id) != here)

    def _process(self, id: str) -> int | None:
        """The generation of the process that a model has."""
        runner = self._dispatch.runners.get(id)
        return runner.generation if runner is not None and runner.state in lifecycle.HAS_PROCESS else None

    def _with_process(self) -> list[str]:
        return [id for id in self._dispatch.runners if self._process(id) is not None]

    def _has_nothing(self) -> bool:
        return not self._with_process() and self._dispatch.closing

    # Settings

    async def patch(self, id: str, changes: Json) -> Json:
        await self._library.patch(id, changes)
        await self._rescan()
        card = self._view.model(id)
        if card is None:
            raise _no_model(id)
        return card

    async def reload(self) -> None:
        self.post(self._limits())
        await self._rescan()

    async def _rescan(self) -> None:
        """Returns when the dispatcher knows the library as it is now, and all that was posted before."""
        models = await self._library.scan()
        # In the same breath: a step in between would ask the library about models that it has no more.
        self._handle(events.Changed(models))
        await self._conditions.until(lambda: True)

    async def _watch(self) -> None:
        while True:
            await self._library.watch()
            try:
                await self._rescan()
            except SparkguardError as error:
                log.error("%s", error.message)  # of a file that somebody is writing just now; the next change is read again

    async def _tell_progress(self) -> None:
        """A load takes minutes without an event that would tell of it."""
        while True:
            await asyncio.sleep(_PROGRESS_SECONDS)
            self._news.progress()

    # The one writer

    def _handle(self, event: events.Event) -> None:
        if isinstance(event, events.Exited):
            self._turnstile.end_leases((event.model, event.generation), f"the runner of {event.model} ended {_how(event)}")
            self._count_exit(event)
        elif isinstance(event, events.Ready):
            self._view.counts(event.model)["loads"] += 1
        models = self._dispatch.models
        for effect in self._dispatch.step(event, asyncio.get_running_loop().time()):
            self._carry_out(effect)
        if isinstance(event, events.Changed):
            self._news.library(models, self._library.warning())
        elif isinstance(event, events.Free):
            self._news.devices()
        self._accounts.settle(self._tasks)
        self._conditions.look(event)

    def _carry_out(self, effect: events.Effect) -> None:
        if isinstance(effect, events.Grant):
            endpoint = self._effects.endpoint(effect.model, effect.generation)
            self._turnstile.grant(effect.ticket, (effect.model, effect.generation), endpoint)
        elif isinstance(effect, events.Loaded):
            self._turnstile.answer(effect.ticket, ())
        elif isinstance(effect, events.MadeRoom):
            log.info("unloading %s: another server needs the memory", ", ".join(model for model, _ in effect.leaving))
            self._turnstile.answer(effect.ticket, effect.leaving)
        elif isinstance(effect, events.Refuse):
            if effect.rooms:
                self._tasks.brief(self._refuse_with_context(effect))
            else:
                self._turnstile.refuse(effect)
        elif isinstance(effect, events.Position):
            self._turnstile.tell_position(effect.ticket, effect.place)
        elif isinstance(effect, events.Spawn):
            self._view.started[effect.model] = time.time()
            log.info("%s: starting on %s", effect.model, effect.placement.device, extra=_about(effect))
            self._effects.spawn(effect.model, effect.generation, effect.placement)
        elif isinstance(effect, events.Stop):
            # A request still there would keep llama-server from ending: SIGTERM waits for it.
            self._turnstile.end_leases((effect.model, effect.generation), f"the runner of {effect.model} is being stopped")
            self._effects.stop(effect.model, effect.generation, effect.grace_seconds)
        elif isinstance(effect, events.Measure):
            self._tasks.brief(self._accounts.measure())
        elif isinstance(effect, events.Wake):
            self._set_alarm(effect.at)
        elif isinstance(effect, events.Turned):
            self._tell_watch(effect.model)
            self._news.runner(effect.model)

    async def _refuse_with_context(self, effect: events.Refuse) -> None:
        """In a thread: the longest context that would fit is found by a dozen estimates, a second or so for a large model."""
        try:
            text = (self._library.describe(effect.model).get("needs") or {}).get("text")
            longest = await self._longest_context(effect.model, effect.rooms)
        except KeyError:  # it has left the library meanwhile
            text = longest = None
        more = f"; in all it needs {text}" if text else ""
        self._turnstile.refuse(effect, more + (f"; the largest context that would fit is {longest} tokens" if longest else ""))

    async def _longest_context(self, model: str, rooms: tuple[Mapping[str, int], ...]) -> int | None:
        """Once for all who are refused together."""
        key = (model, tuple(tuple(sorted(room.items())) for room in rooms))
        if key not in self._searches:
            self._searches[key] = asyncio.ensure_future(asyncio.to_thread(self._library.largest_context, model, rooms))
            self._searches[key].add_done_callback(lambda _: self._searches.pop(key))
        return await self._searches[key]

    def _tell_watch(self, id: str) -> None:
        """The watch on hangs has to know how many requests a runner has."""
        runner = self._dispatch.runners.get(id)
        for key in [key for key in self._busy if key[0] == id and (runner is None or key[1] != runner.generation)]:
            del self._busy[key]
        if runner is not None and self._process(id) is not None:
            key = (id, runner.generation)
            if self._busy.get(key, 0) != len(runner.leases):
                self._busy[key] = len(runner.leases)
                self._effects.busy(id, runner.generation, len(runner.leases))

    def _set_alarm(self, at: float | None) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = None if at is None else asyncio.get_running_loop().call_at(at, self.post, events.Tick())

    def _count_exit(self, event: events.Exited) -> None:
        runner = self._dispatch.runners.get(event.model)
        if runner is not None and runner.generation == event.generation and runner.state in lifecycle.HAS_PROCESS:
            unasked = runner.killed or runner.state in (lifecycle.STARTING, lifecycle.READY)
            self._view.counts(event.model)["crashes"] += unasked
            if unasked:
                log.warning("%s: ended %s", event.model, _how(event), extra=_about(event))

    # What people see

    def resolve(self, name: str) -> str | None:
        return self._library.resolve(name)

    def models(self) -> list[Json]:
        return self._view.models()

    def warning(self) -> str | None:
        return self._library.warning()

    def model(self, id: str) -> Json | None:
        return self._view.model(id)

    def runners(self) -> list[Json]:
        return self._view.runners()

    def devices(self) -> list[Json]:
        return self._view.devices()

    def counters(self) -> list[Json]:
        return self._view.counters()

    def log(self, runner_id: str) -> LogRing | None:
        return self._effects.log(runner_id)

    def subscribe(self) -> AsyncIterator[Json]:
        return self._news.subscribers.new()


def _no_model(id: str) -> Refused:
    return Refused(404, "model_not_found", f"there is no model {id}")


def _how(event: events.Exited) -> str:
    return f"({event.cause}): {event.words}" if event.words else f"({event.cause})"


def _about(what: events.Spawn | events.Exited) -> dict[str, str]:
    """For the journal's fields."""
    return {"model": what.model, "runner": f"{what.model}@{what.generation}"}
