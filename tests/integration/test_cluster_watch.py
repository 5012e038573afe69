"""spark-serve watch over real sshd, with real engines behind: dead ranks, frozen nodes, and what it leaves on the nodes."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from cluster_laptop import Laptop
from cluster_rig import Rig, RigNode

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "schemas" / "watch.json").read_text())
SECONDS = 40.0
# One start of Python takes 10 ms when nothing else runs, and the longer the busier the machine is: a clock that load slows down.
STARTS_IN_TWO_SECONDS = 200


@pytest.fixture
def laptop(rig: Rig, tmp_path: Path) -> Laptop:
    return Laptop(rig, tmp_path / "laptop")


class Ticks:
    """The lines of a `watch --json` that runs."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._buffer = b""

    def until(self, wanted: Callable[[dict[str, Any]], Any], seconds: float = SECONDS) -> dict[str, Any]:
        """The first picture that is as wanted."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + seconds
        last: dict[str, Any] = {}
        while True:
            while b"\n" not in self._buffer:
                ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
                data = os.read(self.process.stdout.fileno(), 1 << 16) if ready else b""
                assert data, f"not seen in time, or it ended: {json.dumps(last)[:3000]}"
                self._buffer += data
            line, self._buffer = self._buffer.split(b"\n", 1)
            last = json.loads(line)
            jsonschema.validate(last, SCHEMA)
            if wanted(last):
                return last
            assert time.monotonic() < deadline, json.dumps(last)[:3000]


@contextmanager
def watching(laptop: Laptop, *words: str) -> Iterator[Ticks]:
    process = laptop.start("watch", "--json", "--interval", "0.5", *words)
    try:
        yield Ticks(process)
    finally:
        process.kill()
        process.communicate()


def states(tick: dict[str, Any]) -> dict[str, str]:
    return {node["node"]: node["state"] for node in tick["nodes"]}


def health(tick: dict[str, Any]) -> str:
    return str(tick["allocations"][0]["state"]) if tick["allocations"] else ""


def both_fresh(tick: dict[str, Any]) -> bool:
    return states(tick) == {"head": "ok", "worker": "ok"}


def is_sampled(node: RigNode) -> bool:
    return any("python3" in line and "-u -c" in line for line in node.programs().values())


def gone_from(node: RigNode) -> None:
    deadline = time.monotonic() + SECONDS
    while node.programs():
        assert time.monotonic() < deadline, node.programs()


def test_a_distributed_model_from_start_to_a_dead_rank(rig: Rig, laptop: Laptop) -> None:
    """Ready after a token, counted while it works, in 120 MB, and not ready within 10 s of its worker's death."""
    laptop.events("up", "ds4", "--no-hermes")
    with watching(laptop) as ticks:
        tick = ticks.until(lambda it: health(it) == "ready" and both_fresh(it))
        (only,) = tick["allocations"]
        assert (only["mode"], only["nodes"], only["served"]) == ("distributed", ["head", "worker"], "ds4")
        assert [rank["state"] for rank in only["ranks"]] == ["running", "running"]
        assert tick["nodes"][0]["gpu"]["memory_total_bytes"] is None
        holders = ticks.until(lambda it: it["nodes"][0]["holders"])["nodes"][0]["holders"]
        assert [holder["container"] for holder in holders] == [only["ranks"][0]["container"]]

        body = json.dumps({"model": "ds4", "messages": [{"role": "user", "content": "x"}], "max_tokens": 64}).encode()
        request = urllib.request.Request(only["url"] + "/v1/chat/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 64
        ticks.until(lambda it: (it["allocations"][0]["engine"]["generation_tokens_s"] or 0) > 10)

        peak = next(line for line in Path(f"/proc/{ticks.process.pid}/status").read_text().splitlines() if "VmHWM" in line)
        assert int(peak.split()[1]) < 120 * 1024

        rig.node("worker").docker("kill", only["ranks"][1]["container"])
        died = time.monotonic()
        tick = ticks.until(lambda it: health(it) == "dead")
        assert time.monotonic() - died < 10
        assert "worker: rank 1 is exited" in tick["allocations"][0]["error"]
        assert tick["allocations"][0]["endpoint"]["answers"] is True


def test_a_frozen_node_does_not_hold_up_the_other(rig: Rig, laptop: Laptop) -> None:
    """It is stale, then unreachable; the other stays fresh; and once it thaws, all is fresh again."""
    with watching(laptop) as ticks:
        ticks.until(both_fresh)
        rig.node("worker").freeze()
        seen = set()
        ticks.until(lambda it: seen.add((states(it)["head"], states(it)["worker"])) or states(it)["worker"] == "unknown")
        assert {head for head, _ in seen} == {"ok"}
        rig.node("worker").thaw()
        ticks.until(both_fresh, 90)


def test_a_dead_daemon_is_unknown(rig: Rig, laptop: Laptop) -> None:
    """The model is neither ready nor gone, and the node is fresh all the same."""
    laptop.events("up", "small", "--node", "head", "--no-hermes")
    with watching(laptop) as ticks:
        ticks.until(lambda it: health(it) == "ready")
        rig.node("head").dead_daemon()
        tick = ticks.until(lambda it: health(it) == "unknown")
        assert states(tick)["head"] == "ok"
        assert "head cannot be asked" in tick["allocations"][0]["error"]
        rig.node("head").revive_daemon()
        ticks.until(lambda it: health(it) == "ready")


def test_a_rebooted_node_is_known_by_its_boot_id(rig: Rig, laptop: Laptop) -> None:
    """It comes back by itself, marked, with another boot_id."""
    with watching(laptop) as ticks:
        before = ticks.until(both_fresh)["nodes"][1]["boot_id"]
        rig.node("worker").reboot()
        tick = ticks.until(lambda it: states(it)["worker"] == "ok" and it["nodes"][1]["boot_id"] != before, 90)
        assert tick["nodes"][1]["boots_seen"] == 2


def test_song_workers_have_a_line_each(rig: Rig, laptop: Laptop) -> None:
    """They are no endpoint of a model; one that renders says which job."""
    with laptop.catalog.open("a") as file:
        urls = [node.yue_url for node in rig.nodes()]
        file.write(f'[yue]\nhead_url = "{urls[0]}"\nworker_url = "{urls[1]}"\nfactory_root = "~/factory"\nready_timeout = 20\n')
    for node in rig:
        (node.folder / "home/factory").symlink_to(node.folder / "factory")
    laptop.events("up", "yue")
    with watching(laptop) as ticks:
        tick = ticks.until(lambda it: [worker["state"] for worker in it["yue"]] == ["ready", "ready"])
        assert [worker["node"] for worker in tick["yue"]] == ["head", "worker"]
        assert tick["allocations"] == []
        rig.node("worker").factory(active_job={"job_id": "song-1"}, busy=True)
        tick = ticks.until(lambda it: it["yue"][1]["state"] == "busy")
        assert (tick["yue"][1]["jobs"], tick["yue"][0]["state"]) == (["song-1"], "ready")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_nothing_stays_on_the_nodes(rig: Rig, laptop: Laptop, number: signal.Signals) -> None:
    """However it ends, it ends within two seconds of an idle machine, and the samplers end with it."""
    with watching(laptop) as ticks:
        ticks.until(both_fresh)
        assert all(is_sampled(node) for node in rig)
        ticks.process.send_signal(number)
        for _ in range(STARTS_IN_TWO_SECONDS):
            if ticks.process.poll() is not None:
                break
            subprocess.run([sys.executable, "-c", "pass"], check=True)
        status = ticks.process.poll()
        assert status == (-signal.SIGKILL if number == signal.SIGKILL else 130)
        for node in rig:
            gone_from(node)


def test_a_reader_that_leaves_ends_it(rig: Rig, laptop: Laptop) -> None:
    """As with `watch --json | head -1`: without a traceback."""
    process = laptop.start("watch", "--json", "--interval", "0.25")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(SECONDS) in (0, 130)
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()
    for node in rig:
        gone_from(node)


def test_what_was_watched_is_kept_and_shown(rig: Rig, laptop: Laptop) -> None:
    """By one of two that run; --history tells it afterwards, to programs and to people."""
    with watching(laptop) as ticks, watching(laptop) as second:
        ticks.until(both_fresh)
        second.until(both_fresh)
        for _ in range(10):
            ticks.until(lambda it: True)
    done = laptop.run("watch", "--history", "5m", "--json")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert {line["subject"] for line in lines} == {"node/head", "node/worker"}
    known = json.loads((Path(__file__).parents[2] / "docs" / "schemas" / "history.json").read_text())
    for line in lines:
        jsonschema.validate(line, known)
        assert all(later - earlier >= 1900 for earlier, later in zip(line["at_ms"], line["at_ms"][1:]))
    assert "memory_used_bytes" in laptop.run("watch", "--history", "5m").stdout
    assert laptop.run("watch", "--history", "5x").returncode == 2


def test_prometheus_is_answered(rig: Rig, laptop: Laptop) -> None:
    """While it runs, with what it shows."""
    with watching(laptop, "--prometheus", "127.0.0.1:0") as ticks:
        assert ticks.process.stderr is not None
        url = next(line.split()[-1] for line in ticks.process.stderr if line.startswith("for Prometheus"))
        ticks.until(lambda it: both_fresh(it) and all(node["gpu"] for node in it["nodes"]))
        with urllib.request.urlopen(url, timeout=10) as answer:
            text = answer.read().decode()
        assert 'spark_node_up{node="head"} 1.0' in text
        assert 'spark_node_gpu_power_watts{gpu="0",node="worker"} 12.5' in text


def test_people_get_plain_words_where_there_is_no_terminal(rig: Rig, laptop: Laptop) -> None:
    """No escape sequence goes into a pipe."""
    process = laptop.start("watch", "--interval", "0.5")
    assert process.stdout is not None
    text = ""
    while "gpu" not in text:
        text += process.stdout.readline()
    process.kill()
    process.communicate()
    assert "\033" not in text
    assert "head  ok" in text
