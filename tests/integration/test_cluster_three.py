"""A cluster of three Sparks with names of their own: [[cluster.nodes]]."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_laptop import CLUSTER, IMAGE, Laptop
from cluster_rig.rig import Rig, why_not

MODELS = f"""
[models.wide]
label = "Wide"
image = "{IMAGE}"
wrapper = "vllm"
served_name = "wide"
hf_id = "org/ds4"
nnodes = 3
container = "vllm_wide"
ready_timeout = 60
drain_timeout = 5
[models.wide.vllm]
args = ["--gpu-memory-utilization", "0.8", "--pipeline-parallel-size", "3", "--tensor-parallel-size", "1"]

[models.pair]
label = "Pair"
image = "{IMAGE}"
wrapper = "vllm"
served_name = "pair"
hf_id = "org/ds4"
nnodes = 2
container = "vllm_pair"
ready_timeout = 60
drain_timeout = 5
[models.pair.vllm]
args = ["--gpu-memory-utilization", "0.8"]

[models.small]
label = "Small"
image = "{IMAGE}"
wrapper = "vllm"
served_name = "small"
hf_id = "org/small"
nnodes = 1
container = "vllm_small"
ready_timeout = 60
drain_timeout = 5
[models.small.vllm]
args = ["--gpu-memory-utilization", "0.5"]
"""


@pytest.fixture
def rig(home: Path, tmp_path: Path) -> Iterator[Rig]:
    if reason := why_not():
        pytest.skip(f"NOT RUN: {reason}")
    with Rig(tmp_path / "rig", ("atlas", "boreas", "chiron")) as rig:
        yield rig


@pytest.fixture
def laptop(rig: Rig, tmp_path: Path) -> Laptop:
    laptop = Laptop(rig, tmp_path / "laptop", MODELS)
    cluster = CLUSTER.partition("[cluster.nccl]")
    nodes = ""
    for node in rig.nodes():
        keys = {"name": node.name, "ssh": node.ssh, "lan_url": node.lan_url, "fabric_addr": node.fabric_addr}
        nodes += "[[cluster.nodes]]\n" + "".join(f'{key} = "{value}"\n' for key, value in keys.items())
    head = f'[cluster]\nmaster_addr = "10.0.0.1"\nhf_cache_host = "/root"\n{cluster[0]}'
    laptop.catalog.write_text(f"{head}{cluster[1]}{cluster[2]}{nodes}{MODELS}")
    return laptop


def running(rig: Rig) -> list[list[str]]:
    return [sorted(node.docker("ps", "--format", "{{.Names}}").split()) for node in rig]


def test_a_model_over_three(rig: Rig, laptop: Laptop) -> None:
    """Three ranks, the first node's serves; without one of them it is not ready, and it is stopped whole."""
    ready = laptop.events("up", "wide", "--no-hermes")[-1]
    assert (ready["event"], ready["url"]) == ("ready", rig.nodes()[0].lan_url)
    assert running(rig) == [["vllm_wide"]] * 3
    words = [json.loads(node.docker("inspect", "vllm_wide"))[0]["Config"]["Cmd"] for node in rig]
    assert [cmd[cmd.index("--node-rank") + 1] for cmd in words] == ["0", "1", "2"]
    assert ["--headless" in cmd for cmd in words] == [False, True, True]
    status = laptop.status()
    assert [(node["node"], node["model"], node["can_use"]) for node in status["nodes"]] == [
        (name, "wide", True) for name in ("atlas", "boreas", "chiron")
    ]
    assert laptop.events("stop", "--node", "chiron", status=75)[-1]["code"] == "scope"
    rig.node("chiron").docker("kill", "vllm_wide")
    assert [node["can_use"] for node in laptop.status()["nodes"][:2]] == [False, False]
    assert laptop.events("stop", "--node", "all")[-1]["event"] == "stopped"
    assert running(rig) == [[], [], []]


def test_two_of_three_and_one(rig: Rig, laptop: Laptop) -> None:
    """A model of two takes the first two; the third serves another, by its name, and each is stopped alone."""
    laptop.events("up", "pair", "--no-hermes")
    laptop.events("up", "small", "--node", "chiron", "--no-hermes")
    assert running(rig) == [["vllm_pair"], ["vllm_pair"], ["vllm_small"]]
    status = laptop.status()
    assert (status["mode"], [node["mode"] for node in status["nodes"]]) == ("mixed", ["distributed", "distributed", "single"])
    assert laptop.events("up", "small", "--node", "boreas", status=75)[-1]["code"] == "scope"
    assert laptop.events("stop", "--node", "atlas,boreas")[-1]["event"] == "stopped"
    assert running(rig) == [[], [], ["vllm_small"]]
    assert laptop.events("stop", "--node", "chiron")[-1]["event"] == "stopped"
    assert running(rig) == [[], [], []]
