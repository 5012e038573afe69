"""The one task that owns all state: events in, one at a time; what core/dispatch.py says is carried out, and told.

Whatever changes state is posted here and never done by whoever wants it. Reading is free to all, since all run in one thread;
but a read that decides whether to change something belongs into an event.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping

from sparkguard.core import events, lifecycle
from sparkguard.core.dispatch import Dispatch
from sparkguard.errors import SparkguardError
from sparkguard.supervisor.lease import RunnerLease
from sparkguard.supervisor.protocol import Effects, Json, Library, LogRing, Memory, Refused
from sparkguard.supervisor.subscribers import Subscribers
from sparkguard.supervisor.view import View

log = logging.getLogger("sparkguard.supervisor")
_REFRESH_SECONDS = 5.0
_END_SECONDS = 5.0  # for processes to be reaped after SIGKILL

Key = tuple[str, int]


class SupervisorLoop:
    """The Supervisor of supervisor/protocol.py. start(), then close(); a bug in the task comes out of failed()."""

    def __init__(
        self, effects: Effects, library: Library, memory: Memory, limits: Callable[[], events.Limits] = events.Limits
    ) -> None:
        self._effects = effects
        self._library = library
        self._memory = memory
        self._limits = limits
        self._dispatch = Dispatch()
        self._queue: asyncio.Queue[events.Event] = asyncio.Queue()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[tuple[Key, ...]]] = {}
        self._positions: dict[int, Callable[[int], None]] = {}
        self._asking: dict[int, RunnerLease] = {}
        self.leases: dict[int, RunnerLease] = {}
        self.view = View(self._dispatch, library, effects)
        self._busy: dict[Key, int] = {}
        self._reserved: dict[str, int] = {}
        self._reserving = False
        self._alarm: asyncio.TimerHandle | None = None
        self._ledger_tasks: set[asyncio.Task[None]] = set()  # they have the ledger's lock, so they are not cancelled
        self._lasting_tasks: set[asyncio.Task[None]] = set()
        self._broken: asyncio.Future[None] | None = None
        self._measures = 0
        self._subscribers = Subscribers()
        self._watchers: list[_Watcher] = []
        self._told: dict[str, str] = {}  # model -> the state that was told last

    async def start(self) -> None:
        """Reads the library and the machine. Raises SparkguardError when it cannot."""
        self._broken = asyncio.get_running_loop().create_future()
        self._effects.attach(self.post)
        self._begin(self._lasting_tasks, self._run())
        await self.reload()
        await self._measure(asked=False)
        self._begin(self._lasting_tasks, self._watch())
        self._begin(self._lasting_tasks, self._refresh())

    async def failed(self) -> None:
        """Ends only by the exception of a bug, on which the process should end too."""
        assert self._broken is not None
        await asyncio.shield(self._broken)

    async def close(self, seconds: float) -> None:
        """Lets requests end, at most so long; then everything."""
        self.post(events.Close())
        try:
            await asyncio.wait_for(self._until(self._has_nothing), seconds)
        except asyncio.TimeoutError:
            self.post(events.Halt())
            try:
                await asyncio.wait_for(self._until(self._has_nothing), _END_SECONDS)
            except asyncio.TimeoutError:
                log.error("runners are left that even SIGKILL does not end: %s", ", ".join(self._with_process()))
        await self._effects.close()
        while self._ledger_tasks:
            await asyncio.wait(self._ledger_tasks)
        lasting = tuple(self._lasting_tasks)
        for task in lasting:
            task.cancel()
        await asyncio.gather(*lasting, return_exceptions=True)
        self._set_alarm(None)
        try:
            await self._memory.hold(dict)
        except SparkguardError as error:
            log.warning("%s", error.message)

    def post(self, event: events.Event) -> None:
        self._queue.put_nowait(event)

    async def _run(self) -> None:
        while True:
            self._handle(await self._queue.get())

    # Requests

    async def lease(self, model: str, on_position: Callable[[int], None] | None = None) -> RunnerLease:
        ticket = next(self._numbers)
        lease = RunnerLease(self, ticket, model)
        if on_position is not None:
            self._positions[ticket] = on_position
        try:
            await self.wait(ticket, lease, events.Asked(ticket, model))
        finally:
            self._positions.pop(ticket, None)
        return lease

    async def wait(self, ticket: int, lease: RunnerLease | None, event: events.Event) -> tuple[Key, ...]:
        """Posts the event and waits for what becomes of the ticket. Raises Refused."""
        turn: asyncio.Future[tuple[Key, ...]] = asyncio.get_running_loop().create_future()
        self._waiting[ticket] = turn
        if lease is not None:
            self._asking[ticket] = lease
        self.post(event)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                turn.exception()  # refused at the same moment: heard
            self._waiting.pop(ticket, None)
            self._asking.pop(ticket, None)
            self.leases.pop(ticket, None)
            self.post(events.Gone(ticket))
            raise

    async def load(self, id: str) -> None:
        ticket = next(self._numbers)
        await self.wait(ticket, None, events.Load(ticket, id))

    async def make_room(self, amounts: Mapping[str, int]) -> tuple[str, ...]:
        ticket = next(self._numbers)
        leaving = await self.wait(ticket, None, events.MakeRoom(ticket, tuple(sorted(amounts.items()))))
        await self._until(lambda: all(self._process(model) != generation for model, generation in leaving))
        await self._memory.hold(self._hold_now)
        return tuple(model for model, _ in leaving)

    async def unload(self, id: str) -> None:
        if id not in self._dispatch.models and id not in self._dispatch.runners:
            raise Refused(404, "model_not_found", f"there is no model {id}")
        here = self._process(id)
        self.post(events.Unload(id))
        await self._until(lambda: self._process(id) != here or here is None)

    async def kill(self, runner_id: str) -> None:
        here = self._process(runner_id)
        if here is None:
            raise Refused(404, "runner_not_found", f"there is no runner of {runner_id}")
        self.post(events.Kill(runner_id))
        await self._until(lambda: self._process(runner_id) != here)

    def _process(self, id: str) -> int | None:
        """The generation of the process that a model has."""
        runner = self._dispatch.runners.get(id)
        return runner.generation if runner is not None and runner.state in lifecycle.HAS_PROCESS else None

    def _with_process(self) -> list[str]:
        return [id for id in self._dispatch.runners if self._process(id) is not None]

    def _has_nothing(self) -> bool:
        return not self._with_process() and self._dispatch.closing

    async def _until(self, holds: Callable[[], bool]) -> None:
        """Waits until something holds that a step may bring about, and at least until all that is posted now is done."""
        watcher = _Watcher(holds)
        self._watchers.append(watcher)
        self.post(watcher.mark)
        await watcher.done

    # Settings

    async def patch(self, id: str, changes: Json) -> Json:
        await self._library.patch(id, changes)
        await self._rescan()
        return self.view.model(id) or self._library.describe(id)

    async def reload(self) -> None:
        self.post(self._limits())
        await self._rescan()

    async def _rescan(self) -> None:
        """Returns when the dispatcher knows the library as it is now."""
        models = await self._library.scan()
        self.post(events.Changed(models))
        await self._until(lambda: True)

    async def _watch(self) -> None:
        while True:
            await self._library.watch()
            try:
                await self._rescan()
            except SparkguardError as error:
                log.error("%s", error.message)  # of a file that somebody is writing just now; the next change is read again

    # The one writer

    def _handle(self, event: events.Event) -> None:
        if isinstance(event, events.Exited):
            self._end_leases((event.model, event.generation), f"the runner of {event.model} ended ({event.cause}): {event.words}")
            self._count_exit(event)
        elif isinstance(event, events.Ready):
            self.view.counts(event.model)["loads"] += 1
        models = self._dispatch.models
        for effect in self._dispatch.step(event, self._now()):
            self._carry_out(effect)
        if isinstance(event, events.Changed):
            self._tell_changes(models)
        elif isinstance(event, events.Free) and self._subscribers:
            self._subscribers.tell({"type": "devices", "devices": self.devices()})
        held = self._dispatch.held()
        if held != self._reserved and not self._measures and not self._reserving:
            self._reserving = True
            self._begin(self._ledger_tasks, self._reserve())
        self._watchers = [watcher for watcher in self._watchers if not watcher.look(event)]

    def _carry_out(self, effect: events.Effect) -> None:
        if isinstance(effect, events.Grant):
            self._grant(effect)
        elif isinstance(effect, events.Loaded):
            self._answer(effect.ticket, ())
        elif isinstance(effect, events.MadeRoom):
            log.info("unloading %s: another server needs the memory", ", ".join(model for model, _ in effect.leaving))
            self._answer(effect.ticket, effect.leaving)
        elif isinstance(effect, events.Refuse):
            self._refuse(effect)
        elif isinstance(effect, events.Position):
            if effect.ticket in self._positions:
                # Later, so that whatever a listener does wrong is its own error.
                asyncio.get_running_loop().call_soon(self._positions[effect.ticket], effect.place)
        elif isinstance(effect, events.Spawn):
            self.view.started[effect.model] = time.time()
            about = {"model": effect.model, "runner": f"{effect.model}@{effect.generation}"}
            log.info("%s: starting on %s", effect.model, effect.placement.device, extra=about)
            self._effects.spawn(effect.model, effect.generation, effect.placement)
        elif isinstance(effect, events.Stop):
            # A request still there would keep llama-server from ending: SIGTERM waits for it.
            self._end_leases((effect.model, effect.generation), f"the runner of {effect.model} is being stopped")
            self._effects.stop(effect.model, effect.generation, effect.grace_seconds)
        elif isinstance(effect, events.Measure):
            self._begin(self._ledger_tasks, self._measure())
        elif isinstance(effect, events.Wake):
            self._set_alarm(effect.at)
        elif isinstance(effect, events.Turned):
            self._tell(effect.model)

    def _grant(self, effect: events.Grant) -> None:
        lease = self._asking.pop(effect.ticket, None)
        if lease is None:
            return  # it has left; its Gone is in the queue
        self.leases[effect.ticket] = lease
        lease.give(effect.generation, self._effects.endpoint(effect.model, effect.generation))
        self._answer(effect.ticket, ((effect.model, effect.generation),))

    def _answer(self, ticket: int, answer: tuple[Key, ...]) -> None:
        turn = self._waiting.pop(ticket, None)
        if turn is not None and not turn.done():
            turn.set_result(answer)

    def _refuse(self, effect: events.Refuse) -> None:
        self._asking.pop(effect.ticket, None)
        turn = self._waiting.pop(effect.ticket, None)
        if turn is None or turn.done():
            return
        message = effect.message
        if effect.rooms:
            text = (self._library.describe(effect.model).get("needs") or {}).get("text")
            longest = self._library.largest_context(effect.model, effect.rooms)
            message += f"; in all it needs {text}" if text else ""
            message += f"; the largest context that would fit is {longest} tokens" if longest else ""
        turn.set_exception(Refused(effect.status, effect.code, message, effect.retry_after))

    def _end_leases(self, key: Key, why: str) -> None:
        for lease in self.leases.values():
            if (lease.model, lease.generation) == key:
                lease.end(why)

    async def _measure(self, asked: bool = True) -> None:
        """asked: by the dispatcher, which then also wants to hear that it was not possible."""
        decided = False
        self._measures += 1

        def decide(reading: events.Reading) -> Mapping[str, int]:
            nonlocal decided
            decided = True
            self._handle(events.Free(reading))  # a step like any other: nothing else runs in this thread meanwhile
            return self._hold_now()

        try:
            await self._memory.read(self._pids(), decide)
        except SparkguardError as error:
            if decided:
                log.warning("what the runners hold is not reserved: %s", error.message)
            elif asked:
                self.post(events.Unread(error.message))
            else:
                log.warning("%s", error.message)
        finally:
            self._measures -= 1

    def _hold_now(self) -> Mapping[str, int]:
        self._reserved = self._dispatch.held()
        return self._reserved

    async def _reserve(self) -> None:
        """Tells the ledger that less, or more, is held than when it was last told."""
        try:
            while self._dispatch.held() != self._reserved:
                await self._memory.hold(self._hold_now)
        except SparkguardError as error:
            log.warning("what the runners hold is not reserved: %s", error.message)
        finally:
            self._reserving = False

    async def _refresh(self) -> None:
        """Looks again while somebody watches the devices."""
        while True:
            await asyncio.sleep(_REFRESH_SECONDS)
            if self._subscribers and not self._measures:
                self._begin(self._ledger_tasks, self._measure(asked=False))

    def _pids(self) -> dict[Key, int]:
        pids = {}
        for id, runner in self._dispatch.runners.items():
            if runner.pid is not None and self._process(id) is not None:
                pids[id, runner.generation] = runner.pid
        return pids

    def _set_alarm(self, at: float | None) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = None if at is None else asyncio.get_running_loop().call_at(at, self.post, events.Tick())

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _begin(self, tasks: set[asyncio.Task[None]], coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and self._broken is not None and not self._broken.done():
            self._broken.set_exception(error)

    def _count_exit(self, event: events.Exited) -> None:
        runner = self._dispatch.runners.get(event.model)
        if runner is not None and runner.generation == event.generation and runner.state in lifecycle.HAS_PROCESS:
            unasked = runner.killed or runner.state in (lifecycle.STARTING, lifecycle.READY)
            self.view.counts(event.model)["crashes"] += unasked
            if unasked:
                about = {"model": event.model, "runner": f"{event.model}@{event.generation}"}
                log.warning("%s: ended (%s): %s", event.model, event.cause, event.words, extra=about)

    # What people see

    def resolve(self, name: str) -> str | None:
        return self._library.resolve(name)

    def models(self) -> list[Json]:
        return self.view.models()

    def warning(self) -> str | None:
        return self._library.warning()

    def model(self, id: str) -> Json | None:
        return self.view.model(id)

    def runners(self) -> list[Json]:
        return self.view.runners()

    def devices(self) -> list[Json]:
        return self.view.devices()

    def counters(self) -> list[Json]:
        return self.view.counters()

    def log(self, runner_id: str) -> LogRing | None:
        return self._effects.log(runner_id)

    def subscribe(self) -> AsyncIterator[Json]:
        return self._subscribers.new()

    def _tell(self, id: str) -> None:
        runner = self._dispatch.runners.get(id)
        for key in [key for key in self._busy if key[0] == id and (runner is None or key[1] != runner.generation)]:
            del self._busy[key]
        if runner is not None and self._process(id) is not None:
            key = (id, runner.generation)
            if self._busy.get(key, 0) != len(runner.leases):
                self._busy[key] = len(runner.leases)
                self._effects.busy(id, runner.generation, len(runner.leases))
        if not self._subscribers:
            return
        queue = len(runner.queue) if runner is not None else 0
        self._subscribers.tell({"type": "queue", "model": id, "queue": queue})
        self._subscribers.tell({"type": "runner", **self.view.runner(id)})
        state = runner.state if runner is not None else lifecycle.STOPPED
        if self._told.get(id) != state:
            self._told[id] = state
            if (card := self.view.model(id)) is not None:
                self._subscribers.tell({"type": "model", **card})

    def _tell_changes(self, before: Mapping[str, events.Model]) -> None:
        after = self._dispatch.models
        for id in {**before, **after} if self._subscribers else ():
            if before.get(id) != after.get(id):
                self._subscribers.tell({"type": "model", **(self.view.model(id) or {"id": id, "state": "removed"})})


class _Watcher:
    """Somebody who waits for a state of things."""

    def __init__(self, holds: Callable[[], bool]) -> None:
        self.holds = holds
        self.mark = events.Tick()  # what was posted before it has been done when it comes
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._armed = False

    def look(self, event: events.Event) -> bool:
        """Whether it is over: it holds, or nobody waits any more."""
        self._armed = self._armed or event is self.mark
        if not self.done.done() and self._armed and self.holds():
            self.done.set_result(None)
        return self.done.done()
