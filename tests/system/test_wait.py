"""A start that waits for memory: it says so, it ends by itself, and it can be called off."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from system.installed import Installed

UNIT = "vllm-model@mymodel"
WAITS = f"systemctl --user show -P StatusText {UNIT} | grep -q 'mymodel waits up to'"
# 0.50 of 121 GiB does not fit into this, and does when there is all of it again.
TOO_LITTLE_GIB, ENOUGH_GIB = 60, 118


@pytest.fixture(autouse=True)
def short_of_memory(installed: Installed) -> None:
    installed.spec("mymodel", "0.50")
    installed.memory(TOO_LITTLE_GIB)


def test_memory_that_comes_back(installed: Installed) -> None:
    """The start says what it waits for, and goes on as soon as it is there."""
    installed.conf(VLLM_MEM_WAIT="1000")
    installed.systemctl("start", "--no-block", UNIT)
    installed.until(WAITS)
    state = installed.state(UNIT)
    assert (state["ActiveState"], installed.starts()) == ("activating", [])
    # 0.50 of 121 GiB, and 5 % of it that stay free, less the 60 GiB that are there
    assert state["StatusText"] == "mymodel waits up to 1000 s for 6.6 GiB more memory to come back"
    installed.memory(ENOUGH_GIB)
    installed.until_state(UNIT, "ActiveState=active", timeout=10)


def test_a_stop_ends_the_wait(installed: Installed) -> None:
    """SIGTERM is answered at once, nothing was started and nothing is held."""
    installed.conf(VLLM_MEM_WAIT="1000")
    installed.systemctl("start", "--no-block", UNIT)
    installed.until(WAITS)
    installed.systemctl("stop", UNIT, timeout=5)
    state = installed.state(UNIT)
    # systemd takes SIGTERM for the clean end of a main process only.
    assert (state["SubState"], state["Result"], state["NRestarts"]) == ("failed", "signal", "0")
    assert (installed.starts(), installed.reservations()) == ([], [])


def test_others_are_not_held_up(installed: Installed) -> None:
    """While one start waits, a smaller one is judged and admitted."""
    installed.conf(VLLM_MEM_WAIT="1000")
    installed.systemctl("start", "--no-block", UNIT)
    installed.until(WAITS)
    installed.spec("small", "0.10", 8001)
    installed.systemctl("start", "vllm-model@small", timeout=5)


@pytest.mark.long
def test_a_wait_of_more_than_90_seconds_ends_in_one_refusal(installed: Installed) -> None:
    """No timeout of systemd's (90 s by default) ends it before, and none makes it a failure to start again after."""
    installed.conf(VLLM_MEM_WAIT="95")
    assert installed.start(UNIT, timeout=150) == 1
    state = installed.state(UNIT)
    assert (state["ActiveState"], state["Result"], state["NRestarts"]) == ("failed", "exit-code", "0")
    waited = int(state["InactiveEnterTimestampMonotonic"]) - int(state["InactiveExitTimestampMonotonic"])
    assert 95 <= waited / 1e6 < 120
    assert "status=75" in state["ExecStartPre"]
    assert re.fullmatch(r"refused: mymodel wants .* 0\.50, 60\.5 GiB, but only 60\.0 GiB .*", state["StatusText"])
    record = installed.refusal(UNIT)
    assert record is not None
    assert (record["reason"], record["invocation"]) == ("memory_taken", state["InvocationID"])
    assert installed.starts() == []
