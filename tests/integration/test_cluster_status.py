"""spark-serve status and logs: what is told of nodes that answer, of those that do not, and how fast."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from pathlib import Path

import jsonschema
import pytest
from cluster_laptop import Laptop
from cluster_rig import Rig

from sparkguard.cluster.catalog import read as catalogs
from sparkguard.cluster.ssh import Fleet
from sparkguard.cluster.transition import status

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "schemas" / "status.json").read_text())


@pytest.fixture
def laptop(rig: Rig, tmp_path: Path) -> Laptop:
    return Laptop(rig, tmp_path / "laptop")


@pytest.mark.parametrize("fault", ["half_open", "hang_banner", "off"])
def test_a_silent_node_delays_nobody_for_long(rig: Rig, laptop: Laptop, fault: str) -> None:
    """Fault 5: whatever kind of silence it is, the node is unknown with the reason, and the other one is told."""
    laptop.events("up", "small", "--node", "head", "--no-hermes")
    laptop.status()
    worker = rig.node("worker")
    if fault == "off":
        worker.power_off()
    else:
        getattr(worker.relay, fault)()
        if fault == "hang_banner":
            worker.relay.drop()
    begin = time.monotonic()
    told = laptop.status(69)
    assert time.monotonic() - begin < 60
    jsonschema.validate(told, SCHEMA)
    head, lost = told["nodes"]
    assert (head["can_use"], lost["state"], lost["can_use"]) == (True, "unknown", None)
    assert lost["error"]
    text = laptop.run("status").stdout
    assert "unknown (was unmanaged)" in text and "small (ready)" in text


def test_a_slow_docker_is_waited_for(rig: Rig, laptop: Laptop) -> None:
    """A node that is slow is not a node that is gone."""
    laptop.events("up", "small", "--node", "head", "--no-hermes")
    rig.node("head").slow_docker(1.5)
    assert laptop.node("head")["can_use"] is True


def test_a_reboot_is_not_hidden(rig: Rig, laptop: Laptop) -> None:
    """What was ready before a node restarted is told as gone, and up starts it again."""
    laptop.events("up", "small", "--node", "head", "--no-hermes")
    head = rig.node("head")
    head.reboot()
    assert head.is_up.wait(30)
    told = laptop.node("head")
    assert (told["state"], told["can_use"], told["error"]) == ("gone", False, "small was ready and is gone")
    assert laptop.events("up", "small", "--node", "head", "--no-hermes")[-1]["unchanged"] is False
    assert laptop.node("head")["can_use"] is True


def test_status_takes_no_part_in_the_lock(rig: Rig, laptop: Laptop) -> None:
    """Statuses that are asked one after another never refuse a transition."""
    asking = [laptop.start("status", "--json") for _ in range(4)]
    assert laptop.events("up", "small", "--node", "head", "--no-hermes")[-1]["event"] == "ready"
    for child in asking:
        child.communicate(timeout=60)


def test_what_another_laptop_started_is_told(rig: Rig, laptop: Laptop, tmp_path: Path) -> None:
    """A laptop without any record says what runs, by the nodes' own labels and receipts, and that it can be used."""
    laptop.events("up", "ds4", "--no-hermes")
    told = Laptop(rig, tmp_path / "other").status()
    jsonschema.validate(told, SCHEMA)
    assert [(node["model"], node["phase"], node["can_use"]) for node in told["nodes"]] == [("ds4", "ready", True)] * 2


def test_logs_follow_until_ctrl_c(rig: Rig, laptop: Laptop) -> None:
    """logs -f prints what the rank says, and ends with the status of an interruption; on the node nothing of it is left."""
    laptop.events("up", "small", "--node", "head", "--no-hermes")
    child = laptop.start("logs", "-f", "head")
    assert child.stdout is not None
    assert any("Application startup complete" in line for line in child.stdout)
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=20)
    assert child.returncode == 130
    head = rig.node("head")
    while any("--follow" in line for line in head.programs().values()):
        pass
    done = laptop.run("logs", "worker")
    assert done.returncode == 1 and "worker has no container of" in done.stderr


def test_looks_share_one_login(rig: Rig, laptop: Laptop, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often the nodes are looked at, each is logged in to once: a login costs what many looks do."""
    laptop.events("up", "ds4", "--no-hermes")
    monkeypatch.setenv("PATH", laptop.env["PATH"])
    catalog = catalogs.load(laptop.catalog)

    async def look() -> list[set[int]]:
        logins = []
        async with Fleet(catalog.nodes, catalog.ssh_opts, str(laptop.state)) as fleet:
            for _ in range(4):
                seen = await status.see(catalog, fleet, laptop.state)
                assert [node.can_use for node in seen.nodes] == [True, True]
                logins.append({pid for node in rig for pid, program in node.pids().items() if "@notty" in program})
        return logins

    logins = asyncio.run(look())
    assert logins[0]
    assert logins == [logins[0]] * 4
