"""`spark-serve bench` as processes, before a real llama-server: measured, cancelled, revoked, killed, kept."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from bench_servers import llama_server

from sparkguard.cluster.bench import leases
from sparkguard.cluster.bench.history import History
from sparkguard.cluster.transition import lock
from sparkguard.errors import SparkguardError

PROGRAM = [sys.executable, "-m", "sparkguard.cli.cluster", "bench"]
LONG = ["--requests", "500", "--max-tokens", "400", "--prompt-tokens", "32"]  # minutes


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with llama_server(tmp_path_factory.mktemp("engine"), "-np", "2", "-c", "8192", layers=4, width=256, hidden=1024) as url:
        yield url


@pytest.fixture
def state_dir(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = home / "state"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("SPARK_SERVE_STATE_DIR", str(folder))
    return folder


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PROGRAM, *arguments], capture_output=True, text=True, timeout=120, check=False)


def run(engine: str, *arguments: str) -> dict[str, Any]:
    done = bench("run", "--url", engine, "--json", *arguments)
    assert done.returncode == 0, done.stderr
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return record


@contextmanager
def running(engine: str) -> Iterator[subprocess.Popen[str]]:
    """A long run that has measured a request."""
    with subprocess.Popen([*PROGRAM, "run", "--url", engine, "--json", *LONG], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert any('"bench_request"' in line for line in process.stdout)
            yield process
        finally:
            process.kill()


def last_line(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    record: dict[str, Any] = json.loads(process.stdout.read().splitlines()[-1])
    return record


def busy(engine: str) -> float:
    with urllib.request.urlopen(f"{engine}/metrics") as answer:
        text = answer.read().decode()
    return sum(float(line.split()[1]) for line in text.splitlines() if line.startswith("llamacpp:requests_processing "))


def valid(*values: Any) -> None:
    known = json.loads((Path(__file__).parents[2] / "docs" / "schemas" / "bench.json").read_text())
    for value in values:
        jsonschema.validate(value, known)


def test_every_line_is_as_the_schema_says(engine: str, state_dir: Path) -> None:
    """Events, the run, what is saved, a list, a comparison, and the answer of cancel."""
    arguments = ["--requests", "2", "--max-tokens", "16", "--prompt-tokens", "32", "--repeats", "2"]
    done = bench("run", "--url", engine, "--json", *arguments)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    names = [line.get("event") for line in lines]
    assert names == ["bench_start", *["bench_warmup"] * 3, *["bench_request"] * 2, "bench_level", *["bench_request"] * 2,
                     "bench_level", "bench_end", None]  # fmt: skip
    valid(
        *lines, *map(json.loads, (bench(*words, "--json").stdout for words in (["list"], ["show", "1"], ["compare", "1", "1"])))
    )
    valid(
        json.loads(bench("cancel", "--json").stdout),
        *(json.loads(path.read_text()) for path in state_dir.glob("benchmarks/*.json")),
    )


def test_a_decode_run(engine: str, state_dir: Path) -> None:
    """It is whole, alone on the engine, new to its cache, as long as asked, and about as fast as the engine says itself."""
    record = run(engine, "--requests", "3", "--max-tokens", "64", "--prompt-tokens", "200")
    assert record["status"] == "completed"
    checks = record["checks"]
    assert (checks["exclusive"], checks["cache_missed"], checks["output_length_fixed"]) == (True, True, True)
    level = record["levels"][0]
    assert (level["ok"], level["completion_tokens"]["median"]) == (3, 64)
    assert level["prompt_tokens"]["median"] == pytest.approx(200, abs=20)
    assert [one["outcome"] for one in record["warmup"]] == ["ok"] * 3


def test_a_prefill_sweep(engine: str, state_dir: Path) -> None:
    """Each size is a level; the engine's own time of the prefill and ours agree, where nothing else came in between."""
    record = run(engine, "--kind", "prefill", "--requests", "6", "--prompt-tokens", "500,1500")
    assert [level["prompt_tokens_wanted"] for level in record["levels"]] == [500, 1500]
    for level in record["levels"]:
        assert level["prompt_tokens"]["median"] == pytest.approx(level["prompt_tokens_wanted"], rel=0.05)
        assert {request["prefill_by"] for request in level["requests"]} == {"server timings"}
        # Other work on the machine makes ours the longer, and by chance alone: what is wrong in the method is in every request.
        ratios = [request["prefill_client_tokens_per_s"] / request["prefill_tokens_per_s"] for request in level["requests"]]
        assert min(ratios, key=lambda ratio: abs(ratio - 1)) == pytest.approx(1, rel=0.1), ratios


def test_levels_and_repeats(engine: str, state_dir: Path) -> None:
    """One stream and two, twice each: the throughput of a level has its interval."""
    record = run(
        engine, "--concurrency", "1,2", "--requests", "2", "--repeats", "2", "--max-tokens", "16", "--prompt-tokens", "32"
    )
    assert [(level["concurrency"], level["ok"]) for level in record["levels"]] == [(1, 4), (2, 4)]
    for level in record["levels"]:
        assert level["over_repeats"]["generated_tokens_per_s"]["n"] == 2
        assert level["over_repeats"]["generated_tokens_per_s"]["half_95"] is not None


def test_streams_overlap(engine: str, state_dir: Path) -> None:
    """Two streams at once are at once: the second begins before the first ends."""
    record = run(engine, "--concurrency", "2", "--requests", "2", "--max-tokens", "100", "--prompt-tokens", "32")
    first, second = sorted(record["levels"][0]["requests"], key=lambda one: float(one["began_s"]))
    assert second["began_s"] < first["began_s"] + first["seconds"]


def test_what_is_kept_can_be_shown_compared_and_exported(engine: str, state_dir: Path) -> None:
    """A list has both runs, newest first; a comparison names what differs; an export has a row a request."""
    first = run(engine, "--requests", "1", "--max-tokens", "16", "--prompt-tokens", "32")
    second = run(engine, "--requests", "2", "--max-tokens", "32", "--prompt-tokens", "32")
    runs = json.loads(bench("list", "--json").stdout)["runs"]
    assert [one["id"] for one in runs] == sorted((first["id"], second["id"]), reverse=True)
    assert json.loads(bench("show", "--json", first["id"]).stdout)["run"] == first
    found = json.loads(bench("compare", "--json", first["id"], second["id"]).stdout)
    assert {one["what"] for one in found["differences"]} == {"settings.max_tokens", "settings.requests"}
    assert found["comparable"] is False
    rows = list(csv.DictReader(io.StringIO(bench("export", second["id"], "--format", "csv").stdout)))
    assert [row["phase"] for row in rows] == ["warmup"] * 3 + ["measured"] * 2
    assert "| whole request, s | 2 |" in bench("export", second["id"], "--format", "markdown").stdout


def test_ctrl_c_ends_the_requests_and_keeps_what_was_measured(engine: str, state_dir: Path) -> None:
    """Status 130, the record says cancelled, and the engine works on nothing of ours."""
    with running(engine) as process:
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    record = History(state_dir).get("last")
    assert (record["status"], record["levels"][0]["ok"] >= 1, record["levels"][0]["cancelled"]) == ("cancelled", True, 1)
    deadline = time.monotonic() + 10
    while busy(engine) and time.monotonic() < deadline:
        pass
    assert busy(engine) == 0
    assert leases.living(state_dir) == []


def test_bench_cancel_waits_until_it_has_ended(engine: str, state_dir: Path) -> None:
    """Another terminal ends the run, and returns when its requests are closed."""
    with running(engine) as process:
        done = bench("cancel", "--json")
        assert done.returncode == 0
        assert leases.living(state_dir) == []
        record = last_line(process)
        assert (json.loads(done.stdout)["runs"], record["status"]) == ([record["id"]], "cancelled")


def test_a_lifecycle_command_revokes_the_lease(engine: str, state_dir: Path) -> None:
    """Within 5 s the benchmark has closed its requests and says why it gave way; its status is 75."""
    with running(engine) as process:
        began = time.monotonic()
        asked = leases.revoke_all(state_dir, 5.0, reason="`up ds4` came")
        assert time.monotonic() - began < 5.0
        record = last_line(process)
        assert process.wait(30) == 75
    assert [lease.id for lease in asked] == [record["id"]]
    assert (record["status"], record["reason"]) == ("revoked", "`up ds4` came")


def test_a_benchmark_that_does_not_answer_stops_the_command(engine: str, state_dir: Path) -> None:
    """Without an acknowledgement in time nothing may be changed: 75, naming the process."""
    with running(engine) as process:
        process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(SparkguardError) as caught:
                leases.revoke_all(state_dir, 0.3)
        finally:
            process.send_signal(signal.SIGCONT)
        assert caught.value.status == 75
        assert f"pid {process.pid}" in caught.value.message


def test_a_killed_benchmark_shows_as_interrupted(engine: str, state_dir: Path) -> None:
    """Its lease is gone with it, and what it had measured by then is still there."""
    with running(engine) as process:
        process.kill()
        process.wait()
        assert leases.revoke_all(state_dir, 0.0) == []
    runs = json.loads(bench("list", "--json").stdout)["runs"]
    assert [one["status"] for one in runs] == ["interrupted"]
    assert list((state_dir / "benchmarks" / "leases").glob("*.json")) == []


def test_no_benchmark_begins_during_a_transition(engine: str, state_dir: Path) -> None:
    """Who is at work is named, and nothing was sent."""
    with lock.held(state_dir, lock.myself("up ds4")):
        done = bench("run", "--url", engine)
    assert done.returncode == 75
    assert "`up ds4`" in done.stderr
    assert f"pid {os.getpid()}" in done.stderr


def test_two_benchmarks_disturb_each_other_and_are_refused(engine: str, state_dir: Path) -> None:
    """The first holds a lease on that endpoint, and the second names it."""
    with running(engine):
        done = bench("run", "--url", engine)
    assert done.returncode == 75
    assert "spark-serve bench cancel" in done.stderr


def test_others_tokens_show(engine: str, state_dir: Path) -> None:
    """Somebody asks the same engine in the meantime: it generated more than this run was given."""
    stop = threading.Event()

    def others() -> None:
        body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200, "ignore_eos": True}).encode()
        while not stop.is_set():
            request = urllib.request.Request(f"{engine}/v1/chat/completions", body, {"Content-Type": "application/json"})
            urllib.request.urlopen(request).read()

    other = threading.Thread(target=others)
    other.start()
    try:
        record = run(engine, "--shared", "--requests", "10", "--max-tokens", "100", "--prompt-tokens", "32")
    finally:
        stop.set()
        other.join()
    assert record["checks"]["exclusive"] is False
    assert any("not exclusive" in note for note in record["notes"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--concurrency", "65"], "--concurrency 65 is not from 1 to 64"),
        (["--concurrency", "x"], "no list of numbers"),
        (["--url", "http://me:secret@127.0.0.1:9"], "SPARK_SERVE_API_KEY"),
        (["--max-tokens", "0"], "--max-tokens 0 is not"),
        (["--url", "ftp://x"], "neither http"),
        ([], "what is to be measured"),
    ],
    ids=["too many", "no number", "a password", "no output", "no http", "nothing"],
)
def test_bad_arguments(arguments: list[str], says: str, state_dir: Path) -> None:
    """Status 2, naming the option, before anything is asked."""
    done = bench("run", *(["--url", "http://127.0.0.1:9"] if arguments and "--url" not in arguments else []), *arguments)
    assert (done.returncode, says in done.stderr) == (2, True), done.stderr


def test_a_run_has_a_deadline(engine: str, state_dir: Path) -> None:
    """What was measured by then is kept, and the run failed."""
    done = bench("run", "--url", engine, "--json", "--deadline", "1", *LONG)
    record = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, record["status"], record["reason"]) == (1, "failed", "not through within 1 s")


def test_what_was_refused_leaves_no_run(engine: str, state_dir: Path) -> None:
    """Only what was begun is in the history."""
    assert bench("run", "--url", engine, "--model", "another").returncode == 1
    assert History(state_dir).runs() == []


def test_nobody_there(state_dir: Path) -> None:
    """An endpoint that cannot be reached is 69."""
    done = bench("run", "--url", "http://127.0.0.1:9")
    assert (done.returncode, "does not answer" in done.stderr) == (69, True)
