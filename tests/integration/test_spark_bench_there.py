"""`spark_bench --ssh-host` on the rig: a Spark is drained, held, measured, and given back as it was."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cluster_laptop import IMAGE, MODELS, Laptop
from cluster_rig.rig import Rig

BENCH = "import sys; from spark_bench.__main__ import main; sys.exit(main())"
ITEM = {"genre": "folk", "lyrics": "[verse]\nOne line\n"}
WORKLOAD: dict[str, Any] = {"version": 1, "workloads": [{"id": "short", **ITEM}, {"id": "long", **ITEM}]}


def songs(rig: Rig) -> str:
    urls = (f'{role}_url = "http://{rig.node(role).address}:8011"' for role in ("head", "worker"))
    return "\n".join([MODELS, "[yue]", *urls])


@pytest.fixture
def laptop(rig: Rig, tmp_path: Path) -> Laptop:
    """With song workers on both nodes that take songs."""
    for node in rig:
        factory_root = node.folder / "home/.local/share/artist-twin/yue-factory"
        factory_root.parent.mkdir(parents=True)
        factory_root.symlink_to(node.folder / "factory")
    laptop = Laptop(rig, tmp_path / "laptop", songs(rig))
    done = laptop.run("up", "yue", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "laptop" / "work.json").write_text(json.dumps(WORKLOAD))
    return laptop


def arguments(laptop: Laptop, *more: str) -> list[str]:
    base = ["concurrency", "--ssh-host", "head", "--synthetic", "--json", "--workload", str(laptop.folder / "work.json")]
    levels = ["--concurrency", "1,2", "--jobs-per-level", "4", "--iterations", "1", "--output", str(laptop.folder / "out")]
    return [*base, *levels, "--config", str(laptop.catalog), "--telemetry-interval", "0.1", *more]


def factory(laptop: Laptop, node: str = "head") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((laptop.rig.node(node).folder / "factory" / "factory.json").read_text())
    return found


def controls(laptop: Laptop) -> list[str]:
    path = laptop.rig.node("head").folder / "factory" / "controls"
    return [json.loads(line)[0] for line in path.read_text().splitlines() if json.loads(line)[0] != "status"]


def announced(laptop: Laptop) -> list[str]:
    return [worker["id"] for worker in json.loads((laptop.state / "yue-workers.json").read_text())["workers"]]


def events(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [json.loads(line)["event"] for line in done.stdout.splitlines()]


def test_a_spark_is_given_back_as_it_was(laptop: Laptop) -> None:
    """Drained, measured with the raw results here, admitted under its own generation, announced; the other Spark went on."""
    before = factory(laptop)
    done = laptop.run(*arguments(laptop), program=BENCH)
    assert done.returncode == 0, done.stdout + done.stderr
    after = factory(laptop)
    assert (after["accepting"], after["generation"]) == (True, before["generation"])
    assert controls(laptop)[-2:] == ["drain", "admit"]
    assert sorted(announced(laptop)) == ["yue-head", "yue-worker"]
    assert events(done)[-1] == "given_back"
    out = laptop.folder / "out"
    assert len((out / "trials" / "r01-c02" / "jobs.jsonl").read_text().splitlines()) == 4
    assert json.loads((out / "summary.json").read_text())["host"] == "head"
    path = json.loads((out / "remote-run.json").read_text())["path"]
    assert "output.wav" in laptop.rig.node("head").run("find", path).stdout
    assert list(out.rglob("*.wav")) == []


def test_it_waits_for_a_song_and_cancels_none(laptop: Laptop) -> None:
    """A song that renders ends in its own time; the experiment begins then."""
    head = laptop.rig.node("head")
    head.factory(active_job={"job_id": "song-7"})
    with laptop.start(*arguments(laptop), program=BENCH) as process:
        assert process.stdout is not None
        assert any('"waiting"' in line and "song-7" in line for line in process.stdout)
        assert announced(laptop) == ["yue-worker"]
        head.factory(active_job=None)
        out = process.stdout.read()
    assert process.returncode == 0, out
    assert "cancel" not in controls(laptop)


def test_a_song_that_does_not_end_ends_the_wait(laptop: Laptop) -> None:
    """75, naming it; it goes on rendering, and the worker takes songs as before."""
    laptop.rig.node("head").factory(active_job={"job_id": "song-7"})
    done = laptop.run(*arguments(laptop, "--wait-idle", "0.5"), program=BENCH)
    assert (done.returncode, "song-7" in done.stderr) == (75, True)
    after = factory(laptop)
    assert (after["active_job"], after["accepting"]) == ({"job_id": "song-7"}, True)
    assert not (laptop.folder / "out").exists()


def test_nobody_else_begins_meanwhile(laptop: Laptop) -> None:
    """A second command on this laptop meets its lock, one on another laptop the node's."""
    head = laptop.rig.node("head")
    head.factory(active_job={"job_id": "song-7"})
    with laptop.start(*arguments(laptop), program=BENCH) as process:
        assert process.stdout is not None
        assert any('"waiting"' in line for line in process.stdout)
        here = laptop.run("stop")
        other = Laptop(laptop.rig, laptop.folder.parent / "other", songs(laptop.rig)).run("stop")
        process.send_signal(signal.SIGINT)
        process.stdout.read()
    for done in (here, other):
        assert (done.returncode, "spark_bench concurrency" in done.stderr) == (75, True), done.stderr


def test_ctrl_c_ends_the_jobs_and_gives_it_back(laptop: Laptop) -> None:
    """Status 130; no process of the experiment is left on the node, and the worker takes songs again."""
    more = ["--jobs-per-level", "400", "--iterations", "5"]
    with laptop.start(*arguments(laptop, *more), program=BENCH) as process:
        assert process.stdout is not None
        assert any('"job"' in line for line in process.stdout)
        process.send_signal(signal.SIGINT)
        out = process.stdout.read()
    assert process.returncode == 130, out
    assert '"given_back"' in out
    assert factory(laptop)["accepting"] is True
    assert [words for words in laptop.rig.node("head").pids().values() if "spark_bench" in words] == []


def test_a_killed_laptop_leaves_the_node_drained_and_free(laptop: Laptop) -> None:
    """Nothing of the experiment goes on; the worker stays drained until `up yue`, which finds nothing in its way."""
    with laptop.start(*arguments(laptop, "--jobs-per-level", "400"), program=BENCH) as process:
        assert process.stdout is not None
        assert any('"job"' in line for line in process.stdout)
        process.kill()
    done = laptop.run("up", "yue", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert factory(laptop)["accepting"] is True
    assert sorted(announced(laptop)) == ["yue-head", "yue-worker"]


def test_a_worker_that_takes_no_songs_is_left_alone(laptop: Laptop) -> None:
    """It could not be given back as it was: refused, and nothing is changed."""
    laptop.rig.node("head").factory(accepting=False)
    before = controls(laptop)
    done = laptop.run(*arguments(laptop), program=BENCH)
    assert (done.returncode, "takes no songs" in done.stderr) == (1, True)
    assert controls(laptop) == before


def test_a_foreign_container_stops_it(laptop: Laptop) -> None:
    """What computes there would be measured with it: refused by name, and the worker takes songs again."""
    head = laptop.rig.node("head")
    head.docker("start", head.docker("create", "--name", "stranger", "--gpus", "all", IMAGE, "serve", "--port", "9000"))
    done = laptop.run(*arguments(laptop), program=BENCH)
    assert done.returncode == 75, done.stdout + done.stderr
    assert "stranger" in done.stderr
    assert '"given_back"' in done.stdout


def test_a_host_that_is_none_of_the_catalogs(laptop: Laptop) -> None:
    """Named with those that are."""
    words = arguments(laptop)
    words[words.index("head")] = "elsewhere"
    done = laptop.run(*words, program=BENCH)
    assert (done.returncode, "head, worker" in done.stderr) == (2, True)
