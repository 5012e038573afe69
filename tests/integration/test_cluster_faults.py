"""What goes wrong while a model starts or runs: who is at work, what died, what is unknown, and what is left afterwards."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from cluster_faulty import MOMENTS, SIGNALS, faulty
from cluster_laptop import SPARK_SERVE, Laptop
from cluster_rig import Rig, RigNode

from sparkguard.cluster import commands
from sparkguard.cluster.causes import NodeError
from sparkguard.cluster.commands import Turn
from sparkguard.cluster.ssh import Fleet
from sparkguard.core.cluster import Holder

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "schemas" / "events.json").read_text())


@pytest.fixture
def laptop(rig: Rig, tmp_path: Path) -> Laptop:
    return Laptop(rig, tmp_path / "laptop")


def containers(node: RigNode) -> dict[str, dict[str, Any]]:
    ids = node.docker("ps", "--all", "--quiet", "--no-trunc").split()
    told = json.loads(node.docker("inspect", *ids)) if ids else []
    return {one["Name"].lstrip("/"): one for one in told}


def states(rig: Rig) -> list[dict[str, str]]:
    return [{name: one["State"]["Status"] for name, one in containers(node).items()} for node in rig]


def until(child: subprocess.Popen[str], event: str) -> dict[str, Any]:
    """The first such event of a verb that runs with --json."""
    assert child.stdout is not None
    for line in child.stdout:
        told: dict[str, Any] = json.loads(line)
        jsonschema.validate(told, SCHEMA)
        if told["event"] == event:
            return told
    raise AssertionError(f"it ended without {event}: {child.stderr.read() if child.stderr else ''}")


def starting(rig: Rig, laptop: Laptop) -> subprocess.Popen[str]:
    """An `up ds4` that waits for an engine which loads for ever."""
    for node in rig:
        node.behave("vllm_ds4", ready=False)
    child = laptop.start("up", "ds4", "--no-hermes", "--json")
    until(child, "head_start")
    until(child, "waiting")
    return child


def interrupted(child: subprocess.Popen[str]) -> tuple[str, str]:
    child.send_signal(signal.SIGINT)
    return child.communicate(timeout=60)


def test_a_second_transition_is_refused_at_once(rig: Rig, laptop: Laptop, tmp_path: Path) -> None:
    """Fault 1: on the same laptop and on another one, with verb, host, pid and user of who is at work (75)."""
    child = starting(rig, laptop)
    same = laptop.events("up", "small", status=75)[-1]
    assert (same["code"], same["holder"]["pid"], same["holder"]["verb"]) == ("locked", child.pid, "up ds4")
    assert same["elapsed_s"] < 2
    other = Laptop(rig, tmp_path / "other").events("stop", status=75)[-1]
    assert other["code"] == "busy"
    assert f"head is held by `up ds4` of root on {same['holder']['host']}, pid {child.pid}" in other["text"]
    status = laptop.status()
    assert status["at_work"]["pid"] == child.pid and status["transition_error"] is None
    interrupted(child)
    assert child.returncode == 130


def test_ctrl_c_cleans_up_what_it_started(rig: Rig, laptop: Laptop) -> None:
    """Fault 13: evidence first, then nothing is left; the record and status say that it was interrupted; the lock is free."""
    child = starting(rig, laptop)
    out, _ = interrupted(child)
    events = [json.loads(line) for line in out.splitlines()]
    assert child.returncode == 130
    kinds = [event["event"] for event in events]
    assert kinds.index("startup_diagnostics") < kinds.index("error")
    assert states(rig) == [{}, {}]
    assert (laptop.record()["transition"]["phase"], laptop.record()["transition"]["error"]) == ("failed", "interrupted")
    head = laptop.node("head")
    assert (head["state"], head["phase"], head["error"]) == ("gone", "failed", "interrupted")
    for node in rig:
        node.behave("vllm_ds4")
    assert laptop.events("up", "ds4", "--no-hermes")[-1]["event"] == "ready"


def test_a_dead_rank_ends_the_start(rig: Rig, laptop: Laptop) -> None:
    """Fault 7: a follower that exits fails the start with host, status and the end of its log, kept before the clean-up."""
    for node in rig:
        node.behave("vllm_ds4", ready=False)
    rig.node("worker").behave("vllm_ds4", exit_code=3, log="RuntimeError: NCCL error: unhandled system error")
    events = laptop.events("up", "ds4", "--no-hermes", status=1)
    jsonschema.validate(events[-1], SCHEMA)
    failed = events[-1]
    assert (failed["event"], failed["code"]) == ("failed", "start_failed")
    assert failed["text"].startswith("worker: vllm_ds4 (") and failed["text"].endswith("is exited with status 3")
    assert failed["elapsed_s"] < 15
    error = events[-2]
    assert error["event"] == "error" and error["cleanup_error"] is None
    kept = json.loads(Path(error["evidence"], "failure.json").read_text())
    worker = kept["nodes"]["worker"]
    assert worker["containers"][0]["exit_code"] == 3
    assert worker["containers"][0]["log"]["stdout"] == ["RuntimeError: NCCL error: unhandled system error"]
    assert "MemAvailable" in worker["meminfo"] and set(worker["pressure"]) == {"cpu", "memory", "io"}
    assert {"kernel", "kernel_previous_boot"} <= set(worker)
    assert kept["nodes"]["head"]["containers"][0]["state"] == "running"
    assert states(rig) == [{}, {}]
    assert "is exited with status 3" in laptop.status()["transition_error"]


def test_a_rank_that_ran_out_of_memory_is_told(rig: Rig, laptop: Laptop) -> None:
    """Fault 7: the kernel's kill is told as what it was."""
    rig.node("head").behave("vllm_ds4", oom=True)
    failed = laptop.events("up", "ds4", "--no-hermes", status=1)[-1]
    assert "head: vllm_ds4" in failed["text"] and "was killed because memory ran out" in failed["text"]


def test_a_rank_that_dies_before_the_first_token_ends_the_start(rig: Rig, laptop: Laptop) -> None:
    """Fault 7: while the token is waited for, the ranks are watched all the same."""
    rig.node("head").behave("vllm_ds4", stuck=True)
    child = laptop.start("up", "ds4", "--no-hermes", "--json")
    until(child, "head_start")
    head, worker = rig.node("head"), rig.node("worker")
    while "num_requests_running" not in head.run("curl", "-s", "localhost:8000/metrics", check=False).stdout:
        pass
    worker.docker("kill", containers(worker)["vllm_ds4"]["Id"])
    failed = json.loads(child.communicate(timeout=30)[0].splitlines()[-1])
    assert failed["code"] == "start_failed" and failed["text"].startswith("worker: vllm_ds4")
    assert states(rig) == [{}, {}]


def test_a_clean_up_that_fails_is_told_beside_the_error(rig: Rig, laptop: Laptop) -> None:
    """Fault 13: a node that is lost while a start waits: both errors are kept, and the next up takes what was left."""
    child = starting(rig, laptop)
    rig.node("worker").relay.refuse()
    rig.node("worker").relay.drop()
    child.communicate(timeout=90)
    assert child.returncode == 1
    transition = laptop.record()["transition"]
    assert "what the rank on worker does is unknown" in transition["error"]
    assert transition["cleanup_error"].startswith("worker: ")
    assert states(rig)[0] == {} and list(states(rig)[1]) == ["vllm_ds4"]
    assert laptop.status(69)["transition_error"].count("worker") >= 2
    rig.node("worker").relay.forward()
    for node in rig:
        node.behave("vllm_ds4")
    assert laptop.events("up", "ds4", "--no-hermes")[-1]["event"] == "ready"
    settled(rig, laptop, "ds4")


def test_evidence_that_cannot_be_kept_keeps_nothing_running(rig: Rig, laptop: Laptop) -> None:
    """A failed start on a laptop that can write no evidence, or whose node tells nonsense, is cleaned up like any other."""
    laptop.state.mkdir(mode=0o700)
    (laptop.state / "diagnostics").write_text("")
    rig.node("worker").behave("vllm_ds4", exit_code=3)
    failed = laptop.run("up", "ds4", "--no-hermes")
    assert failed.returncode == 1 and "no evidence can be kept" in failed.stderr and "Traceback" not in failed.stderr
    assert states(rig) == [{}, {}]
    buggy = "from sparkguard.cluster.transition import diagnostics; diagnostics.summary = None\n"
    (laptop.state / "diagnostics").unlink()
    assert laptop.run("up", "ds4", "--no-hermes", program=buggy + SPARK_SERVE).returncode == 70
    assert states(rig) == [{}, {}]


def test_what_a_node_cannot_write_is_told_in_a_line(rig: Rig, laptop: Laptop) -> None:
    """A node whose state folder is no folder, or whose disk is full: where and why, and nothing is touched."""
    folder = rig.node("worker").state_dir
    folder.parent.mkdir(parents=True)
    folder.write_text("")
    for verb in (("status",), ("up", "small", "--node", "worker", "--no-hermes"), ("stop", "--node", "worker")):
        done = laptop.run(*verb)
        said = done.stdout + done.stderr
        assert done.returncode == 69 and "spark-serve cannot be written: File exists" in said and "Traceback" not in said
        assert "worker: worker:" not in said
    folder.unlink()
    folder.mkdir()
    (folder / "node.lock").symlink_to("/dev/full")
    done = laptop.run("up", "small", "--node", "worker", "--no-hermes")
    assert done.returncode == 71 and "node.lock cannot be written" in done.stderr and "Traceback" not in done.stderr
    assert states(rig) == [{}, {}]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["SIGTERM", "closed terminal"])
def test_other_signals_clean_up_too(rig: Rig, laptop: Laptop, number: int) -> None:
    """A controller that is asked to end, or whose terminal is closed, leaves nothing."""
    child = starting(rig, laptop)
    assert child.stdout is not None and child.stderr is not None
    child.stdout.close()  # as a dashboard that was closed: nobody reads the events of the clean-up
    child.stderr.close()
    child.send_signal(number)
    assert child.wait(60) in (1, 130)  # click says 1 when even stderr is gone
    assert states(rig) == [{}, {}]
    assert laptop.record()["transition"]["error"] == "interrupted"


def test_two_laptops_at_once(rig: Rig, laptop: Laptop, tmp_path: Path) -> None:
    """Of two starts in the same instant from two laptops exactly one goes on; the other is told who is at work (75)."""
    other = Laptop(rig, tmp_path / "other")
    children = [laptop.start("up", "ds4", "--no-hermes", "--json"), other.start("up", "glm", "--no-hermes", "--json")]
    outs = [child.communicate(timeout=90)[0] for child in children]
    assert sorted(child.returncode for child in children) in ([0, 75], [0, 0]), outs
    winners = [name for name, child in zip(("ds4", "glm"), children) if child.returncode == 0]
    if len(winners) == 1:
        assert states(rig) == [{f"vllm_{winners[0]}": "running"}] * 2
    else:  # one had ended before the other looked: that one's is there
        assert alive(rig) and len(alive(rig)) == 1


def test_a_controller_that_is_killed_while_it_cleans_up(rig: Rig, laptop: Laptop) -> None:
    """Faults 2 and 7: evidence is there already, the next status says what happened, and the next up takes what is left."""
    rig.node("worker").behave("vllm_ds4", exit_code=3)
    dying = "import os; from sparkguard.cluster.transition import run; run.clean_up = lambda work: os.kill(os.getpid(), 9)\n"
    assert laptop.run("up", "ds4", "--no-hermes", program=dying + SPARK_SERVE).returncode == -9
    assert [list(names) for names in states(rig)] == [["vllm_ds4"]] * 2
    assert len(list((laptop.state / "diagnostics").glob("startup-*/failure.json"))) == 1
    assert "`up ds4` (pid" in laptop.status()["transition_error"]
    rig.node("worker").behave("vllm_ds4")
    events = laptop.events("up", "ds4", "--no-hermes")
    assert "reconcile" in [event["event"] for event in events]
    settled(rig, laptop, "ds4")


def test_the_evidence_is_bounded(rig: Rig, laptop: Laptop) -> None:
    """160 lines and 32 KiB of each log are kept, the last ones."""
    rig.node("head").behave("vllm_small", exit_code=1, log="\n".join(f"line {number} " + "x" * 1000 for number in range(500)))
    events = laptop.events("up", "small", "--node", "head", "--no-hermes", status=1)
    kept = json.loads(Path(events[-2]["evidence"], "failure.json").read_text())
    lines = kept["nodes"]["head"]["containers"][0]["log"]["stdout"]
    assert lines[-1].startswith("line 499 ")
    assert sum(len(line) + 1 for line in lines) <= 32 << 10 and len(lines) <= 160


def test_a_model_is_not_ready_without_its_follower(rig: Rig, laptop: Laptop) -> None:
    """Fault 8: the head still answers /v1/models, and status says what died."""
    laptop.events("up", "ds4", "--no-hermes")
    worker = rig.node("worker")
    worker.docker("kill", containers(worker)["vllm_ds4"]["Id"])
    head = laptop.node("head")
    assert (head["state"], head["can_use"], head["url"]) == ("running", False, None)
    assert head["error"] == "rank 1 on worker is exited"


def test_another_model_on_the_port_is_misrouted(rig: Rig, laptop: Laptop) -> None:
    """Fault 9: an answer with another id is not readiness."""
    laptop.events("up", "small", "--node", "head", "--no-hermes")
    rig.node("head").behave("vllm_small", served="something-else")
    head = laptop.node("head")
    assert (head["can_use"], head["served"]) == (False, "something-else")
    assert "is misrouted: another model answers (something-else, not small)" in head["error"]


def test_an_engine_that_gives_no_token_is_not_ready(rig: Rig, laptop: Laptop) -> None:
    """/v1/models answers, and no token comes: status says no."""
    laptop.events("up", "small", "--node", "head", "--no-hermes")
    rig.node("head").behave("vllm_small", error_body="EngineDeadError")
    head = laptop.node("head")
    assert (head["can_use"], "EngineDeadError" in head["error"]) == (False, True)


def test_an_unreachable_node_is_unknown(rig: Rig, laptop: Laptop) -> None:
    """Fault 5: the other node is still told; up of both is refused (69), and nothing on the reachable one was touched."""
    laptop.events("up", "small", "--node", "head", "--no-hermes")
    rig.node("worker").relay.refuse()
    rig.node("worker").relay.drop()
    status = laptop.status(69)
    head, worker = status["nodes"]
    assert (head["state"], head["can_use"]) == ("running", True)
    assert (worker["state"], worker["can_use"]) == ("unknown", None)
    assert worker["error"]
    refused = laptop.events("up", "ds4", status=69)[-1]
    assert refused["code"] == "unreachable" and "worker cannot be asked" in refused["text"]
    assert laptop.node("head")["can_use"] is True


def test_a_dead_daemon_is_unknown(rig: Rig, laptop: Laptop) -> None:
    """Fault 6: neither missing nor stopped; a start and a stop there are refused, and what is known stays recorded."""
    laptop.events("up", "small", "--node", "worker", "--no-hermes")
    rig.node("worker").dead_daemon()
    worker = laptop.status(69)["nodes"][1]
    assert (worker["state"], worker["model"], worker["can_use"]) == ("unknown", "small", None)
    assert "Cannot connect to the Docker daemon" in worker["error"]
    assert laptop.events("up", "ds4", status=69)[-1]["code"] == "unreachable"
    assert laptop.events("stop", "--node", "worker", status=69)[-1]["code"] == "unreachable"
    rig.node("worker").revive_daemon()
    assert laptop.node("worker")["can_use"] is True


def test_stop_releases_what_it_can_reach(rig: Rig, laptop: Laptop) -> None:
    """With one node gone the other is released all the same; the status is 69, and the lost one stays unknown."""
    laptop.events("up", "ds4", "--no-hermes")
    rig.node("worker").relay.refuse()
    rig.node("worker").relay.drop()
    laptop.events("stop", status=69)
    assert containers(rig.node("head")) == {}
    assert laptop.status(69)["nodes"][1]["state"] == "unknown"
    assert json.loads((laptop.state / "endpoint.json").read_text())["endpoints"] == []


def test_a_stop_that_is_not_permitted_is_no_stop(rig: Rig, laptop: Laptop) -> None:
    """Fault 12: the failure is told, the container stays ours, and the next stop ends it."""
    laptop.events("up", "small", "--node", "head", "--no-hermes")
    rig.node("head").deny("stop", "kill")
    failed = laptop.events("stop", "--node", "head", status=1)[-1]
    assert failed["event"] == "failed" and "permi" in failed["text"].lower()
    assert states(rig)[0] == {"vllm_small": "running"}
    assert laptop.record()["nodes"]["head"]["phase"] == "failed"
    rig.node("head").deny()
    assert laptop.events("stop", "--node", "head")[-1]["event"] == "stopped"
    assert states(rig)[0] == {}


def test_a_delayed_command_does_nothing(rig: Rig, laptop: Laptop) -> None:
    """Fault 3: a start of an older generation that arrives after a newer transition is refused as stale (75)."""
    laptop.events("up", "small", "--node", "head", "--no-hermes")
    old = laptop.record()["nodes"]["head"]["generation"]
    identity = containers(rig.node("head"))["vllm_small"]["Id"]
    laptop.events("up", "other", "--node", "head", "--no-hermes")

    async def late() -> None:
        async with Fleet(rig.nodes(), rig.ssh_opts, str(rig.folder / "state"), linger_seconds=0) as fleet:
            await commands.start(fleet["head"], Turn(old, Holder("laptop", 1, 0.0, "up small")), identity)

    with pytest.raises(NodeError) as caught:
        asyncio.run(late())
    assert (caught.value.code, caught.value.status) == ("stale", 75)
    assert list(containers(rig.node("head"))) == ["vllm_other"]


def test_a_damaged_record_is_refused_and_kept(rig: Rig, laptop: Laptop) -> None:
    """Fault 23: no verb overwrites a record that it cannot read (78)."""
    laptop.state.mkdir(parents=True)
    path = laptop.state / "controller.json"
    path.write_text('{"version": 1, "nodes": {"head": {"pha')
    for words in (("up", "small"), ("stop",), ("status",)):
        done = laptop.run(*words)
        assert done.returncode == 78 and "is cut off or damaged" in done.stderr
    assert path.read_text() == '{"version": 1, "nodes": {"head": {"pha'


def settled(rig: Rig, laptop: Laptop, name: str) -> None:
    """One container of ours on each node, running, of the generation that the record and the announcement have."""
    assert states(rig) == [{f"vllm_{name}": "running"}] * 2
    status = laptop.status()
    assert [node["can_use"] for node in status["nodes"]] == [True, True] and status["transition_error"] is None
    generations = {containers(node)[f"vllm_{name}"]["Config"]["Labels"]["sparkguard.generation"] for node in rig}
    assert generations == {node["generation"] for node in status["nodes"]}
    assert [end["generation"] for end in announced(laptop)] == list(generations)


def announced(laptop: Laptop) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = json.loads((laptop.state / "endpoint.json").read_text())["endpoints"]
    return told


@pytest.mark.long
@SIGNALS
def test_up_may_end_at_every_step(rig: Rig, laptop: Laptop, how: int) -> None:
    """Faults 2 and 13: whenever the controller of a swap ends, the next up explains and starts the model exactly once."""
    laptop.events("up", "glm", "--no-hermes")
    runs, wanted, steps = "glm", "ds4", 0
    while True:
        moment = MOMENTS[(steps + 1) % 3]
        done = faulty(laptop, steps + 1, moment, how, "up", wanted, "--no-hermes")
        if done.returncode in (0, 99):  # it ended before the signal came
            break
        steps += 1
        if how == signal.SIGINT:
            assert done.returncode == 130, f"{steps} {moment}: {done.stderr}"
            assert all(f"vllm_{wanted}" not in names for names in states(rig)), f"{steps} {moment}"
        assert not announced(laptop) or [end["served"] for end in announced(laptop)] == list(alive(rig)), f"{steps} {moment}"
        transition = laptop.record()["transition"]
        events = laptop.events("up", wanted, "--no-hermes")
        if not transition["ended"]:
            assert any(event["event"] == "reconcile" and "was killed while" in event["text"] for event in events)
        settled(rig, laptop, wanted)
        runs, wanted = wanted, runs
    assert steps > 15


def alive(rig: Rig) -> set[str]:
    """The models of which every node has a rank that runs."""
    each = [{name.removeprefix("vllm_") for name, state in names.items() if state == "running"} for names in states(rig)]
    return each[0] & each[1]


@pytest.mark.long
@SIGNALS
def test_stop_may_end_at_every_step(rig: Rig, laptop: Laptop, how: int) -> None:
    """Faults 2 and 13: whenever the controller of a stop ends, nothing gone is announced, and the next verb settles it."""
    steps = 0
    while True:
        laptop.events("up", "ds4", "--no-hermes")
        settled(rig, laptop, "ds4")
        moment = MOMENTS[(steps + 1) % 3]
        done = faulty(laptop, steps + 1, moment, how, "stop")
        if done.returncode in (0, 99):
            break
        steps += 1
        assert done.returncode == (130 if how == signal.SIGINT else -9), f"{steps} {moment}: {done.stderr}"
        assert not announced(laptop) or alive(rig) == {"ds4"}
        if steps % 2:
            laptop.events("stop")
            assert states(rig) == [{}, {}]
    assert steps > 8


@pytest.mark.long
@SIGNALS
@pytest.mark.parametrize("verb", ["reboot", "shutdown"])
def test_reboot_and_shutdown_may_end_at_every_step(rig: Rig, laptop: Laptop, verb: str, how: int) -> None:
    """Faults 2 and 13: whenever the controller of either ends, nothing gone is announced, and a model starts again."""
    for node in rig:
        node.sudo(passwordless=True)
    steps = 0
    while True:
        done = up_when_they_are_up(rig, laptop)
        assert done.returncode == 0, done.stderr
        settled(rig, laptop, "ds4")
        moment = MOMENTS[(steps + 1) % 3]
        done = faulty(laptop, steps + 1, moment, how, verb)
        if done.returncode in (0, 99):
            break
        steps += 1
        assert done.returncode == (130 if how == signal.SIGINT else -9), f"{steps} {moment}: {done.stderr}"
        assert not announced(laptop) or alive(rig) == {"ds4"}
    assert steps > 12


def up_when_they_are_up(rig: Rig, laptop: Laptop) -> subprocess.CompletedProcess[str]:
    """Unreachable (69) is a node that goes down under the command, and no other; each does so once, and is then up again."""
    for _ in ("head", "worker"):
        boots = rig.come_up()
        done = laptop.run("up", "ds4", "--no-hermes")
        if done.returncode != 69:
            return done
        assert rig.goes_down(boots), f"no node went down: {done.stderr}"
    rig.come_up()
    return laptop.run("up", "ds4", "--no-hermes")
