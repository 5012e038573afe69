"""Starts at the same instant, and guards that are killed: never more than the budget, and nothing left that blocks."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections.abc import Iterator

import pytest
from world import GATE, World, serving

from sparkguard.core.share import parse_share

STARTS = 20
BUDGETS = {"a third fit": ("0.0200", "0.0030"), "exactly five": ("0.0200", "0.0040"), "one": ("0.0200", "0.0101")}


@pytest.mark.parametrize(("budget", "share"), BUDGETS.values(), ids=BUDGETS)
@pytest.mark.parametrize("round_", range(2))
def test_starts_at_the_same_instant(world: World, round_: int, budget: str, share: str) -> None:
    """Of twenty launches let go together exactly floor(budget / share) become servers; the others are refused with 75."""
    gate, opener = os.pipe()
    env = {"VLLM_MEM_BUDGET": budget, "VLLM_GPU_MEM_UTIL": share}
    starts = [world.start("launch", "model", gate=GATE, stdin=gate, **env) for _ in range(STARTS)]
    os.close(gate)
    os.close(opener)
    facts = [serving(start) for start in starts]
    refused = [start for start, fact in zip(starts, facts, strict=True) if fact is None]
    assert STARTS - len(refused) == parse_share(budget) // parse_share(share)
    for start in refused:
        assert start.wait(60) == 75
        assert start.stderr is not None
        assert f"over the {float(budget):.2f} budget" in start.stderr.read()


def test_a_servers_end_makes_room(world: World) -> None:
    """After a server has ended, by whatever signal, the next start is admitted; before, it is not."""
    env = {"VLLM_MEM_BUDGET": "0.02", "VLLM_GPU_MEM_UTIL": "0.011"}
    for end in (signal.SIGTERM, signal.SIGKILL):
        server = world.launch("model", **env)
        assert serving(server) is not None
        assert world.guard("model", **env).returncode == 75
        server.send_signal(end)
        server.communicate(timeout=60)
    assert world.guard("model", **env).returncode == 0


def moments() -> Iterator[float]:
    """From before the import of the guard until after the exec of the server, on a machine of any speed."""
    dice = random.Random(7)
    while True:
        yield dice.choice((0.02, 0.1, 0.3)) * dice.random()


def test_killed_at_any_moment(world: World) -> None:
    """Launches that are killed -9 at random moments leave no reservation and no lock: the whole budget is free afterwards."""
    env = {"VLLM_MEM_BUDGET": "0.02", "VLLM_GPU_MEM_UTIL": "0.02"}
    when = moments()
    for _ in range(25):
        start = world.launch("model", **env)
        try:
            start.wait(next(when))
        except subprocess.TimeoutExpired:
            start.kill()
        start.communicate(timeout=60)
    last = world.guard("model", **env)
    assert last.returncode == 0, last.stderr
    assert not list((world.home / "run" / "sparkguard").glob("*.new"))


def test_a_reservation_counts_before_its_server_is_seen(world: World) -> None:
    """Between admission and the server's first instruction the share is taken already: by one that is not a vLLM yet."""
    slow = world.bin / "slow"
    slow.write_text("#!/bin/sh\necho waiting\nread line\n")
    slow.chmod(0o755)
    env = {"VLLM_MEM_BUDGET": "0.02", "VLLM_GPU_MEM_UTIL": "0.011"}
    start = world.start("launch", "model", stdin=subprocess.PIPE, VLLM_BIN=str(slow), **env)
    assert start.stdout is not None
    assert start.stdout.readline() == "waiting\n"
    refused = world.guard("model", **env)
    assert refused.returncode == 75
    assert "at 0.011 starting (start of model under way)" in refused.stderr
    start.communicate("\n")
    assert world.guard("model", **env).returncode == 0
