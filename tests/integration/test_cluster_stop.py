"""Songs and benchmarks that a transition meets: drained, told by name, and ended only when that was asked for."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from cluster_faulty import MOMENTS, SIGNALS, faulty
from cluster_laptop import Laptop
from cluster_rig import Rig, RigNode

MANIFEST = "ab" * 32
STATUS_SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "schemas" / "status.json").read_text())
# The contract with Artist Twin, who reads the file.
YUE_SCHEMA = {
    "type": "object",
    "required": ["version", "mode", "generation", "workers"],
    "additionalProperties": False,
    "properties": {
        "version": {"const": 1},
        "mode": {"enum": ["yue", "unavailable"]},
        "generation": {"type": "string"},
        "workers": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["id", "url", "generation", "runtime_manifest"],
                "additionalProperties": False,
                "properties": {"id": {}, "url": {}, "generation": {}, "runtime_manifest": {"pattern": "^[0-9a-f]{64}$"}},
            },
        },
    },
}
BENCHMARK = """
import sys
from pathlib import Path
from sparkguard.cluster.bench import leases
with leases.held(Path(sys.argv[1]), leases.Lease("b1", 1, "laptop", 0.0, "http://x", "small", ("head",))) as held:
    print("held", flush=True)
    if sys.argv[2] == "gives way":
        import asyncio
        print(asyncio.run(held.until_revoked()), flush=True)
    else:
        sys.stdin.read()
"""


@pytest.fixture
def laptop(rig: Rig, tmp_path: Path) -> Laptop:
    laptop = Laptop(rig, tmp_path / "laptop")
    urls = [node.yue_url for node in rig.nodes()]
    root = [str(node.folder / "factory") for node in rig]
    assert len(set(root)) == 2
    with laptop.catalog.open("a") as file:
        file.write(f'[yue]\nhead_url = "{urls[0]}"\nworker_url = "{urls[1]}"\nfactory_root = "~/factory"\nready_timeout = 20\n')
    for node in rig:
        (node.folder / "home/factory").symlink_to(node.folder / "factory")
    return laptop


def workers(laptop: Laptop) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((laptop.state / "yue-workers.json").read_text())
    jsonschema.validate(told, YUE_SCHEMA)
    return told


def factory(node: RigNode) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((node.folder / "factory/factory.json").read_text())
    return told


def controls(node: RigNode) -> list[list[str]]:
    path = node.folder / "factory/controls"
    return [words for line in path.read_text().splitlines() if (words := json.loads(line)) != ["status"]] if path.exists() else []


def test_song_workers_from_admission_to_release(rig: Rig, laptop: Laptop) -> None:
    """up yue starts both, admits them with one generation and publishes them; up of a model revokes, drains, and starts."""
    events = laptop.events("up", "yue")
    assert events[-1]["event"] == "ready"
    told = workers(laptop)
    assert (told["mode"], [worker["id"] for worker in told["workers"]]) == ("yue", ["yue-head", "yue-worker"])
    assert {worker["generation"] for worker in told["workers"]} == {told["generation"]}
    assert {worker["runtime_manifest"] for worker in told["workers"]} == {MANIFEST}
    with urllib.request.urlopen(told["workers"][0]["url"] + "/health", timeout=10) as answer:
        assert json.load(answer)["generation"] == told["generation"]
    status = laptop.status()
    assert (status["mode"], status["ready_workers"]) == ("yue", 2)
    assert [worker["ready"] for worker in status["yue_workers"]] == [True, True]
    assert laptop.events("up", "yue")[-1]["unchanged"] is True
    assert workers(laptop) == told

    laptop.events("up", "ds4", "--no-hermes")
    assert workers(laptop) == {"version": 1, "mode": "unavailable", "generation": "", "workers": []}
    assert [controls(node) for node in rig] == [[["admit", "--generation", told["generation"]], ["drain"]]] * 2
    assert laptop.status()["mode"] == "distributed"


def test_a_song_that_renders_blocks_and_is_named(rig: Rig, laptop: Laptop) -> None:
    """Fault 14: stop and up end with 75 and the job's id, the workers stay drained, and nothing else starts."""
    laptop.events("up", "yue")
    rig.node("worker").factory(active_job={"job_id": "job-9"})
    for words in (("stop",), ("up", "ds4", "--no-hermes")):
        refused = laptop.events(*words, status=75)[-1]
        assert (refused["code"], refused["jobs"]) == ("jobs", {"worker": ["job-9"]})
        assert "--cancel-jobs" in refused["hint"]
        assert [factory(node)["accepting"] for node in rig] == [False, False]
        assert factory(rig.node("worker"))["active_job"] == {"job_id": "job-9"}
        assert workers(laptop)["workers"] == []
        status = laptop.status()
        assert status["nodes"][1]["phase"] == "draining" and "job-9" in status["transition_error"]
        assert [(node["state"], node["can_use"]) for node in status["nodes"]] == [("gone", False), ("running", False)]
        jsonschema.validate(status, STATUS_SCHEMA)
        renders = [(song["ready"], song["accepting"], song["jobs"]) for song in status["yue_workers"]]
        assert renders == [(False, False, []), (False, False, ["job-9"])]
    assert "YuE on worker: it takes no songs; renders job-9" in laptop.run("status").stdout
    rig.node("worker").factory(active_job=None)
    assert laptop.events("stop")[-1]["event"] == "stopped"


def test_songs_of_both_workers_are_named(rig: Rig, laptop: Laptop) -> None:
    """Each worker's job stands in the refusal, with its node."""
    laptop.events("up", "yue")
    rig.node("head").factory(active_job={"job_id": "job-1"})
    rig.node("worker").factory(active_job={"job_id": "job-2"})
    assert laptop.events("stop", status=75)[-1]["jobs"] == {"head": ["job-1"], "worker": ["job-2"]}


def test_cancel_jobs_ends_the_song(rig: Rig, laptop: Laptop) -> None:
    """--cancel-jobs cancels by the job's own id and waits until it is gone."""
    laptop.events("up", "yue")
    rig.node("head").factory(active_job={"job_id": "job-7"})
    assert laptop.events("stop", "--cancel-jobs")[-1]["event"] == "stopped"
    assert ["cancel", "--job-id", "job-7"] in controls(rig.node("head"))
    assert factory(rig.node("head"))["active_job"] is None


def test_a_worker_that_is_not_fit_is_not_admitted(rig: Rig, laptop: Laptop) -> None:
    """Assets that are wrong, a mock, or HTTP that says otherwise: nothing is published (69 before, 1 after the start)."""
    rig.node("worker").factory(mock=True)
    refused = laptop.events("up", "yue", status=69)[-1]
    assert "worker: YuE is not fit to serve: it is a mock" in refused["text"]
    rig.node("worker").factory(mock=False, health={"runtime_manifest": "cd" * 32})
    with laptop.catalog.open("r+") as file:
        text = file.read().replace("ready_timeout = 20", "ready_timeout = 2")
        file.seek(0)
        file.write(text)
    failed = laptop.events("up", "yue", status=1)[-1]
    assert "worker: control and HTTP do not agree on its manifest" in failed["text"]
    assert workers(laptop)["workers"] == []
    assert [factory(node)["accepting"] for node in rig] == [False, False]


def test_an_old_factory_is_asked_nothing(rig: Rig, laptop: Laptop) -> None:
    """A factory without the marker of protocol 2 would take a control verb for a request to start a server."""
    for node in rig:
        path = node.folder / "factory/yue_factory.py"
        path.write_text(path.read_text().replace("API_VERSION = 2", "API_VERSION = 1"))
    refused = laptop.events("up", "yue", status=69)[-1]
    assert "lacks the line 'API_VERSION = 2'" in refused["text"]
    assert [(node.folder / "factory/controls").exists() for node in rig] == [False, False]


def test_one_worker_alone(rig: Rig, laptop: Laptop) -> None:
    """up small on the head takes its worker away; the other one stays announced."""
    laptop.events("up", "yue")
    laptop.events("up", "small", "--node", "head", "--no-hermes")
    assert [worker["id"] for worker in workers(laptop)["workers"]] == ["yue-worker"]
    status = laptop.status()
    assert [node["mode"] for node in status["nodes"]] == ["single", "yue"]
    assert (status["mode"], status["ready_workers"]) == ("mixed", 1)


def benchmark(laptop: Laptop, manner: str) -> subprocess.Popen[str]:
    laptop.state.mkdir(parents=True, exist_ok=True)
    child = subprocess.Popen(
        [sys.executable, "-c", BENCHMARK, str(laptop.state), manner], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "held\n"
    return child


def test_a_benchmark_gives_way(rig: Rig, laptop: Laptop) -> None:
    """Fault 15: its lease is revoked with the reason, and up goes on when it has ended."""
    child = benchmark(laptop, "gives way")
    assert laptop.events("up", "small", "--node", "head", "--no-hermes")[-1]["event"] == "ready"
    out, _ = child.communicate(timeout=10)
    assert out == "`up small` came\n"


def test_a_benchmark_that_does_not_end_blocks(rig: Rig, laptop: Laptop) -> None:
    """Fault 15: without its acknowledgement within 5 s nothing is drained (75)."""
    laptop.events("up", "small", "--node", "head", "--no-hermes")
    child = benchmark(laptop, "stays")
    refused = laptop.events("up", "other", "--node", "head", "--no-hermes", status=75)[-1]
    child.communicate("")
    assert "a benchmark has not ended within 5 s: b1" in refused["text"]
    head = laptop.node("head")
    assert (head["can_use"], head["phase"], head["model"]) == (True, "ready", "small")


@pytest.mark.long
@SIGNALS
def test_up_yue_may_end_at_every_step(rig: Rig, laptop: Laptop, how: int) -> None:
    """Faults 2 and 13: a worker is announced only while it takes songs of that generation, and the next up settles both."""
    laptop.events("up", "ds4", "--no-hermes")
    runs, wanted, steps = "ds4", "yue", 0
    while True:
        moment = MOMENTS[steps % 3]
        done = faulty(laptop, steps + 1, moment, how, "up", wanted, "--no-hermes")
        if done.returncode in (0, 99):
            break
        steps += 1
        where = f"{steps} {moment}: {done.stderr}"
        assert done.returncode == (130 if how == signal.SIGINT else -9), where
        for worker in workers(laptop)["workers"]:
            told = factory(rig.node(worker["id"].removeprefix("yue-")))
            assert (told["accepting"], told["generation"]) == (True, worker["generation"]), where
        laptop.events("up", wanted, "--no-hermes")
        assert [factory(node)["accepting"] for node in rig] == [wanted == "yue"] * 2, where
        assert len(workers(laptop)["workers"]) == (2 if wanted == "yue" else 0), where
        names = [node.docker("ps", "--all", "--format", "{{.Names}}").split() for node in rig]
        assert names == [[] if wanted == "yue" else ["vllm_ds4"]] * 2, where
        runs, wanted = wanted, runs
    assert steps > 12
