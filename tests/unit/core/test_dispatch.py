"""Requests and runners, one event at a time."""

from __future__ import annotations

import pytest
from dispatch_world import MIB, World, model

from sparkguard.core.events import (
    Changed,
    Close,
    Exited,
    Grant,
    Halt,
    Kill,
    Limits,
    MadeRoom,
    Placement,
    Problem,
    Ready,
    Spawn,
    Stop,
    Tick,
    Unload,
    Unread,
    Wake,
)


def loaded(*models: str, **more: object) -> World:
    """A world of 100 MiB models a, b and c in 250 MiB, some of them loaded."""
    world = World(model("a"), model("b"), model("c"), totals={"ram": 250}, **more)  # type: ignore[arg-type]
    for number, name in enumerate(models, 900):
        world.load(number, name)
        world.start(name)
    return world


def test_the_first_request_loads_the_model() -> None:
    """Measured, started, granted when it is ready."""
    world = loaded()
    world.ask(1, "a")
    assert (world.state("a"), world.measuring, world.places) == ("stopped", True, {1: 1})
    world.measure()
    assert world.state("a") == "starting"
    world.ready("a")
    assert world.tickets == {1: "running"}


def test_a_load_is_shared() -> None:
    """Requests that arrive meanwhile wait for it, and then for each other, in the order of arrival."""
    world = loaded()
    for ticket in (1, 2, 3):
        world.ask(ticket, "a")
    world.start("a")
    assert world.tickets == {1: "running", 2: "waiting", 3: "waiting"}
    assert world.places == {1: 1, 2: 1, 3: 2}
    world.done(1)
    assert world.tickets == {1: "done", 2: "running", 3: "waiting"}
    assert sum(isinstance(effect, Spawn) for effect in world.log) == 1


def test_parallel_raises_the_number_at_once() -> None:
    """As many as the model's setting says."""
    world = World(model("a", parallel=2))
    for ticket in (1, 2, 3):
        world.ask(ticket, "a")
    world.start("a")
    assert world.tickets == {1: "running", 2: "running", 3: "waiting"}


def test_different_models_load_side_by_side() -> None:
    """When there is memory for both."""
    world = loaded()
    world.ask(1, "a")
    world.ask(2, "b")
    world.measure()
    assert (world.state("a"), world.state("b")) == ("starting", "starting")


def test_an_idle_one_makes_room() -> None:
    """The least recently used; the new one starts when it has gone, and until then there is nothing to be measured."""
    world = loaded("a", "b")
    world.ask(1, "a")
    world.now += 1
    world.done(1)
    world.ask(2, "c")
    world.measure()
    assert (world.stopping(), world.state("a"), world.state("c")) == (["b"], "ready", "stopped")
    assert not world.measuring
    world.exit("b")
    world.start("c")
    assert world.tickets[2] == "running"


def test_a_place_is_free_when_its_runner_is_told_to_stop() -> None:
    """At the cap and with memory for both, the new one is started while the old one ends, by one measurement."""
    world = loaded("a", limits=Limits(most_loaded=1))
    world.ask(1, "b")
    world.measure()
    assert (world.stopping(), world.state("b"), world.measuring) == (["a"], "starting", False)
    assert [type(effect) for effect in world.log if isinstance(effect, (Stop, Spawn))] == [Spawn, Stop, Spawn]
    world.ready("b")
    assert (world.tickets[1], world.state("a")) == ("running", "stopping")
    world.exit("a")
    assert world.state("a") == "stopped"


def test_one_that_does_not_end_is_not_joined_by_a_second() -> None:
    """Where each place has a runner that is stuck, an end is waited for as where memory lacks."""
    world = World(model("a"), model("b"), model("c"), limits=Limits(most_loaded=1))
    for ticket, name in enumerate("abc"):
        world.ask(ticket, name)
        world.measure()
        if name != "c":
            world.ready(name)
            world.done(ticket)
    assert (world.stopping(), world.state("c"), world.measuring) == (["a", "b"], "stopped", False)
    world.exit("b")
    world.start("c")
    assert (world.tickets[2], world.stopping()) == ("running", ["a"])


def test_a_busy_one_is_never_evicted() -> None:
    """Whoever needs its memory waits until its request has ended; then its turn comes before younger requests."""
    world = loaded("a", limits=Limits(most_loaded=1))
    world.ask(1, "a")
    world.ask(2, "b")
    world.ask(3, "a")
    world.measure()
    assert world.stopping() == []
    world.done(1)
    assert world.tickets[3] == "waiting"
    world.measure()
    assert world.stopping() == ["a"]
    world.exit("a")
    world.start("b")
    assert world.tickets[2] == "running"


def test_older_requests_of_a_busy_one_come_first() -> None:
    """What was in its queue before is answered by it before it goes."""
    world = loaded("a", limits=Limits(most_loaded=1))
    for ticket, name in enumerate(("a", "a", "b", "a"), 1):
        world.ask(ticket, name)
    world.measure()
    world.done(1)
    assert (world.tickets[2], world.tickets[4]) == ("running", "waiting")


def test_a_load_is_paid_for_before_the_next() -> None:
    """For as long as it took to load, a runner answers its own queue, though another model has waited longer."""
    world = World(model("a"), model("b"), limits=Limits(most_loaded=1))
    for ticket, name in enumerate(("a", "b", "a", "a"), 1):
        world.ask(ticket, name)
    world.measure()
    world.now += 10
    world.ready("a")
    if world.measuring:
        world.measure()
    world.now += 9
    world.done(1)
    assert world.tickets[3] == "running"
    world.now += 1
    world.done(3)
    assert world.tickets[4] == "waiting"
    world.measure()
    assert world.stopping() == ["a"]


def test_when_nobody_waits_any_more_the_busy_one_goes_on() -> None:
    """The request that wanted its memory has gone, and with it the bar."""
    world = loaded("a", limits=Limits(most_loaded=1))
    for ticket, name in enumerate(("a", "b", "a"), 1):
        world.ask(ticket, name)
    world.measure()
    world.gone(2)
    world.done(1)
    assert world.tickets[3] == "running"
    assert world.stopping() == []


def test_a_client_that_leaves_the_queue_frees_its_place() -> None:
    """The ones behind it hear that they have moved up."""
    world = loaded("a")
    for ticket in (1, 2, 3):
        world.ask(ticket, "a")
    world.gone(2)
    assert world.places[3] == 1
    world.gone(1)
    assert world.tickets[3] == "running"


def test_the_last_client_leaves_while_the_model_loads() -> None:
    """The load is finished, and its idle time begins then and not before."""
    world = loaded(limits=Limits(idle_seconds=100))
    world.ask(1, "a")
    world.measure()
    world.gone(1)
    world.now += 500
    world.ready("a")
    world.feed(Tick())
    assert (world.state("a"), world.wake) == ("ready", world.now + 100)


def test_idle_ones_are_unloaded() -> None:
    """Counted from the end of the last request, never while one runs or waits."""
    world = loaded("a", limits=Limits(idle_seconds=100))
    world.ask(1, "a")
    assert world.wake is None
    world.now += 1000
    world.feed(Tick())
    assert world.state("a") == "ready"
    world.done(1)
    assert world.wake == world.now + 100
    world.now += 99
    world.feed(Tick())
    assert world.state("a") == "ready"
    world.now += 1
    world.feed(Tick())
    assert world.state("a") == "stopping"
    world.exit("a")
    assert world.state("a") == "stopped"


@pytest.mark.parametrize(("pinned", "seconds"), [(True, 100.0), (False, 0.0)])
def test_some_stay_loaded(pinned: bool, seconds: float) -> None:
    """Those that are set to, and all of them with SPARK_IDLE_UNLOAD_MINUTES=0."""
    world = World(model("a", pinned=pinned), limits=Limits(idle_seconds=seconds))
    world.load(1, "a")
    world.start("a")
    world.now += 1e6
    world.feed(Tick())
    assert (world.state("a"), world.wake) == ("ready", None)


def test_what_cannot_fit_is_refused_with_the_sum() -> None:
    """Nothing is started to fail."""
    world = World(model("big", 2000), totals={"ram": 1000}, reserve=100)
    world.ask(1, "big")
    world.measure()
    refusal = world.refusals[1]
    assert (refusal.status, refusal.code, refusal.retry_after) == (503, "does_not_fit", None)
    assert "needs 2000 MB of ram" in refusal.message
    assert refusal.rooms == ({"ram": 900 * MIB},)
    assert world.processes == {}
    assert not world.measuring


def test_what_others_hold_may_come_back() -> None:
    """Such a refusal says when to ask again."""
    world = World(model("a", 500), totals={"ram": 1000})
    world.others["ram"] = 600
    world.ask(1, "a")
    world.measure()
    assert world.refusals[1].retry_after == 30


def test_memory_that_is_not_back_yet_is_waited_for() -> None:
    """For five seconds after an end the live reading may lag; after that it is believed."""
    world = loaded("a", "b", limits=Limits(idle_seconds=0))
    world.ask(1, "c")
    world.measure()
    world.exit("a")
    world.hidden["ram"] = 100
    world.measure()
    assert (world.tickets[1], world.wake) == ("waiting", world.now + 0.25)
    world.now += 0.25
    world.feed(Tick())
    world.hidden["ram"] = 0
    world.start("c")
    assert world.tickets[1] == "running"


def test_memory_that_does_not_come_back_is_gone() -> None:
    """The same as above, and it ends in a refusal."""
    world = loaded("a", "b")
    world.ask(1, "c")
    world.measure()
    world.exit("a")
    world.hidden["ram"] = 200
    world.measure()
    world.now += 5
    world.feed(Tick())
    world.measure()
    assert world.refusals[1].code == "does_not_fit"
    assert world.state("b") == "ready"


def test_a_full_queue_refuses() -> None:
    """With 429 and a time that follows from how long requests take."""
    world = loaded("a", limits=Limits(queue_limit=2))
    world.ask(1, "a")
    world.now += 10
    world.done(1)
    for ticket in (2, 3, 4, 5):
        world.ask(ticket, "a")
    assert [world.tickets[ticket] for ticket in (2, 3, 4, 5)] == ["running", "waiting", "waiting", "refused"]
    assert (world.refusals[5].status, world.refusals[5].retry_after) == (429, 21)


def test_with_no_queue_at_all_a_free_runner_still_answers() -> None:
    """SPARK_QUEUE_LIMIT=0 bounds the waiting, not the running."""
    world = loaded("a", limits=Limits(queue_limit=0))
    world.ask(1, "a")
    world.ask(2, "a")
    assert (world.tickets[1], world.tickets[2]) == ("running", "refused")


def test_what_waiting_would_not_change_is_refused_at_once() -> None:
    """An unknown model, and one whose settings cannot be met."""
    world = World(model("gpu", problem=Problem(503, "no_gpu", "there is no CUDA device")), model("nowhere", placements=()))
    for ticket, name in enumerate(("other", "gpu", "nowhere"), 1):
        world.ask(ticket, name)
    assert [(refusal.status, refusal.code) for refusal in world.refusals.values()] == [
        (404, "model_not_found"),
        (503, "no_gpu"),
        (503, "no_device"),
    ]
    assert not world.measuring


def test_a_crash_is_repaired() -> None:
    """After a second the model is loaded again; who waited gets it, and who ran without a byte sent goes first."""
    world = loaded("a")
    for ticket in (1, 2):
        world.ask(ticket, "a")
    world.exit("a", "crash", "segmentation fault")
    world.done(1, ok=False, replay=True)
    assert (world.state("a"), world.wake) == ("backoff", world.now + 1)
    world.now += 1
    world.feed(Tick())
    world.start("a")
    assert world.tickets == {900: "loaded", 1: "running", 2: "waiting"}


def test_an_idle_one_that_crashes_comes_back_too() -> None:
    """Nobody need ask."""
    world = loaded("a")
    world.exit("a", "crash")
    world.now += 1
    world.feed(Tick())
    world.start("a")
    assert world.state("a") == "ready"


def test_the_loss_of_a_connection_may_come_before_the_death() -> None:
    """Nothing is sent to that runner until it is known to be dead, or has lived on for a second."""
    world = loaded("a")
    world.ask(1, "a")
    world.done(1, ok=False, replay=True)
    assert (world.tickets[1], world.wake) == ("waiting", world.now + 1)
    world.now += 1
    world.feed(Tick())
    assert world.tickets[1] == "running"


def test_a_request_that_kills_its_runners_is_not_tried_for_ever() -> None:
    """After three of them it is told so."""
    world = loaded("a")
    world.ask(1, "a")
    for _ in range(2):
        world.exit("a", "crash")
        world.done(1, ok=False, replay=True)
        world.now += 10
        world.feed(Tick())
        world.start("a")
    world.exit("a", "crash")
    world.done(1, ok=False, replay=True)
    assert (world.refusals[1].status, world.refusals[1].code) == (502, "runner_died")


def test_the_backoff_grows_and_is_forgotten_after_a_healthy_minute() -> None:
    """1, 2, 4 seconds; after 60 s in the state ready it begins anew."""
    world = loaded("a")
    waits = []
    for healthy in (0, 0, 59, 60, 0):
        world.now += healthy
        world.exit("a", "crash")
        assert world.wake is not None
        waits.append(world.wake - world.now)
        world.now = world.wake
        world.feed(Tick())
        world.start("a")
    assert waits == [1, 2, 4, 1, 2]


def test_a_kill_by_hand_is_not_held_against_the_runner() -> None:
    """It ends at once, comes back after the shortest time, and the next request works."""
    world = loaded("a")
    for _ in range(3):
        world.feed(Kill("a"))
        assert Stop(*world.key("a"), 0.0) in world.log
        world.exit("a", "crash")
        assert world.wake == world.now + 1
        world.now += 1
        world.feed(Tick())
        world.start("a")
    world.ask(1, "a")
    assert world.tickets[1] == "running"


def test_a_load_by_hand_does_not_wait_for_the_backoff() -> None:
    """Nor does the request behind it."""
    world = loaded("a")
    world.ask(1, "a")
    world.exit("a", "crash")
    world.load(2, "a")
    world.start("a")
    assert world.tickets[2] == "loaded"


@pytest.mark.parametrize("cause", ["bad_file", "bad_settings"])
def test_what_cannot_be_loaded_is_not_tried_again_until_it_changes(cause: str) -> None:
    """Waiting requests, and those that come later, are told the engine's last words, and whose fault it is."""
    world = loaded()
    world.ask(1, "a")
    world.measure()
    world.exit("a", cause, "invalid magic characters")
    world.ask(2, "a")
    world.load(3, "a")
    assert [(refusal.status, refusal.code) for refusal in world.refusals.values()] == [(500, cause)] * 3
    assert "invalid magic characters" in world.refusals[2].message
    assert (world.state("a"), world.measuring) == ("failed", False)
    world.models["a"] = model("a", version=2)
    world.feed(Changed(tuple(world.models.values())))
    world.ask(4, "a")
    world.start("a")
    assert world.tickets[4] == "running"


def test_out_of_memory_moves_elsewhere_and_then_gives_up() -> None:
    """Each placement is tried once."""
    ways = (Placement("cuda:0", (("gpu0", 100 * MIB),)), Placement("cpu", (("ram", 100 * MIB),), 1))
    world = World(model("a", placements=ways), totals={"gpu0": 1000, "ram": 1000})
    world.ask(1, "a")
    world.measure()
    world.exit("a", "out_of_memory", "cudaMalloc failed")
    world.measure()
    assert world.processes[world.key("a")].placement == ways[1]
    world.exit("a", "out_of_memory", "no memory at all")
    assert (world.refusals[1].status, world.refusals[1].code) == (503, "out_of_memory")
    assert "no memory at all" in world.refusals[1].message


def test_a_start_that_always_fails_is_given_up() -> None:
    """The third refuses who waits; a later request tries again after the back-off."""
    world = loaded()
    world.ask(1, "a")
    for _ in range(3):
        world.measure()
        world.exit("a", "crash", "error: invalid argument: --nope")
        world.now += 60
        world.feed(Tick())
    assert (world.refusals[1].status, world.refusals[1].code) == (503, "cannot_start")
    assert "--nope" in world.refusals[1].message
    assert (world.state("a"), world.measuring) == ("stopped", False)
    world.ask(2, "a")
    assert world.measuring


def test_unload_lets_requests_end() -> None:
    """Those that wait are refused, those that run are not; then the runner goes."""
    world = loaded("a")
    world.ask(1, "a")
    world.ask(2, "a")
    world.feed(Unload("a"))
    assert (world.state("a"), world.tickets[1], world.refusals[2].code) == ("draining", "running", "unloaded")
    assert world.stopping() == []
    world.done(1)
    assert world.stopping() == ["a"]
    world.exit("a")
    assert (world.state("a"), world.measuring) == ("stopped", False)


def test_a_request_while_its_model_unloads_loads_it_again() -> None:
    """As soon as the old process has gone."""
    world = loaded("a")
    world.feed(Unload("a"))
    world.ask(1, "a")
    world.exit("a")
    world.start("a")
    assert world.tickets[1] == "running"


def test_new_settings_wait_for_the_running_request() -> None:
    """It ends on the old runner; the next one runs on a new one."""
    world = loaded("a")
    world.ask(1, "a")
    world.ask(2, "a")
    world.models["a"] = model("a", version=2)
    world.feed(Changed(tuple(world.models.values())))
    assert (world.state("a"), world.tickets[1], world.tickets[2]) == ("draining", "running", "waiting")
    world.done(1)
    world.exit("a")
    world.start("a")
    assert world.tickets[2] == "running"


def test_settings_that_change_nothing_stop_nothing() -> None:
    """The library is read again whenever a file appears."""
    world = loaded("a")
    world.models["d"] = model("d")
    world.feed(Changed(tuple(world.models.values())))
    assert (world.state("a"), world.stopping()) == ("ready", [])


def test_a_pinned_one_comes_back_with_its_new_settings() -> None:
    """It is set to stay loaded."""
    world = World(model("a", pinned=True))
    world.load(1, "a")
    world.start("a")
    world.models["a"] = model("a", pinned=True, version=2)
    world.feed(Changed(tuple(world.models.values())))
    world.exit("a")
    world.start("a")
    assert world.state("a") == "ready"


def test_a_file_that_is_removed_ends_its_runner_and_no_request() -> None:
    """Running ones end, waiting ones are told."""
    world = loaded("a")
    world.ask(1, "a")
    world.ask(2, "a")
    world.feed(Changed(()))
    assert (world.tickets[1], world.refusals[2].status) == ("running", 404)
    world.done(1)
    world.exit("a")
    assert world.dispatch.runners == {}


def test_unreadable_memory_refuses_and_is_read_again_later() -> None:
    """Nothing is started blindly."""
    world = loaded()
    world.ask(1, "a")
    world.measuring = False
    world.feed(Unread("the lock is held by pid 7"))
    assert (world.refusals[1].code, world.refusals[1].message) == ("memory_unknown", "the lock is held by pid 7")
    world.ask(2, "a")
    assert world.tickets[2] == "waiting"
    assert world.measuring


def test_the_end_of_the_supervisor() -> None:
    """Running requests end first; at the deadline their runners go with them."""
    world = loaded("a", "b")
    world.ask(1, "a")
    world.ask(2, "a")
    world.feed(Close())
    assert (world.state("a"), world.stopping(), world.refusals[2].code) == ("draining", ["b"], "shutting_down")
    world.ask(3, "b")
    assert world.refusals[3].code == "shutting_down"
    world.feed(Halt())
    assert world.stopping() == ["a", "b"]
    world.exit("b")
    world.exit("a")
    world.gone(1)
    assert not world.measuring


def test_room_for_somebody_else() -> None:
    """The least recently used idle runner ends for it, and none that is not needed; the answer names it."""
    world = loaded("a", "b")
    world.now += 1
    world.ask(1, "a")
    world.done(1)
    generation = world.key("b")[1]
    world.make_room(2, ram=100)
    assert world.stopping() == ["b"]
    assert world.tickets[2] == "loaded"
    assert MadeRoom(2, (("b", generation),)) in world.log
    world.exit("b")
    assert world.state("a") == "ready"


def test_nobody_busy_pinned_or_loading_ends_for_somebody_else() -> None:
    """It is refused at once, with their names, and nothing is stopped."""
    world = World(model("a"), model("b", pinned=True), model("c"))
    for ticket, name in enumerate("abc"):
        world.ask(ticket, name)
        world.measure()
        if name != "c":
            world.ready(name)
    world.done(1)
    world.make_room(3, ram=100)
    text = "idle models hold 0 MB of ram, and 100 MB are wanted (a is busy, c is busy, b is pinned)"
    assert (world.refusals[3].code, world.refusals[3].message) == ("busy", text)
    assert world.stopping() == []


def test_nothing_ends_for_somebody_else_when_it_would_not_suffice() -> None:
    """Both idle models together hold less than is wanted, so both stay."""
    world = loaded("a", "b")
    world.make_room(1, ram=201)
    assert world.refusals[1].message == "idle models hold 200 MB of ram, and 201 MB are wanted"
    assert world.stopping() == []


def test_a_free_runner_costs_no_measurement() -> None:
    """A request to it is granted in the same step."""
    world = loaded("a")
    before = len(world.log)
    world.ask(1, "a")
    assert [type(effect) for effect in world.log[before:] if isinstance(effect, (Grant, Wake))] == [Grant, Wake]
    assert not world.measuring


def test_events_of_an_earlier_runner_are_nothing() -> None:
    """A generation that has gone cannot end the present one."""
    world = loaded("a")
    key = world.key("a")
    world.exit("a", "crash")
    world.now += 1
    world.feed(Tick())
    world.start("a")
    world.feed(Exited(*key, "crash"))
    world.feed(Ready(*key))
    assert world.state("a") == "ready"
