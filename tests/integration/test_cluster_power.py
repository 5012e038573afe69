"""reboot and shutdown on real nodes: sudo before the drain, no secret anywhere, and boot_id as the proof."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import jsonschema
import pytest
from cluster_laptop import Laptop
from cluster_rig import Rig, RigNode

from sparkguard.cluster.ssh import Fleet
from sparkguard.cluster.transition import power
from sparkguard.cluster.transition.turn import Work
from sparkguard.core.cluster import NodeView, Step
from sparkguard.errors import SparkguardError

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/schemas/events.json").read_text())
PASSWORD = "correct horse"


class Command:
    """spark-serve, with something on its stdin."""

    def __init__(self, laptop: Laptop) -> None:
        self._laptop = laptop
        self.state = laptop.state

    def run(self, *words: str, given: str = "") -> subprocess.CompletedProcess[str]:
        child = self._laptop.start(*words, stdin=subprocess.PIPE)
        out, err = child.communicate(given, timeout=120)
        return subprocess.CompletedProcess(words, child.returncode, out, err)

    def events(self, *words: str, given: str = "") -> tuple[int, list[dict[str, object]], str]:
        done = self.run(*words, "--json", given=given)
        events = [json.loads(line) for line in done.stdout.splitlines()]
        for event in events:
            jsonschema.validate(event, SCHEMA)
        return done.returncode, events, done.stderr


@pytest.fixture
def command(rig: Rig, tmp_path: Path) -> Command:
    return Command(Laptop(rig, tmp_path / "laptop"))


def names(events: list[dict[str, object]]) -> list[tuple[object, object]]:
    wanted = ("host_down", "host_up", "rebooted", "failed")
    return [(event["event"], event.get("node")) for event in events if event["event"] in wanted]


def everywhere(*folders: Path) -> str:
    """All text below the folders: state, logs, what the rig kept of calls."""
    found = []
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file() and not path.is_symlink() and path.name != "sudo.json":
                found.append(path.read_bytes().decode("utf-8", "replace"))
    return "\n".join(found)


def commands_of(node: RigNode) -> list[str]:
    path = node.folder / "sudo.log"
    return [" ".join(json.loads(line)["command"]) for line in path.read_text().splitlines()] if path.exists() else []


def test_reboot_where_sudo_asks_nothing(rig: Rig, command: Command) -> None:
    """Both machines are new boots afterwards, the worker was told first, and the cluster is idle."""
    before = {node.name: node.boot_id for node in rig}
    for node in rig:
        node.sudo(passwordless=True)
    status, events, errors = command.events("reboot")
    assert status == 0, errors
    assert {node.name for node in rig if node.boot_id != before[node.name]} == {"head", "worker"}
    told = [event["node"] for event in events if "reboot the machine" in str(event.get("text"))]
    assert told == ["worker", "head"]
    assert sorted(names(events)[:-1]) == [
        ("host_down", "head"),
        ("host_down", "worker"),
        ("host_up", "head"),
        ("host_up", "worker"),
    ]
    assert names(events)[-1] == ("rebooted", None)


def test_a_password_leaves_no_trace(rig: Rig, command: Command) -> None:
    """It works from stdin, with a lecture before it; no state, log, command line or output has it."""
    for node in rig:
        node.sudo(password=PASSWORD, lecture="We trust you have received the usual lecture from the local System Administrator.")
    done = command.run("reboot", "--sudo-password-stdin", "--json", given=PASSWORD + "\n")
    assert done.returncode == 0, done.stderr
    assert PASSWORD not in done.stdout + done.stderr + everywhere(command.state, rig.folder)


def test_a_password_typed_into_a_terminal(rig: Rig, command: Command) -> None:
    """Where sudo takes it from a terminal alone, it is given one."""
    for node in rig:
        node.sudo(password=PASSWORD, tty=True)
    before = rig.node("head").boot_id
    done = command.run("reboot", "--sudo-password-stdin", "--json", given=PASSWORD + "\n")
    assert done.returncode == 0, done.stderr
    assert rig.node("head").boot_id != before
    assert PASSWORD not in done.stdout + done.stderr + everywhere(command.state, rig.folder)


def test_a_wrong_password_on_one_node_drains_nothing(rig: Rig, command: Command) -> None:
    """sudo is asked on all nodes first: the model still serves, and nothing was rebooted."""
    rig.node("head").sudo(passwordless=True)
    rig.node("worker").sudo(password=PASSWORD)
    assert command.run("up", "small", "--node", "head", "--no-hermes").returncode == 0
    done = command.run("reboot", "--sudo-password-stdin", given="wrong one\n")
    assert done.returncode == 1
    assert "worker: sudo does not take this password" in done.stderr and "nothing was drained" in done.stderr
    assert "wrong one" not in done.stdout + done.stderr + everywhere(command.state, rig.folder)
    assert "running vllm_small" in rig.node("head").docker("ps")
    assert not any("reboot" in line for line in commands_of(rig.node("head")))


def test_a_password_is_wanted_and_there_is_none(rig: Rig, command: Command) -> None:
    """Without a terminal the nodes that want it are named, with the flag that passes it."""
    rig.node("head").sudo(passwordless=True)
    rig.node("worker").sudo(password=PASSWORD)
    status, events, errors = command.events("reboot")
    assert status == 78 and "sudo on worker wants a password" in errors and "--sudo-password-stdin" in errors
    assert [event["event"] for event in events] == ["failed"]


def test_a_rule_for_the_one_command_is_enough(rig: Rig, command: Command) -> None:
    """Passwordless sudo of the very command line, as sudo -l lists it, asks for nothing."""
    allowed = ["/usr/bin/apt update", "/usr/bin/systemctl poweroff --no-block"]
    rig.node("worker").sudo(password=PASSWORD, nopasswd=allowed)
    status, events, errors = command.events("shutdown", "--node", "worker")
    assert status == 0, errors
    assert rig.node("worker").is_down.is_set() and not rig.node("head").is_down.is_set()
    assert names(events) == [("host_down", "worker")]


def test_reboot_drains_first(rig: Rig, command: Command) -> None:
    """The model is stopped by its id before sudo's real command is run."""
    for node in rig:
        node.sudo(passwordless=True)
    assert command.run("up", "small", "--node", "head", "--no-hermes").returncode == 0
    status, events, errors = command.events("reboot")
    assert status == 0, errors
    order = [str(event["event"]) for event in events]
    assert order.index("stop") < order.index("host_down")
    assert [words[0] for words in rig.node("head").calls() if words[0] in ("stop", "kill")] == ["stop"]


def test_a_reboot_that_nobody_saw_happen(rig: Rig, command: Command) -> None:
    """A boot_id that changed is a reboot, also when the connection never broke."""
    head = rig.node("head")
    head.sudo(passwordless=True)
    path = head.folder / "bin/systemctl"
    new = f'#!/bin/sh\n[ "$1" = reboot ] && cat /proc/sys/kernel/random/uuid > {head.folder}/boot_id\nexit 0\n'
    os.truncate(path, 0)  # the same file: it is mounted over the machine's own
    path.write_text(new)
    status, events, errors = command.events("reboot", "--node", "head")
    assert status == 0, errors
    assert names(events) == [("host_down", "head"), ("host_up", "head"), ("rebooted", None)]


def test_a_machine_that_does_not_come_back(rig: Rig, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without waiting the command ends when the order is taken; the record says what the machine was told."""
    head = rig.node("head")
    head.sudo(passwordless=True)
    head.reboot_gate.clear()
    status, events, errors = command.events("reboot", "--node", "head", "--no-wait")
    assert status == 0, errors
    assert names(events) == []
    assert head.is_down.wait(20)
    told = json.loads(command.run("status", "--json").stdout)
    (row,) = [row for row in told["nodes"] if row["node"] == "head"]
    assert (row["state"], row["phase"]) == ("unknown", "rebooting")


def test_a_machine_that_stays_away_or_stays_up_is_a_failure(rig: Rig, tmp_path: Path) -> None:
    """Neither wait goes on for ever, and each says what the machine did instead."""

    async def wait(effect: Callable[[Step, Work], Awaitable[None]], boot_id: str) -> None:
        async with Fleet(rig.nodes(), (*rig.ssh_opts, "-o", "ConnectTimeout=1"), str(tmp_path / "s")) as fleet:
            work = SimpleNamespace(
                fleet=fleet, emit=lambda event, **fields: None, views={"head": NodeView("head", boot_id=boot_id)}
            )
            await effect(Step("", "", "head", seconds=1), cast("Work", work))

    head = rig.node("head")
    with pytest.raises(SparkguardError, match="head has not gone down within 1 s"):
        asyncio.run(wait(power.wait_down, head.boot_id))
    with pytest.raises(SparkguardError, match="not back within 1 s: it answers, and is still the boot that it was"):
        asyncio.run(wait(power.wait_up, head.boot_id))
    head.power_off()
    with pytest.raises(SparkguardError, match="not back within 1 s: head: "):
        asyncio.run(wait(power.wait_up, head.boot_id))


def test_systemctl_that_refuses(rig: Rig, command: Command) -> None:
    """Its words are told, the phase is failed, and the machine is up."""
    head = rig.node("head")
    head.sudo(passwordless=True)
    (head.folder / "power_fails").touch()
    status, _, errors = command.events("reboot", "--node", "head")
    assert status == 1 and "Access denied" in errors
    assert head.is_up.is_set()


def test_shutdown_leaves_them_off(rig: Rig, command: Command) -> None:
    """Both are down when the command ends, and nobody waits for them to come back."""
    for node in rig:
        node.sudo(passwordless=True)
    status, events, errors = command.events("shutdown")
    assert status == 0, errors
    assert sorted(names(events)) == [("host_down", "head"), ("host_down", "worker")]
    assert all(node.is_down.is_set() and not node.is_up.is_set() for node in rig)


def test_a_dry_run_asks_no_sudo(rig: Rig, command: Command) -> None:
    """Only the steps are printed."""
    done = command.run("reboot", "--dry-run")
    assert done.returncode == 0 and "reboot the machine" in done.stdout
    assert commands_of(rig.node("head")) == []
