"""Benchmarks of what serves on a node of the catalog, and lifecycle commands that want the node meanwhile."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from cluster_laptop import Laptop
from cluster_rig.rig import Rig

SHORT = ["--requests", "2", "--max-tokens", "20", "--prompt-tokens", "64"]
LONG = ["--requests", "500", "--max-tokens", "400", "--prompt-tokens", "64"]


@pytest.fixture
def laptop(rig: Rig, tmp_path: Path) -> Laptop:
    for node in rig:
        node.behave(token_seconds=0.005)
    return Laptop(rig, tmp_path / "laptop")


def up(laptop: Laptop, *words: str) -> None:
    done = laptop.run("up", *words, "--no-hermes", "--json")
    assert done.returncode == 0, done.stdout + done.stderr


def bench(laptop: Laptop, node: str, *words: str) -> dict[str, Any]:
    done = laptop.run("bench", "run", "--node", node, "--json", *SHORT, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return record


@contextmanager
def running(laptop: Laptop, node: str) -> Iterator[subprocess.Popen[str]]:
    with laptop.start("bench", "run", "--node", node, "--json", *LONG) as process:
        assert process.stdout is not None
        try:
            assert any('"bench_request"' in line for line in process.stdout)
            yield process
        finally:
            process.kill()


def last(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    record: dict[str, Any] = json.loads(process.stdout.read().splitlines()[-1])
    return record


def container(laptop: Laptop, name: str, node: str = "head") -> str:
    return laptop.rig.node(node).docker("inspect", "--format", "{{.Id}}", name)


def test_what_is_measured_is_told(laptop: Laptop) -> None:
    """The record names model, node, image, digest, container and generation, and that the engine worked for nobody else."""
    up(laptop, "small", "--node", "head")
    record = bench(laptop, "head")
    target = record["target"]
    assert (target["name"], target["model"], target["nodes"]) == ("small", "small", ["head"])
    assert target["containers"] == [container(laptop, "vllm_small")]
    assert target["image"].startswith("sha256:")
    assert all(target[key] for key in ("digest", "generation", "url"))
    assert (record["status"], record["checks"]["exclusive"], record["checks"]["same"]) == ("completed", True, True)
    for when in ("before", "after"):
        assert record["environment"][when]["head"]["gpus"][0]["celsius"] == 45
    jsonschema.validate(record, json.loads((Path(__file__).parents[2] / "docs" / "schemas" / "bench.json").read_text()))


def test_a_model_on_two_nodes_is_one_target(laptop: Laptop) -> None:
    """Asked for at its worker it is measured at its head, with both ranks in the record."""
    up(laptop, "ds4")
    record = bench(laptop, "worker")
    assert record["target"]["nodes"] == ["head", "worker"]
    assert len(record["target"]["containers"]) == 2
    with running(laptop, "head"):
        done = laptop.run("bench", "run", "--node", "worker", "--json", *SHORT)
    assert (done.returncode, "measures ds4 there" in done.stderr) == (75, True)


def test_two_nodes_are_measured_at_once(laptop: Laptop) -> None:
    """Independent models do not disturb each other."""
    up(laptop, "small", "--node", "head")
    up(laptop, "other", "--node", "worker")
    with running(laptop, "head"):
        assert bench(laptop, "worker")["target"]["name"] == "other"


def test_nothing_serves_there(laptop: Laptop) -> None:
    """Status 1, naming the node."""
    up(laptop, "small", "--node", "head")
    done = laptop.run("bench", "run", "--node", "worker", *SHORT)
    assert (done.returncode, "serves on worker" in done.stderr) == (1, True)


def test_up_ends_the_benchmark_first(laptop: Laptop) -> None:
    """Fault 15: the benchmark gives way and says to whom; then the other model starts."""
    up(laptop, "small", "--node", "head")
    with running(laptop, "head") as process:
        up(laptop, "other", "--node", "head")
        record = last(process)
        assert process.wait(30) == 75
    assert record["status"] == "revoked"
    assert "up other" in record["reason"]


def test_up_leaves_the_other_nodes_benchmark_alone(laptop: Laptop) -> None:
    """A lease on the worker does not concern the head."""
    up(laptop, "small", "--node", "worker")
    with running(laptop, "worker") as process:
        up(laptop, "other", "--node", "head")
        assert process.poll() is None
        assert any('"bench_request"' in line for line in process.stdout or ())


def test_a_benchmark_that_does_not_give_way_stops_up(laptop: Laptop) -> None:
    """Fault 15, fail closed: without its acknowledgement nothing is changed, and what served still serves."""
    up(laptop, "small", "--node", "head")
    before = container(laptop, "vllm_small")
    with running(laptop, "head") as process:
        process.send_signal(signal.SIGSTOP)
        try:
            done = laptop.run("up", "other", "--node", "head", "--no-hermes")
        finally:
            process.send_signal(signal.SIGCONT)
    assert (done.returncode, f"pid {process.pid}" in done.stderr) == (75, True)
    assert container(laptop, "vllm_small") == before


def test_another_container_in_the_middle_ends_the_run(laptop: Laptop) -> None:
    """The engine is killed under the benchmark: the run fails, and says that it is not the same one any more."""
    up(laptop, "small", "--node", "head")
    with running(laptop, "head") as process:
        laptop.rig.node("head").docker("kill", container(laptop, "vllm_small"))
        record = last(process)
    assert (record["status"], record["reason"]) == ("failed", "what answers is not what answered at the start")
    assert record["levels"][0]["ok"] >= 1
