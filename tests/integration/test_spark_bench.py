"""`python3 -m spark_bench` as a process: real workers, real files, real ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = [sys.executable, "-m", "spark_bench"]
ITEM = {"genre": "folk", "lyrics": "[verse]\nOne line\n"}
WORKLOAD: dict[str, Any] = {"version": 1, "workloads": [{"id": "short", **ITEM}, {"id": "long", **ITEM}]}
# Renders as the synthetic worker does, but for what a test wants to go wrong.
GOOD = [sys.executable, "-m", "spark_bench.synthetic", "{request}", "{output}"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "work.json").write_text(json.dumps(WORKLOAD))
    return tmp_path


def real(folder: Path, runner: list[str], stop: list[str] | None = None, **more: Any) -> None:
    """A workload that is rendered by a command; its songs are half a second long."""
    for name in ("attestation", "vocal", "instrumental"):
        (folder / name).write_text(name)
    items = [{**item, "min_seconds": 0.1, "max_seconds": 5} for item in WORKLOAD["workloads"]]
    files = {name: name for name in ("attestation", "vocal", "instrumental")}
    made = {
        **WORKLOAD,
        **files,
        "workloads": items,
        "rights_basis": "own_voice",
        "runner": runner,
        "stop": stop or ["true"],
        **more,
    }
    (folder / "work.json").write_text(json.dumps(made))


def machine(folder: Path, free_kib: int = 50 << 20, celsius: str = "60") -> dict[str, str]:
    """A /proc/meminfo and an nvidia-smi; the environment in which that is found."""
    (folder / "proc").mkdir(exist_ok=True)
    lines = [f"MemTotal: {120 << 20} kB", f"MemAvailable: {free_kib} kB", "SwapTotal: 0 kB", "SwapFree: 0 kB"]
    (folder / "proc" / "meminfo").write_text("\n".join(lines) + "\n")
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '0, 90, {celsius}, [N/A], 2400'\n")
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


def command(folder: Path, *arguments: str) -> list[str]:
    base = ["concurrency", "--workload", str(folder / "work.json"), "--output", str(folder / "out"), "--json", "--cooldown", "0"]
    return [*PROGRAM, *base, "--jobs-per-level", "4", "--concurrency", "1,2", "--telemetry-interval", "0.05", *arguments]


def run(folder: Path, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(folder, *arguments), capture_output=True, text=True, timeout=120, check=False, env=env)


def record(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "out" / "run.json").read_text())
    return found


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_synthetic_sweep(folder: Path) -> None:
    """Every level of every iteration has its jobs, all passed, and telemetry; there is a report and no recommendation."""
    done = run(folder, "--synthetic", "--iterations", "2", "--seed", "5")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert [(level["concurrency"], level["passed"]) for level in summary["levels"]] == [(1, 8), (2, 8)]
    assert summary["recommended"] is None
    names = sorted(path.name for path in (folder / "out" / "trials").iterdir())
    assert names == ["r01-c01", "r01-c02", "r02-c01", "r02-c02", "warmup"]
    for name in names:
        assert lines(folder / "out" / "trials" / name / "telemetry.jsonl")[0]["available_bytes"] > 0
    assert (folder / "out" / "report.md").read_text().startswith("# Concurrency on ")


def test_the_same_corpus_at_every_level(folder: Path) -> None:
    """Keys and seeds of all trials are the same ones."""
    run(folder, "--synthetic", "--iterations", "2", "--warmup", "0")
    seen = {
        tuple(sorted((job["key"], job["seed"]) for job in lines(path)))
        for path in (folder / "out" / "trials").glob("*/jobs.jsonl")
    }
    assert len(seen) == 1


def test_analysis_is_the_same_to_the_byte(folder: Path) -> None:
    """From a copy of the raw results alone, in another folder."""
    run(folder, "--synthetic", "--iterations", "2")
    names = ("summary.json", "comparison.csv", "report.md")
    first = {name: (folder / "out" / name).read_bytes() for name in names}
    copy = folder / "elsewhere"
    shutil.copytree(folder / "out", copy, ignore=shutil.ignore_patterns(*names, "*.wav"))
    done = subprocess.run([*PROGRAM, "analyze", copy], capture_output=True, text=True, check=True)
    assert {name: (copy / name).read_bytes() for name in names} == first
    assert done.stdout.encode() == first["report.md"]


def test_streams_are_processes_at_once(folder: Path) -> None:
    """Two at once overlap, and never are three."""
    run(folder, "--synthetic", "--iterations", "1")
    level = json.loads((folder / "out" / "summary.json").read_text())["levels"][1]
    assert level["overlap_most"] == 2
    assert level["overlap_mean"] > 1.2


def test_results_are_never_written_over(folder: Path) -> None:
    """A folder that is there already is refused."""
    (folder / "out").mkdir()
    (folder / "out" / "inputs").mkdir()
    done = run(folder, "--synthetic")
    assert (done.returncode, "never written over" in done.stderr) == (2, True)


def test_little_memory_ends_it(folder: Path) -> None:
    """The guard stops the trial, what ran is ended, what waited is cancelled, and why is in every record."""
    env = machine(folder, free_kib=11 << 20)
    done = run(folder, "--synthetic", "--guards", "--proc", str(folder / "proc"), "--warmup", "0", env=env)
    assert done.returncode == 1
    assert record(folder)["reason"] == "guard: 11.0 GiB are free, fewer than 12.0"
    jobs = lines(folder / "out" / "trials" / "r01-c01" / "jobs.jsonl")
    assert len(jobs) == 4
    assert {job["outcome"] for job in jobs} <= {"cancelled", "passed"}
    assert "cancelled" in {job["outcome"] for job in jobs}
    summary = json.loads((folder / "out" / "summary.json").read_text())
    assert summary["provisional"] is True


def test_heat_pauses_it_until_it_is_gone(folder: Path) -> None:
    """At 90 degrees no job begins; when it has cooled the rest is rendered, and the pause is on record."""
    env = machine(folder, celsius="90")
    arguments = ["--synthetic", "--guards", "--proc", str(folder / "proc"), "--warmup", "0", "--iterations", "1"]
    with subprocess.Popen(command(folder, *arguments), stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        assert any('"paused"' in line for line in process.stdout)
        machine(folder, celsius="60")
        process.stdout.read()
    assert process.returncode == 0
    trial = json.loads((folder / "out" / "trials" / "r01-c01" / "trial.json").read_text())
    assert trial["paused_seconds"] > 0
    assert trial["pauses"] == ["90 degrees, not below 85"]
    assert any("was paused" in doubt for doubt in json.loads((folder / "out" / "summary.json").read_text())["doubts"])


def test_ctrl_c_ends_the_workers(folder: Path) -> None:
    """The job's own command to end it is called, its processes are gone, and the record says interrupted."""
    pids = folder / "pids"
    script = f"echo $$ >>{pids}; echo started; sleep 600 & wait"
    real(folder, ["sh", "-c", script], ["sh", "-c", f"touch {folder}/{{name}}.stopped"])
    env = machine(folder)
    arguments = ["--proc", str(folder / "proc"), "--warmup", "0"]
    with subprocess.Popen(command(folder, *arguments), stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        while not pids.exists() or not pids.read_text().endswith("\n"):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.stdout.read()
    assert process.returncode == 1
    assert record(folder)["reason"] == "interrupted by SIGINT"
    assert len(list(folder.glob("sparkbench-out-r01-c01-*.stopped"))) == 1
    for pid in pids.read_text().split():
        assert not Path("/proc", pid).exists()


def test_a_job_that_takes_too_long_ends_it(folder: Path) -> None:
    """It is a timeout, and load is not raised after one."""
    real(folder, ["sleep", "600"])
    done = run(folder, "--proc", str(folder / "proc"), "--warmup", "0", "--timeout", "0.3", env=machine(folder))
    assert done.returncode == 1
    assert record(folder)["reason"] == "a job took more than 0.3 s"
    assert lines(folder / "out" / "trials" / "r01-c01" / "jobs.jsonl")[0]["outcome"] == "timeout"
    assert sorted(path.name for path in (folder / "out" / "trials").iterdir()) == ["r01-c01"]


def test_a_song_that_is_none_is_a_failed_job(folder: Path) -> None:
    """The worker's status is 0 and its audio silence: the job fails, the experiment goes on, and nothing is recommended."""
    write = "w.setparams((1, 2, 8000, 0, 'NONE', '')); w.writeframes(bytes(16000))"
    silence = f"import sys, wave; w = wave.open(sys.argv[1], 'wb'); {write}"
    real(folder, [sys.executable, "-c", silence, "{output}"])
    done = run(folder, "--proc", str(folder / "proc"), "--warmup", "0", "--iterations", "1", env=machine(folder))
    assert done.returncode == 0
    jobs = lines(folder / "out" / "trials" / "r01-c02" / "jobs.jsonl")
    assert {(job["outcome"], job["status"]) for job in jobs} == {("failed", 0)}
    assert "silent" in jobs[0]["reason"]
    assert json.loads((folder / "out" / "summary.json").read_text())["recommended"] is None


def test_a_worker_that_cannot_be_started_ends_it(folder: Path) -> None:
    """There is no use in trying it at the next level."""
    real(folder, ["/nowhere/render"])
    done = run(folder, "--proc", str(folder / "proc"), "--warmup", "0", env=machine(folder))
    assert (done.returncode, "could not be started" in record(folder)["reason"]) == (1, True)


def test_inputs_are_frozen(folder: Path) -> None:
    """The references are copied, and jobs are told of the copies."""
    real(folder, GOOD)
    env = {**machine(folder), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = run(folder, "--proc", str(folder / "proc"), "--warmup", "0", "--iterations", "1", env=env)
    assert done.returncode == 0, done.stderr
    request = json.loads(next((folder / "out" / "trials").glob("r01-c01/jobs/*/request.json")).read_text())
    assert request["vocal"] == str(folder / "out" / "inputs" / "vocal")
    assert json.loads((folder / "out" / "summary.json").read_text())["synthetic"] is False


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["--concurrency", "2,3"], "lacks 1"), (["--concurrency", "1,x"], "no list"), (["--jobs-per-level", "1"], "cannot keep 2")],
    ids=["no baseline", "no number", "too few jobs"],
)
def test_bad_arguments(arguments: list[str], says: str, folder: Path) -> None:
    """Status 2, and nothing is written."""
    done = run(folder, "--synthetic", *arguments)
    assert (done.returncode, says in done.stderr, (folder / "out").exists()) == (2, True, False)


def test_without_a_gpu_nothing_real_is_rendered(folder: Path) -> None:
    """A temperature that nobody can read is not guarded: fail closed."""
    real(folder, GOOD)
    machine(folder)
    (folder / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    done = run(folder, "--proc", str(folder / "proc"), "--warmup", "0", env=env)
    assert (done.returncode, record(folder)["reason"]) == (1, "guard: the GPU's temperature cannot be read")
