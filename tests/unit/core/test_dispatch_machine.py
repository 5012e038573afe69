"""What must hold whatever happens in whatever order, and the stall of llama-server's router as a simulation."""

from __future__ import annotations

import heapq
import random

import pytest
from dispatch_world import MIB, World, model
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sparkguard.core.events import (
    CAUSES,
    STOPPED,
    Changed,
    Close,
    Grant,
    Halt,
    Kill,
    Limits,
    Measure,
    Model,
    Placement,
    Spawn,
    Stop,
    Tick,
    Unload,
    Unread,
)
from sparkguard.core.lifecycle import BACKOFF, HAS_PROCESS, MOST_BACKOFF_SECONDS, READY, TRANSITIONS

NAMES = ("a", "b", "c", "d")
SIZES = {"a": 100, "b": 200, "c": 300, "d": 900}


def machine_model(name: str, version: int, parallel: int, pinned: bool) -> Model:
    """c may run on the GPU too, and d fits there only in parts."""
    mib = SIZES[name]
    ways = [Placement("cpu", (("ram", mib * MIB),), 2)]
    if name in "cd":
        ways.insert(0, Placement("cuda:0", (("gpu0", mib * MIB),), 0))
    if name == "d":
        ways.insert(1, Placement("cuda:0", (("gpu0", 200 * MIB), ("ram", 700 * MIB)), 1, 8))
    return model(name, placements=tuple(ways), version=version, parallel=parallel, pinned=pinned)


class Runners(RuleBasedStateMachine):
    """Clients, processes, users, files and other programs do what they like; World objects where the dispatcher errs."""

    @initialize(
        parallel=st.tuples(*[st.integers(1, 3)] * 4),
        pinned=st.tuples(*[st.booleans()] * 4),
        most_loaded=st.integers(0, 3),
        queue_limit=st.integers(1, 4),
    )
    def begin(self, parallel: tuple[int, ...], pinned: tuple[bool, ...], most_loaded: int, queue_limit: int) -> None:
        models = [machine_model(name, 1, *more) for name, *more in zip(NAMES, parallel, pinned)]
        limits = Limits(idle_seconds=50, most_loaded=most_loaded, queue_limit=queue_limit)
        self.world = World(*models, totals={"ram": 1000, "gpu0": 500}, reserve=50, limits=limits)
        self.next = 1
        self.closed = False
        self.states: dict[str, str] = {}
        self.seen = 0

    def with_state(self, state: str) -> list[int]:
        return [ticket for ticket, its in self.world.tickets.items() if its == state]

    @rule(name=st.sampled_from(NAMES))
    def ask(self, name: str) -> None:
        self.world.ask(self.next, name)
        self.next += 1

    @rule(name=st.sampled_from(NAMES))
    def load(self, name: str) -> None:
        self.world.load(self.next, name)
        self.next += 1

    @rule(ram=st.integers(0, 1200))
    def make_room(self, ram: int) -> None:
        self.world.make_room(self.next, ram=ram)
        self.next += 1

    @precondition(lambda self: self.with_state("running"))
    @rule(data=st.data(), replay=st.booleans())
    def done(self, data: st.DataObject, replay: bool) -> None:
        self.world.done(data.draw(st.sampled_from(self.with_state("running"))), not replay, replay)

    @precondition(lambda self: self.with_state("running") + self.with_state("waiting") + self.with_state("loading"))
    @rule(data=st.data())
    def gone(self, data: st.DataObject) -> None:
        tickets = self.with_state("running") + self.with_state("waiting") + self.with_state("loading")
        self.world.gone(data.draw(st.sampled_from(tickets)))

    @precondition(lambda self: self.world.measuring)
    @rule(failed=st.sampled_from([False] * 9 + [True]))
    def measured(self, failed: bool) -> None:
        if failed:
            self.world.measuring = False
            self.world.feed(Unread("no answer"))
        else:
            self.world.measure()

    @precondition(lambda self: any(not process.ready and process.grace is None for process in self.world.processes.values()))
    @rule(data=st.data())
    def ready(self, data: st.DataObject) -> None:
        names = [key[0] for key, process in self.world.processes.items() if not process.ready and process.grace is None]
        self.world.ready(data.draw(st.sampled_from(names)))

    @precondition(lambda self: self.world.stopping())
    @rule(data=st.data())
    def stopped(self, data: st.DataObject) -> None:
        self.world.exit(data.draw(st.sampled_from(self.world.stopping())), STOPPED)

    @precondition(lambda self: self.world.processes)
    @rule(data=st.data(), cause=st.sampled_from(CAUSES))
    def died(self, data: st.DataObject, cause: str) -> None:
        self.world.exit(data.draw(st.sampled_from([key[0] for key in self.world.processes])), cause, "last words")

    @rule(name=st.sampled_from(NAMES), what=st.sampled_from([Unload, Kill]))
    def by_hand(self, name: str, what: type[Unload | Kill]) -> None:
        self.world.feed(what(name))

    @rule(name=st.sampled_from(NAMES), there=st.booleans(), pinned=st.booleans(), version=st.integers(1, 3))
    def changed(self, name: str, there: bool, pinned: bool, version: int) -> None:
        self.world.models.pop(name, None)
        if there:
            self.world.models[name] = machine_model(name, version, 1, pinned)
        self.world.feed(Changed(tuple(self.world.models.values())))

    @rule(pool=st.sampled_from(["ram", "gpu0"]), others=st.integers(0, 300), hidden=st.integers(0, 100))
    def others(self, pool: str, others: int, hidden: int) -> None:
        self.world.others[pool], self.world.hidden[pool] = others, hidden

    @rule(seconds=st.sampled_from([0.1, 1.0, 10.0, 100.0]))
    def time_passes(self, seconds: float) -> None:
        end = self.world.now + seconds
        for _ in range(1000):
            if self.world.wake is None or self.world.wake > end:
                break
            self.world.now = max(self.world.now, self.world.wake)
            self.world.wake = None
            self.world.feed(Tick())
        else:
            raise AssertionError("it wakes itself again and again")
        self.world.now = end

    @rule()
    def close(self) -> None:
        if not self.closed and self.next > 6:
            self.closed = True
            self.world.feed(Close())

    @invariant()
    def states_follow_the_table(self) -> None:
        if not hasattr(self, "world"):
            return
        for name, runner in self.world.dispatch.runners.items():
            assert (runner.state in HAS_PROCESS) == (name in {key[0] for key in self.world.processes})
            if runner.state == BACKOFF:
                assert runner.retry_at <= self.world.now + MOST_BACKOFF_SECONDS
                assert runner.deaths >= 1 or runner.retry_at <= self.world.now
            if runner.state == READY:
                assert runner.restart is None or runner.version != (runner.model and runner.model.version)

    @invariant()
    def nothing_waits_without_a_reason(self) -> None:
        """Whoever waits has a load under way, a turn to come, or an alarm or a measurement that will decide."""
        if not hasattr(self, "world"):
            return
        world = self.world
        for ticket in self.with_state("waiting"):
            runner = world.dispatch.runners[world.of[ticket]]
            assert ticket in [name for _, name in runner.queue]
            if runner.state in HAS_PROCESS:
                idle = runner.state == READY and len(runner.leases) < runner.parallel
                assert not idle or world.measuring or world.wake is not None or self.somebody_moves()
            else:
                assert world.measuring or world.wake is not None or self.somebody_moves()

    def somebody_moves(self) -> bool:
        return any(not process.ready or process.tickets or process.grace is not None for process in self.world.processes.values())

    def teardown(self) -> None:
        """In the end everything has an answer, nothing is left, and no ticket was answered twice (World sees to that)."""
        if not hasattr(self, "world"):
            return
        world = self.world
        for _ in range(10_000):
            if running := self.with_state("running"):
                world.done(running[0])
            elif world.stopping():
                world.exit(world.stopping()[0])
            elif loading := [key[0] for key, process in world.processes.items() if not process.ready]:
                world.ready(loading[0])
            elif world.measuring:
                world.measure()
            elif self.with_state("waiting") + self.with_state("loading"):
                assert world.wake is not None, "a request waits for ever"
                world.now, world.wake = max(world.now, world.wake), None
                world.feed(Tick())
            else:
                break
        assert set(world.tickets.values()) <= {"done", "gone", "loaded", "refused"}
        world.feed(Close())
        world.feed(Halt())
        for name in world.stopping():
            world.exit(name)
        assert world.processes == {}
        assert world.dispatch.held() == {}
        assert world.dispatch.tickets == {}


TestRunners = Runners.TestCase
TestRunners.settings = settings(max_examples=100, stateful_step_count=60)


def test_every_state_can_be_left_and_reached() -> None:
    """The table of transitions has no dead end and no state out of nowhere."""
    assert all(TRANSITIONS.values())
    assert set(TRANSITIONS) == set().union(*TRANSITIONS.values())


MEASURE, STOP, START, SLOWEST = 0.02, 0.07, 0.40, 0.30


class Router:
    """Models of which only some may be loaded; clients with some requests each, of whom a share loses patience after 150 ms."""

    def __init__(
        self, seed: int, models: int, loaded: int, clients: int, requests: int, impatient: float, room: int | None = None
    ) -> None:
        """room: for how many at once there is memory, those that are ending included; None: for all."""
        self.random = random.Random(seed)
        self.models = [f"m{number}" for number in range(models)]
        self.impatient = impatient
        limits = Limits(most_loaded=loaded, idle_seconds=0)
        self.world = World(*map(model, self.models), totals={"ram": 100 * (room or models)}, limits=limits)
        self.agenda: list[tuple[float, int, object]] = []
        self.asked: dict[int, float] = {}
        self.ahead: dict[int, int] = {}
        self.patient: set[int] = set()
        self.left = [requests] * clients
        self.client: dict[int, int] = {}
        self.waits: list[tuple[float, int]] = []
        self.count = 0
        self.swaps = 0

    def at(self, seconds: float, what: object) -> None:
        self.count += 1
        heapq.heappush(self.agenda, (self.world.now + seconds, self.count, what))

    def run(self) -> None:
        for client in range(len(self.left)):
            self.at(self.random.random() * 0.05, ("ask", client))
        seen = len(self.world.log)
        while self.agenda:
            self.world.now, _, what = heapq.heappop(self.agenda)
            self.happen(*what)  # type: ignore[misc]
            for effect in self.world.log[seen:]:
                self.follow(effect)
            seen = len(self.world.log)

    def happen(self, what: str, whom: int | tuple[str, int]) -> None:
        world = self.world
        if what == "ask":
            assert isinstance(whom, int)
            self.left[whom] -= 1
            self.count += 1
            ticket = self.count
            self.client[ticket], self.asked[ticket] = whom, world.now
            self.ahead[ticket] = sum(state in ("waiting", "running") for state in world.tickets.values())
            if self.random.random() < self.impatient:
                self.at(0.15, ("leave", ticket))
            else:
                self.patient.add(ticket)
            world.ask(ticket, self.random.choice(self.models))
        elif what == "leave" and world.tickets[whom] in ("waiting", "running"):  # type: ignore[index]
            world.gone(whom)  # type: ignore[arg-type]
            self.go_on(whom)  # type: ignore[arg-type]
        elif what == "done" and world.tickets[whom] == "running":  # type: ignore[index]
            world.done(whom)  # type: ignore[arg-type]
            self.go_on(whom)  # type: ignore[arg-type]
        elif what == "measured":
            world.measure()
        elif what == "ready":
            world.ready(whom[0])  # type: ignore[index]
        elif what == "exited":
            world.exit(whom[0])  # type: ignore[index]

    def go_on(self, ticket: int) -> None:
        if self.left[self.client[ticket]]:
            self.at(0.001, ("ask", self.client[ticket]))

    def follow(self, effect: object) -> None:
        if isinstance(effect, Spawn):
            self.swaps += 1
            self.at(START, ("ready", (effect.model, effect.generation)))
        elif isinstance(effect, Stop):
            self.at(STOP, ("exited", (effect.model, effect.generation)))
        elif isinstance(effect, Measure):
            self.at(MEASURE, ("measured", 0))
        elif isinstance(effect, Grant):
            self.waits.append((self.world.now - self.asked[effect.ticket], self.ahead[effect.ticket]))
            self.at(self.random.uniform(0.05, SLOWEST), ("done", effect.ticket))


SWAP = MEASURE + START + SLOWEST  # where there is memory for both
NARROW_SWAP = MEASURE + STOP + SWAP


@pytest.mark.parametrize(("room", "swap"), [(2, SWAP), (1, NARROW_SWAP)])
@pytest.mark.parametrize("seed", range(20))
def test_impatient_clients_do_not_stall_the_others(seed: int, room: int, swap: float) -> None:
    """Every patient request is answered, and nobody waits longer than a change of models for each client takes."""
    router = Router(seed, models=3, loaded=1, clients=6, requests=8, impatient=0.35, room=room)
    router.run()
    assert {router.world.tickets[ticket] for ticket in router.patient} == {"done"}
    assert len(router.asked) == 48
    assert max(wait for wait, _ in router.waits) <= 6 * swap
    # Each one ahead may change the model and then have it as long as that took; a load that nobody waits for is finished.
    assert all(wait <= (ahead + 1) * (swap + START) + START for wait, ahead in router.waits)
    assert router.swaps > 3


def test_two_hundred_clients_share_two_of_twenty_models() -> None:
    """All are answered, with far fewer changes of models than requests."""
    router = Router(1, models=20, loaded=2, clients=200, requests=1, impatient=0.0)
    router.run()
    assert set(router.world.tickets.values()) == {"done"}
    assert router.swaps < 120
