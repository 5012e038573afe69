"""The order in which steps are done, and what is made of nodes before a plan sees them."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest
from cluster_views import RULES, node, pair

from sparkguard.cluster.transition import run, state
from sparkguard.cluster.transition.effects import EFFECTS
from sparkguard.cluster.transition.run import Asked, groups, unfinished
from sparkguard.cluster.transition.state import Controller, Transition
from sparkguard.core.cluster import Blocked, Holder, Plan, Step
from sparkguard.core.transition import plan_power, plan_stop, plan_up
from sparkguard.errors import CONFIG, SparkguardError


def test_steps_of_one_kind_on_several_nodes_are_done_at_once() -> None:
    """Fences and creations together; stops one after another, the serving rank first."""
    steps = [Step(kind, kind, name) for kind in ("fence", "stop", "create") for name in ("head", "worker")]
    assert [[step.kind for step in group] for group in groups(tuple(steps))] == [
        ["fence"] * 2,
        ["stop"],
        ["stop"],
        ["create"] * 2,
    ]


def test_every_kind_of_step_has_an_effect() -> None:
    """No plan holds a step that cannot be done; reboot and poweroff are power.py's."""
    views = {"head": node("head"), "worker": node("worker")}
    plans = [
        plan_up(views, RULES, pair(drop_caches=True)),
        plan_up(views, RULES, pair(), wait=False),
        plan_stop(views, RULES, ("head", "worker")),
        plan_power(views, RULES, ("head", "worker"), "reboot"),
    ]
    kinds = {step.kind for plan in plans if isinstance(plan, Plan) for step in plan.steps}
    assert kinds - EFFECTS.keys() <= {"reboot"}
    assert len(kinds) > 12


def test_a_lock_of_a_dead_process_of_this_machine_is_no_lock() -> None:
    """What the node still finishes for it, the fence waits for; another machine's holder is believed."""
    with subprocess.Popen(["true"]) as child:
        child.wait()
    here = socket.gethostname()

    def locked(host: str, pid: int) -> Holder | None:
        seen = run._without_the_dead({"head": node("head", lock=Holder(host, pid, 0.0, "up ds4"))})
        return seen["head"].lock

    assert locked(here, child.pid) is None
    assert locked(here, os.getpid()) is not None
    assert locked("another", child.pid) is not None
    assert locked(here, 0) is not None


def test_a_transition_that_was_killed_is_explained() -> None:
    """Its verb, its process, how far it was and where; one that ended is not."""
    last = Transition("g1", "up ds4", "starting", ("head", "worker"), "ds4", "mac", 7)
    words = unfinished(Controller(transition=last))
    assert words is not None and words.startswith("`up ds4` (pid 7 on mac) was killed while it was starting on head, worker")
    assert unfinished(Controller(transition=last.replace(ended=True))) is None
    assert unfinished(Controller()) is None


def test_a_secret_that_is_missing_is_told_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any lock is taken, with the name of the variable."""
    monkeypatch.delenv("NGC_API_KEY", raising=False)
    wanted = pair(ranks=tuple(rank.replace(secrets=("NGC_API_KEY",)) for rank in pair().ranks))
    asked = Asked("up ds4", ("head", "worker"), lambda views, rules: Blocked(1, ("x",)), wanted)
    with pytest.raises(SparkguardError, match="ds4 wants NGC_API_KEY, which is not set here") as caught:
        run._secrets_are_there(asked)
    assert caught.value.status == CONFIG


def test_a_record_of_the_past_is_kept(tmp_path: Path) -> None:
    """The other node's entry survives a transition of one node."""
    state.save(tmp_path, Controller((("worker", state.Placed("ready", "single", "small", "g0")),)))
    controller = state.load(tmp_path)
    state.save(tmp_path, controller.with_node("head", state.Placed("stopped")))
    assert state.load(tmp_path).of("worker").model == "small"
