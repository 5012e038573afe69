"""Twenty starts at once: never more than the budget, and never fewer than fit."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from system.installed import Installed

STARTS, FIT = 20, 8  # at 0.10 each, under 0.80
START_ALL = f"""
for i in {{1..{STARTS}}}; do (systemctl --user start vllm-model@m$i 2>/dev/null; echo $?) & done
wait
"""


def test_twenty_starts_at_once(installed: Installed) -> None:
    """Exactly eight of twenty are admitted, three times in a row, each time at once after all were stopped."""
    for i in range(1, STARTS + 1):
        installed.spec(f"m{i}", "0.10", 8100 + i)
    for _ in range(3):
        statuses = installed.exec(START_ALL).stdout.split()
        assert sorted(statuses) == ["0"] * FIT + ["1"] * (STARTS - FIT)
        status, verdict = installed.guard("one-more", "--gpu-memory-utilization", "0.01")
        assert (status, verdict["reason"]) == (75, "over_budget")
        assert verdict["pools"][0]["claimed_share"] == "0.80"
        units = [claim["unit"] for claim in verdict["claims"]]
        assert len(set(units)) == FIT
        assert all(re.fullmatch(r"vllm-model@m\d+\.service", unit) for unit in units)
        installed.systemctl("stop", "vllm-model@*")
        assert installed.reservations() == []
        installed.systemctl("reset-failed")


def test_a_restart_does_not_count_itself(installed: Installed) -> None:
    """One server with the whole budget is restarted at once: its former self is not in its way."""
    installed.spec("m1", "0.80", 8101)
    installed.systemctl("start", "vllm-model@m1")
    for _ in range(3):
        installed.systemctl("restart", "vllm-model@m1")
    assert installed.state("vllm-model@m1")["ActiveState"] == "active"


def test_a_killed_guard_blocks_nobody(installed: Installed) -> None:
    """A start whose guard was killed, and that systemd will repeat, leaves the whole budget to the next one."""
    installed.spec("m1", "0.80", 8101)
    installed.spec("m2", "0.80", 8102)
    installed.conf(VLLM_MEM_WAIT="1000")
    installed.memory(available_gib=10)
    installed.systemctl("start", "--no-block", "vllm-model@m1")
    installed.until("systemctl --user show -P StatusText vllm-model@m1 | grep 'm1 waits up to 1000 s for'")
    installed.systemctl("kill", "--signal=KILL", "vllm-model@m1")
    installed.until_state("vllm-model@m1", "SubState=auto-restart")
    installed.memory(available_gib=118)
    assert installed.start("vllm-model@m2") == 0
