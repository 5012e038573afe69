"""The rig itself: its machines are apart, can fail, and leave nothing on this one."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_rig import Rig, why_not

HERE = Path(__file__).parents[1]


def interfaces(prefix: str) -> list[str]:
    return [name for name in os.listdir("/sys/class/net") if name.startswith(prefix)]


def test_its_nodes_are_machines_of_their_own(rig: Rig) -> None:
    """Each has its own name, boot, home, processes and interfaces."""
    for node in rig:
        assert node.run("uname", "-n").stdout.strip() == node.name
        assert node.run("cat", "/proc/sys/kernel/random/boot_id").stdout.strip() == node.boot_id
        assert "121" in node.run("sh", "-c", "awk '/MemTotal/ {print int($2 / 1048576)}' /proc/meminfo").stdout
        assert set(node.run("ls", "/sys/class/net").stdout.split()) >= {"lan0", "enp1s0f1np1", "enP2p1s0f1np1"}
        assert len(node.run("ls", "/proc").stdout.split()) < 200
    assert rig.node("head").boot_id != rig.node("worker").boot_id


def test_a_reboot_ends_everything_on_it(rig: Rig) -> None:
    """Containers are exited afterwards, as docker leaves those without a restart policy, and the boot is another."""
    head = rig.node("head")
    head.docker("run", "-d", "--name", "x", "vllm/vllm-openai:v0.30.0", "serve", "m")
    before = head.boot_id
    head.reboot()
    assert head.is_up.wait(30)
    assert head.boot_id != before
    assert head.docker("inspect", "--format", "{{.State.Status}}", "x") == "exited"


@pytest.mark.skipif(why_not() is not None, reason=f"NOT RUN: {why_not()}")
def test_a_killed_test_run_leaves_nothing(tmp_path: Path) -> None:
    """After kill -9 of the process that made it, its namespaces, processes and interfaces are gone."""
    script = (
        f"import sys\nsys.path.insert(0, {str(HERE)!r})\nfrom pathlib import Path\nfrom cluster_rig import Rig\n"
        f"with Rig(Path({str(tmp_path / 'rig')!r})) as rig:\n"
        "    rig.node('head').docker('run', '-d', '--name', 'x', 'vllm/vllm-openai:v0.30.0', 'serve', 'm')\n"
        "    print(*(node.init_pid for node in rig), flush=True)\n    sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        ends = [os.pidfd_open(int(pid)) for pid in run.stdout.readline().split()]
        assert len(ends) == 2 and len(interfaces(f"sg{run.pid}n")) == 2
        run.send_signal(signal.SIGKILL)
        run.wait()
        for end in ends:
            assert select.select([end], [], [], 20)[0], "a node outlived its test run"
            os.close(end)
    # The kernel ends a network a moment after its last process; a new one can only be added when it has.
    deadline = select.poll()
    while interfaces(f"sg{run.pid}n"):
        deadline.poll(20)
