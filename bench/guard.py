"""Speed and size of the guard, from exec to verdict, beside its peers in the same run: `make bench`.

Every figure is a whole process as its caller sees it. The contenders take turns, so that a slow moment of the machine hits
all of them; ratios are of the pairs of one turn. Prints a table; asserts nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
GUARD = "import sys; from sparkguard.guard import main; sys.exit(main(sys.argv[1:]))"
ASKED = ["bench", "--gpu-memory-utilization", "0.10"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=41, help="turns at 300 processes (default 41)")
    parser.add_argument("--many", type=int, default=10_000, help="processes of the second part (default 10000; 0: leave it out)")
    options = parser.parse_args()
    python = sys.executable
    with tempfile.TemporaryDirectory() as folder:
        environment = {"PATH": os.environ["PATH"], "HOME": folder, "XDG_RUNTIME_DIR": folder}
        bash = {
            "guard": [python, "-I", "-c", GUARD, *ASKED],
            "python -I -c pass": [python, "-I", "-c", "pass"],
            "plain bash sum": [str(HERE / "plain_sum.sh"), "0.10"],
        }
        with Crowd(300):
            rows, peak = race(bash, options.turns, environment)
            print(f"# {processes()} processes, {options.turns} turns, {cpu()}, Python {sys.version.split()[0]}")
            table(rows, "guard")
            print(f"peak RSS of the guard: {peak['guard'] / 1024:.1f} MB")
            status = {"sparkguard status": [python, "-I", "-m", "sparkguard", "status"], **bash}
            del status["guard"], status["plain bash sum"]
            rows, _ = race(status, 11, environment)
            print("\n# the first output of `sparkguard status` (it prints once)")
            table(rows, "sparkguard status")
        if options.many:
            scan = {"guard": bash["guard"], "pgrep -af": ["pgrep", "-af", "vllm serve"]}
            with Crowd(300):
                few_count = processes()
                few, _ = race(scan, 15, environment)
            with Crowd(options.many):
                many_count = processes()
                many, _ = race(scan, 15, environment)
            print(f"\n# cost of one more process, from {few_count} to {many_count} processes")
            each = {name: (median(many[name]) - median(few[name])) / (many_count - few_count) for name in scan}
            for name, seconds in each.items():
                print(f"{name:20} {seconds * 1e6:8.2f} us")
            print(f"{'guard / pgrep -af':20} {each['guard'] / each['pgrep -af']:8.2f}")
    return 0


class Crowd:
    """Real processes that do nothing, until the machine has as many as asked for."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.pids: list[int] = []

    def __enter__(self) -> Crowd:
        sleep = shutil.which("sleep") or "/bin/sleep"
        for _ in range(max(0, self.total - processes())):
            self.pids.append(os.posix_spawn(sleep, ["sleep", "infinity"], {}))
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.pids:
            os.kill(pid, 9)
        for pid in self.pids:
            os.waitpid(pid, 0)


def processes() -> int:
    return sum(name.isdigit() for name in os.listdir("/proc"))


def race(
    contenders: dict[str, list[str]], turns: int, environment: dict[str, str]
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds of each turn, and the largest resident size in KiB."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    peak = dict.fromkeys(contenders, 0)
    for turn in range(turns + 2):
        for name, argv in contenders.items():
            began = time.perf_counter()
            process = subprocess.Popen(argv, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            _, status, usage = os.wait4(process.pid, 0)
            ended = time.perf_counter()
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode not in (0, 1):  # 1: pgrep found nothing
                raise SystemExit(f"{name} ended with status {process.returncode}: this would measure a failure")
            if turn >= 2:  # the first two warm the caches
                seconds[name].append(ended - began)
                peak[name] = max(peak[name], usage.ru_maxrss)
    return seconds, peak


def table(rows: dict[str, list[float]], ours: str) -> None:
    for name, values in rows.items():
        ratios = sorted(mine / other for mine, other in zip(rows[ours], values))
        low, middle, high = ratios[len(ratios) // 10], median(ratios), ratios[-1 - len(ratios) // 10]
        ratio = "" if name == ours else f"   {ours} / it: {middle:.2f} ({low:.2f} to {high:.2f})"
        print(f"{name:20} median {median(values) * 1e3:7.2f} ms   min {min(values) * 1e3:7.2f} ms{ratio}")


def median(values: list[float]) -> float:
    return statistics.median(values)


def cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    return f"{os.cpu_count()} x {model}"


if __name__ == "__main__":
    raise SystemExit(main())
