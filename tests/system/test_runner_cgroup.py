"""A cgroup for each runner, in a real delegated unit of a real user manager."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from system.installed import HOME

if TYPE_CHECKING:
    from system.installed import Installed

# The package in the VM's own disk: a module read from the host's folder was once closed under the reader (EBADF).
PYTHON = f"{HOME}/.local/share/sparkguard/venv/bin/python"
# Two runners that take 200 MB: one may have 50, the other what it wants.
SCRIPT = """
import os, subprocess, sys
from sparkguard.supervisor.cgroup import Cgroups
groups = Cgroups()
print(groups.reason)
for name, cap in (("small", 50 << 20), ("large", None)):
    path = groups.make(name, cap)
    take = f"open({path!r} + '/cgroup.procs', 'w').write('0'); x = bytearray(200 << 20); print('took it')"
    done = subprocess.run([sys.executable, "-c", take], capture_output=True, text=True)
    print(name, done.returncode, done.stdout.strip(), groups.killed_for_memory(path))
    sleeper = subprocess.Popen(["setsid", "sleep", "1000"], preexec_fn=lambda: open(path + "/cgroup.procs", "w").write("0"))
    groups.kill(path)
    print(sleeper.wait())
    groups.remove(path)
    print(os.path.exists(path))
"""


def test_a_cap_kills_the_runner_alone(installed_vm: Installed) -> None:
    """The one that takes more than its cap dies of it, and the kernel says so; what left the session ends with its cgroup."""
    unit = "systemd-run --user --quiet --pipe --wait -p Delegate='memory pids' -p MemorySwapMax=0"
    done = installed_vm.exec(f"{unit} -- {PYTHON} -I -c {shlex.quote(SCRIPT)}", timeout=60)
    assert done.stdout.splitlines() == [
        "None", "small -9  True", "-9", "False", "large 0 took it False", "-9", "False"
    ], done.stderr  # fmt: skip
