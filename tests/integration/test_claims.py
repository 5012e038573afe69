"""Real processes, seen through the real /proc: a stand-in for vLLM that has its name, its arguments, its children and titles."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sparkguard.core.share import format_share
from sparkguard.core.types import UNIFIED, Machine, MemoryPool
from sparkguard.probe import claims, engines, procfs

GIB = 1 << 30
MACHINE = Machine((MemoryPool("ram", UNIFIED, 128 * GIB, name="NVIDIA GB10"),))

# What a server does as far as /proc can tell. A title is written as setproctitle does it: over the command line, in place,
# and padded with NULs. Everybody ends when the test closes the pipe, also those whose parent has been killed.
STAND_IN = """
import ctypes, json, os, socket, sys

def call_oneself(title):
    fields = open("/proc/self/stat", "rb").read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    ctypes.memmove(start, title.encode().ljust(end - start, b"\\0")[: end - start], end - start)
    ctypes.CDLL(None).prctl(15, title.encode(), 0, 0, 0)

def child(title, *below):
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ready)
        pids = [os.getpid()] + [pid for entry in below for pid in child(*entry)]
        if title:
            call_oneself(title)
        os.write(told, json.dumps(pids).encode() + b"\\n")
        sys.stdin.read()
        os._exit(0)
    with open(ready) as pipe:
        return json.loads(pipe.readline())

def main():
    pids = [pid for entry in json.loads(os.environ.get("CHILDREN", "[]")) for pid in child(*entry)]
    if "NAME" in os.environ:
        ctypes.CDLL(None).prctl(15, os.environ["NAME"].encode(), 0, 0, 0)
    listener = socket.create_server(("127.0.0.1", int(os.environ["LISTEN"]))) if "LISTEN" in os.environ else None
    print(json.dumps([os.getpid(), *pids]), flush=True)
    sys.stdin.read()

main()
"""
ENGINE = [["VLLM::EngineCore", ["VLLM::Worker_TP0"], ["VLLM::Worker_TP1"]]]
UNTITLED = [["", [""], [""]]]


class Started(NamedTuple):
    process: subprocess.Popen[str]
    pids: list[int]  # the server, then its children


Start = Callable[..., Started]


@pytest.fixture
def vllm(tmp_path: Path) -> str:
    """A console script, as pip writes one."""
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    script = tmp_path / "venv" / "bin" / "vllm"
    script.write_text(f"#!{sys.executable}\n{STAND_IN}")
    script.chmod(0o755)
    return str(script)


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a command in a session of its own, and waits until the server in it has said its pids."""
    running: list[subprocess.Popen[str]] = []

    def start(argv: Sequence[str], children: Sequence[Any] = (), cwd: Path | None = None, **environ: str) -> Started:
        environment = {**os.environ, "CHILDREN": json.dumps(children), **environ}
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=cwd, start_new_session=True
        )
        running.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"{argv[0]} ended with status {process.wait()}"
        return Started(process, json.loads(line))

    yield start
    for process in running:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        process.stdout.read()  # until the last one that holds the pipe has ended
        process.stdout.close()
        process.wait()


def see(started: Started, *others: int) -> list[claims.Seen]:
    """The claims that name one of these processes; other servers on this machine are no matter of the test."""
    snapshot = procfs.scan("/proc", engines.MARKERS)
    mine = {started.process.pid, *started.pids, *others}
    return [entry for entry in claims.see("/proc", snapshot, MACHINE, None) if mine.intersection(entry.pids)]


def share(entry: claims.Seen) -> str | None:
    (hold,) = entry.claim.holds
    return None if hold.share is None else format_share(hold.share)


@pytest.mark.parametrize("children", [[], UNTITLED, ENGINE], ids=["alone", "children without titles", "children with titles"])
def test_a_server_is_one_claim(start: Start, vllm: str, children: list[Any]) -> None:
    """However many processes it has, and whatever they call themselves."""
    server = start([vllm, "serve", "m", "--gpu-memory-utilization", "0.4", "--port", "8001"], children)
    assert len(server.pids) == (4 if children else 1)
    (entry,) = see(server)
    assert (entry.claim.pid, share(entry), entry.claim.port, entry.claim.source) == (server.pids[0], "0.40", 8001, "argument")


@pytest.mark.parametrize(
    "wrapper",
    [
        pytest.param(["bash", "-c", '"$0" "$@"; true'], id="bash -c with arguments"),
        pytest.param(["timeout", "60"], id="timeout"),
        pytest.param(["nice"], id="nice"),
        pytest.param(["env", "X=1"], id="env"),
        pytest.param(["taskset", "-c", "0"], id="taskset"),
        pytest.param([sys.executable], id="interpreter"),
    ],
)
def test_a_wrapper_counts_once(start: Start, vllm: str, wrapper: list[str]) -> None:
    """Wrapper and server are one claim, the server's."""
    server = start([*wrapper, vllm, "serve", "m", "--gpu-memory-utilization=0.4"], ENGINE)
    (entry,) = see(server)
    assert (entry.claim.pid, share(entry)) == (server.pids[0], "0.40")


def test_a_shells_text_is_no_server(start: Start, vllm: str) -> None:
    """bash -c holds the whole command in one argument, with the flag in it."""
    server = start(["bash", "-c", f"{vllm} serve m --gpu-memory-utilization 0.4; true"])
    assert server.process.pid != server.pids[0]
    (entry,) = see(server)
    assert (entry.pids, share(entry)) == ((server.pids[0],), "0.40")


def test_the_module(start: Start, tmp_path: Path) -> None:
    """python -m, the older form."""
    module = tmp_path / "vllm" / "entrypoints" / "openai" / "api_server.py"
    module.parent.mkdir(parents=True)
    module.write_text(STAND_IN)
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", "m", "--gpu-mem", "0.4"]
    (entry,) = see(start(argv, ENGINE, cwd=tmp_path))
    assert share(entry) == "0.40"


def test_an_orphan(start: Start, vllm: str) -> None:
    """After kill -9 of the server its engine lives on, holds the memory, and is named."""
    server = start([vllm, "serve", "m", "--gpu-memory-utilization", "0.4"], ENGINE)
    os.kill(server.pids[0], signal.SIGKILL)
    server.process.wait()
    (entry,) = see(server)
    assert entry.claim.orphan and entry.claim.note == "its server is gone"
    assert (entry.claim.pid, set(entry.pids), share(entry)) == (server.pids[1], set(server.pids[1:]), None)


def test_an_engine_in_a_program(start: Start, tmp_path: Path) -> None:
    """A Python program with LLM() in it is alive, and its share is in its code."""
    (tmp_path / "batch.py").write_text(STAND_IN)
    program = start([sys.executable, "batch.py"], ENGINE, cwd=tmp_path)
    (entry,) = see(program)
    assert not entry.claim.orphan and entry.claim.grows and share(entry) is None
    assert entry.claim.note == f"its share is in the code of pid {program.pids[0]}"


def test_a_zombie(start: Start, vllm: str) -> None:
    """A server that has ended, and that nobody has waited for, holds nothing."""
    server = start([vllm, "serve", "m", "--gpu-memory-utilization", "0.4"])
    server.process.kill()
    os.waitid(os.P_PID, server.process.pid, os.WEXITED | os.WNOWAIT)
    stat = procfs.read_stat("/proc", server.process.pid)
    assert stat is not None and stat.state == "Z"
    assert see(server) == []


def test_a_config_file_in_the_servers_folder(start: Start, vllm: str, tmp_path: Path) -> None:
    """A relative path is the server's, not ours; the size is in no argument."""
    (tmp_path / "c.yaml").write_text("model: m\ngpu-memory-utilization: 0.25\nport: 8005\n")
    (entry,) = see(start([vllm, "serve", "--config", "c.yaml"], cwd=tmp_path))
    assert (share(entry), entry.claim.port, entry.claim.source) == ("0.25", 8005, "config")


def test_the_default_of_the_version_beside(start: Start, vllm: str, tmp_path: Path) -> None:
    """Nobody said a fraction: the dist-info beside the console script says which default holds."""
    (tmp_path / "venv/lib/python3.12/site-packages/vllm-0.11.0.dist-info").mkdir(parents=True)
    (entry,) = see(start([vllm, "serve", "m"]))
    assert (share(entry), entry.claim.source) == ("0.90", "default")


def test_odd_arguments_and_names(start: Start, vllm: str) -> None:
    """A flag inside an argument, newlines, bytes that are no UTF-8, more than 128 KiB, and a name with parentheses."""
    odd = [
        "--served-model-name",
        "x --gpu-memory-utilization 0.77",
        "--chat-template",
        "{{ a\n}}" * 12_000,
        os.fsdecode(b"--x=\xff"),
    ]
    server = start([vllm, "serve", "m", *odd, "--gpu_memory_utilization", "0.4", "y" * 100_000], UNTITLED, NAME="a) S 1 (b\n")
    (entry,) = see(server)
    assert (entry.claim.pid, share(entry)) == (server.pids[0], "0.40")


def test_a_one_shot(start: Start, vllm: str) -> None:
    """vllm serve --help imports for ten seconds, and is no server."""
    assert see(start([vllm, "serve", "--help"])) == []


def test_ready(start: Start, vllm: str) -> None:
    """On a unified pool a server has taken all of its claim once it listens, and little before."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    argv = [vllm, "serve", "m", "--gpu-memory-utilization", "0.4", "--port", str(port)]
    (loading,) = (entry.claim.holds[0] for entry in see(start(argv)))
    assert loading.bytes is not None and 1 << 20 < loading.taken_bytes < GIB
    server = start(argv, LISTEN=str(port))
    (ready,) = (entry.claim.holds[0] for entry in see(server))
    assert ready.taken_bytes == ready.bytes
