"""What a unit's processes may use: their share of the cores, their memory, and their turn when memory runs out."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from system.installed import STAND_IN

if TYPE_CHECKING:
    from system.installed import Installed

UNIT = "vllm-model@mymodel"
# The kernel's victim must be in the unit, and neither of these.
WITNESS = "systemd-run --user --unit=test-witness --slice=app.slice -- sleep 10000"
# Its subprocess balloons; the stand-in for vLLM does that well.
DAEMON = f"""
[Service]
Type=exec
Environment=STAND_IN_TAKES=1000
ExecStart=/bin/sh -c '{STAND_IN} serve archive --port 8000; echo $? >%h/ended; exec sleep 10000'
"""
EXAMPLE = "examples/vims-server-memcap.conf"
MEMORY_MAX = f"cat /sys/fs/cgroup$(systemctl --user show -P ControlGroup {UNIT})/memory.max"


def of_all(installed: Installed, file: str) -> list[str]:
    """The lines that each process of the unit has in a file of /proc/PID."""
    group = installed.state(UNIT)["ControlGroup"]
    script = f"for pid in $(cat /sys/fs/cgroup{group}/cgroup.procs); do cat /proc/$pid/{file}; done"
    return installed.exec(script, check=True).stdout.splitlines()


def cpus_of(installed: Installed) -> list[str]:
    return [line.split()[1] for line in of_all(installed, "status") if line.startswith("Cpus_allowed_list:")]


def test_server_and_children_stay_on_their_cores(installed: Installed) -> None:
    """By default each process of the unit has the same four fifths of the cores, rounded down, and at least one."""
    installed.spec("mymodel", "0.10")
    installed.systemctl("start", UNIT)
    installed.until_it_serves(8000)
    server, child = cpus_of(installed)
    assert server == child
    told = installed.exec(["/home/spark/.local/bin/vllm_env.sh"], check=True).stdout
    assert told.startswith(f"cpus={server} of ")
    cores = len(os.sched_getaffinity(0))
    allowed = installed.exec(["taskset", "-c", server, "nproc"], check=True).stdout
    assert int(allowed) == max(1, cores * 4 // 5)


def test_a_share_of_1_pins_nothing(installed: Installed) -> None:
    """VLLM_CPU_SHARE=1 by drop-in leaves the server all cores."""
    installed.spec("mymodel", "0.10")
    installed.drop_in(UNIT, "[Service]\nEnvironment=VLLM_CPU_SHARE=1\n")
    installed.systemctl("start", UNIT)
    installed.until_it_serves(8000)
    everything = installed.exec("grep Cpus_allowed_list: /proc/self/status").stdout.split()[1]
    assert cpus_of(installed) == [everything, everything]


def test_inference_goes_first(installed: Installed) -> None:
    """Each process of the unit is in inference.slice, and offered to the OOM killer before the desktop."""
    installed.spec("mymodel", "0.10")
    installed.systemctl("start", UNIT)
    installed.until_it_serves(8000)
    assert installed.state(UNIT)["Slice"] == "inference.slice"
    assert all("/inference.slice/" in line for line in of_all(installed, "cgroup") if line.startswith("0::"))
    assert of_all(installed, "oom_score_adj") == ["500", "500"]


def test_the_example_contains_a_subprocess(installed_vm: Installed) -> None:
    """Under the VIMS example the subprocess that balloons is killed; the daemon and all others live."""
    installed_vm.write(".config/systemd/user/test-vims-server.service", DAEMON)
    folder = "~/.config/systemd/user/test-vims-server.service.d"
    installed_vm.exec(f"mkdir {folder} && cp {EXAMPLE} {folder}/ && systemctl --user daemon-reload && {WITNESS}", check=True)
    installed_vm.systemctl("start", "test-vims-server")
    installed_vm.until("[ -s ~/ended ]")
    assert installed_vm.exec("cat ~/ended").stdout == "137\n"
    state = installed_vm.state("test-vims-server")
    assert (state["ActiveState"], state["Result"], state["NRestarts"]) == ("active", "success", "0")
    assert "oom_kill 1" in installed_vm.exec(["cat", f"/sys/fs/cgroup{state['ControlGroup']}/memory.events"]).stdout
    assert installed_vm.state("test-witness")["ActiveState"] == "active"


def test_a_cap_on_a_model(installed_vm: Installed) -> None:
    """`sparkguard cap` has the kernel kill all of a unit that goes over it, and nothing else; --revert is in force at once."""
    cap = f"/home/spark/.local/bin/sparkguard cap {UNIT}"
    installed_vm.conf(SPARK_MEMORY_RESERVE_MB="0")
    installed_vm.spec("mymodel", "0.10", 8000, STAND_IN_TAKES="700")
    installed_vm.exec(f"{WITNESS} && {cap} --high 25% --max 30%", check=True)
    assert installed_vm.start(UNIT) == 0
    state = installed_vm.until_state(UNIT, "SubState=auto-restart")
    assert state["Result"] == "oom-kill"
    assert installed_vm.exec(["pgrep", "-f", "fakes/vllm serve"]).stdout == ""
    assert installed_vm.state("test-witness")["ActiveState"] == "active"

    installed_vm.systemctl("stop", UNIT)
    installed_vm.exec(f"{cap} --max 1G", check=True)
    assert installed_vm.start(UNIT) == 0
    installed_vm.until_it_serves(8000)
    assert installed_vm.exec(MEMORY_MAX).stdout == f"{1 << 30}\n"
    installed_vm.exec(f"{cap} --revert", check=True)
    assert installed_vm.exec(MEMORY_MAX).stdout == "max\n"
