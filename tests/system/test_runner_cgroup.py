"""A cgroup for each runner, in a real delegated unit of a real user manager."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from guest import REPOSITORY

if TYPE_CHECKING:
    from guest import Guest

# Two runners that take 200 MB: one may have 50, the other what it wants.
SCRIPT = f"""
import os, subprocess, sys
sys.path.insert(0, {str(REPOSITORY)!r})
from sparkguard.supervisor.cgroup import Cgroups
groups = Cgroups()
print(groups.reason)
for name, cap in (("small", 50 << 20), ("large", None)):
    path = groups.make(name, cap)
    take = f"open({{path!r}} + '/cgroup.procs', 'w').write('0'); x = bytearray(200 << 20); print('took it')"
    done = subprocess.run([sys.executable, "-c", take], capture_output=True, text=True)
    print(name, done.returncode, done.stdout.strip(), groups.killed_for_memory(path))
    sleeper = subprocess.Popen(["setsid", "sleep", "1000"], preexec_fn=lambda: open(path + "/cgroup.procs", "w").write("0"))
    groups.kill(path)
    print(sleeper.wait())
    groups.remove(path)
    print(os.path.exists(path))
"""


def test_a_cap_kills_the_runner_alone(fresh_vm: Guest) -> None:
    """The one that takes more than its cap dies of it, and the kernel says so; what left the session ends with its cgroup."""
    unit = "systemd-run --user --quiet --pipe --wait -p Delegate='memory pids' -p MemorySwapMax=0"
    done = fresh_vm.exec(f"{unit} -- /usr/bin/python3 -c {shlex.quote(SCRIPT)}", timeout=60)
    assert done.stdout.splitlines() == [
        "None", "small -9  True", "-9", "False", "large 0 took it False", "-9", "False"
    ], done.stderr  # fmt: skip
