"""spark-serve pull, from a laptop over real ssh to two nodes."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
from cluster_laptop import IMAGE, Laptop
from cluster_rig import Rig
from hub import COMMIT, Hub

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "schemas" / "pull.json").read_text())
BIG = bytes(range(256)) * 12_000
MODELS = f"""
[models.large]
image = "{IMAGE}"
hf_id = "org/model"
hf_mount = "/cache"
serve_path = "/cache/models/x"
nnodes = 2
served_name = "large"
gpu_memory_utilization = 0.8
container = "vllm_large"
copy_over_fabric = false
[[models.large.checkpoints]]
repo = "org/model"
revision = "{COMMIT}"
folder = "models/x"
[[models.large.mounts]]
container = "/runtime"
source = "runtime-cache"
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub("0.0.0.0") as hub:
        hub.files["org/model"] = {"config.json": b"{}", "model-1.safetensors": BIG}
        yield hub


@pytest.fixture
def laptop(rig: Rig, hub: Hub, tmp_path: Path) -> Iterator[Laptop]:
    laptop = Laptop(rig, tmp_path / "laptop", MODELS, "disk_reserve_gib = 0\n")
    laptop.env |= {"HF_ENDPOINT": f"http://{rig.node('head').gateway}:{hub.port}", "HF_TOKEN": "hf_secret"}
    yield laptop
    hub.go.set()
    laptop.run("pull", "large", "--cancel")


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_both_nodes_are_prepared(laptop: Laptop, rig: Rig, hub: Hub) -> None:
    """Each node has the files, the marker and the mounts' folders, so that `up` finds all that it asks for."""
    told = laptop.events("pull", "large")
    assert told[-1]["event"] == "pull_ready"
    assert sorted(event["node"] for event in told if event["event"] == "pull_done") == ["head", "worker"]
    for event in told:
        jsonschema.validate(event, SCHEMA)
    for node in rig:
        home = node.folder / "home"
        assert (home / "models/x/model-1.safetensors").read_bytes() == BIG and (home / "runtime-cache").is_dir()
    assert {header for _, _, header in hub.log} == {"Bearer hf_secret"}
    assert "hf_secret" not in json.dumps(told)


def test_a_pull_outlives_its_connections(laptop: Laptop, rig: Rig, hub: Hub) -> None:
    """With every ssh of the laptop killed in the middle, the same command finds the way back and ends as if nothing had been."""
    hub.holds["model-1.safetensors"] = 1 << 20
    with laptop.start("pull", "large", "--json") as child:
        assert child.stdout is not None and child.stderr is not None
        told = []
        while sum('"pull_plan"' in line for line in told) < 2:
            told.append(child.stdout.readline())
            assert told[-1]
        assert hub.holding.wait(20)
        for pid in children(child.pid):
            os.kill(pid, signal.SIGKILL)
        while "pull_lost" not in (line := child.stdout.readline()):
            assert line
        hub.go.set()
        rest = [json.loads(line) for line in child.stdout]
        child.stderr.read()
    assert child.returncode == 0
    assert rest[-1]["event"] == "pull_ready"
    assert not [event for event in rest if event["event"] == "pull_start"]  # nothing began anew
    assert (rig.node("worker").folder / "home/models/x/model-1.safetensors").read_bytes() == BIG


def test_a_laptop_that_goes_leaves_the_job(laptop: Laptop, hub: Hub) -> None:
    """After Ctrl-C the preparation goes on, another pull joins it, and --cancel ends it on all nodes."""
    hub.holds["model-1.safetensors"] = 1 << 20
    with laptop.start("pull", "large") as child:
        assert child.stdout is not None and child.stderr is not None
        assert hub.holding.wait(30)
        while "files" not in (line := child.stderr.readline()):
            assert line
        os.kill(child.pid, signal.SIGINT)
        assert "the preparation goes on" in child.stderr.read()
    assert child.returncode == 130
    joined = laptop.run("pull", "large", "--detach", "--json")
    assert joined.returncode == 0, joined.stderr
    assert [json.loads(line)["event"] for line in joined.stdout.splitlines()] == ["pull_attached", "pull_attached"]
    ended = laptop.events("pull", "large", "--cancel")
    for event in ended:
        jsonschema.validate(event, SCHEMA)
    assert [event["event"] for event in ended] == ["pull_cancelled", "pull_cancelled"]
    hub.go.set()
    assert laptop.events("pull", "large")[-1]["event"] == "pull_ready"


def test_different_images_are_told(laptop: Laptop, rig: Rig) -> None:
    """When both nodes are prepared and their images differ, the command fails and names both ids."""
    rig.node("worker").set_images({IMAGE: "sha256:" + "9" * 64})
    done = laptop.run("pull", "large")
    assert done.returncode == 1
    assert "the nodes have different images: head sha256:" in done.stderr and "worker sha256:" + "9" * 64 in done.stderr


def test_one_node_that_fails_fails_the_pull(laptop: Laptop, rig: Rig) -> None:
    """A node without docker's daemon fails with its words, while the other's preparation ends well."""
    rig.node("worker").dead_daemon()
    begun = time.monotonic()
    done = laptop.run("pull", "large")
    assert done.returncode == 69 and "worker: Cannot connect to the Docker daemon" in done.stderr
    assert "head: prepared" in done.stderr and time.monotonic() - begun < 60


def test_yue_is_not_pulled(laptop: Laptop) -> None:
    """YuE brings its own installer, and pull says where it is told."""
    done = laptop.run("pull", "yue")
    assert done.returncode == 2 and "docs/cluster/yue.md" in done.stderr


def test_a_secret_that_is_not_set_is_told_before_a_node_is_asked(laptop: Laptop, rig: Rig) -> None:
    """`up` of a model whose secret this shell lacks ends with 78 and the variable's name, and no docker was asked."""
    text = laptop.catalog.read_text()
    laptop.catalog.write_text(text.replace('container = "vllm_large"', 'container = "vllm_large"\nsecrets = ["GATED_TOKEN"]'))
    done = laptop.run("up", "large")
    assert done.returncode == 78 and "large wants GATED_TOKEN, which is not set here" in done.stderr
    assert rig.node("head").calls() == []


def test_up_wants_what_pull_prepares(laptop: Laptop, rig: Rig) -> None:
    """Before `pull`, `up` is refused with what is missing on each node and the command that brings it; after it, it serves."""
    refused = laptop.run("up", "large", "--no-hermes")
    assert refused.returncode == 75 or refused.returncode == 78, refused.stderr
    assert "spark-serve pull large" in refused.stderr and "/root/models/x" in refused.stderr
    assert laptop.events("pull", "large")[-1]["event"] == "pull_ready"
    assert laptop.events("up", "large", "--no-hermes")[-1]["event"] == "ready"
    assert laptop.run("pull", "large").returncode == 0  # beside it
    assert laptop.node("head")["phase"] == "ready"
