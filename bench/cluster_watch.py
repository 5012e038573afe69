"""What watching costs: the node's processor, this laptop's processor and memory, and the disk that a day of history takes.

    .venv/bin/python bench/cluster_watch.py            all three, about two minutes
    .venv/bin/python bench/cluster_watch.py --day      only the day of history

The samplers are real ones, with this machine's /proc and /sys, started by the same text that ssh would carry; an nvidia-smi of a
few lines stands in their PATH, so that its own cost is apart. The figures of one GPU are as a GB10 gives them. Prints a table;
asserts nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from sparkguard.cluster.program import BOOT, MARKER, payload
from sparkguard.cluster.watch import history
from sparkguard.cluster.watch.history import values_of
from sparkguard.cluster.watch.picture import Found, Watch

ROW = "0, NVIDIA GB10, 37, 61, 45.20, 2405, 3003, [N/A], [N/A], P0, 0x0000000000000004"
SMI = f'case "$1" in *compute*) exit 0 ;; esac\nwhile echo "{ROW}"; do sleep "$(echo "$3" | cut -d= -f2)e-3"; done'
DOCKER = "exit 0"
NAMES = ("head", "worker")


class Local:
    """A sampler without ssh between."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        programs = folder / "bin"
        programs.mkdir(parents=True)
        for program, text in {
            "nvidia-smi": SMI,
            "docker": DOCKER,
        }.items():
            (programs / program).write_text(f"#!/bin/sh\n{text}\n")
            (programs / program).chmod(0o755)
        self._environment = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(folder), "SPARK_SERVE_STATE_DIR": str(folder)}
        self.lines = 0
        self.line_bytes = 0

    async def stream(self, program: str, request: dict[str, Any], *, quiet_seconds: float) -> AsyncIterator[dict[str, Any]]:
        pipe = asyncio.subprocess.PIPE
        command = BOOT.replace("python3", sys.executable, 1)
        process = await asyncio.create_subprocess_exec(
            "/bin/sh", "-c", command, stdin=pipe, stdout=pipe, env=self._environment, start_new_session=True, limit=1 << 22
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(payload(program, request, None, None, None))
            await process.stdout.readuntil(MARKER)
            while line := await process.stdout.readline():
                self.lines += 1
                self.line_bytes += len(line)
                yield json.loads(line)["reply"]
        finally:
            process.stdin.close()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def watched(folder: Path, interval: float, seconds: float) -> dict[str, float]:
    """Shares of one core that the sampler took, and what this process did, over so many seconds once all is under way."""
    links = {name: Local(name, folder / name) for name in NAMES}
    watch = Watch(links, lambda: Found(()), folder, interval)
    kept = history.writer(folder)
    assert kept is not None
    shares: list[float] = []
    own = began = 0.0
    async with aclosing(watch.ticks()) as ticks:
        async for tick in ticks:
            kept.add(time.time_ns() // 1_000_000, values_of(tick))
            if not began and all(node["sampler_cpu_percent"] is not None for node in tick["nodes"]):
                began, own = time.monotonic(), _cpu()
                continue
            if began:
                shares += [node["sampler_cpu_percent"] for node in tick["nodes"] if node["sampler_cpu_percent"] is not None]
                if time.monotonic() - began >= seconds:
                    break
    kept.close()
    passed = time.monotonic() - began
    return {
        "sampler": sum(shares) / len(shares),
        "line": sum(link.line_bytes for link in links.values()) / sum(link.lines for link in links.values()),
        "own": (_cpu() - own) / passed,
    }


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def day(folder: Path) -> None:
    """Two Sparks and two models at 2 s, 26 hours: a day as seen, and what is rolled up meanwhile."""
    from spark_tree import Tree

    from sparkguard.cluster.node.host import Host
    from sparkguard.cluster.watch.node_samples import NodeSamples

    clock = [0.0]
    tree = Tree(folder / "spark")
    host = Host(str(tree.proc), str(tree.sys))
    samples = {name: NodeSamples(name, 2.0, lambda: clock[0]) for name in NAMES}
    gpu = {"utilization_percent": 96.0, "celsius": 61.0, "watts": 45.0, "sm_mhz": 2405.0, "reasons": 4}
    for its in samples.values():
        its.line({"hello": host.about()})
        for second in (0.0, 2.0):
            clock[0] += 1.0
            tree.count(second)
            told = {"gpus": [gpu], "gpu_error": None, "steady_s": clock[0], "cost": {"own_s": clock[0], "children_s": 0.0}}
            its.line({"tick": {**host.quick(), **told}, "slow": host.slow([])})
    nodes = values_of({"nodes": [its.view() for its in samples.values()], "allocations": []})
    names = [f"{which}_{what}_s" for which in ("ttft", "itl", "e2e") for what in ("mean", "p50", "p95", "p99")]
    model: dict[str, float | None] = dict.fromkeys((*history._ENGINE, *names, "ready"), 1.0)
    values = {**nodes, "model/a/head": model, "model/b/worker": model}
    kept = history.writer(folder)
    assert kept is not None
    chance = random.Random(1)
    begin, worst = 1_800_000_000_000, 0.0
    started = time.monotonic()
    for tick in range(26 * 1800):
        now = {who: _shaken(its, chance) for who, its in values.items()}
        before = time.perf_counter()
        kept.add(begin + tick * 2000, now)
        worst = max(worst, time.perf_counter() - before)
    kept.close()
    size = sum((folder / name).stat().st_size for name in os.listdir(folder) if name.startswith(history.FILE))
    series = sum(len(its) for its in values.values())
    print(f"# history: 2 nodes and 2 models, {series} values each 2 s, for 26 h")
    print(f"size                        {size / 1e6:8.1f} MB")
    mean = (time.monotonic() - started) / (26 * 1800)
    print(f"one tick is written in      {mean * 1e3:8.2f} ms on average, {worst * 1e3:.0f} ms at worst")
    reader = history.reader(folder)
    assert reader is not None
    end = begin + 26 * 3600_000
    for hours in (1, 24):
        before = time.perf_counter()
        reader.read("node/head", end - hours * 3600_000, end)
        print(f"{hours:3} h of a node is read in   {(time.perf_counter() - before) * 1e3:8.0f} ms")
    reader.close()


def _shaken(values: dict[str, float | None], chance: random.Random) -> dict[str, float | None]:
    return {name: None if value is None else value * chance.random() for name, value in values.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30, help="of watching, for each interval (default 30)")
    parser.add_argument("--day", action="store_true", help="only the day of history")
    options = parser.parse_args()
    if not options.day:
        python = sys.version.split()[0]
        print(f"# 2 nodes, {os.cpu_count()} cores, {options.seconds:g} s each, Python {python}; nvidia-smi's own cost apart")
        print("interval   sampler, of a core   a line   watch, of a core")
        for interval in (0.25, 1.0, 2.0):
            with tempfile.TemporaryDirectory() as folder:
                found = asyncio.run(watched(Path(folder), interval, options.seconds))
            print(f"{interval:6} s   {found['sampler']:13.2f}%   {found['line']:8.0f} B   {found['own']:12.2%}")
        print(f"peak RSS of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")
    with tempfile.TemporaryDirectory() as folder:
        day(Path(folder))


if __name__ == "__main__":
    main()
