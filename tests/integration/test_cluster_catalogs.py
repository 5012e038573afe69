"""Two laptops with different catalogs, and a catalog that changed while a model runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster_laptop import MODELS, Laptop
from cluster_rig import Rig

OTHERS = MODELS.replace("[models.ds4", "[models.theirs").replace("[models.small", "[models.mine")


@pytest.fixture
def laptop(rig: Rig, tmp_path: Path) -> Laptop:
    return Laptop(rig, tmp_path / "laptop")


def test_half_of_another_laptops_model_is_not_stopped(rig: Rig, laptop: Laptop, tmp_path: Path) -> None:
    """Neither node alone is stopped, rebooted or started on by who does not know the model; both together may be stopped."""
    laptop.events("up", "ds4", "--no-hermes")
    other = Laptop(rig, tmp_path / "other", OTHERS)
    for node in ("head", "worker"):
        for verb in (("stop",), ("reboot", "--dry-run"), ("up", "mine", "--no-hermes")):
            refused = other.run(*verb, "--node", node)
            assert refused.returncode == 75 and "one part of ds4" in refused.stderr, refused.stdout + refused.stderr
    assert laptop.status()["active_node"] == "head"
    assert other.events("stop")[-1]["event"] == "stopped"
    assert [node.docker("ps", "--all", "--quiet") for node in rig] == ["", ""]
    told = laptop.status()["nodes"]
    assert [node["phase"] for node in told] == ["stopped"] * 2
    assert all("another laptop has ended it" in node["error"] for node in told)


def test_a_model_that_is_renamed_while_it_runs(rig: Rig, laptop: Laptop) -> None:
    """Its old name is told as unknown to the catalog; up of the new one starts it again, and every verb finds it."""
    laptop.events("up", "small", "--node", "head", "--no-hermes")
    laptop.catalog.write_text(laptop.catalog.read_text().replace("[models.small", "[models.mine"))
    node = laptop.node("head")
    assert (node["model"], node["can_use"]) == ("small", None) and "small is not in" in node["error"]
    assert laptop.events("up", "mine", "--node", "head", "--no-hermes")[-1]["event"] == "ready"
    node = laptop.node("head")
    assert (node["model"], node["can_use"], node["error"]) == ("mine", True, None)
