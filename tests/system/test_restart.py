"""The restart table: what died is started again, what was refused is not, and nothing is for ever."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from system.installed import Installed

UNIT = "vllm-model@mymodel"
# The units wait 10 s, for memory to come back.
QUICK = "[Service]\nRestartSec=50ms\n"
COMMAND = "serve org/mymodel --port 8000 --gpu-memory-utilization 0.40"
LIMIT = 6  # StartLimitBurst= of the units


@pytest.fixture(autouse=True)
def quick(installed: Installed) -> None:
    installed.spec("mymodel", "0.40")
    installed.drop_in(UNIT, QUICK)


@pytest.mark.parametrize("end", ["1", "SIGKILL", "SIGSEGV", "137", "0"])
def test_a_server_that_failed_is_started_again(installed: Installed, end: str) -> None:
    """After vLLM's error, a signal, and the status 0 of an API server whose engine died; the start limit ends it."""
    installed.spec("mymodel", "0.40", STAND_IN_EXIT=end)
    assert installed.start(UNIT) == 0
    installed.until_state(UNIT, "ActiveState=failed", "SubState=failed")
    assert installed.starts() == [COMMAND] * LIMIT
    assert installed.reservations() == []


@pytest.mark.parametrize("end", ["2", "127"])
def test_what_a_restart_cannot_mend_is_final(installed: Installed, end: str) -> None:
    """Bad arguments and a missing program fail once."""
    installed.spec("mymodel", "0.40", STAND_IN_EXIT=end)
    installed.start(UNIT)
    state = installed.until_state(UNIT, "ActiveState=failed")
    assert (state["ExecMainStatus"], state["NRestarts"], state["SubState"]) == (end, "0", "failed")
    assert installed.starts() == [COMMAND]


def test_the_servers_death_is_survived(installed: Installed) -> None:
    """A ready server that is killed comes back, under a new start and with a reservation of its own."""
    installed.start(UNIT)
    installed.until_it_serves(8000)
    before = installed.state(UNIT)
    installed.systemctl("kill", "--kill-whom=main", "--signal=KILL", UNIT)
    after = installed.until_state(UNIT, "ActiveState=active", "NRestarts=1")
    installed.until_it_serves(8000)
    assert after["InvocationID"] != before["InvocationID"]
    assert [held["invocation"] for held in installed.reservations()] == [after["InvocationID"]]


def test_a_refusal_at_a_restart_is_final(installed: Installed) -> None:
    """When a killed server no longer fits, its restart is refused once, though its own end was a failure to restart after."""
    installed.start(UNIT)
    installed.until_it_serves(8000)
    installed.conf(VLLM_MEM_BUDGET="0.30")
    installed.systemctl("kill", "--kill-whom=main", "--signal=KILL", UNIT)
    state = installed.until_state(UNIT, "ActiveState=failed", "SubState=failed")
    assert (state["NRestarts"], state["Result"]) == ("1", "exit-code")
    assert "over the 0.30 budget" in state["StatusText"]
    assert installed.starts() == [COMMAND]


def test_a_stop_is_no_failure(installed: Installed) -> None:
    """A stopped server stays stopped; it alone got the SIGTERM, and what it left behind is gone too."""
    installed.start(UNIT)
    installed.until_it_serves(8000)
    group = installed.state(UNIT)["ControlGroup"]
    installed.systemctl("stop", UNIT)
    state = installed.state(UNIT)
    assert (state["ActiveState"], state["Result"], state["NRestarts"]) == ("inactive", "success", "0")
    assert installed.exec("cat ~/started").stdout.count("\n") == 1
    assert installed.exec(["test", "-e", f"/sys/fs/cgroup{group}"]).returncode == 1
    assert installed.reservations() == []


def test_a_stop_while_loading_is_bounded(installed: Installed) -> None:
    """A server that is loading swallows SIGTERM: TimeoutStopSec= ends it and its children, and it is not started again."""
    assert installed.state(UNIT)["TimeoutStopUSec"] == "30s"
    installed.drop_in(UNIT, QUICK + "TimeoutStopSec=1s\n")
    installed.spec("mymodel", "0.40", STAND_IN_LOADS="1")
    installed.start(UNIT)
    installed.until("grep -q loads ~/started")
    group = installed.state(UNIT)["ControlGroup"]
    installed.systemctl("stop", UNIT, timeout=10)
    state = installed.state(UNIT)
    assert (state["SubState"], state["Result"], state["NRestarts"]) == ("failed", "timeout", "0")
    assert installed.exec(["test", "-e", f"/sys/fs/cgroup{group}"]).returncode == 1
    assert installed.reservations() == []
    assert installed.start(UNIT) == 0
