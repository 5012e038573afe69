"""One transition under way: what it is about, what it has done so far, and what it records of itself."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

from sparkguard.cluster.commands import Turn
from sparkguard.cluster.observe import look
from sparkguard.cluster.transition import state, wanted
from sparkguard.cluster.transition.state import Placed, Transition
from sparkguard.core.cluster import DRAINING, FAILED, STARTING, STOPPED
from sparkguard.errors import SparkguardError

if TYPE_CHECKING:
    from pathlib import Path

    from sparkguard.cluster.catalog.read import Catalog
    from sparkguard.cluster.events import Emit
    from sparkguard.cluster.ssh import Fleet
    from sparkguard.cluster.transition.discovery import Worker
    from sparkguard.cluster.transition.power import Power
    from sparkguard.core.cluster import Allocation, Blocked, Container, Holder, NodeView


class Refused(SparkguardError):
    """A plan that is not begun, or a step that found what it must not touch."""

    def __init__(self, verb: str, blocked: Blocked) -> None:
        reasons = blocked.reasons
        text = f": {reasons[0]}" if len(reasons) == 1 else ":" + "".join(f"\n  {reason}" for reason in reasons)
        super().__init__(f"`{verb}` is refused{text}", blocked.hint or None, blocked.status)
        self.code = blocked.code
        self.reasons = reasons


class JobsActive(SparkguardError):
    """Songs render: the workers stay drained, and everything else stays as it is."""

    code = "jobs"

    def __init__(self, jobs: dict[str, tuple[str, ...]]) -> None:
        each = "; ".join(f"{node}: {', '.join(found) or 'a song of unknown id'}" for node, found in jobs.items())
        hint = "they take no more songs. Repeat the command when these are done, or with --cancel-jobs"
        super().__init__(f"songs render on {each}", hint, 75)
        self.jobs = jobs


class Work:
    """The one mutable thing of a transition."""

    def __init__(
        self,
        catalog: Catalog,
        state_dir: Path,
        fleet: Fleet,
        emit: Emit,
        holder: Holder,
        nodes: tuple[str, ...],
        allocation: Allocation | None = None,
        client_target: str = "local",
    ) -> None:
        self.catalog = catalog
        self.rules = wanted.rules_of(catalog)
        self.state_dir = state_dir
        self.fleet = fleet
        self.emit = emit
        self.verb = holder.verb
        self.nodes = nodes
        self.wanted = allocation
        self.client_target = client_target
        self.generation = uuid.uuid4().hex
        self.turn = Turn(self.generation, holder.replace(generation=self.generation))
        self.views: dict[str, NodeView] = {}
        self.created: dict[tuple[str, int], Container] = {}
        self.learned: dict[str, str] = {}  # variable -> what rank 0 printed
        self.admitted: list[str] = []  # nodes whose YuE this transition let take songs
        self.workers: tuple[Worker, ...] = ()
        self.generations: dict[str, str] = {}  # node -> the generation of what runs there, where it is not this one's
        self.begun = False  # something was changed that the record must tell
        self.lost: dict[str, str] = {}
        self.warnings: list[SparkguardError] = []
        self.fabric = ""
        self.power: Power | None = None  # of reboot and shutdown
        self.phase = ""

    async def look(self, nodes: tuple[str, ...] | None = None) -> dict[str, NodeView]:
        asked = wanted.questions(self.catalog, nodes or self.nodes, self.wanted)
        found = await look(self.fleet, asked)
        self.views = {**self.views, **found}
        return self.views

    def generation_on(self, node: str) -> str:
        return self.generations.get(node, self.generation)

    def ready_facts(self, unchanged: bool) -> dict[str, Any]:
        """What a ready event tells beside its words."""
        assert self.wanted is not None
        return {
            "model": self.wanted.model,
            "served": self.wanted.served,
            "url": self.wanted.url,
            "unchanged": unchanged,
            "fabric": self.fabric or None,
            "slow_fabric": self.fabric == "socket",
        }

    def record(self, phase: str, error: str | None = None, cleanup_error: str | None = None, evidence: str | None = None) -> None:
        """What the nodes are meant to do now, and how far this transition is."""
        controller = state.load(self.state_dir)
        now = time.time()
        for node in self.nodes:
            if node in self.lost:
                placed = controller.of(node).replace(phase=FAILED, at=now, error=self.lost[node])
            elif phase in (STARTING, "ready") and self.wanted is not None:
                wanted, generation = self.wanted, self.generation_on(node)
                placed = Placed(
                    phase, wanted.mode, wanted.model, generation, wanted.digest, wanted.nodes, now, error, self.fabric
                )
            elif phase == STOPPED:
                placed = Placed(STOPPED, generation=self.generation, at=now)
            else:
                placed = controller.of(node).replace(phase=phase, generation=self.generation_on(node), at=now, error=error)
            controller = controller.with_node(node, placed)
        holder = self.turn.holder
        transition = Transition(
            self.generation,
            self.verb,
            phase,
            self.nodes,
            self.wanted.model if self.wanted is not None else "",
            holder.host,
            holder.pid,
            holder.since,
            False,
            error,
            cleanup_error,
            evidence,
        )
        state.save(self.state_dir, controller.replace(transition=transition))
        self.phase = phase
        self.begun = self.begun or phase == DRAINING

    def end(self, error: str | None = None) -> None:
        """This transition is over; what it leaves is as it was recorded."""
        controller = state.load(self.state_dir)
        if controller.transition is not None and controller.transition.generation == self.generation:
            transition = controller.transition.replace(ended=True, error=error or controller.transition.error)
            state.save(self.state_dir, controller.replace(transition=transition))
