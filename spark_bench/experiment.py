"""The experiment: a warm-up, then each level of each iteration with the same corpus, and every raw result on disk as it comes."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from spark_bench import dispatch, guards, telemetry, workload
from spark_bench.fault import Fault

VERSION = 1
COMPLETE, STOPPED = "complete", "stopped"


class Options:
    """What the command line says; see __main__.py for each."""

    def __init__(self, **values: Any) -> None:
        self.workload: str = values["workload"]
        self.output: str = values["output"]
        self.levels: list[int] = values["levels"]
        self.jobs: int = values["jobs"]
        self.iterations: int = values["iterations"]
        self.seed: int = values["seed"]
        self.warmup: int = values["warmup"]
        self.cooldown: float = values["cooldown"]
        self.interval: float = values["interval"]
        self.timeout: float = values["timeout"]
        self.synthetic: bool = values["synthetic"]
        self.limits: guards.Limits | None = values["limits"]
        self.proc: str = values.get("proc", "/proc")
        self.node: str | None = values.get("node")

    def check(self) -> None:
        faults = []
        if not self.levels or len(set(self.levels)) != len(self.levels) or min(self.levels) < 1 or max(self.levels) > 64:
            faults.append("--concurrency wants different numbers from 1 to 64")
        elif 1 not in self.levels:
            faults.append("--concurrency lacks 1, to which the others are compared")
        elif self.jobs < max(self.levels):
            faults.append(
                f"{self.jobs} jobs cannot keep {max(self.levels)} at work: --jobs-per-level {max(self.levels)} at least"
            )
        if self.iterations < 1 or self.warmup < 0 or self.cooldown < 0 or self.interval <= 0 or self.timeout <= 0:
            faults.append("iterations, interval and timeout are above 0, warm-up and cool-down not below")
        if not 0 <= self.seed < 2**63:
            faults.append("--seed is not from 0 to 2^63")
        if faults:
            raise Fault("; ".join(faults))


def run(options: Options, say: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The record of the run, which is on disk as well. Raises Fault for bad arguments; a stopped run is returned, not raised."""
    options.check()
    found = workload.load(options.workload, options.synthetic)
    folder = os.path.abspath(options.output)
    try:
        os.makedirs(os.path.join(folder, "inputs"))
        if os.listdir(folder) != ["inputs"]:
            raise Fault(f"{folder} is not empty: results are never written over")
    except FileExistsError:
        raise Fault(f"{folder} is there already: results are never written over") from None
    frozen = _freeze(found, folder, options.synthetic)
    record = _record(options, frozen, found)
    path = os.path.join(folder, "run.json")
    telemetry.write(path, record)
    active: list[dispatch.Trial] = []
    interrupted: list[str] = []

    def on_signal(number: int, _: Any) -> None:
        interrupted.append(f"interrupted by {signal.Signals(number).name}")
        for trial in active:
            trial.stop(interrupted[0])

    handlers = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        reason = None
        for number, planned in enumerate(_trials(options)):
            if interrupted or reason:
                break
            if number and options.cooldown:
                _rest(options.cooldown, interrupted)
            if not interrupted:
                reason = _trial(options, frozen, folder, planned, active, say)
        reason = interrupted[0] if interrupted else reason
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    record["status"] = STOPPED if reason else COMPLETE
    record["reason"] = reason
    record["ended"] = time.time()
    telemetry.write(path, record)
    say({"event": "end", "status": record["status"], "reason": reason, "text": reason or record["status"]})
    return record


def _trials(options: Options) -> list[dict[str, Any]]:
    """The warm-up, which is measured by nobody, and the schedule."""
    warm = [{"name": "warmup", "iteration": 0, "concurrency": 1, "measured": False}] if options.warmup else []
    made = workload.schedule(options.levels, options.iterations)
    return warm + [dict(one, name=f"r{one['iteration'] + 1:02}-c{one['concurrency']:02}", measured=True) for one in made]


def _trial(
    options: Options,
    frozen: dict[str, Any],
    folder: str,
    planned: dict[str, Any],
    active: list[dispatch.Trial],
    say: Callable[[dict[str, Any]], None],
) -> str | None:
    """Why the experiment ends here; None: it goes on."""
    count = options.jobs if planned["measured"] else options.warmup
    items = {item["id"]: item for item in frozen["workloads"]}
    jobs = workload.corpus(frozen, count, options.seed, planned["iteration"])
    for job in jobs:
        item = items[job["workload"]]
        job["name"] = "sparkbench-{}-{}-{}".format(os.path.basename(folder), planned["name"], job["key"])
        job["payload"] = dict({key: frozen.get(key) for key in workload.REFERENCES}, **item)
        job["min_seconds"] = item.get("min_seconds", 0.1 if options.synthetic else workload.MIN_SECONDS)
        job["max_seconds"] = item.get("max_seconds", workload.MAX_SECONDS)
        if options.synthetic:  # what the stand-in writes, whatever the songs should be
            job["min_seconds"], job["max_seconds"] = 0.1, 10.0
    path = os.path.join(folder, "trials", planned["name"])
    sampler = telemetry.Sampler(options.proc)
    trial = dispatch.Trial(
        path, jobs, planned["concurrency"], _runner(options, frozen), sampler, options.interval, options.limits, say
    )
    say(
        {
            "event": "trial",
            "trial": planned["name"],
            "text": f"{planned['name']}: {count} jobs, {planned['concurrency']} at once",
        }
    )
    active.append(trial)
    try:
        result = trial.run()
    finally:
        active.clear()
    telemetry.write(os.path.join(path, "trial.json"), dict(planned, **result))
    return None if result["status"] == "complete" else result["reason"]


def _runner(options: Options, frozen: dict[str, Any]) -> dispatch.Runner:
    if not options.synthetic:
        return dispatch.Runner(frozen["runner"], frozen["stop"], options.timeout)
    # The job's folder is its working folder: the package is found where this one was.
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    environment = dict(os.environ, PYTHONPATH=root)
    render = [sys.executable, "-m", "spark_bench.synthetic", "{request}", "{output}"]
    return dispatch.Runner(render, [], options.timeout, environment)


def _freeze(found: dict[str, Any], folder: str, synthetic: bool) -> dict[str, Any]:
    """A copy of all inputs: whoever edits a file meanwhile edits no experiment."""
    frozen = dict(found)
    for key in () if synthetic else workload.REFERENCES:
        target = os.path.join(folder, "inputs", key + os.path.splitext(found[key])[1])
        shutil.copyfile(found[key], target)
        frozen[key] = target
    telemetry.write(os.path.join(folder, "inputs", "workload.json"), frozen)
    return frozen


def _record(options: Options, frozen: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    what = {"workloads": found["workloads"], "seed": options.seed, "jobs": options.jobs}
    return {
        "version": VERSION,
        "status": "running",
        "reason": None,
        "began": time.time(),
        "ended": None,
        "host": options.node or socket.gethostname(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "synthetic": options.synthetic,
        "levels": options.levels,
        "iterations": options.iterations,
        "jobs_per_level": options.jobs,
        "warmup": options.warmup,
        "cooldown_seconds": options.cooldown,
        "seed": options.seed,
        "corpus": workload.digest(what),
        "workloads": [item["id"] for item in frozen["workloads"]],
        "runner": None if options.synthetic else frozen["runner"],
        "limits": options.limits.record() if options.limits else None,
    }


def _rest(seconds: float, interrupted: list[str]) -> None:
    last = time.monotonic() + seconds
    while not interrupted and time.monotonic() < last:
        time.sleep(min(0.2, max(0.0, last - time.monotonic())))
