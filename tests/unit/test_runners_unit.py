"""The runners' unit, read by systemd's own parser and held to the program that it starts."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from sparkguard.errors import SOFTWARE
from sparkguard.web.service import DRAIN_SECONDS

UNIT = "spark-runners.service"
UNITS = Path(__file__).parents[2] / "systemd" / "user"
needs_systemd = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")


def service() -> dict[str, str]:
    """The keys of the unit's [Service], each with its value."""
    section = (UNITS / UNIT).read_text().partition("[Service]\n")[2].partition("\n[")[0]
    return dict(line.split("=", 1) for line in section.splitlines() if line and not line.startswith("#"))


def verify(home: Path, further: str = "") -> subprocess.CompletedProcess[str]:
    folder = home / ".config" / "systemd" / "user"
    shutil.copytree(UNITS, folder, dirs_exist_ok=True)
    (folder / UNIT).write_text((UNITS / UNIT).read_text().replace("[Install]", f"{further}\n[Install]"))
    program = home / ".local" / "bin" / "sparkguard"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    environment = {"HOME": str(home), "XDG_RUNTIME_DIR": str(home / "run"), "PATH": "/usr/bin:/bin"}
    command = ["systemd-analyze", "verify", "--user", UNIT]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


@needs_systemd
def test_systemd_has_no_complaint(home: Path) -> None:
    """An empty stderr is a clean bill; an unknown key would be reported there."""
    done = verify(home)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Nonsense" in verify(home, "Nonsense=1").stderr


def test_a_start_goes_past_the_check_and_tells_when_it_is_ready() -> None:
    """What is not fit fails `systemctl start`; readiness, status and signs of life come from the main process."""
    unit = service()
    assert unit["ExecStartPre"] == unit["ExecStart"] + " --check" == "%h/.local/bin/sparkguard serve --check"
    assert (unit["Type"], unit["NotifyAccess"], unit["Slice"]) == ("notify", "main", "inference.slice")
    assert int(unit["WatchdogSec"]) > 0


def test_a_refusal_is_final_and_a_bug_is_not() -> None:
    """on-failure would retry the check's refusal for ever; a bug's own status has to be listed."""
    assert service()["Restart"] == "on-abnormal"
    assert str(SOFTWARE) in service()["RestartForceExitStatus"].split()


def test_systemd_waits_longer_than_the_drain() -> None:
    """SIGKILL never cuts off what the supervisor still lets end, nor its stopping of the runners."""
    assert int(service()["TimeoutStopSec"]) >= DRAIN_SECONDS + 10
    assert service()["KillMode"] == "mixed"


def test_a_runner_goes_before_its_supervisor() -> None:
    """The kernel takes what scores higher, and one runner's end is not the others'."""
    assert 0 < int(service()["OOMScoreAdjust"]) < 500
    assert service()["OOMPolicy"] == "continue"
