"""Apple's text formats; the machine itself is asked on macOS only."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkguard.errors import OSERR, SparkguardError
from sparkguard.probe import apple

DATA = Path(__file__).parents[2] / "data/apple"
GIB = 1 << 30
MB = 1 << 20


def test_sysctl() -> None:
    """hw.memsize is in bytes, and a wired limit of 0 means that none is set."""
    assert apple.parse_sysctl((DATA / "sysctl.txt").read_text()) == (128 * GIB, 0)


def test_an_older_system_has_no_wired_limit() -> None:
    """The wired limit is unknown where sysctl has no such key."""
    assert apple.parse_sysctl("hw.memsize: 17179869184\n") == (16 * GIB, None)


@pytest.mark.parametrize("text", ["", "hw.memsize: \n", "hw.memsize: 0\n", "hw.memsize: x\n", "iogpu.wired_limit_mb: 5\n"])
def test_sysctl_without_memory_cannot_be_read(text: str) -> None:
    """Without the size of the RAM the machine counts as unreadable."""
    with pytest.raises(SparkguardError) as caught:
        apple.parse_sysctl(text)
    assert caught.value.status == OSERR


@pytest.mark.parametrize(
    "ram, limit, largest",
    [
        pytest.param(16 * GIB, 0, 11.84, id="measured 11.84 of 16"),
        pytest.param(24 * GIB, None, 17.76, id="measured 17.76 of 24"),
        pytest.param(128 * GIB, 0, 107.5, id="a plan for 108 of 128 failed at 107.5"),
    ],
)
def test_the_default_working_set_stays_below_what_was_measured(ram: int, limit: int | None, largest: float) -> None:
    """The default is never above what Metal was measured to give, and no less than two thirds of the RAM."""
    assert ram * 2 // 3 < apple.working_set_bytes(ram, limit) <= largest * GIB


def test_a_wired_limit_decides() -> None:
    """iogpu.wired_limit_mb replaces the default, and cannot exceed the RAM."""
    assert apple.working_set_bytes(128 * GIB, 120_000) == 120_000 * MB
    assert apple.working_set_bytes(16 * GIB, 999_999) == 16 * GIB


def test_vm_stat() -> None:
    """Available are the free, speculative and inactive pages, in pages of the size that vm_stat names."""
    assert apple.parse_vm_stat((DATA / "vm_stat.txt").read_text()) == (3219431 + 83025 + 1488207) * 16384


@pytest.mark.parametrize("text", ["", "Pages free: 5.\n", "Mach Virtual Memory Statistics: (page size of 16384 bytes)\n"])
def test_half_a_vm_stat_cannot_be_read(text: str) -> None:
    """Neither the page size nor the pages are guessed."""
    with pytest.raises(SparkguardError) as caught:
        apple.parse_vm_stat(text)
    assert caught.value.status == OSERR


def test_ps() -> None:
    """Each row has pid, parent and the whole command line, blanks kept."""
    rows = apple.parse_ps((DATA / "ps.txt").read_text())
    assert rows[0] == (1, 0, "/sbin/launchd")
    assert rows[2][:2] == (4242, 512)
    assert rows[2][2].endswith("vllm serve /Users/ada/my models/gemma --gpu-memory-utilization 0.40")
    assert rows[3] == (4250, 4242, "VLLM::EngineCore")
    assert len(rows) == 5


@given(st.text())
def test_any_text_is_read_without_failing(text: str) -> None:
    """Nothing that ps could print makes the reader fail, and every row has two numbers."""
    assert all(pid >= 0 and ppid >= 0 for pid, ppid, _ in apple.parse_ps(text))
