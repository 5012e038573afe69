"""What is decided from what was seen: every refusal before the first step, and steps in an order that loses nothing."""

from __future__ import annotations

from typing import Any

import pytest
from cluster_views import GIB, IMAGE, RULES, TOTAL, container, holder, identifier, lost, node, owned, pair, rank, solo, songs, yue
from hypothesis import given
from hypothesis import strategies as st

from sparkguard.core.cluster import Allocation, Blocked, Holder, Listener, NodeView, Plan
from sparkguard.core.ownership import runs_as_wanted
from sparkguard.core.transition import plan_power, plan_stop, plan_up, verify_idle
from sparkguard.core.types import UNIFIED, Hold, MemoryPool
from sparkguard.errors import CONFIG, TEMPFAIL, UNAVAILABLE

DS4 = (owned("spark-ds4", "ds4", 0), owned("spark-ds4", "ds4", 1))
GLM = (owned("spark-glm", "glm", 0), owned("spark-glm", "glm", 1))
SMALL = owned("spark-small", "small", 0)
DESKTOP = holder(None, 0.2, name="gnome-remote-desktop-daemon", exempt=True)
EMBEDDINGS = container("embeddings")
OTHER_IMAGE = "sha256:" + "2" * 64
MIA = Holder("mias-mac", 4711, 0.0, "up glm", "mia")


def views(head: NodeView | None = None, worker: NodeView | None = None) -> dict[str, NodeView]:
    return {"head": head or node("head"), "worker": worker or node("worker")}


def kinds(plan: Plan | Blocked) -> list[str]:
    assert isinstance(plan, Plan), plan
    return [step.kind for step in plan.steps]


REFUSED: dict[str, tuple[dict[str, NodeView], Allocation, str, int, str]] = {
    "a node is down": (views(worker=lost("worker")), pair(), "unreachable", UNAVAILABLE, "worker cannot be asked: no answer"),
    "docker is dead on one node": (
        views(worker=node("worker", containers=None, daemon="gone", daemon_error="Cannot connect to the Docker daemon")),
        pair(),
        "unreachable",
        UNAVAILABLE,
        "worker docker does not answer: Cannot connect",
    ),
    "nobody knows the GPU": (
        views(node("head", gpu=None, gpu_error="NVML: Unknown Error")),
        pair(),
        "unknown",
        UNAVAILABLE,
        "head: its GPU cannot be asked: NVML",
    ),
    "another laptop is at work": (
        views(worker=node("worker", lock=MIA)),
        pair(),
        "busy",
        TEMPFAIL,
        "worker is held by `up glm` of mia on mias-mac, pid 4711",
    ),
    "a solo start would split a distributed model": (
        views(node("head", DS4[0]), node("worker", DS4[1])),
        solo("head"),
        "scope",
        TEMPFAIL,
        "head: spark-ds4 (737061726b2d, ds4 rank 0) is one part of ds4, which also runs on worker",
    ),
    "a foreign container on the GPU": (
        views(worker=node("worker", container("comfy"))),
        pair(),
        "foreign",
        TEMPFAIL,
        f"worker: foreign container comfy ({identifier('comfy')[:12]})",
    ),
    "a paused foreign container": (
        views(node("head", container("comfy", state="paused"))),
        pair(),
        "foreign",
        TEMPFAIL,
        "foreign container comfy",
    ),
    "a foreign process on the GPU": (
        views(node("head", gpu=(DESKTOP, holder(None, name="blender")))),
        pair(),
        "foreign",
        TEMPFAIL,
        "head: foreign process blender, pid 77,",
    ),
    "a process of a container that asked for no GPU": (
        views(node("head", container("sneaky", gpu=False), gpu=(holder(container("sneaky")),))),
        solo(),
        "foreign",
        TEMPFAIL,
        "foreign process",
    ),
    "a foreign program on the port": (
        views(node("head", listeners=(Listener(8000, 99, "nginx"),))),
        pair(),
        "foreign",
        TEMPFAIL,
        "head: port 8000 is taken by nginx, pid 99",
    ),
    "somebody on the master port": (
        views(node("head", listeners=(Listener(29501, None, ""),))),
        pair(),
        "foreign",
        TEMPFAIL,
        "port 29501 is taken by a program of another",
    ),
    "a foreign program beside a model that has no such port": (
        views(node("head", SMALL, listeners=(Listener(29502, 99, "nginx"),))),
        solo("head", ranks=(rank("head", 0, "small", port=29502, digest="new"),)),
        "foreign",
        TEMPFAIL,
        "head: port 29502 is taken by nginx",
    ),
    "the name is taken": (
        views(node("head", container("spark-ds4", gpu=False, state="exited"))),
        pair(),
        "foreign",
        TEMPFAIL,
        "the name spark-ds4 is taken by 7370",
    ),
    "the name is a kept container's": (
        views(node("head", EMBEDDINGS)),
        solo("head", ranks=(rank("head", 0).replace(name="embeddings"),)),
        "foreign",
        TEMPFAIL,
        "keep_containers holds it",
    ),
    "an image is missing on one node": (
        views(worker=node("worker", images=((IMAGE, None),))),
        pair(),
        "preflight",
        CONFIG,
        f"worker: the image {IMAGE} is not there",
    ),
    "an image differs between the nodes": (
        views(worker=node("worker", images=((IMAGE, OTHER_IMAGE),))),
        pair(),
        "image_differs",
        CONFIG,
        f"worker: {IMAGE} is {OTHER_IMAGE}",
    ),
    "a path is missing": (
        views(worker=node("worker", missing=("/models",))),
        pair(),
        "preflight",
        CONFIG,
        "worker: /models is not there",
    ),
    "a pinned interface is down on one node": (
        views(worker=node("worker", interfaces=(("enp1s0f1np1", "down"),))),
        pair(),
        "preflight",
        CONFIG,
        "worker: the network interface enp1s0f1np1 is down",
    ),
    "a pinned interface is absent": (
        views(node("head", interfaces=())),
        pair(),
        "preflight",
        CONFIG,
        "head: the network interface enp1s0f1np1 is absent",
    ),
    "a RoCE device is down": (
        views(worker=node("worker", hcas=(("rocep1s0f1", "down"),))),
        pair(),
        "preflight",
        CONFIG,
        "worker: the RoCE device rocep1s0f1 is down",
    ),
    "too little memory": (
        views(worker=node("worker", pools=(MemoryPool("ram", UNIFIED, TOTAL, 60 * GIB),))),
        pair(),
        "memory",
        TEMPFAIL,
        "worker: refused: ds4 on worker wants --gpu-memory-utilization 0.85, 102.0 GiB, but only 60.0 GiB",
    ),
    "memory that the catalog does not tell": (
        views(),
        solo(ranks=(rank("head", 0, holds=(Hold("ram", None, None),)),)),
        "memory",
        CONFIG,
        "nobody knows how much memory small",
    ),
    "memory that nobody can read": (
        views(node("head", pools=())),
        pair(),
        "memory",
        UNAVAILABLE,
        "head: its memory (ram) cannot be read",
    ),
    "what is kept holds too much": (
        views(node("head", EMBEDDINGS, gpu=(holder(EMBEDDINGS, 20),), pools=(MemoryPool("ram", UNIFIED, TOTAL, 96 * GIB),))),
        pair(),
        "memory",
        TEMPFAIL,
        "over the 1.00 budget",
    ),
    "what is kept holds nobody knows what": (
        views(node("head", EMBEDDINGS, gpu=(holder(EMBEDDINGS, None),), pools=(MemoryPool("ram", UNIFIED, TOTAL, 119 * GIB),))),
        pair(),
        "memory",
        TEMPFAIL,
        "head: keep_containers has embeddings, which uses the GPU, and nobody knows",
    ),
    "what is drained gives back nobody knows what": (
        views(node("head", SMALL, gpu=(holder(SMALL, None),))),
        solo("head", "other"),
        "memory",
        TEMPFAIL,
        "but only 26.0 GiB",
    ),
    "YuE answers wrongly": (
        views(node("head", yue=yue(error="API_VERSION = 1"))),
        solo(),
        "yue",
        UNAVAILABLE,
        "head: YuE does not answer as it should: API_VERSION = 1",
    ),
    "YuE has lost its containers": (
        views(node("head", yue=yue(ownership_ok=False))),
        solo(),
        "yue",
        UNAVAILABLE,
        "lost the ownership",
    ),
    "no YuE factory": (
        views(node("head", yue=yue(active=False, accepting=False))),
        songs(),
        "yue",
        UNAVAILABLE,
        "worker: no YuE factory",
    ),
    "a mock of YuE": (
        views(node("head", yue=yue(mock=True)), node("worker", yue=yue())),
        songs(),
        "yue",
        UNAVAILABLE,
        "head: YuE is not fit",
    ),
}


@pytest.mark.parametrize(("seen", "wanted", "code", "status", "words"), REFUSED.values(), ids=REFUSED)
def test_refused_before_the_first_step(seen: dict[str, NodeView], wanted: Allocation, code: str, status: int, words: str) -> None:
    """Nothing is done, the reason has the node and who or what it is, and the status its kind."""
    blocked = plan_up(seen, RULES, wanted)
    assert isinstance(blocked, Blocked)
    assert (blocked.code, blocked.status) == (code, status)
    assert any(words in reason for reason in blocked.reasons), blocked.reasons
    assert blocked.hint


def test_up_on_idle_nodes() -> None:
    """All ranks are created before one is started, the follower is started before the head, and ready comes last."""
    plan = plan_up(views(), RULES, pair())
    assert kinds(plan) == [
        *("fence", "fence", "leases", "state", "revoke", "verify", "state", "state"),
        *("create", "create", "start", "start", "ready", "publish", "client", "state"),
    ]
    assert isinstance(plan, Plan)
    assert [step.node for step in plan.steps if step.kind == "start"] == ["worker", "head"]
    assert [step.target for step in plan.steps if step.kind == "state"] == ["draining", "stopped", "starting", "ready"]


def test_up_swaps_what_runs() -> None:
    """What runs is drained and stopped by its id, head first, before anything is created; a kept container stays."""
    seen = views(node("head", GLM[0], container("embeddings", gpu=False)), node("worker", GLM[1]))
    plan = plan_up(seen, RULES, pair())
    order = kinds(plan)
    assert isinstance(plan, Plan)
    assert order.index("drain") < order.index("stop") < order.index("remove") < order.index("verify") < order.index("create")
    assert [(step.node, step.target) for step in plan.steps if step.kind == "stop"] == [
        ("head", GLM[0].id),
        ("worker", GLM[1].id),
    ]
    assert [(step.kind, step.target, step.seconds) for step in plan.steps if step.kind == "drain"] == [("drain", "glm", 60)]


def test_up_of_what_runs_stops_nothing() -> None:
    """Equal digests that run: nothing is stopped, created or started, and readiness is still asked for."""
    plan = plan_up(views(node("head", DS4[0]), node("worker", DS4[1])), RULES, pair())
    assert isinstance(plan, Plan) and plan.unchanged
    assert kinds(plan) == ["adopt", "ready", "publish", "client", "state"]


AGAIN = {
    "another digest": (owned("spark-ds4", "ds4", 0, digest="old"), DS4[1]),
    "a follower that exited": (DS4[0], owned("spark-ds4", "ds4", 1, state="exited")),
    "ranks of two starts": (DS4[0], owned("spark-ds4", "ds4", 1, generation="g0")),
}


@pytest.mark.parametrize("ranks", AGAIN.values(), ids=AGAIN)
def test_up_of_what_runs_otherwise_starts_again(ranks: tuple[Any, Any]) -> None:
    """A changed, broken or mixed model is stopped whole and started whole."""
    plan = plan_up(views(node("head", ranks[0]), node("worker", ranks[1])), RULES, pair())
    assert kinds(plan).count("create") == 2
    assert kinds(plan).count("remove") == 2


def test_a_solo_change_touches_its_node_alone() -> None:
    """With the other node down and serving its own, a solo model starts on its node."""
    plan = plan_up(views(node("head", SMALL), lost("worker")), RULES, solo("head", "other"))
    assert isinstance(plan, Plan)
    assert {step.node for step in plan.steps} <= {None, "head"}
    assert all("worker" not in step.target for step in plan.steps)


def test_the_drained_model_gives_its_memory_back() -> None:
    """A model that would not fit beside the one that runs is admitted in its place."""
    seen = views(node("head", GLM[0]), node("worker", GLM[1]))
    assert seen["head"].pools[0].available_bytes == 26 * GIB
    assert isinstance(plan_up(seen, RULES, pair()), Plan)


def test_a_port_of_the_model_that_is_drained_is_free() -> None:
    """Root's socket on port 8000 counts as the running model's until it is stopped, and as foreign after that."""
    seen = views(node("head", SMALL, listeners=(Listener(8000, None, ""),)))
    assert isinstance(plan_up(seen, RULES, solo("head", "other")), Plan)
    after = views(node("head", listeners=(Listener(8000, None, ""),)))
    blocked = verify_idle(after, RULES, ("head",), solo("head", "other"))
    assert blocked is not None and blocked.code == "foreign"


def test_stop_names_are_ours_and_kept_containers_never() -> None:
    """A name in stop_names is stopped by its id; one that keep_containers has as well is not."""
    old, mine = container("old-vllm"), container("embeddings")
    plan = plan_stop(views(node("head", old, mine, container("foreign"))), RULES, ("head", "worker"))
    assert isinstance(plan, Plan)
    assert [step.target for step in plan.steps if step.kind in ("stop", "remove")] == [old.id, old.id]


def test_leftovers_are_removed_by_id() -> None:
    """A container of ours that exited is not stopped again, only removed."""
    plan = plan_stop(views(node("head", owned("spark-ds4", "ds4", 0, state="exited"))), RULES, ("head", "worker"))
    assert kinds(plan).count("stop") == 0
    assert kinds(plan).count("remove") == 1


def test_stop_says_when_nothing_runs() -> None:
    """It fences and looks again all the same: a command of a killed laptop may still be on its way."""
    plan = plan_stop(views(), RULES, ("head", "worker"))
    assert isinstance(plan, Plan) and plan.unchanged
    assert kinds(plan) == ["fence", "fence", "leases", "state", "revoke", "verify", "state"]


def test_stop_releases_what_it_can_reach() -> None:
    """With one node down the other is stopped, and the last step says what stays unknown."""
    plan = plan_stop(views(node("head", DS4[0]), lost("worker")), RULES, ("head", "worker"))
    assert isinstance(plan, Plan)
    assert [step.node for step in plan.steps if step.kind in ("fence", "stop", "remove")] == ["head"] * 3
    assert (plan.steps[-1].kind, plan.steps[-1].node) == ("unknown", "worker")
    blocked = plan_stop({"worker": lost("worker")}, RULES, ("worker",))
    assert isinstance(blocked, Blocked) and blocked.status == UNAVAILABLE


def test_stop_of_half_a_model_is_refused() -> None:
    """A distributed model is stopped on all of its nodes or on none."""
    blocked = plan_stop(views(node("head", DS4[0]), node("worker", DS4[1])), RULES, ("worker",))
    assert isinstance(blocked, Blocked) and blocked.code == "scope"
    assert "spark-serve stop" in blocked.hint


def test_what_to_do_first_can_be_typed() -> None:
    """In the words of spark-serve, not in those of systemctl."""
    blocked = plan_power(views(node("head", DS4[0]), node("worker", DS4[1])), RULES, ("worker",), "poweroff")
    assert isinstance(blocked, Blocked)
    assert blocked.hint == "stop it whole first: spark-serve stop --node head,worker; then spark-serve shutdown"


THEIRS = (owned("vllm_x", "theirs", 0), owned("vllm_x", "theirs", 1))
PARTS = {
    "of another laptop's catalog": (views(node("head", THEIRS[0]), node("worker", THEIRS[1])), "head"),
    "a follower alone, whose first rank is not seen": ({"worker": node("worker", THEIRS[1])}, "worker"),
    "of a model that needed one node in no other catalog": (
        views(node("head", owned("vllm_s", "small", 0)), node("worker", owned("vllm_s", "small", 1))),
        "head",
    ),
}


@pytest.mark.parametrize("seen, on", PARTS.values(), ids=PARTS)
def test_half_a_model_that_the_catalog_does_not_know_is_refused(seen: dict[str, NodeView], on: str) -> None:
    """What was started together is stopped together, whatever this laptop's catalog says; all of it may be stopped."""
    for blocked in (
        plan_stop(seen, RULES, (on,)),
        plan_power(seen, RULES, (on,), "reboot"),
        plan_up(seen, RULES, solo(on, "small")),
    ):
        assert isinstance(blocked, Blocked) and blocked.code == "scope"
    both = views(*seen.values()) if len(seen) == 2 else views(worker=seen["worker"])
    assert isinstance(plan_stop(both, RULES, ("head", "worker")), Plan)


def test_models_of_their_own_are_stopped_on_their_own() -> None:
    """Two of one name that were started each by itself share nothing."""
    seen = views(node("head", owned("vllm_x", "theirs", 0)), node("worker", owned("vllm_x", "theirs", 0, generation="g2")))
    assert isinstance(plan_stop(seen, RULES, ("head",)), Plan)


def test_a_model_that_was_renamed_is_started_again() -> None:
    """It has the same digest, and the label of a name that no verb finds any more."""
    seen = views(node("head", owned("spark-small", "tiny", 0, digest="digest-small-0")))
    assert "create" in kinds(plan_up(seen, RULES, solo()))


def test_songs_are_drained_before_a_model_starts() -> None:
    """YuE stops taking songs, then is waited for, then the rest; without --cancel-jobs the step says that it ends there."""
    seen = views(node("head", yue=yue(busy=True, jobs=("job-9",))), node("worker", yue=yue()))
    plan = plan_up(seen, RULES, pair())
    order = kinds(plan)
    assert order.index("yue_drain") < order.index("yue_idle") < order.index("verify") < order.index("create")
    assert isinstance(plan, Plan)
    step = next(step for step in plan.steps if step.kind == "yue_idle")
    assert (step.target, step.text) == ("", "song job-9 renders: end here with status 75, YuE drained (--cancel-jobs ends it)")
    cancelling = plan_up(seen, RULES, pair(), cancel_jobs=True)
    assert [step.target for step in getattr(cancelling, "steps", ()) if step.kind == "yue_cancel"] == ["job-9"]


def test_up_yue_starts_no_container_itself() -> None:
    """Workers are started drained and admitted; what served before is stopped first."""
    seen = views(node("head", DS4[0], yue=yue(accepting=False)), node("worker", DS4[1], yue=yue(accepting=False)))
    order = kinds(plan_up(seen, RULES, songs()))
    assert order.index("verify") < order.index("yue_start") < order.index("yue_admit") < order.index("yue_ready")
    assert "create" not in order and "client" not in order


def test_up_yue_of_admitted_workers_changes_nothing() -> None:
    """Two workers that take songs are left as they are."""
    plan = plan_up(views(node("head", yue=yue()), node("worker", yue=yue())), RULES, songs())
    assert isinstance(plan, Plan) and plan.unchanged


def test_reboot_drains_and_takes_the_head_last() -> None:
    """The steps end with the machines, worker before head; foreign work on them blocks."""
    plan = plan_power(views(node("head", DS4[0]), node("worker", DS4[1])), RULES, ("head", "worker"), "reboot")
    assert isinstance(plan, Plan)
    kinds = [(step.kind, step.node) for step in plan.steps[-7:]]
    waits = [("host_down", "worker"), ("host_down", "head"), ("host_up", "worker"), ("host_up", "head"), ("powered", None)]
    assert kinds == [("reboot", "worker"), ("reboot", "head"), *waits]
    blocked = plan_power(views(node("head", container("comfy"))), RULES, ("head", "worker"), "reboot")
    assert isinstance(blocked, Blocked) and blocked.code == "foreign"


def test_without_waiting_nothing_is_announced() -> None:
    """--no-wait starts and ends; `wait` announces."""
    order = kinds(plan_up(views(), RULES, pair(), wait=False))
    assert order[-3:] == ["start", "start", "launched"]
    assert "publish" not in order


def test_a_rank_that_learns_is_created_last() -> None:
    """What NIM's rank 0 prints is known only when it runs, so the other rank is created after that."""
    wanted = pair("nim", ranks=(rank("head", 0, "nim"), rank("worker", 1, "nim", learns="NIM_PRIMARY_NODE")))
    plan = plan_up(views(), RULES, wanted)
    order = kinds(plan)
    assert order[order.index("create") : order.index("ready")] == ["create", "start", "learn", "create", "start"]


def test_the_recipes_check_comes_before_any_drain() -> None:
    """The fence lets the check run; nothing is drained or revoked before every rank's check was content."""
    wanted = pair(ranks=tuple(each.replace(preflight=("--rm", IMAGE, "true")) for each in pair().ranks))
    order = kinds(plan_up(views(node("head", GLM[0]), node("worker", GLM[1])), RULES, wanted))
    assert order[:6] == ["fence", "fence", "preflight", "preflight", "leases", "state"]


def test_every_step_describes_itself() -> None:
    """No step is without words, and those of a node name what they act on."""
    seen = views(node("head", GLM[0], yue=yue(jobs=("job-9",))), node("worker", GLM[1]))
    plan = plan_up(seen, RULES, pair(drop_caches=True), cancel_jobs=True)
    assert isinstance(plan, Plan)
    assert all(step.text for step in plan.steps)
    assert "stop spark-glm (737061726b2d, glm rank 0): SIGTERM, up to 60 s for the engine, then SIGKILL" in [
        step.text for step in plan.steps
    ]


STATES = ("created", "running", "paused", "restarting", "exited", "dead")
CONTAINERS = st.builds(
    lambda name, model, rank, state, owned, gpu, digest: container(
        name, model=model, rank=rank, state=state, owned=owned, gpu=gpu, digest=digest, generation="g1"
    ),
    st.sampled_from(("spark-ds4", "spark-glm", "spark-small", "embeddings", "old-vllm", "comfy")),
    st.sampled_from(("", "ds4", "glm", "small", "gone-from-the-catalog")),
    st.sampled_from((None, 0, 1)),
    st.sampled_from(STATES),
    st.booleans(),
    st.booleans(),
    st.sampled_from(("", "digest-ds4-0", "digest-ds4-1", "digest-small-0")),
)
SONGS = st.none() | st.builds(
    lambda accepting, busy, jobs, active, error: yue(accepting=accepting, busy=busy, jobs=jobs, active=active, error=error),
    st.sampled_from((True, False, None)),
    st.sampled_from((True, False, None)),
    st.sampled_from(((), ("job-1",))),
    st.booleans(),
    st.sampled_from((None, None, "no answer")),
)


@st.composite
def seen_nodes(draw: st.DrawFn, name: str) -> NodeView:
    if draw(st.integers(0, 9)) == 0:
        return lost(name)
    found = draw(st.lists(CONTAINERS, max_size=4, unique_by=lambda one: one.name))
    changes: dict[str, Any] = {"yue": draw(SONGS)}
    if draw(st.integers(0, 9)) == 0:
        changes["containers"] = None
    if draw(st.integers(0, 3)) == 0:
        changes["gpu"] = draw(st.sampled_from((None, (), (holder(None),), (DESKTOP,))))
    if draw(st.integers(0, 3)) == 0:
        changes["listeners"] = (Listener(draw(st.sampled_from((22, 8000, 29501))), None, ""),)
    return node(name, *found, **changes)


VIEWS = st.fixed_dictionaries({"head": seen_nodes("head"), "worker": seen_nodes("worker")})
WANTED = st.sampled_from((pair(), solo("head"), solo("worker"), songs(), songs("head")))


@given(VIEWS, WANTED, st.booleans(), st.sampled_from(("up", "stop", "reboot")))
def test_whatever_is_seen(seen: dict[str, NodeView], wanted: Allocation, cancel: bool, verb: str) -> None:
    """Nothing starts before a verified stop, nothing is removed that is not ours, no node outside the scope is touched."""
    if verb == "up":
        plan = plan_up(seen, RULES, wanted, cancel_jobs=cancel)
    elif verb == "stop":
        plan = plan_stop(seen, RULES, wanted.nodes, cancel_jobs=cancel)
    else:
        plan = plan_power(seen, RULES, wanted.nodes, verb, cancel_jobs=cancel)
    if isinstance(plan, Blocked):
        assert plan.status in (UNAVAILABLE, TEMPFAIL, CONFIG) and plan.reasons and all(plan.reasons)
        return
    order = [step.kind for step in plan.steps]
    assert all(step.node is None or step.node in wanted.nodes for step in plan.steps)
    for step in plan.steps:
        if step.kind in ("stop", "remove"):
            one = next(one for one in seen[str(step.node)].containers or () if one.id == step.target)
            assert one.name not in RULES.keep and (one.owned or one.name in RULES.stop_names)
        if step.kind in ("create", "start", "yue_admit", "reboot"):
            assert "verify" in order[: plan.steps.index(step)]
            assert seen[str(step.node)].error is None and seen[str(step.node)].containers is not None
    if "verify" in order:
        last_deed = max(i for i, kind in enumerate(order) if kind == "verify")
        assert not {"stop", "remove", "yue_drain", "drain"} & set(order[last_deed:])
        assert order.index("fence") < order.index("revoke") < last_deed
        for name in wanted.nodes:
            if seen[name].containers is not None and seen[name].error is None:
                assert ("fence", name) in [(step.kind, step.node) for step in plan.steps]
    if verb == "up" and not plan.unchanged:
        removed = {step.target for step in plan.steps if step.kind == "remove"}
        for name in wanted.nodes:
            left = [
                one
                for one in seen[name].containers or ()
                if one.id not in removed and one.state in ("running", "paused", "restarting")
            ]
            assert all(one.name in RULES.keep or not one.gpu or one.id in (seen[name].yue or yue()).containers for one in left)
    if plan.unchanged and verb == "up":
        assert runs_as_wanted(seen, RULES, wanted)
        assert not {"stop", "remove", "create", "start", "fence"} & set(order)
