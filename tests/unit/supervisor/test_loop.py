"""The one task: what clients, the page and the ledger get, over recorded effects and without a process or a sleep."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any

import pytest

from sparkguard.core.events import Close, Event, Exited, Limits, Model, Placement, Pool, Reading, Ready, Started
from sparkguard.errors import SparkguardError
from sparkguard.supervisor.loop import SupervisorLoop
from sparkguard.supervisor.protocol import Json, LogRing, Refused, RunnerDied

MIB = 1 << 20


def model(id: str, mib: int = 100, version: int = 1, **more: Any) -> Model:
    return Model(id, (Placement("cpu", (("ram", mib * MIB),)),), version, **more)


class FakeEffects:
    """Records; processes come and go when the test says so."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.post: Callable[[Event], None] = lambda event: None
        self.closed = False
        self.loaded = 0.5

    def attach(self, post: Callable[[Event], None]) -> None:
        self.post = post

    def spawn(self, model: str, generation: int, placement: Placement) -> None:
        self.calls.append(("spawn", model, generation, placement.device))

    def stop(self, model: str, generation: int, grace_seconds: float) -> None:
        self.calls.append(("stop", model, generation, grace_seconds))

    def busy(self, model: str, generation: int, requests: int) -> None:
        self.calls.append(("busy", model, generation, requests))

    def endpoint(self, model: str, generation: int) -> tuple[str, str | None]:
        return f"/run/{model}-{generation}.sock", None

    def pid(self, model: str, generation: int) -> int | None:
        return 4000 + generation

    def progress(self, model: str) -> float | None:
        return self.loaded

    def log(self, model: str) -> LogRing | None:
        return None

    async def close(self) -> None:
        self.closed = True

    def spawned(self) -> list[str]:
        return [call[1] for call in self.calls if call[0] == "spawn"]


class FakeLibrary:
    def __init__(self, *models: Model) -> None:
        self.found = {model.id: model for model in models}
        self.change = asyncio.Event()
        self.after_scan: Callable[[], None] = lambda: None
        self.bound: str | None = None

    async def scan(self) -> tuple[Model, ...]:
        self.after_scan()
        return tuple(self.found.values())

    async def watch(self) -> None:
        await self.change.wait()
        self.change.clear()

    def resolve(self, name: str) -> str | None:
        return name if name in self.found else None

    def describe(self, id: str) -> Json:
        return {"id": self.found[id].id, "needs": {"text": "2000 MB for 4096 tokens of context"}}

    def largest_context(self, id: str, rooms: Sequence[Mapping[str, int]]) -> int | None:
        return 1024 if rooms[0]["ram"] else None

    def warning(self) -> str | None:
        return self.bound

    def devices(self) -> list[Json]:
        return [{"id": "cpu", "pool": "ram", "total_bytes": 1000 * MIB}]

    async def patch(self, id: str, changes: Json) -> None:
        if "nonsense" in changes:
            raise SparkguardError("nonsense is no setting")
        self.found[id] = self.found[id].replace(version=changes)


class FakeMemory:
    """One at a time, as behind the ledger's lock; `gate` holds readers back."""

    def __init__(self) -> None:
        self.reading = Reading((Pool("ram", 1000 * MIB, 1000 * MIB, 0),))
        self.reserved: list[dict[str, int]] = []
        self.error: SparkguardError | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.lock = asyncio.Lock()
        self.pids: Mapping[tuple[str, int], int] = {}

    async def read(self, pids: Mapping[tuple[str, int], int], decide: Callable[[Reading], Mapping[str, int]]) -> None:
        async with self.lock:
            await self.gate.wait()
            if self.error:
                raise self.error
            self.pids = pids
            self.reserved.append(dict(decide(self.reading)))

    async def hold(self, amounts: Callable[[], Mapping[str, int]]) -> None:
        async with self.lock:
            self.reserved.append(dict(amounts()))


class Bench:
    def __init__(self, *models: Model, limits: Limits | None = None) -> None:
        self.effects, self.library, self.memory = FakeEffects(), FakeLibrary(*models), FakeMemory()
        self.limits = limits or Limits()
        self.loop = SupervisorLoop(self.effects, self.library, self.memory, lambda: self.limits)

    async def until(self, holds: Callable[[], object]) -> None:
        """Turns the event loop until it holds; nothing here takes time, so a few hundred turns are more than enough."""
        for _ in range(500):
            if holds():
                return
            await asyncio.sleep(0)
        raise AssertionError("it does not come about")

    async def ready(self, id: str) -> int:
        """The process that is starting, or is about to, comes up."""
        await self.until(lambda: self.loop._dispatch.runners[id].state == "starting")
        generation = self.loop._dispatch.runners[id].generation
        self.effects.post(Started(id, generation, 4000 + generation))
        self.effects.post(Ready(id, generation))
        await self.until(lambda: self.loop._dispatch.runners[id].state != "starting")
        return generation

    def exit(self, id: str, cause: str = "stopped", words: str = "") -> None:
        self.effects.post(Exited(id, self.loop._dispatch.runners[id].generation, cause, words))

    async def loaded(self, id: str) -> int:
        load = asyncio.create_task(self.loop.load(id))
        await self.until(lambda: id in self.loop._dispatch.runners)
        generation = await self.ready(id)
        await load
        return generation

    async def stopping(self, id: str) -> None:
        await self.until(lambda: self.loop._dispatch.runners[id].state == "stopping")


def queued(bench: Bench) -> int:
    return len(bench.loop._dispatch.runners["a"].queue)


def run(test: Callable[[Bench], Coroutine[Any, Any, None]], *models: Model, limits: Limits | None = None) -> None:
    """Runs the test over a started supervisor, and ends that in good order."""

    async def main() -> None:
        bench = Bench(*(models or (model("a"), model("b"))), limits=limits)
        await bench.loop.start()
        await test(bench)
        closing = asyncio.create_task(bench.loop.close(60))
        for id in bench.loop._with_process():
            await bench.stopping(id)
            bench.exit(id)
        await closing
        assert bench.effects.closed
        assert bench.memory.reserved[-1] == {}
        turnstile = bench.loop._turnstile
        assert not turnstile.waiting and not turnstile.asking and not turnstile.leases

    asyncio.run(main())


def test_a_lease_is_a_runner() -> None:
    """It is started under the ledger's lock, reserved there, and the lease says where it listens."""

    async def test(bench: Bench) -> None:
        asked = asyncio.create_task(bench.loop.lease("a"))
        await bench.until(lambda: "a" in bench.loop._dispatch.runners)
        await bench.ready("a")
        async with await asked as lease:
            assert (lease.model, lease.socket, lease.key) == ("a", "/run/a-1.sock", None)
            assert bench.effects.calls == [("spawn", "a", 1, "cpu"), ("busy", "a", 1, 1)]
            lease.tokens(7, 5)
        await bench.until(lambda: ("busy", "a", 1, 0) in bench.effects.calls)
        assert bench.memory.reserved[-1] == {"ram": 100 * MIB}
        assert bench.loop.counters()[0] == {
            "model": "a", "requests": 1, "failed": 0, "prompt_tokens": 7, "generated_tokens": 5,
            "loads": 1, "crashes": 0, "seconds": pytest.approx(0, abs=5), "queue": 0,
        }  # fmt: skip

    run(test)


def test_no_start_comes_between_the_reading_and_the_reservation() -> None:
    """What is reserved when the lock is let go holds what was started under it."""

    async def test(bench: Bench) -> None:
        bench.memory.gate.clear()
        asked = [asyncio.create_task(bench.loop.load(id)) for id in ("a", "b")]
        await bench.until(lambda: len(bench.loop._dispatch.runners) == 2)
        assert bench.effects.spawned() == []
        before = len(bench.memory.reserved)
        bench.memory.gate.set()
        await bench.ready("a")
        await bench.ready("b")
        await asyncio.gather(*asked)
        assert bench.memory.reserved[before] == {"ram": 200 * MIB}

    run(test)


def test_what_has_ended_is_given_back() -> None:
    """The reservation follows the runners."""

    async def test(bench: Bench) -> None:
        await bench.loaded("a")
        unload = asyncio.create_task(bench.loop.unload("a"))
        await bench.stopping("a")
        assert bench.memory.reserved[-1] == {"ram": 100 * MIB}
        bench.exit("a")
        await unload
        await bench.until(lambda: bench.memory.reserved[-1] == {})

    run(test)


def test_places_in_the_queue_are_told() -> None:
    """1 is next."""

    async def test(bench: Bench) -> None:
        await bench.loaded("a")
        places: list[int] = []
        first = await bench.loop.lease("a")
        second = asyncio.create_task(bench.loop.lease("a"))
        third = asyncio.create_task(bench.loop.lease("a", places.append))
        await bench.until(lambda: places == [2])
        async with first:
            pass
        async with await second:
            await bench.until(lambda: places == [2, 1])
        async with await third:
            assert bench.loop.model("a")["queue"] == 0  # type: ignore[index]

    run(test)


def test_a_client_that_leaves_frees_its_place() -> None:
    """In the queue, at the moment of its turn, and while it runs."""

    async def test(bench: Bench) -> None:
        await bench.loaded("a")
        first = await bench.loop.lease("a")
        second = asyncio.create_task(bench.loop.lease("a"))
        third = asyncio.create_task(bench.loop.lease("a"))
        await bench.until(lambda: queued(bench) == 2)
        second.cancel()
        await bench.until(lambda: queued(bench) == 1)

        async def running() -> None:
            async with first:
                await asyncio.Event().wait()

        client = asyncio.create_task(running())
        await asyncio.sleep(0)
        client.cancel()
        await bench.until(lambda: third in asyncio.all_tasks() and bench.loop._turnstile.leases)
        third.cancel()  # granted, and not yet told
        with pytest.raises(asyncio.CancelledError):
            await third
        await bench.until(lambda: not bench.loop._dispatch.runners["a"].leases)
        assert bench.loop.counters()[0]["failed"] == 1

    run(test)


def test_the_search_for_what_would_fit_holds_nobody_up() -> None:
    """It takes a second for a large model: once for all who are refused together, and others are answered meanwhile."""
    searches, found = [], threading.Event()

    async def test(bench: Bench) -> None:
        began, loop = asyncio.Event(), asyncio.get_running_loop()

        def search(id: str, rooms: Sequence[Mapping[str, int]]) -> int | None:
            searches.append(id)
            loop.call_soon_threadsafe(began.set)
            return 512 if found.wait(30) else None

        bench.library.largest_context = search  # type: ignore[method-assign]
        refused = [asyncio.create_task(bench.loop.load("big")) for _ in range(3)]
        await began.wait()
        await bench.loaded("a")
        found.set()
        for task in refused:
            with pytest.raises(Refused, match="512 tokens"):
                await task
        assert searches == ["big"]

    run(test, model("a"), model("big", 2000))


def test_a_refusal_says_what_would_fit() -> None:
    """The arithmetic, what the model needs in all, and the longest context that there is room for."""

    async def test(bench: Bench) -> None:
        with pytest.raises(Refused) as caught:
            await bench.loop.lease("big")
        assert (caught.value.http_status, caught.value.code) == (503, "does_not_fit")
        assert caught.value.message == (
            "big needs 2000 MB of ram to run on cpu, and at most 1000 MB of its 1000 MB could be had (0 MB stay free): "
            "1000 MB too little; in all it needs 2000 MB for 4096 tokens of context; "
            "the largest context that would fit is 1024 tokens"
        )
        assert bench.effects.spawned() == []
        assert bench.loop.model("big")["fits"] is False  # type: ignore[index]

    run(test, model("big", 2000))


def test_unknown_names_are_404() -> None:
    """For every verb."""

    async def test(bench: Bench) -> None:
        for verb in (bench.loop.lease, bench.loop.load, bench.loop.unload, bench.loop.kill):
            with pytest.raises(Refused) as caught:
                await verb("nobody")
            assert caught.value.http_status == 404
        assert bench.loop.model("nobody") is None

    run(test)


def test_memory_that_cannot_be_read_starts_nothing() -> None:
    """The request is told why."""

    async def test(bench: Bench) -> None:
        bench.memory.error = SparkguardError("the lock has been held for 10 s by pid 7")
        with pytest.raises(Refused, match="by pid 7"):
            await bench.loop.lease("a")
        assert bench.effects.spawned() == []

    run(test)


def test_a_death_is_replayed_before_the_first_byte() -> None:
    """The lease hears of it, waits for the next runner, and goes first."""

    async def test(bench: Bench) -> None:
        await bench.loaded("a")
        async with await bench.loop.lease("a") as lease:
            second = asyncio.create_task(bench.loop.lease("a"))
            await bench.until(lambda: queued(bench) == 1)
            bench.exit("a", "crash", "segmentation fault")
            assert await lease.death == "the runner of a ended (crash): segmentation fault"
            again = asyncio.create_task(lease.replay())
            load = asyncio.create_task(bench.loop.load("a"))  # by hand, so that no back-off passes
            generation = await bench.ready("a")
            await again
            await load
            assert (lease.generation, lease.socket) == (generation, "/run/a-2.sock")
            assert not second.done()
            lease.first_byte()
            with pytest.raises(RunnerDied):
                await lease.replay()
        async with await second:
            pass
        counters = bench.loop.counters()[0]
        assert (counters["requests"], counters["failed"], counters["crashes"], counters["loads"]) == (2, 0, 1, 2)

    run(test)


def test_a_refused_replay_is_over() -> None:
    """Leaving the block then gives nothing back twice."""

    async def test(bench: Bench) -> None:
        await bench.loaded("a")
        with pytest.raises(Refused, match="bad magic"):
            async with await bench.loop.lease("a") as lease:
                bench.exit("a", "crash")
                await lease.death
                load = asyncio.create_task(bench.loop.load("a"))
                await bench.until(lambda: bench.loop._dispatch.runners["a"].state == "starting")
                bench.exit("a", "bad_file", "bad magic")
                await bench.until(lambda: bench.loop._dispatch.runners["a"].state == "failed")
                with pytest.raises(Refused):
                    await load
                await lease.replay()
        assert bench.loop.model("a")["error"] == "bad magic"  # type: ignore[index]

    run(test)


def test_a_kill_is_told_to_the_request() -> None:
    """Its connection must be closed, or the engine waits for it."""

    async def test(bench: Bench) -> None:
        generation = await bench.loaded("a")
        async with await bench.loop.lease("a") as lease:
            kill = asyncio.create_task(bench.loop.kill("a"))
            assert await lease.death == "the runner of a is being stopped"
            assert ("stop", "a", generation, 0.0) in bench.effects.calls
            bench.exit("a", "crash")
            await kill
            lease.failed()
        (card,) = bench.loop.runners()
        assert card["state"] == "backoff" and 0 <= card["retry_at"] - time.time() < 2

    run(test)


def test_a_reload_drops_no_running_request() -> None:
    """It ends on the runner that it has; new settings are for the next."""

    async def test(bench: Bench) -> None:
        await bench.loaded("a")
        async with await bench.loop.lease("a") as lease:
            bench.limits = Limits(most_loaded=1)
            bench.library.found["a"] = model("a", version=2)
            await bench.loop.reload()
            assert bench.loop._dispatch.limits.most_loaded == 1
            assert bench.loop.runners()[0]["state"] == "draining"
            assert not lease.death.done()
            assert [call for call in bench.effects.calls if call[0] == "stop"] == []
        await bench.stopping("a")

    run(test)


def test_a_changed_library_is_read_again() -> None:
    """As soon as the watch says so; nobody need ask."""

    async def test(bench: Bench) -> None:
        bench.library.found["new"] = model("new")
        bench.library.change.set()
        await bench.until(lambda: bench.loop.model("new"))

    run(test)


def test_a_patch_is_in_force_when_it_returns() -> None:
    """And a bad one changes nothing."""

    async def test(bench: Bench) -> None:
        answer = await bench.loop.patch("a", {"context": 8192})
        assert answer["id"] == "a"
        assert bench.loop._dispatch.models["a"].version == {"context": 8192}
        with pytest.raises(SparkguardError, match="no setting"):
            await bench.loop.patch("a", {"nonsense": 1})

    run(test)


def test_the_json_of_a_runner() -> None:
    """All keys, before and after it is ready."""

    async def test(bench: Bench) -> None:
        load = asyncio.create_task(bench.loop.load("a"))
        await bench.until(lambda: bench.effects.spawned())
        (card,) = bench.loop.runners()
        assert (card["state"], card["progress"], card["memory_bytes"]) == ("starting", 0.5, None)
        await bench.ready("a")
        await load
        (card,) = bench.loop.runners()
        assert {key: value for key, value in card.items() if key != "started_at"} == {
            "id": "a", "model": "a", "state": "ready", "device": "cpu", "pid": 4001, "generation": 1,
            "memory_bytes": 100 * MIB, "estimated_bytes": 100 * MIB, "requests": 0, "tokens": 0, "queue": 0,
            "running": 0, "restarts": 0, "last_error": None, "retry_at": None,
            "progress": None,
        }  # fmt: skip
        assert bench.loop.devices() == [{"id": "cpu", "pool": "ram", "total_bytes": 1000 * MIB, "available_bytes": 1000 * MIB}]
        assert bench.loop.model("a")["fits"] is True  # type: ignore[index]

    run(test)


def test_room_is_made() -> None:
    """When the model has ended and the ledger says so, the call returns its name; else it says why not."""

    async def test(bench: Bench) -> None:
        await bench.loaded("a")
        with pytest.raises(Refused, match="idle models hold 100 MB of ram, and 101 MB are wanted"):
            await bench.loop.make_room({"ram": 101 * MIB})
        room = asyncio.create_task(bench.loop.make_room({"ram": 50 * MIB}))
        await bench.stopping("a")
        assert not room.done()
        bench.exit("a")
        assert await room == ("a",)
        assert bench.memory.reserved[-1] == {}

    run(test)


async def take(events: AsyncIterator[Json], count: int) -> list[Json]:
    return [await anext(events) for _ in range(count)]


def test_changes_are_told() -> None:
    """To everybody who has subscribed, from then on; who reads no more is forgotten."""

    async def test(bench: Bench) -> None:
        events = bench.loop.subscribe()
        await bench.loaded("a")
        told = await take(events, 8)
        assert {"type": "queue", "model": "a", "queue": 0} in told
        assert [event["state"] for event in told if event["type"] == "model"] == ["stopped", "starting"]
        unload = asyncio.create_task(bench.loop.unload("a"))
        await bench.stopping("a")
        bench.exit("a")
        await unload
        last = [await anext(events) for _ in range(events._events.qsize())]  # type: ignore[attr-defined]
        assert {"type": "runner", "id": "a", "model": "a", "state": "stopped"} in last
        del events
        assert len(bench.loop._news.subscribers) == 0

    run(test)


def test_who_follows_hears_that_the_list_is_not_whole() -> None:
    """Once, and once more when it is."""

    async def test(bench: Bench) -> None:
        events = bench.loop.subscribe()
        for bound in (None, "too many files", "too many files", None):
            bench.library.bound = bound
            await bench.loop.reload()
        assert await take(events, 2) == [{"type": "library", "warning": text} for text in ("too many files", None)]
        assert events._events.empty()  # type: ignore[attr-defined]

    run(test)


def test_a_model_that_goes_while_its_runner_ends() -> None:
    """Nothing is asked of the library about a model that it has no more, though a step of its runner is under way."""

    async def test(bench: Bench) -> None:
        events = bench.loop.subscribe()
        await bench.loaded("a")
        del bench.library.found["a"]
        bench.library.after_scan = lambda: bench.exit("a", "crash")
        await bench.loop.reload()
        await bench.until(lambda: bench.loop._queue.empty())
        assert bench.loop.model("a") is None and bench.loop.runners() == []
        told = [await anext(events) for _ in range(events._events.qsize())]  # type: ignore[attr-defined]
        assert {"type": "model", "id": "a", "state": "removed"} in told

    run(test)


def test_a_model_that_goes_while_it_is_changed() -> None:
    """Its settings are written, and whoever wrote them is told that it is not there."""

    async def test(bench: Bench) -> None:
        bench.library.after_scan = lambda: bench.library.found.clear()
        with pytest.raises(Refused) as caught:
            await bench.loop.patch("a", {"context": 1024})
        assert caught.value.http_status == 404

    run(test)


def test_the_progress_of_a_load_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time that it has changed, though nothing else happens meanwhile, and no more once it is ready."""
    monkeypatch.setattr("sparkguard.supervisor.loop._PROGRESS_SECONDS", 0)

    async def test(bench: Bench) -> None:
        load = asyncio.create_task(bench.loop.load("a"))
        await bench.until(lambda: bench.effects.spawned())
        events = bench.loop.subscribe()
        for share in (0.6, 0.7, 0.8):
            bench.effects.loaded = share
            told = await anext(events)
            assert (told["type"], told["model"], told["progress"]) == ("runner", "a", share)
        await bench.ready("a")
        await load
        told = [await anext(events) for _ in range(events._events.qsize())]  # type: ignore[attr-defined]
        bench.effects.loaded = 0.9
        for _ in range(10):
            await asyncio.sleep(0)
        assert events._events.empty()  # type: ignore[attr-defined]
        assert [event["progress"] for event in told if event["type"] == "runner"][-1] is None

    run(test)


def test_a_slow_reader_loses_events_and_stops_nobody() -> None:
    """It is told how many."""

    async def test(bench: Bench) -> None:
        events = bench.loop.subscribe()
        for number in range(1003):
            bench.loop._news.subscribers.tell({"type": "queue", "number": number})
        told = await take(events, 1001)
        assert told[999]["number"] == 999
        assert told[1000] == {"type": "dropped", "count": 3}

    run(test)


def test_the_deadline_of_the_end_is_kept() -> None:
    """A request that does not end is cut off, and its runner goes."""

    async def main() -> None:
        bench = Bench(model("a"))
        await bench.loop.start()
        generation = await bench.loaded("a")
        async with await bench.loop.lease("a") as lease:
            closing = asyncio.create_task(bench.loop.close(0))
            await lease.death
            assert bench.effects.calls[-1] == ("stop", "a", generation, 0.0)
            bench.exit("a")
            await closing
        assert bench.effects.closed

    asyncio.run(main())


def test_a_bug_in_the_one_task_comes_out() -> None:
    """The process must not go on without its head."""

    async def main() -> None:
        bench = Bench(model("a"))
        await bench.loop.start()
        bench.effects.post("nonsense")  # type: ignore[arg-type]
        with pytest.raises(KeyError):
            await bench.loop.failed()

    asyncio.run(main())


def test_a_bug_that_a_request_meets_is_no_fault_of_the_request() -> None:
    """It waits for an answer as ever, and the process ends."""

    async def main() -> None:
        bench = Bench(model("a"))
        await bench.loop.start()
        asking = asyncio.create_task(bench.loop._turnstile.wait(1, "nonsense"))  # type: ignore[arg-type]
        with pytest.raises(KeyError):
            await bench.loop.failed()
        assert not asking.done()
        asking.cancel()

    asyncio.run(main())


def test_a_request_finds_what_was_posted_before_it() -> None:
    """It is decided at once only where nothing waits before it."""

    async def test(bench: Bench) -> None:
        await bench.loaded("a")
        bench.loop.post(bench.limits)
        bench.loop.post(Close())
        with pytest.raises(Refused, match="shutting down"):
            await bench.loop.lease("a")

    run(test)
