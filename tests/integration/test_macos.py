"""The guard as it runs on macOS, from what its ps, sysctl and vm_stat print: there is no Mac here (docs/guard.md says so)."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

import pytest

from sparkguard import guard
from sparkguard.errors import CONFIG, OK, TEMPFAIL
from sparkguard.probe import apple, ports

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30
SYSCTL = f"hw.memsize: {64 * GIB}\niogpu.wired_limit_mb: 0\n"
# 2,621,440 free pages of 16 KiB are 40 GiB.
VM_STAT = "Mach Virtual Memory Statistics: (page size of 16384 bytes)\nPages free: 2621440.\nPages inactive: 0.\n"
PS = """\
    1     0 /sbin/launchd
  700     1 /opt/venv/bin/python3 /opt/venv/bin/vllm serve org/model --port 8001 --gpu-memory-utilization 0.30
  701   700 VLLM::EngineCore
  800     1 /bin/zsh -l
"""


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    def ask(*argv: str) -> str:
        if argv[0].endswith("sysctl"):
            return SYSCTL
        if argv[0].endswith("vm_stat"):
            return VM_STAT
        if "-axo" in argv:
            return PS
        pid = int(argv[-1])
        if pid == os.getpid():
            return "S  800 800 Sun Nov 29 22:34:01 2026\n"
        row = next((line.split() for line in PS.splitlines() if int(line.split()[0]) == pid), None)
        return f"S  {row[1]} {row[0]} Sun Nov 29 20:00:00 2026\n" if row else ""

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(apple, "_ask", ask)
    monkeypatch.setattr(ports, "_answers", lambda port: port == 8001)
    return {"HOME": str(tmp_path), "PATH": "/usr/bin", "XDG_RUNTIME_DIR": str(tmp_path / "none"), "VLLM_MEM_WAIT": "0"}


@pytest.mark.parametrize(
    ("share", "status", "reason"), [("0.50", OK, "fits"), ("0.60", TEMPFAIL, "over_budget"), ("0.90", CONFIG, "never_fits")]
)
def test_the_sum_is_of_what_the_gpu_may_wire(
    mac: dict[str, str], capsys: pytest.CaptureFixture[str], share: str, status: int, reason: str
) -> None:
    """A server that ps shows counts once, its children do not, and the pool is the unified working set."""
    assert guard.main(["mine", "--json", "--gpu-memory-utilization", share], mac) == status
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["reason"] == reason
    assert [(claim["pid"], claim["port"], claim["share"], claim["orphan"]) for claim in verdict["claims"]] == [
        (700, 8001, "0.30", False)
    ]
    assert [(pool["id"], pool["kind"], pool["total_bytes"]) for pool in verdict["pools"]] == [("ram", "unified", 48 * GIB)]


def test_a_reservation_lasts_as_long_as_its_process(mac: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """Without /proc and boot id, the pid and the start that ps tells keep a reservation in force."""
    assert guard.main(["mine", "--gpu-memory-utilization", "0.20"], mac) == OK
    capsys.readouterr()
    from sparkguard import ledger

    with ledger.Ledger(ledger.directory(mac)) as held:
        assert [reservation.name for reservation in held.live()] == ["mine"]
