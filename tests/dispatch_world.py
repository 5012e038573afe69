"""A machine in memory that does what the dispatcher says, and objects where it must never have said it."""

from __future__ import annotations

from sparkguard.core.dispatch import Dispatch
from sparkguard.core.events import (
    Asked,
    Changed,
    Done,
    Effect,
    Event,
    Exited,
    Free,
    Gone,
    Grant,
    Limits,
    Load,
    Loaded,
    MadeRoom,
    MakeRoom,
    Measure,
    Model,
    Placement,
    Pool,
    Position,
    Reading,
    Ready,
    Refuse,
    Spawn,
    Started,
    Stop,
    Wake,
)

MIB = 1 << 20


def model(id: str, mib: int = 100, **more: object) -> Model:
    """A model that needs so much of the host's memory, unless placements say otherwise."""
    placements = more.pop("placements", (Placement("cpu", (("ram", mib * MIB),)),))
    return Model(id, placements, **{"version": 1, **more})  # type: ignore[arg-type]


class Process:
    def __init__(self, placement: Placement, parallel: int) -> None:
        self.placement = placement
        self.parallel = parallel
        self.ready = False
        self.grace: float | None = None  # it was told to stop
        self.tickets: set[int] = set()


class World:
    """Feeds events, carries effects out, and keeps what became of each ticket: waiting, running, done, gone, loaded, refused."""

    def __init__(
        self, *models: Model, totals: dict[str, int] | None = None, reserve: int = 0, limits: Limits | None = None
    ) -> None:
        self.now = 1000.0
        self.dispatch = Dispatch(limits)
        self.models = {model.id: model for model in models}
        self.totals = {"ram": 1000} if totals is None else totals
        self.others = dict.fromkeys(self.totals, 0)  # MiB, taken
        self.hidden = dict.fromkeys(self.totals, 0)  # MiB that somebody uses and nobody claims
        self.reserve = reserve
        self.processes: dict[tuple[str, int], Process] = {}
        self.tickets: dict[int, str] = {}
        self.of: dict[int, str] = {}
        self.refusals: dict[int, Refuse] = {}
        self.places: dict[int, int] = {}
        self.measuring = False
        self.wake: float | None = None
        self.log: list[Effect] = []
        self.event: Event | None = None
        self.feed(Changed(tuple(models)))

    def feed(self, event: Event) -> tuple[Effect, ...]:
        self.event = event
        effects = self.dispatch.step(event, self.now)
        for effect in effects:
            self.carry_out(effect)
        self.log += effects
        self.check_memory()
        return effects

    def carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Spawn):
            assert not [key for key in self.processes if key[0] == effect.model], "a model has one runner"
            assert effect.placement in self.models[effect.model].placements
            self.processes[effect.model, effect.generation] = Process(effect.placement, self.models[effect.model].parallel)
            if cap := self.dispatch.limits.most_loaded:
                staying = [process for process in self.processes.values() if process.grace is None]
                assert len(staying) <= cap, "more are loaded than may be"
                assert len(self.processes) <= 2 * cap, "those that are ending pile up"
        elif isinstance(effect, Stop):
            process = self.processes[effect.model, effect.generation]
            if isinstance(self.event, (Free, MakeRoom)):
                assert process.ready, "a runner that was loading was evicted"
                assert not process.tickets, "a runner was evicted under its requests"
            process.grace = effect.grace_seconds if process.grace is None else min(process.grace, effect.grace_seconds)
        elif isinstance(effect, Grant):
            process = self.processes[effect.model, effect.generation]
            assert process.ready and process.grace is None, "a request went to a runner that cannot take it"
            assert self.tickets[effect.ticket] == "waiting" and self.of[effect.ticket] == effect.model
            waiting = [ticket for ticket, state in self.tickets.items() if state == "waiting" and self.of[ticket] == effect.model]
            assert effect.ticket == min(waiting), "a request was overtaken"
            process.tickets.add(effect.ticket)
            assert len(process.tickets) <= process.parallel, "more requests than the runner takes"
            self.tickets[effect.ticket] = "running"
        elif isinstance(effect, Refuse):
            assert self.tickets[effect.ticket] in ("waiting", "loading"), "only one that waits can be refused"
            if (
                effect.code == "does_not_fit"
                and self.of[effect.ticket]
                and len(effect.rooms) == len(self.models[effect.model].placements)
            ):
                for placement in self.models[effect.model].placements:
                    assert any(amount > self.most(pool) for pool, amount in placement.amounts), "refused although it fits"
            self.tickets[effect.ticket] = "refused"
            self.refusals[effect.ticket] = effect
        elif isinstance(effect, Loaded):
            assert self.tickets[effect.ticket] == "loading"
            self.tickets[effect.ticket] = "loaded"
        elif isinstance(effect, MadeRoom):
            assert self.tickets[effect.ticket] == "loading"
            assert not any(self.models[model].pinned for model, _ in effect.leaving), "a pinned model had to go for somebody else"
            self.tickets[effect.ticket] = "loaded"
        elif isinstance(effect, Measure):
            assert not self.measuring, "measured twice at once"
            self.measuring = True
        elif isinstance(effect, Wake):
            self.wake = effect.at
        elif isinstance(effect, Position):
            assert self.tickets[effect.ticket] == "waiting"
            self.places[effect.ticket] = effect.place

    def most(self, pool: str) -> int:
        """What a pool could give if every runner ended."""
        return max(0, self.totals[pool] - self.others[pool] - self.hidden[pool] - self.reserve) * MIB

    def check_memory(self) -> None:
        for pool, total in self.totals.items():
            held = sum(dict(process.placement.amounts).get(pool, 0) for process in self.processes.values())
            assert held <= max(0, total - self.reserve) * MIB, f"more of {pool} was promised than there is"
            assert self.dispatch.held().get(pool, 0) == held

    # What happens

    def ask(self, ticket: int, model: str) -> None:
        self.tickets[ticket], self.of[ticket] = "waiting", model
        self.feed(Asked(ticket, model))

    def load(self, ticket: int, model: str) -> None:
        self.tickets[ticket], self.of[ticket] = "loading", model
        self.feed(Load(ticket, model))

    def make_room(self, ticket: int, **mib: int) -> None:
        self.tickets[ticket], self.of[ticket] = "loading", ""
        self.feed(MakeRoom(ticket, tuple((pool, amount * MIB) for pool, amount in mib.items())))

    def done(self, ticket: int, ok: bool = True, replay: bool = False) -> None:
        assert self.tickets[ticket] == "running"
        self.release(ticket)
        self.tickets[ticket] = "waiting" if replay else "done"
        self.feed(Done(ticket, ok, replay=replay))

    def gone(self, ticket: int) -> None:
        self.release(ticket)
        self.tickets[ticket] = "gone"
        self.feed(Gone(ticket))

    def release(self, ticket: int) -> None:
        for process in self.processes.values():
            process.tickets.discard(ticket)

    def reading(self) -> Reading:
        taken: dict[tuple[str, int], dict[str, int]] = {
            key: dict(process.placement.amounts) for key, process in self.processes.items() if process.ready
        }
        pools = []
        for id, total in self.totals.items():
            others = self.others[id] * MIB
            used = others + self.hidden[id] * MIB + sum(amounts.get(id, 0) for amounts in taken.values())
            pools.append(Pool(id, total * MIB, total * MIB - used, self.reserve * MIB, others))
        return Reading(tuple(pools), taken)

    def measure(self) -> tuple[Effect, ...]:
        assert self.measuring
        self.measuring = False
        return self.feed(Free(self.reading()))

    def key(self, model: str) -> tuple[str, int]:
        (key,) = [key for key in self.processes if key[0] == model]
        return key

    def ready(self, model: str) -> None:
        key = self.key(model)
        self.processes[key].ready = True
        self.feed(Started(*key, pid=4000 + key[1]))
        self.feed(Ready(*key))

    def exit(self, model: str, cause: str = "stopped", words: str = "") -> None:
        key = self.key(model)
        del self.processes[key]
        self.feed(Exited(*key, cause, words))

    def start(self, model: str) -> None:
        """The whole of a load that has room."""
        self.measure()
        self.ready(model)

    def state(self, model: str) -> str:
        return self.dispatch.runners[model].state if model in self.dispatch.runners else "stopped"

    def stopping(self) -> list[str]:
        return [key[0] for key, process in self.processes.items() if process.grace is not None]
