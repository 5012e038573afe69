"""The sparkguard command beside a real user manager and its journal."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from system.installed import Installed

SPARKGUARD = "/home/spark/.local/bin/sparkguard"
GLUTTON = """
[Service]
ExecStart=/usr/bin/python3 -c 'x = bytearray(200 << 20)'
"""


def run(installed: Installed, *words: str, **env: str) -> tuple[int, Any]:
    """(status, the object)."""
    done = installed.exec([SPARKGUARD, *words, "--json"], env=env)
    return done.returncode, json.loads(done.stdout) if done.stdout else done.stderr


def why(installed: Installed, unit: str) -> tuple[str, str]:
    status, answer = run(installed, "why", unit)
    assert status == 0, answer
    assert answer["unit"] == f"{unit}.service"
    return answer["cause"], "\n".join([answer["message"], *answer["evidence"]])


def test_config_and_check_see_what_the_unit_sees(installed: Installed) -> None:
    """The manager's environment and a drop-in, with blanks and quotes as they are, beat the spec."""
    installed.spec("longcontext", "0.70", 8000)
    installed.drop_in(
        "vllm-longcontext", '[Service]\nEnvironment=VLLM_GPU_MEM_UTIL=0.85 "VLLM_EXTRA_ARGS=--a {\\"b\\": \\"c d\\"}"\n'
    )
    installed.systemctl("set-environment", "VLLM_CPU_SHARE=0.5")
    _, answer = run(installed, "config", "vllm-longcontext")
    rows = {row["key"]: (row["value"], row["origin"]) for row in answer["settings"]}
    origin = "the environment of vllm-longcontext.service"
    assert rows["VLLM_GPU_MEM_UTIL"] == ("0.85", origin)
    assert rows["VLLM_EXTRA_ARGS"] == ('--a {"b": "c d"}', origin)
    assert rows["VLLM_CPU_SHARE"] == ("0.5", origin)
    status, verdict = run(installed, "check", "longcontext")
    assert (status, verdict["reason"], verdict["wanted"]["share"]) == (78, "never_fits", "0.85")


def test_check_is_what_a_start_would_get(installed: Installed) -> None:
    """Beside a running server, and with the Conflicts= peer counted as gone, as its start would find it."""
    installed.spec("embeddings", "0.10", 8001)
    installed.spec("longcontext", "0.70", 8000)
    installed.spec("vision-agent", "0.65", 8000)
    assert installed.start("vllm-embeddings") == installed.start("vllm-vision-agent") == 0
    status, verdict = run(installed, "check", "vllm-longcontext")
    assert (status, verdict["reason"], verdict["pools"][0]["claimed_share"]) == (0, "fits", "0.10")
    installed.drop_in("vllm-longcontext", "[Service]\nEnvironment=VLLM_GPU_MEM_UTIL=0.75\n")
    assert run(installed, "check", "vllm-longcontext")[0] == 75
    assert installed.state("vllm-vision-agent")["ActiveState"] == "active"
    assert installed.start("vllm-longcontext") == 1


def test_plan_knows_the_installed_units(installed: Installed) -> None:
    """Before anything is started: sets, Conflicts=, and a drop-in's share."""
    installed.spec("embeddings", "0.10", 8001)
    installed.spec("longcontext", "0.70", 8000)
    installed.spec("vision-agent", "0.65", 8000)
    installed.spec("my-model", "0.30", 8002)
    installed.drop_in("vllm-longcontext", "[Service]\nEnvironment=VLLM_GPU_MEM_UTIL=0.75\n")
    status, answer = run(installed, "plan")
    names = {unit["unit"].removesuffix(".service"): unit["share"] for unit in answer["units"]}
    assert names == {
        "vllm-embeddings": "0.10",
        "vllm-longcontext": "0.75",
        "vllm-vision-agent": "0.65",
        "vllm-model@my-model": "0.30",
    }
    assert answer["conflicts"] == [["vllm-longcontext.service", "vllm-vision-agent.service"]]
    assert answer["never_together"] == [
        ["vllm-embeddings.service", "vllm-longcontext.service"],
        ["vllm-longcontext.service", "vllm-model@my-model.service"],
        ["vllm-vision-agent.service", "vllm-model@my-model.service"],
    ]
    assert (status, installed.starts()) == (0, [])


def test_why_of_a_refusal(installed: Installed) -> None:
    """The guard's text, by its own record."""
    installed.spec("embeddings", "0.10", 8001)
    installed.spec("longcontext", "0.75", 8000)
    installed.start("vllm-embeddings")
    installed.start("vllm-longcontext")
    cause, text = why(installed, "vllm-longcontext")
    assert cause == "refusal"
    assert "take the GPU-memory total to 0.85, over the 0.80 budget" in text
    assert "or stop vllm-embeddings.service" in text


def test_why_of_bad_configuration(installed: Installed) -> None:
    """A refusal without a verdict is one all the same."""
    installed.spec("longcontext", "75%", 8000)
    installed.start("vllm-longcontext")
    cause, text = why(installed, "vllm-longcontext")
    assert cause == "refusal"
    assert "'75%', which is no share" in text


def kill(installed: Installed) -> None:
    installed.systemctl("kill", "--kill-who=main", "--signal=SEGV", "vllm-embeddings")
    installed.until_state("vllm-embeddings", "Result=signal")


def stop(installed: Installed) -> None:
    installed.systemctl("stop", "vllm-embeddings")


@pytest.mark.parametrize(
    ("end", "cause", "evidence"),
    [(lambda installed: None, "running", "ActiveState=active"), (kill, "signal", "SIGSEGV"), (stop, "stopped", "Stopped")],
    ids=["running", "killed", "stopped"],
)
def test_why_of_a_start_that_was_admitted(
    installed: Installed, end: Callable[[Installed], None], cause: str, evidence: str
) -> None:
    """It runs, was killed, or was stopped; the journal's lines are among the evidence."""
    installed.drop_in("vllm-embeddings", "[Service]\nRestart=no\nRestartForceExitStatus=\n")
    installed.spec("embeddings", "0.10", 8001)
    installed.start("vllm-embeddings")
    installed.until_it_serves(8001)
    end(installed)
    found, text = why(installed, "vllm-embeddings")
    assert found == cause
    assert evidence in text
    assert "embeddings is admitted at 0.10" in text


def test_why_of_a_refusal_that_was_reset(installed: Installed) -> None:
    """After reset-failed systemd knows nothing of it; the record and the journal still do."""
    installed.spec("longcontext", "0.95", 8000)
    installed.start("vllm-longcontext")
    installed.systemctl("reset-failed", "vllm-longcontext")
    cause, text = why(installed, "vllm-longcontext")
    assert cause == "refusal"
    assert "wants --gpu-memory-utilization 0.95" in text


def test_why_of_what_nobody_started(installed: Installed) -> None:
    """A spec that waits for its first start."""
    installed.spec("untouched", "0.10")
    assert why(installed, "vllm-model@untouched")[0] == "never-started"


def test_why_of_nothing(installed: Installed) -> None:
    """Neither unit nor spec is 78."""
    done = installed.exec([SPARKGUARD, "why", "test-nosuch"])
    assert (done.returncode, done.stdout) == (78, "")


def test_doctor_finds_the_manager(installed: Installed) -> None:
    """The user manager answers, the guest's user lingers, and the units' programs start an interpreter that is there."""
    _, answer = run(installed, "doctor")
    checks = {check["id"]: check for check in answer["checks"]}
    assert {checks[id]["ok"] for id in ("user-manager", "linger", "interpreter", "reservations", "settings")} == {True}


def test_why_of_a_kill_for_memory(installed_vm: Installed) -> None:
    """A unit that outgrows its cap: the cap is what the manager and the kernel have, and the cause is oom-kill."""
    installed_vm.write(".config/systemd/user/test-glutton.service", GLUTTON)
    installed_vm.systemctl("daemon-reload")
    _, capped = run(installed_vm, "cap", "test-glutton", "--max", "64M")
    assert capped["configured"] == {"MemoryHigh": "infinity", "MemoryMax": 64 << 20, "MemorySwapMax": 0}
    installed_vm.start("test-glutton")
    installed_vm.until_state("test-glutton", "ActiveState=failed")
    assert why(installed_vm, "test-glutton")[0] == "oom-kill"
