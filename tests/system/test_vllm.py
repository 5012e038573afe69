"""A real vLLM: counted once at all times, kept to its cores, restarted when it breaks, and found when it is an orphan."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from system.installed import HOME

if TYPE_CHECKING:
    from pathlib import Path

    from system.installed import Installed

UNIT = "vllm-model@tiny"
PORT = 8123
LOADING_SECONDS = 240  # 25 on an idle machine
GROUP = f"/sys/fs/cgroup$(systemctl --user show -P ControlGroup {UNIT})"
ENGINE = "pgrep -u spark -f '^VLLM::EngineCore'"
# The manager forgets how the server ended when it starts the next one.
DROP_IN = "[Service]\nRestartSec=50ms\nExecStopPost=/bin/sh -c 'echo $(printenv EXIT_CODE EXIT_STATUS) >>%h/ends'\n"
FIELDS = ("engine", "share", "port", "unit", "source", "orphan")


@pytest.fixture
def real(installed: Installed, vllm: Path, tiny_model: Path) -> Installed:
    """The spec `tiny` runs the real vLLM, with a bounded KV cache; the memory is this machine's."""
    installed.this_machines_memory()
    installed.conf(VLLM_BIN=str(vllm / "bin" / "vllm"), SPARK_MEMORY_RESERVE_MB="0")
    installed.spec(
        "tiny",
        "0.20",
        PORT,
        VLLM_MODEL=str(tiny_model),
        VLLM_EXTRA_ARGS="--enforce-eager --max-model-len 128 --max-num-seqs 4",
        VLLM_CPU_KVCACHE_SPACE="1",
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
    )
    installed.drop_in(UNIT, DROP_IN)
    return installed


def claims(real: Installed, pid: int) -> None:
    """Another start sees exactly one claim, the unit's, and is refused when both are too much."""
    status, verdict = real.guard("other", "--gpu-memory-utilization", "0.61")
    assert (status, verdict["reason"]) == (75, "over_budget")
    assert [{key: claim[key] for key in ("pid", *FIELDS)} for claim in verdict["claims"]] == [
        {
            "pid": pid,
            "engine": "vllm",
            "share": "0.20",
            "port": PORT,
            "unit": f"{UNIT}.service",
            "source": "argument",
            "orphan": False,
        }
    ]


def test_a_real_vllm_in_a_unit(real: Installed) -> None:
    """From its first second on it is one claim, on its cores; either half that dies takes the other along and is replaced."""
    real.systemctl("start", UNIT)
    first = int(real.state(UNIT)["MainPID"])
    claims(real, first)
    real.until_it_serves(PORT, timeout=LOADING_SECONDS)
    claims(real, first)

    processes = real.exec(f"for pid in $(cat {GROUP}/cgroup.procs); do tr '\\0' ' ' </proc/$pid/cmdline; echo; done").stdout
    assert "VLLM::EngineCore" in processes
    allowed = real.exec(f"for pid in $(cat {GROUP}/cgroup.procs); do grep Cpus_allowed_list /proc/$pid/status; done").stdout
    cpus = real.exec([f"{HOME}/.local/bin/vllm_env.sh"]).stdout.split()[0].removeprefix("cpus=")
    assert {line.split()[1] for line in allowed.splitlines()} == {cpus}
    environ = real.exec(["cat", f"/proc/{first}/environ"]).stdout.split("\0")
    assert "VLLM_CPU_KVCACHE_SPACE=1" in environ
    assert not any(line.startswith(("VLLM_PORT=", "VLLM_GPU_MEM_UTIL=", "NOTIFY_SOCKET=")) for line in environ)

    real.exec(f"kill -KILL $({ENGINE})", check=True)
    second = int(real.until_state(UNIT, "NRestarts=1", "ActiveState=active", timeout=60)["MainPID"])
    claims(real, second)

    real.until(ENGINE, timeout=LOADING_SECONDS)
    engine = real.exec(ENGINE).stdout.split()[0]
    real.exec(["kill", "-KILL", str(second)], check=True)
    third = int(real.until_state(UNIT, "NRestarts=2", "ActiveState=active")["MainPID"])
    assert real.exec(["test", "-e", f"/proc/{engine}"]).returncode == 1
    claims(real, third)
    assert real.exec("cat ~/ends").stdout == "exited 0\nkilled KILL\n"

    real.systemctl("stop", UNIT)
    assert real.exec("pgrep -u spark -f vllm").stdout == ""


def test_an_orphaned_engine(real: Installed) -> None:
    """The engine of a server killed outside a unit holds its memory: starts are refused until the told command is run."""
    shell = f"systemd-run --user --scope --unit=test-shell -- {HOME}/.local/bin/vllm-serve.sh tiny >~/log 2>&1 &"
    real.exec(shell, check=True)
    real.until_it_serves(PORT, timeout=LOADING_SECONDS)
    engine = int(real.exec(ENGINE).stdout.split()[0])
    _, verdict = real.guard("other", "--gpu-memory-utilization", "0.61")
    server = verdict["claims"][0]["pid"]
    assert (verdict["reason"], len(verdict["claims"]), server != engine) == ("over_budget", 1, True)

    real.exec(["kill", "-KILL", str(server)], check=True)
    real.until(f"! [ -e /proc/{server} ]")
    status, verdict = real.guard("other", "--gpu-memory-utilization", "0.10")
    assert (status, verdict["reason"]) == (75, "orphan")
    assert [(claim["pid"], claim["orphan"]) for claim in verdict["claims"]] == [(engine, True)]
    told = f"end it: kill {engine}"
    assert told in verdict["hint"]

    real.exec(told.partition(": ")[2], check=True)
    real.until("! pgrep -u spark -f '^VLLM::'")
    assert real.guard("other", "--gpu-memory-utilization", "0.10")[0] == 0
