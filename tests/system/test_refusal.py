"""A refusal under systemd: `start` fails, the reason is where people look, and nothing was started."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from system.installed import Installed


def test_start_fails_and_says_why(installed: Installed) -> None:
    """A start over the budget: systemctl returns 1, the unit's status and record have the reason, and no server ran."""
    installed.spec("embeddings", "0.10", 8001)
    installed.spec("longcontext", "0.75", 8000)
    assert installed.start("vllm-embeddings") == 0

    done = installed.guest.systemctl("start", "vllm-longcontext")

    assert done.returncode == 1
    assert "Job for vllm-longcontext.service failed" in done.stderr
    state = installed.state("vllm-longcontext")
    assert (state["ActiveState"], state["Result"], state["NRestarts"]) == ("failed", "exit-code", "0")
    assert state["ExecMainPID"] == "0"
    assert "status=75" in state["ExecStartPre"]
    reason = (
        "refused: longcontext wants --gpu-memory-utilization 0.75, which would "
        "take the GPU-memory total to 0.85, over the 0.80 budget."
    )
    assert state["StatusText"] == reason
    assert f'Status: "{reason}"' in installed.guest.systemctl("status", "vllm-longcontext").stdout
    assert installed.starts() == ["serve org/embeddings --port 8001 --gpu-memory-utilization 0.10"]


def test_the_record_of_a_refusal(installed: Installed) -> None:
    """The record names the holder by pid, port, share and unit, in the FATAL text and in the object alike."""
    installed.spec("embeddings", "0.10", 8001)
    installed.spec("longcontext", "0.75", 8000)
    installed.start("vllm-embeddings")
    pid = int(installed.state("vllm-embeddings")["MainPID"])

    installed.start("vllm-longcontext")

    record = installed.refusal("vllm-longcontext")
    assert record is not None
    assert (record["unit"], record["verdict"], record["reason"]) == ("vllm-longcontext.service", "refused", "over_budget")
    assert record["invocation"] == installed.state("vllm-longcontext")["InvocationID"]
    claim = record["claims"][0]
    assert (claim["pid"], claim["unit"], claim["port"], claim["share"]) == (pid, "vllm-embeddings.service", 8001, "0.10")
    assert f"Already reserved (0.10):\n  pid {pid} port 8001 at 0.10 vllm-embeddings.service\n" in record["text"]
    assert re.search(r"the largest share that fits now is 0\.70\b.*: VLLM_GPU_MEM_UTIL=0\.70\n", record["text"])
    assert "systemctl --user stop 'vllm-embeddings.service'" in record["text"]


def test_a_refusal_leaves_no_reservation(installed: Installed) -> None:
    """What a refused start wanted is free for the next one."""
    installed.spec("one", "0.85", 8001)
    installed.spec("two", "0.80", 8002)
    assert installed.start("vllm-model@one") == 1
    assert installed.reservations() == []
    assert installed.start("vllm-model@two") == 0


def test_what_can_never_fit(installed: Installed) -> None:
    """A share above the budget is refused with 78, as configuration, whoever runs."""
    installed.spec("longcontext", "0.95", 8000)
    assert installed.start("vllm-longcontext") == 1
    state = installed.state("vllm-longcontext")
    assert "status=78" in state["ExecStartPre"]
    assert state["StatusText"].startswith("refused: longcontext wants --gpu-memory-utilization 0.95, ")
    assert installed.starts() == []


def test_a_fresh_install_names_the_line_to_edit(installed: Installed) -> None:
    """A unit whose spec names no model is refused with 78, and its status tells the file and the line."""
    assert installed.start("vllm-embeddings") == 1
    state = installed.state("vllm-embeddings")
    assert "status=78" in state["ExecStartPre"]
    assert state["StatusText"] == (
        "refused: no model is set for embeddings; "
        "add a line to /home/spark/.config/spark/models/embeddings.env: VLLM_MODEL=a folder, or a hub id"
    )


def test_no_vllm_to_start(installed: Installed) -> None:
    """A VLLM_BIN that is not there is seen before the start: 127, and the status tells the setting to change."""
    installed.conf(VLLM_BIN="/nowhere/vllm")
    installed.spec("mymodel", "0.10", 8001)
    assert installed.start("vllm-model@mymodel") == 1
    state = installed.state("vllm-model@mymodel")
    assert "status=127" in state["ExecStartPre"]
    assert re.fullmatch(r"refused: /nowhere/vllm was not found .*; set VLLM_BIN in .*/spark/spark.conf", state["StatusText"])


def test_the_journal_has_it(installed: Installed) -> None:
    """The whole FATAL text is in the user's journal, once."""
    installed.spec("longcontext", "0.95", 8000)
    installed.start("vllm-longcontext")
    # By the process: the journal does not always know the unit of one that ended at once.
    pid = re.search(r"pid=(\d+)", installed.state("vllm-longcontext")["ExecStartPre"])
    assert pid is not None
    installed.until(f"journalctl --user -o cat _PID={pid[1]} | grep 'can never be admitted'")
    text = installed.exec(["journalctl", "--user", "-o", "cat", f"_PID={pid[1]}"]).stdout
    assert text.count("FATAL: longcontext wants --gpu-memory-utilization 0.95") == 1
