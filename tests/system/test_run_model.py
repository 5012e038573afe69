"""run-model.sh under a real manager: the port changes hands, or everything stays as it was."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from system.installed import HOME, STAND_IN

if TYPE_CHECKING:
    import subprocess

    from system.installed import Installed

LONG, VISION = "vllm-longcontext", "vllm-vision-agent"


@pytest.fixture(autouse=True)
def longcontext_beside_embeddings(installed: Installed) -> None:
    installed.spec("embeddings", "0.10", 8001)
    installed.spec("longcontext", "0.70", 8000)
    installed.spec("vision-agent", "0.65", 8000)
    installed.systemctl("start", "vllm-embeddings", LONG)
    installed.until_it_serves(8000, 8001)


def run_model(installed: Installed, name: str) -> subprocess.CompletedProcess[str]:
    return installed.exec([f"{HOME}/.local/bin/run-model.sh", name])


def served(installed: Installed) -> str:
    """What /v1/models answers on port 8000."""
    script = "exec 3<>/dev/tcp/127.0.0.1/8000; printf 'GET /v1/models HTTP/1.0\\r\\n\\r\\n' >&3; cat <&3"
    return installed.exec(script).stdout


@pytest.mark.parametrize("name", [VISION, "vision-agent"])
def test_a_switch(installed: Installed, name: str) -> None:
    """By the unit's name or the spec's: the other server is stopped, the wanted one answers, the always-on one stays."""
    embeddings = installed.state("vllm-embeddings")["MainPID"]
    done = run_model(installed, name)
    assert done.returncode == 0, done.stderr
    assert f"stopping {LONG}.service\nstarting {VISION}.service\n" in done.stderr
    assert f"{VISION}.service answers on port 8000 after" in done.stderr
    assert '"org/vision-agent"' in served(installed)
    assert installed.state(LONG)["ActiveState"] == "inactive"
    assert installed.state("vllm-embeddings")["MainPID"] == embeddings


def test_a_switch_to_a_spec_of_ones_own(installed: Installed) -> None:
    """A template's unit has no Conflicts=: the one that holds its port is found and stopped all the same."""
    installed.spec("my-model", "0.60", 8000)
    done = run_model(installed, "my-model")
    assert done.returncode == 0, done.stderr
    assert '"org/my-model"' in served(installed)
    assert installed.state(LONG)["ActiveState"] == "inactive"
    assert installed.state("vllm-model@my-model")["ActiveState"] == "active"


def test_there_and_back_again(installed: Installed) -> None:
    """More switches than the start limit allows starts: it counts crashes, not people."""
    for unit in (LONG, VISION):
        installed.drop_in(unit, "[Unit]\nStartLimitBurst=2\n")
    for name in [VISION, LONG] * 3:
        assert run_model(installed, name).returncode == 0
    assert '"org/longcontext"' in served(installed)


def test_a_refused_switch_changes_nothing(installed: Installed) -> None:
    """The guard is asked before anything is stopped."""
    installed.drop_in(VISION, "[Service]\nEnvironment=VLLM_GPU_MEM_UTIL=0.75\n")
    before = installed.state(LONG)["MainPID"]
    done = run_model(installed, VISION)
    assert done.returncode == 75
    assert "FATAL: vision-agent wants --gpu-memory-utilization 0.75" in done.stderr
    assert f"that is with {LONG}.service counted as gone; nothing was changed" in done.stderr
    state = installed.state(LONG)
    assert (state["MainPID"], state["ActiveState"]) == (before, "active")
    assert installed.state(VISION)["InactiveExitTimestampMonotonic"] == "0"


def test_a_failed_start_puts_the_former_back(installed: Installed) -> None:
    """A server that dies while it loads is not tried again: the former one serves again, and the reason was shown."""
    installed.spec("vision-agent", "0.65", 8000, STAND_IN_EXIT="1")
    done = run_model(installed, VISION)
    assert done.returncode == 69
    assert f"{VISION}.service failed after" in done.stderr
    assert f"{LONG}.service was started again" in done.stderr
    installed.until_it_serves(8000)
    assert '"org/longcontext"' in served(installed)
    assert installed.state(VISION)["ActiveState"] in ("inactive", "failed")


def test_a_port_that_is_not_ours_to_free(installed: Installed) -> None:
    """A server that no unit runs is named and left alone, and nothing else is stopped for it either."""
    installed.systemctl("stop", LONG)
    shell = f"{STAND_IN} serve org/byhand --port 8000 --gpu-memory-utilization 0.05"
    installed.exec(f"systemd-run --user --scope --unit=test-shell -- {shell} >/dev/null 2>&1 &", check=True)
    installed.until_it_serves(8000)
    done = run_model(installed, VISION)
    assert done.returncode == 75
    assert "port 8000 is held by vllm, pid " in done.stderr
    assert '"org/byhand"' in served(installed)
