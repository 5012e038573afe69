"""Conflicts=: the two servers on port 8000 take turns, and a refusal says what it has cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from system.installed import Installed

PEERS = [("vllm-longcontext", "vllm-vision-agent"), ("vllm-vision-agent", "vllm-longcontext")]


@pytest.fixture(autouse=True)
def default_shares(installed: Installed) -> None:
    installed.spec("embeddings", "0.10", 8001)
    installed.spec("longcontext", "0.70", 8000)
    installed.spec("vision-agent", "0.65", 8000)


@pytest.mark.parametrize("first, second", PEERS)
def test_the_peer_is_stopped_first(installed: Installed, first: str, second: str) -> None:
    """In both directions, beside the embeddings and under the default budget: the stop ends before the guard looks."""
    installed.systemctl("start", "vllm-embeddings", first)
    installed.until_it_serves(8000, 8001)
    assert installed.start(second) == 0
    installed.until_it_serves(8000)
    before, after = installed.state(first), installed.state(second)
    assert (before["ActiveState"], after["ActiveState"]) == ("inactive", "active")
    assert int(before["InactiveEnterTimestampMonotonic"]) <= int(after["InactiveExitTimestampMonotonic"])
    assert installed.state("vllm-embeddings")["ActiveState"] == "active"


@pytest.mark.parametrize("first, second", PEERS)
def test_a_refusal_names_the_stopped_peer(installed: Installed, first: str, second: str) -> None:
    """Its status and its record name the peer that was stopped for nothing, and the command that brings it back works."""
    installed.drop_in(second, "[Service]\nEnvironment=VLLM_GPU_MEM_UTIL=0.75\n")
    installed.systemctl("start", "vllm-embeddings", first)
    installed.until_it_serves(8000, 8001)
    assert installed.start(second) == 1

    back = f"systemctl --user start '{first}.service'"
    told = f"{first}.service was stopped for this start (Conflicts=). Bring it back with: {back}"
    assert installed.state(second)["StatusText"].endswith(f"over the 0.80 budget. {told}")
    record = installed.refusal(second)
    assert record is not None
    assert record["text"].endswith(f"\n       {told}")
    assert installed.state(first)["ActiveState"] == "inactive"
    installed.exec(back, check=True)
    assert installed.state(first)["ActiveState"] == "active"


def test_a_bad_spec_names_the_stopped_peer(installed: Installed) -> None:
    """A start that fails for its configuration has stopped the peer as well, and says so."""
    installed.spec("vision-agent", "65%", 8000)
    installed.systemctl("start", "vllm-longcontext")
    installed.until_it_serves(8000)
    assert installed.start("vllm-vision-agent") == 1
    status = installed.state("vllm-vision-agent")["StatusText"]
    assert "'65%', which is no share; write 0.65 for 65%; vllm-longcontext.service was stopped for this start" in status


def test_a_peer_that_was_stopped_before_is_not_named(installed: Installed) -> None:
    """One that somebody stopped by hand is none that this start has cost."""
    installed.systemctl("start", "vllm-embeddings", "vllm-vision-agent")
    installed.systemctl("stop", "vllm-vision-agent")
    stopped = int(installed.state("vllm-vision-agent")["InactiveEnterTimestampMonotonic"])
    installed.until(f"read now idle </proc/uptime; [ ${{now%.*}} -gt {stopped // 1_000_000 + 1} ]")
    installed.drop_in("vllm-longcontext", "[Service]\nEnvironment=VLLM_GPU_MEM_UTIL=0.75\n")
    assert installed.start("vllm-longcontext") == 1
    assert installed.state("vllm-longcontext")["StatusText"].endswith("over the 0.80 budget.")
