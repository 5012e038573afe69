"""The experiment's own dispatcher: so many processes at once, each its own job in its own folder, and a guard that watches.

The factory's queue and its limit of one song are not used and not changed.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

from spark_bench import audio, guards, telemetry

PASSED, FAILED, TIMEOUT, CANCELLED = "passed", "failed", "timeout", "cancelled"
END_SECONDS = 20.0  # from SIGTERM to SIGKILL
LOG_BYTES = 1 << 20
_STEP = 0.2


class Runner:
    """How a job is rendered, and how one is ended. Words in braces are the job's: {request} {output} {name} {seed} {folder}."""

    def __init__(self, render: list[str], stop: list[str], seconds: float, environment: dict[str, str] | None = None) -> None:
        self.render = render
        self.stop = stop
        self.seconds = seconds
        self.environment = environment

    def words(self, argv: list[str], job: dict[str, Any], folder: str) -> list[str]:
        values = {
            "{request}": os.path.join(folder, "request.json"),
            "{output}": os.path.join(folder, "output.wav"),
            "{name}": job["name"],
            "{seed}": str(job["seed"]),
            "{folder}": folder,
        }
        made = []
        for word in argv:
            for key, value in values.items():
                word = word.replace(key, value)
            made.append(word)
        return made


class Trial:
    """One level of one iteration. run() returns its record; a job's record is on disk as soon as it has ended."""

    def __init__(
        self,
        folder: str,
        jobs: list[dict[str, Any]],
        streams: int,
        runner: Runner,
        sampler: telemetry.Sampler,
        interval: float,
        limits: guards.Limits | None,
        say: Callable[[dict[str, Any]], None],
    ) -> None:
        self._folder = folder
        self._jobs = jobs
        self._streams = streams
        self._runner = runner
        self._sampler = sampler
        self._interval = interval
        self._limits = limits
        self._say = say
        self._waiting: queue.Queue[dict[str, Any]] = queue.Queue()
        self._go = threading.Event()  # jobs may be started
        self._stopped = threading.Event()
        self._over = threading.Event()
        self._writing = threading.Lock()
        self._reason: str | None = None
        self._paused = 0.0
        self._pauses: list[str] = []
        self._active = 0
        self.records: list[dict[str, Any]] = []

    def stop(self, reason: str) -> None:
        """Running jobs are ended, and no other begins."""
        if self._reason is None:
            self._reason = reason
        self._stopped.set()
        self._go.set()

    def run(self) -> dict[str, Any]:
        os.makedirs(os.path.join(self._folder, "jobs"))
        for job in self._jobs:
            self._waiting.put(job)
        self._go.set()
        guard = threading.Thread(target=self._guard, daemon=True)
        guard.start()
        began = time.monotonic()
        workers = [threading.Thread(target=self._work, daemon=True) for _ in range(self._streams)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        seconds = time.monotonic() - began
        self._over.set()
        guard.join()
        while not self._waiting.empty():
            self._keep(dict(self._waiting.get(), outcome=CANCELLED, reason=f"never started: {self._reason}"))
        return {
            "concurrency": self._streams,
            "expected": len(self._jobs),
            "seconds": seconds,
            "status": "stopped" if self._stopped.is_set() else "complete",
            "reason": self._reason,
            "paused_seconds": self._paused,
            "pauses": self._pauses,
        }

    def _work(self) -> None:
        while True:
            self._go.wait()
            if self._stopped.is_set():
                return
            try:
                job = self._waiting.get_nowait()
            except queue.Empty:
                return
            with self._writing:
                self._active += 1
            try:
                record = self._render(job)
            except OSError as error:
                record = dict(job, outcome=FAILED, reason=f"it could not be started: {error}")
                self.stop(f"a job could not be started: {error}")
            with self._writing:
                self._active -= 1
            self._keep(record)

    def _render(self, job: dict[str, Any]) -> dict[str, Any]:
        folder = os.path.join(self._folder, "jobs", job["key"])
        os.makedirs(folder)
        telemetry.write(os.path.join(folder, "request.json"), dict(job["payload"], seed=job["seed"], job=job["name"]))
        began = time.monotonic()
        with open(os.path.join(folder, "worker.log"), "wb") as log:
            # A session of its own: Ctrl-C at the terminal is ours to pass on, in our order.
            process = subprocess.Popen(
                self._runner.words(self._runner.render, job, folder),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=self._runner.environment,
                start_new_session=True,
            )
            outcome = self._wait(process, began)
            if outcome is not None:
                self._end(process, job, folder)
        ended = time.monotonic()
        record = {key: job[key] for key in ("key", "name", "workload", "seed")}
        record.update(began=began, ended=ended, seconds=ended - began, status=process.returncode)
        if outcome is not None:
            return dict(record, outcome=outcome, reason=self._reason if outcome == CANCELLED else "not through in time")
        if process.returncode:
            return dict(record, outcome=FAILED, reason=f"it ended with status {process.returncode}")
        found = audio.check(os.path.join(folder, "output.wav"), job["min_seconds"], job["max_seconds"])
        gated = dict(record, audio=found, outcome=PASSED if found["ok"] else FAILED, reason=found["reason"])
        # The gate is part of the work: a song that nobody may hear is none.
        gated.update(ended=time.monotonic(), seconds=time.monotonic() - began)
        return gated

    def _wait(self, process: subprocess.Popen[bytes], began: float) -> str | None:
        while True:
            try:
                process.wait(_STEP)
                return None
            except subprocess.TimeoutExpired:
                if self._stopped.is_set():
                    return CANCELLED
                if time.monotonic() - began > self._runner.seconds:
                    self.stop(f"a job took more than {self._runner.seconds:g} s")
                    return TIMEOUT

    def _end(self, process: subprocess.Popen[bytes], job: dict[str, Any], folder: str) -> None:
        """By its own command where there is one, since a container outlives its client; then by signals."""
        if self._runner.stop:
            try:
                words = self._runner.words(self._runner.stop, job, folder)
                subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=END_SECONDS, check=False)
            except (OSError, subprocess.TimeoutExpired):
                pass  # the signals follow
        for number, seconds in ((signal.SIGTERM, END_SECONDS), (signal.SIGKILL, END_SECONDS)):
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                pass
            try:
                process.wait(seconds)
                return
            except subprocess.TimeoutExpired:
                continue

    def _guard(self) -> None:
        """Reads at once and then at each interval; what it reads is kept, also where it decides nothing."""
        first: dict[str, Any] | None = None
        since: float | None = None
        path = os.path.join(self._folder, "telemetry.jsonl")
        while True:
            now = self._sampler.read()
            first = now if first is None else first
            verdict, why = guards.GO, None
            if self._limits is not None:
                waited = None if since is None else time.monotonic() - since
                verdict, why = guards.decide(now, first, self._limits, waited)
            telemetry.append(path, dict(now, active=self._active, guard=verdict, reason=why))
            if verdict == guards.STOP:
                self.stop(f"guard: {why}")
            elif verdict == guards.PAUSE and since is None:
                since = time.monotonic()
                self._pauses.append(str(why))
                self._go.clear()
                self._say({"event": "paused", "text": f"paused: {why}"})
            elif verdict == guards.GO and since is not None:
                self._paused += time.monotonic() - since
                since = None
                self._go.set()
                self._say({"event": "resumed", "text": "goes on"})
            if self._over.wait(self._interval):
                if since is not None:
                    self._paused += time.monotonic() - since
                return

    def _keep(self, record: dict[str, Any]) -> None:
        kept = {key: value for key, value in record.items() if key not in ("payload", "min_seconds", "max_seconds")}
        with self._writing:
            self.records.append(kept)
            telemetry.append(os.path.join(self._folder, "jobs.jsonl"), kept)
        self._say({"event": "job", "job": kept, "text": "{}: {}{}".format(kept["key"], kept["outcome"], _why(kept))})


def _why(record: dict[str, Any]) -> str:
    if record["outcome"] == PASSED:
        return " in {:.1f} s".format(record["seconds"])
    return " ({})".format(record.get("reason"))
