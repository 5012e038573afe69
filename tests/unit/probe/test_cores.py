"""Which CPUs may be used, and of which kind each is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sparkguard.core.affinity import Core
from sparkguard.probe import cores


@pytest.fixture
def twenty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(20)))


def write(sys_root: Path, **files: str) -> str:
    for name, text in files.items():
        path = sys_root / "devices" / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return str(sys_root)


def test_this_machine() -> None:
    """The CPUs of this process's own affinity, each once."""
    assert {core.cpu for core in cores.usable()} == os.sched_getaffinity(0)


def test_gb10(tmp_path: Path, twenty: None) -> None:
    """GB10: A725 are 0-4 and 10-14, X925 are 5-9 and 15-19, told by their capacity; no siblings."""
    fast = {*range(5, 10), *range(15, 20)}
    for cpu in range(20):
        folder = f"system__cpu__cpu{cpu}__"
        write(tmp_path, **{folder + "cpu_capacity": "1024" if cpu in fast else "718"})
        write(tmp_path, **{folder + "topology__thread_siblings_list": str(cpu)})
    found = cores.usable(str(tmp_path))
    assert {core.cpu for core in found if core.capacity == 1024} == fast
    assert {core.capacity for core in found} == {718, 1024}
    assert [core.first_sibling for core in found] == list(range(20))


def test_x86_with_two_kinds(tmp_path: Path, twenty: None) -> None:
    """Intel tells its slow cores by a PMU of their own, and threads of one core by their siblings."""
    write(tmp_path, cpu_atom__cpus="8-19")
    for cpu in range(8):
        write(tmp_path, **{f"system__cpu__cpu{cpu}__topology__thread_siblings_list": f"{cpu & ~1}-{cpu | 1}"})
    found = cores.usable(str(tmp_path))
    assert [core.capacity for core in found] == [1] * 8 + [0] * 12
    assert [core.first_sibling for core in found[:8]] == [0, 0, 2, 2, 4, 4, 6, 6]


def test_an_affinity_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A share of a share stays inside it."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {7, 3})
    assert cores.usable(str(tmp_path)) == (Core(3, 1, 3), Core(7, 1, 7))


@pytest.mark.parametrize("text", ["", "x", "0-", "3-1"])
def test_odd_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """What cannot be read makes a CPU an ordinary one."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    root = write(
        tmp_path,
        cpu_atom__cpus=text,
        system__cpu__cpu0__cpu_capacity=text,
        system__cpu__cpu0__topology__thread_siblings_list=text,
    )
    assert cores.usable(root) == (Core(0, 1, 0),)


def test_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a process cannot be pinned there is nothing to choose from."""
    monkeypatch.delattr(os, "sched_getaffinity")
    assert cores.usable() == ()
