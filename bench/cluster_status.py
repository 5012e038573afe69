"""How long a look at two nodes takes over warm connections, and what it costs them. Needs root and sshd: tests/cluster_rig.

    python bench/cluster_status.py [--rounds N]

The nodes are namespaces of this machine, so the times hold no network, and both ends share its processors. docker and nvidia-smi
are the rig's, started as often as the real ones would be; a real `docker ps` costs about 180 ms on a Spark by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from cluster_laptop import Laptop
from cluster_rig import Rig, why_not

from sparkguard.cluster.observe import look
from sparkguard.cluster.ssh import Fleet


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder, Rig(Path(folder) / "rig") as rig:
        looks, cpu = asyncio.run(looking(rig, Path(folder) / "state", rounds))
        logins = [login(rig) for _ in range(max(3, rounds // 4))]
        laptop = Laptop(rig, Path(folder) / "laptop")
        whole_command(laptop)
        command = [whole_command(laptop) for _ in range(max(3, rounds // 4))]
    warm, plain = statistics.median(looks), statistics.median(logins)
    spread = f"(least {min(looks):.0f}, p95 {sorted(looks)[int(len(looks) * 0.95)]:.0f})"
    print(f"{'a look at two nodes, warm':<44}{warm:>8.0f} ms   {spread}")
    print(f"{'its processor time, both ends and both nodes':<44}{cpu:>8.0f} ms")
    print(f"{'`ssh node true` twice, one login each':<44}{plain:>8.0f} ms")
    print(f"{'`spark-serve status --json`, warm':<44}{statistics.median(command):>8.0f} ms")
    print(f"{'a warm look to two plain logins':<44}{warm / plain:>8.2f}")
    return 0


async def looking(rig: Rig, state: Path, rounds: int) -> tuple[list[float], float]:
    """Milliseconds of each look, and the processor's milliseconds of one, of this machine, which is all of them."""
    times = []
    async with Fleet(rig.nodes(), rig.ssh_opts, str(state), linger_seconds=0) as fleet:
        await look(fleet)
        before = busy(rig)
        for _ in range(rounds):
            started = time.perf_counter()
            views = await look(fleet)
            times.append((time.perf_counter() - started) * 1000)
            assert all(view.error is None for view in views.values()), views
        spent = busy(rig) - before
    return times, spent / rounds * 1000


def busy(rig: Rig) -> float:
    """Seconds that this process, its children, its masters and the nodes' sshds have computed so far; what has ended on a node
    counts with the sshd that waited for it."""
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        used = resource.getrusage(who)
        total += used.ru_utime + used.ru_stime
    masters = subprocess.run(
        ["pgrep", "-f", f"ssh .*-MNf.*{rig.folder}"], capture_output=True, text=True, check=False
    ).stdout.split()
    pids = [*masters, *(str(pid) for node in rig for pid in node.pids())]
    for pid in pids:
        try:
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(int(word) for word in words[11:15]) / os.sysconf("SC_CLK_TCK")
    return total


def login(rig: Rig) -> float:
    started = time.perf_counter()
    for node in rig:
        subprocess.run(["ssh", *rig.ssh_opts, "-o", "BatchMode=yes", node.name, "true"], check=True, stdin=subprocess.DEVNULL)
    return (time.perf_counter() - started) * 1000


def whole_command(laptop: Laptop) -> float:
    """The command from its start to its end: Python's start and its imports too."""
    started = time.perf_counter()
    done = laptop.run("status", "--json")
    assert done.returncode == 0, done.stderr
    return (time.perf_counter() - started) * 1000


if __name__ == "__main__":
    sys.exit(main())
