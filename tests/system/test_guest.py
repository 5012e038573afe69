"""The guests are what the other system tests take them for."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from guest import REPOSITORY

if TYPE_CHECKING:
    from pathlib import Path

    from guest import Guest

SLEEPER = """
mkdir -p ~/.config/systemd/user
printf '[Service]\\nType=exec\\nExecStart=/bin/sleep 1000\\n' >~/.config/systemd/user/test-sleeper.service
systemctl --user daemon-reload
systemctl --user start test-sleeper
"""
# Larger than its cap, in a page after the other: the kernel kills it while it still grows.
GLUTTON = "/usr/bin/python3 -c 'x = bytearray(200 << 20)'"


def test_the_user_manager_answers(fresh_guest: Guest) -> None:
    """The user spark has a running manager of their own."""
    assert fresh_guest.systemctl("is-system-running").stdout.strip() == "running"


def test_a_unit_starts(fresh_guest: Guest) -> None:
    """systemctl --user starts a unit from the user's home."""
    fresh_guest.exec(SLEEPER, check=True)
    assert fresh_guest.show("test-sleeper", "ActiveState") == "active"


def test_fresh_leaves_nothing(guest: Guest) -> None:
    """After fresh() units, their files, stray processes and the manager's variables of a test are gone."""
    guest.exec(SLEEPER + "systemctl --user set-environment VLLM_MEM_BUDGET=0.5; setsid sleep 1000 & touch ~/.x", check=True)
    guest.fresh()
    assert guest.show("test-sleeper", "LoadState") == "not-found"
    assert guest.exec("ls -A").returncode == 0
    assert guest.exec("ls -A ~; pgrep -u spark -x sleep; systemctl --user show-environment | grep VLLM").stdout == ""


def test_exec_hands_over_everything(guest: Guest) -> None:
    """A command's input, variables, both outputs and status pass unchanged."""
    done = guest.exec('cat; echo "$WORD" >&2; exit 7', stdin="ä\n", env={"WORD": "two words 'quoted'"})
    assert (done.returncode, done.stdout, done.stderr) == (7, "ä\n", "two words 'quoted'\n")


def test_commands_run_side_by_side(guest: Guest) -> None:
    """A second command need not wait for the first: one of them waits for the other here."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor() as pool:
        reader = pool.submit(guest.exec, "until [ -e $GUEST_OUT/pipe ]; do :; done; cat $GUEST_OUT/pipe", timeout=20)
        guest.exec("mkfifo $GUEST_OUT/pipe; echo through > $GUEST_OUT/pipe", timeout=20, check=True)
        assert reader.result().stdout == "through\n"


def test_what_spark_can_reach(guest: Guest) -> None:
    """The user reads the repository and Python, and neither root's home nor the network."""
    assert guest.exec(["test", "-r", str(REPOSITORY / "pyproject.toml")]).returncode == 0
    assert guest.exec(["/usr/bin/python3", "-I", "-c", "pass"]).returncode == 0
    assert guest.exec(["ls", "/root"]).returncode == 2
    assert guest.exec("grep -v 'lo:' /proc/net/dev | wc -l").stdout.strip() == "2"  # its two lines of heading


def test_the_host_is_untouched(guest: Guest) -> None:
    """What a command writes outside the share stays in the guest."""
    mark = f"/var/tmp/sparkguard-guest-{os.getpid()}"
    guest.exec(["touch", mark], check=True)
    assert not os.path.exists(mark)


def test_a_cap_kills_inside_the_unit(fresh_vm: Guest) -> None:
    """In the VM a unit over its MemoryMax= is killed by the kernel, and what runs beside it lives."""
    fresh_vm.exec(SLEEPER, check=True)
    fresh_vm.exec(f"systemd-run --user --unit=test-glutton -p MemoryMax=64M -p MemorySwapMax=0 -- {GLUTTON}", check=True)
    fresh_vm.until("[ $(systemctl --user show -P ActiveState test-glutton) = failed ]")
    assert fresh_vm.show("test-glutton", "Result") == "oom-kill"
    assert fresh_vm.show("test-sleeper", "ActiveState") == "active"
    assert fresh_vm.systemctl("is-system-running").stdout.strip() == "degraded"


def test_the_vm_has_pressure_and_controllers(vm: Guest) -> None:
    """In the VM the user's part of the cgroup tree has the controllers that caps need, and memory pressure can be read."""
    own = "/sys/fs/cgroup/user.slice/user-6666.slice/user@6666.service"
    assert {"cpu", "cpuset", "memory", "pids"} <= set(vm.exec(["cat", f"{own}/cgroup.controllers"]).stdout.split())
    assert vm.exec(["cat", f"{own}/memory.pressure"]).stdout.startswith("some avg10=")


def test_the_wheels_suffice(fresh_guest: Guest, wheels: Path) -> None:
    """The checkout installs in the guest, which has no network, from the kept wheels alone."""
    script = f"""
    /usr/bin/python3 -m venv ~/venv
    ~/venv/bin/pip install --quiet --no-index --find-links {wheels} {REPOSITORY}
    ~/venv/bin/python -I -c 'import sparkguard, click, psutil, pynvml'
    """
    assert fresh_guest.exec(f"set -e\n{script}", timeout=120).stderr == ""
