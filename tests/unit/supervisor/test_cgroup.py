"""A tree of cgroups as the kernel shows it, of files: what is written where, and why there may be none."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkguard.supervisor.cgroup import Cgroups

UNIT = "/user.slice/user-1000.slice/user@1000.service/app.slice/spark-runners.service"


def tree(root: Path, path: str, pids: str = "10\n11\n") -> tuple[str, str]:
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "self" / "cgroup").write_text(f"0::{path}\n")
    base = root / "cgroup"
    (base / path[1:]).mkdir(parents=True)
    (base / "cgroup.controllers").write_text("cpu memory\n")
    (base / path[1:] / "cgroup.procs").write_text(pids)
    return str(base), str(root / "proc")


@pytest.mark.parametrize("path", [UNIT, f"{UNIT}/supervisor"])
def test_a_runner_gets_a_cap(path: str, tmp_path: Path) -> None:
    """Below the unit, not below the leaf that the supervisor moved into."""
    root, proc = tree(tmp_path, path)
    (Path(root) / UNIT[1:] / "cgroup.procs").touch()
    groups = Cgroups(root, proc)
    assert groups.reason is None
    assert (Path(root) / UNIT[1:] / "cgroup.subtree_control").read_text() == "+memory"
    made = groups.make("a-1", 5 << 20)
    assert made == f"{root}{UNIT}/runner-a-1" and (Path(made) / "memory.max").read_text() == str(5 << 20)


@pytest.mark.parametrize("path", ["/", "/user.slice/session-3.scope"])
def test_outside_a_unit_there_is_none(path: str, tmp_path: Path) -> None:
    """A shell's session is not ours to divide."""
    groups = Cgroups(*tree(tmp_path, path))
    assert groups.reason == "the supervisor does not run in a unit of its own" and groups.make("a", 1) is None


def test_without_version_2_there_is_none(tmp_path: Path) -> None:
    """Where version 1 is mounted as well, the controllers are there."""
    root, proc = tree(tmp_path, UNIT)
    (Path(root) / "cgroup.controllers").unlink()
    assert "version 2" in (Cgroups(root, proc).reason or "")


def test_an_oom_kill_is_read(tmp_path: Path) -> None:
    """oom counts the times that memory lacked, oom_kill the processes that died of it."""
    events = tmp_path / "memory.events"
    assert not Cgroups.killed_for_memory(str(tmp_path))
    events.write_text("low 0\noom 3\noom_kill 0\n")
    assert not Cgroups.killed_for_memory(str(tmp_path))
    events.write_text("low 0\noom 3\noom_kill 12\noom_group_kill 0\n")
    assert Cgroups.killed_for_memory(str(tmp_path))
