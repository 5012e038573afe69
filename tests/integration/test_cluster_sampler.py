"""The sampler as a node runs it: a process on a held channel, beside a docker and an nvidia-smi that misbehave."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from spark_tree import Tree

from sparkguard.cluster.node.sampler import SLOW_SECONDS
from sparkguard.cluster.program import BOOT, MARKER, payload

SECONDS = 20.0  # for what takes a fraction of one
ID, OTHER = "a" * 64, "b" * 64
# As a GB10 answers: no memory of its own, no limit of its fan.
ROW = "0, NVIDIA GB10, 37, 61, 45.20, 2405, 3003, [N/A], [N/A], P0, 0x0000000000000004"


class Node:
    """A home, a PATH of few programs, and one sampler."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tree = Tree(folder / "root")
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.state = folder / "state"
        self.state.mkdir()
        self.program("nvidia-smi", f'case "$1" in *compute*) exit 0 ;; esac\nwhile echo "{ROW}"; do sleep 0.2; done')
        self.docker("[]")
        self.process: subprocess.Popen[bytes] | None = None
        self._buffer = b""

    def program(self, name: str, text: str) -> None:
        new = self.bin / f".{name}"
        new.write_text(f"#!/bin/sh\n{text}\n")
        new.chmod(0o755)
        new.replace(self.bin / name)

    def docker(self, out: str, err: str = "", status: int = 0) -> None:
        (self.folder / "out").write_text(out)
        (self.folder / "err").write_text(err)
        self.program("docker", f"cat {self.folder}/out; cat {self.folder}/err >&2; exit {status}")

    def receipts(self, *ids: str) -> None:
        receipts = {id: {"name": f"rank-{id[0]}", "model": "m", "rank": 1, "digest": "d", "generation": "g"} for id in ids}
        kept = {"version": 1, "generation": "g", "receipts": receipts, "intents": {}}
        (self.state / "node.json").write_text(json.dumps(kept))

    def start(self, interval: float = 0.25, **request: Any) -> None:
        environment = {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "HOME": str(self.folder),
            "SPARK_SERVE_STATE_DIR": str(self.state),
            "SPARK_SERVE_PROC": str(self.tree.proc),
            "SPARK_SERVE_SYS": str(self.tree.sys),
        }
        command = BOOT.replace("python3", sys.executable, 1)
        self.process = subprocess.Popen(
            ["sh", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )
        assert self.process.stdin is not None
        self.process.stdin.write(payload("sampler", {"interval": interval, "slow_interval": 0.3, **request}, None, 30, None))
        self.process.stdin.flush()
        while MARKER not in self._buffer:
            self._more()
        self._buffer = self._buffer.split(MARKER, 1)[1]

    def _more(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], SECONDS)
        assert ready, "it says nothing"
        data = os.read(self.process.stdout.fileno(), 65536)
        assert data, "it ended"
        self._buffer += data

    def next(self, kind: str, wanted: Any = lambda it: True) -> Any:
        """The next line of that kind that is as wanted."""
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            while b"\n" not in self._buffer:
                self._more()
            line, self._buffer = self._buffer.split(b"\n", 1)
            reply = json.loads(line)["reply"]
            if kind in reply and wanted(reply[kind]):
                return reply[kind]
        raise AssertionError(f"no {kind} as wanted")


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    if node.process is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(node.process.pid, signal.SIGKILL)
        assert node.process.stdin is not None
        assert node.process.stdout is not None
        node.process.wait()
        node.process.stdin.close()
        node.process.stdout.close()


def inspected(id: str, **state: Any) -> dict[str, Any]:
    status = {"Status": "running", "ExitCode": 0, "OOMKilled": False, "StartedAt": "2026-01-01T00:00:00Z", **state}
    return {"Id": id, "Name": "/rank", "Image": "sha256:1", "State": status, "Config": {"Labels": {"sparkguard.rank": "1"}}}


def children(node: Node) -> set[int]:
    """All processes of its session and below that still run its nvidia-smi."""
    found = subprocess.run(["pgrep", "-f", str(node.bin)], capture_output=True, text=True, check=False).stdout
    return {int(pid) for pid in found.split()}


def test_a_tick_has_all_that_is_quick(node: Node) -> None:
    """Counters, gauges, and the GPU by one nvidia-smi that stays; what it calls [N/A] is null."""
    node.start()
    assert node.next("hello")["hostname"] == "spark-a"
    tick = node.next("tick", lambda it: it["gpus"])
    assert tick["gpus"] == [
        {
            "name": "NVIDIA GB10",
            "utilization_percent": 37,
            "celsius": 61,
            "watts": 45.2,
            "sm_mhz": 2405,
            "max_sm_mhz": 3003,
            "pstate": "P0",
            "memory_used_bytes": None,
            "memory_total_bytes": None,
            "reasons": 4,
        }
    ]
    assert tick["gpu_error"] is None
    assert set(tick["roce"]) == {"rocep1s0f1", "roceP2p1s0f1"}
    again = node.next("tick")
    assert again["steady_s"] > tick["steady_s"]


def test_it_costs_less_than_a_hundredth_of_a_core(node: Node) -> None:
    """At one tick a second, docker's and nvidia-smi's looks of every 5 s included; the nvidia-smi that stays is apart."""
    node.receipts(ID)
    node.docker(json.dumps([inspected(ID)]))
    node.start(interval=1.0, slow_interval=5.0)
    for _ in range(2):
        first = node.next("tick")
    last = node.next("tick", lambda it: it["steady_s"] - first["steady_s"] > 5.5)
    seconds = last["steady_s"] - first["steady_s"]
    assert sum(last["cost"].values()) - sum(first["cost"].values()) < 0.01 * seconds


def test_it_ends_with_its_stdin_and_leaves_nothing(node: Node) -> None:
    """ssh carries no signals: a closed channel ends the sampler, and its nvidia-smi with it."""
    node.start()
    node.next("tick", lambda it: it["gpus"])
    assert children(node)
    assert node.process is not None
    assert node.process.stdin is not None
    node.process.stdin.close()
    assert node.process.wait(SECONDS) == 75
    until = time.monotonic() + SECONDS
    while children(node):
        assert time.monotonic() < until


def test_a_container_that_dies_is_seen(node: Node) -> None:
    """With its exit code, at the next look, and looks are 5 s apart."""
    node.receipts(ID)
    node.docker(json.dumps([inspected(ID)]))
    node.start()
    assert node.next("containers")["found"][0]["state"] == "running"
    node.docker(json.dumps([inspected(ID, Status="exited", ExitCode=137, OOMKilled=True)]))
    dead = node.next("containers", lambda it: it["found"][0]["state"] != "running")["found"][0]
    assert (dead["id"], dead["state"], dead["exit_code"], dead["oom_killed"]) == (ID, "exited", 137, True)


def test_looks_are_close_enough() -> None:
    """A rank that dies just after a look is told by the next one, and 10 s are promised until it is shown."""
    assert SLOW_SECONDS + 3.0 < 10


def test_a_container_that_is_gone_is_not_a_daemon_that_is(node: Node) -> None:
    """docker's own words tell: no such container is gone, no daemon is unknown."""
    node.receipts(ID, OTHER)
    node.docker(json.dumps([inspected(ID)]), f"Error response from daemon: No such container: {OTHER}\n", 1)
    node.start()
    found = node.next("containers")["found"]
    assert [(it["id"], it["state"], it["rank"]) for it in found] == [(ID, "running", 1), (OTHER, "gone", 1)]
    node.docker("[]", "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?\n", 1)
    unknown = node.next("containers", lambda it: it["found"] is None)
    assert "Cannot connect" in unknown["error"]


def test_a_docker_that_hangs_holds_up_nothing_else(node: Node) -> None:
    """Ticks and sensors go on."""
    node.receipts(ID)
    node.program("docker", "exec sleep 600")
    node.start()
    for _ in range(3):
        node.next("tick")
    assert node.next("slow")["thermal"][0]["celsius"] == 51.2


def test_an_older_driver_is_asked_in_its_own_words(node: Node) -> None:
    """Where clocks_event_reasons is unknown, clocks_throttle_reasons is asked."""
    node.program(
        "nvidia-smi",
        'case "$*" in *compute*) exit 0 ;; *event_reasons*) echo "Field \\"x\\" is not a valid field to query."; exit 2 ;; esac\n'
        f'while echo "{ROW}"; do sleep 0.2; done',
    )
    node.start()
    assert node.next("tick", lambda it: it["gpus"])["gpus"][0]["reasons"] == 4


def test_an_nvidia_smi_that_falls_silent_is_not_believed(node: Node) -> None:
    """Its last answer is not that of now: unknown, and why."""
    node.program("nvidia-smi", f'case "$*" in *compute*) exit 0 ;; esac\necho "{ROW}"; exec sleep 600')
    node.start()
    node.next("tick", lambda it: it["gpus"])
    tick = node.next("tick", lambda it: it["gpus"] is None)
    assert "has said nothing for" in tick["gpu_error"]


def test_without_an_nvidia_smi_the_rest_is_told(node: Node) -> None:
    """GPUs are unknown, not idle."""
    (node.bin / "nvidia-smi").unlink()
    node.start()
    tick = node.next("tick", lambda it: "cannot be run" in (it["gpu_error"] or ""))
    assert tick["gpus"] is None
    assert tick["memory"]["total_bytes"] > 0
    assert "nvidia-smi" in node.next("holders")["error"]
