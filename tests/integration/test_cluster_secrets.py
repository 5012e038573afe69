"""Credentials that a model wants, in what is kept of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster_laptop import IMAGE, Laptop
from cluster_rig import Rig

MODEL = f"""
[models.gated]
label = "Gated"
image = "{IMAGE}"
wrapper = "vllm"
served_name = "gated"
hf_id = "org/small"
nnodes = 1
container = "vllm_gated"
secrets = ["GATE_KEY"]
ready_timeout = 60
[models.gated.vllm]
args = ["--gpu-memory-utilization", "0.5"]
"""
KEY = "nvapi-0123456789abcdef"


@pytest.fixture
def laptop(rig: Rig, tmp_path: Path) -> Laptop:
    laptop = Laptop(rig, tmp_path / "laptop", MODEL)
    laptop.env["GATE_KEY"] = KEY
    return laptop


def holding(*folders: Path) -> list[str]:
    return [str(path) for folder in folders for path in folder.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]


def test_a_key_that_the_engine_prints_is_in_no_evidence(rig: Rig, laptop: Laptop) -> None:
    """What is shown and kept of a failed start is what people send to each other: the key's name stands in its place."""
    rig.node("head").behave("vllm_gated", exit_code=3, log=f"refused: key {KEY} is not valid")
    failed = laptop.run("up", "gated", "--node", "head", "--no-hermes", "--json")
    assert failed.returncode == 1 and "refused: key [GATE_KEY] is not valid" in failed.stdout
    assert KEY not in failed.stdout + failed.stderr
    (kept,) = laptop.state.glob("diagnostics/*/failure.json")
    assert "[GATE_KEY]" in kept.read_text()
    assert holding(laptop.state, rig.node("head").state_dir) == []
