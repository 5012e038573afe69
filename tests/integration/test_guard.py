"""The guard as units call it: real servers beside it, memory that comes back, and folders that cannot be written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from process_tree import ProcessTree
from world import World

from sparkguard.ledger import Ledger


def test_refuses_beside_a_running_server(world: World) -> None:
    """A vLLM that somebody started by hand is counted: 0.50 and 0.40 are over the budget, and the text names it."""
    pid = world.serve_by_hand("org/other", "--port", "8123", "--gpu-memory-utilization=0.50")["pid"]
    refused = world.guard("model", VLLM_GPU_MEM_UTIL="0.40")
    assert refused.returncode == 75
    assert refused.stdout == ""
    assert refused.stderr.startswith(
        "FATAL: model wants --gpu-memory-utilization 0.40, which would\n"
        "       take the GPU-memory total to 0.90, over the 0.80 budget.\n"
    )
    assert f"\n  pid {pid} port 8123 at 0.50\n" in refused.stderr
    assert f"\n         or stop pid {pid}: kill {pid}\n" in refused.stderr


def test_the_object_says_the_same(world: World) -> None:
    """--json prints one object on stdout, before or behind the name, with the status and the text on stderr as without."""
    pid = world.serve_by_hand("org/other", "--gpu-memory-utilization", "0.01")["pid"]
    for words in (["--json", "model"], ["model", "--json"]):
        admitted = world.guard(*words, VLLM_GPU_MEM_UTIL="0.01")
        entry = json.loads(admitted.stdout)
        assert (admitted.returncode, entry["verdict"], entry["reason"]) == (0, "admitted", "fits")
        # Without root there is no pid namespace, and other servers of the machine are counted, too.
        assert [(claim["pid"], claim["share"]) for claim in entry["claims"] if claim["pid"] == pid] == [(pid, "0.01")]
        assert "sparkguard: model is admitted at 0.01" in admitted.stderr
    refused = world.guard("--json", "model", VLLM_GPU_MEM_UTIL="0.80")
    entry = json.loads(refused.stdout)
    assert (refused.returncode, entry["verdict"], entry["reason"]) == (75, "refused", "over_budget")
    assert refused.stderr.startswith("FATAL: ")


def test_a_check_by_hand_reserves_nothing_for_later(world: World) -> None:
    """A guard that was not part of a start ends, and its reservation with it."""
    for _ in range(3):
        assert world.guard("model", VLLM_MEM_BUDGET="0.02", VLLM_GPU_MEM_UTIL="0.02").returncode == 0


def test_arguments_of_another_launcher(world: World) -> None:
    """NAME without a spec, with vLLM's own arguments, is judged by them: no model has to be set, for it is not ours to start."""
    assert world.guard("stranger", "org/name", "--gpu-memory-utilization", "0.95").returncode == 78
    assert world.guard("stranger", "--gpu-memory-utilization", "0.01").returncode == 0
    assert world.guard("stranger").returncode == 78


USAGES = {"nothing": ([], 2, "stderr"), "help": (["--help"], 0, "stdout"), "json alone": (["--json"], 2, "stderr")}


@pytest.mark.parametrize(("words", "status", "stream"), USAGES.values(), ids=USAGES)
def test_usage(world: World, words: list[str], status: int, stream: str) -> None:
    """Bad arguments are 2 with the usage on stderr; --help is an answer, on stdout."""
    done = world.guard(*words)
    assert done.returncode == status
    assert getattr(done, stream).startswith("usage: vllm_mem_budget.sh NAME")


def test_a_bad_setting_is_said_with_its_place(world: World) -> None:
    """A malformed share is 78; the message has the file and the line, the hint what to write."""
    world.spec("model", "VLLM_MODEL=org/name\nVLLM_GPU_MEM_UTIL=40%\n")
    done = world.guard("model")
    assert done.returncode == 78
    path = world.config / "models" / "model.env"
    assert done.stderr == (f"sparkguard: VLLM_GPU_MEM_UTIL in {path}, line 2 is '40%', which is no share\n  write 0.40 for 40%\n")


class Memory:
    """A machine of 100 GiB in files, whose available memory a test changes."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.tree = ProcessTree(folder / "proc")
        self.home = home
        (folder / "sys").mkdir()
        (folder / "dev").mkdir()
        self.roots = f"Roots('{self.tree.root}', '{folder / 'sys'}', '{folder / 'dev'}')"
        models = home / ".config" / "spark" / "models"
        models.mkdir(parents=True)
        (models / "model.env").write_text("VLLM_MODEL=org/name\nVLLM_GPU_MEM_UTIL=0.50\n")

    def available(self, gib: int) -> None:
        path = self.tree.root / "meminfo"
        path.with_name("new").write_text(f"MemTotal: {100 << 20} kB\nMemFree: 1024 kB\nMemAvailable: {gib << 20} kB\n")
        os.replace(path.with_name("new"), path)

    def guard(self, **env: str) -> subprocess.Popen[str]:
        code = f"import sys; from sparkguard.guard import main, Roots; sys.exit(main(sys.argv[1:], None, {self.roots}))"
        everything = {"HOME": str(self.home), "XDG_RUNTIME_DIR": str(self.home / "run"), "PATH": "/usr/bin:/bin", **env}
        return subprocess.Popen(
            [sys.executable, "-I", "-c", code, "model"],
            env=everything,
            stderr=subprocess.PIPE,
            text=True,
            stdin=subprocess.DEVNULL,
        )


@pytest.fixture
def memory(tmp_path: Path, home: Path) -> Memory:
    return Memory(tmp_path, home)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    return process.stderr.readline()


def test_waits_for_memory_to_come_back(memory: Memory) -> None:
    """A start whose bytes are not there yet says what it waits for, holds no lock meanwhile, and goes on when they are."""
    memory.available(20)
    start = memory.guard()
    assert first_line(start) == "sparkguard: model waits up to 60 s for 35.0 GiB more memory to come back\n"
    with Ledger(str(memory.home / "run" / "sparkguard"), seconds=10) as held:
        assert held.live() == ()
    memory.available(55)
    _, err = start.communicate(timeout=20)
    assert start.returncode == 0
    assert err == "sparkguard: model is admitted at 0.50 (50.0 GiB): 0.50 of the 0.80 budget of system RAM\n"


def test_a_stop_ends_the_wait_at_once(memory: Memory) -> None:
    """SIGTERM does not wait for VLLM_MEM_WAIT, and no lock or reservation is left."""
    memory.available(20)
    start = memory.guard()
    first_line(start)
    began = time.monotonic()
    start.terminate()
    start.communicate(timeout=20)
    assert start.returncode == -signal.SIGTERM
    assert time.monotonic() - began < 5
    memory.available(55)
    again = memory.guard()
    again.communicate(timeout=20)
    assert again.returncode == 0


def test_an_interrupt_ends_it_without_a_traceback(memory: Memory) -> None:
    """Ctrl-C while it waits is 130."""
    memory.available(20)
    start = memory.guard()
    first_line(start)
    start.send_signal(signal.SIGINT)
    _, err = start.communicate(timeout=20)
    assert (start.returncode, err) == (130, "")


def test_the_wait_has_an_end(memory: Memory) -> None:
    """After VLLM_MEM_WAIT seconds the refusal comes, once, with 75."""
    memory.available(20)
    began = time.monotonic()
    start = memory.guard(VLLM_MEM_WAIT="0.7")
    _, err = start.communicate(timeout=20)
    assert start.returncode == 75
    assert time.monotonic() - began >= 0.7
    assert err.startswith("sparkguard: model waits up to 0.7 s for 35.0 GiB more memory to come back\nFATAL: ")
    assert err.count("FATAL") == err.count("waits") == 1


def test_no_wait(memory: Memory) -> None:
    """VLLM_MEM_WAIT=0 refuses at once, and so does what no wait would change: a sum over the budget."""
    memory.available(20)
    for env, status in (({"VLLM_MEM_WAIT": "0"}, 75), ({"VLLM_GPU_MEM_UTIL": "0.81"}, 78)):
        start = memory.guard(**env)
        _, err = start.communicate(timeout=20)
        assert start.returncode == status
        assert "waits" not in err


def in_private_mounts(script: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    code = "import sys; from sparkguard.guard import main; sys.exit(main(['model']))"
    command = ["unshare", "--mount", "sh", "-ec", f'{script}; exec "$@"', "sh", sys.executable, "-I", "-c", code]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


DISKS = {
    "full": (
        'mount -t tmpfs -o size=16k tmpfs "$XDG_RUNTIME_DIR"; mkdir -m 700 "$XDG_RUNTIME_DIR/sparkguard";'
        ' head -c 100k /dev/zero >"$XDG_RUNTIME_DIR/zeros" 2>/dev/null || :',
        "No space left on device\n  it is full: free some space there\n",
    ),
    "without inodes": (
        'mount -t tmpfs -o nr_inodes=3 tmpfs "$XDG_RUNTIME_DIR"; mkdir -m 700 "$XDG_RUNTIME_DIR/sparkguard";'
        ' : >"$XDG_RUNTIME_DIR/sparkguard/lock"',
        "No space left on device\n  it is full: free some space there\n",
    ),
    "read-only": (
        'mount -t tmpfs -o ro tmpfs "$XDG_RUNTIME_DIR"',
        "Read-only file system\n  it is read-only: set XDG_RUNTIME_DIR to a folder that you can write to\n",
    ),
    "somebody else's": (
        'mkdir "$XDG_RUNTIME_DIR/sparkguard"; chown 4711 "$XDG_RUNTIME_DIR/sparkguard"',
        "it belongs to somebody else (uid 4711)\n  remove it, or set XDG_RUNTIME_DIR to your own folder\n",
    ),
}


@pytest.mark.skipif(os.getuid() != 0, reason="mounts and other users' folders need root; tests/unit/test_ledger.py has the rest")
@pytest.mark.parametrize(("script", "words"), DISKS.values(), ids=DISKS)
def test_no_reservation_no_start(world: World, script: str, words: str) -> None:
    """Where no reservation can be kept the start is refused with 71 and what would help: two at once would both be admitted."""
    done = in_private_mounts(script, world.env({"VLLM_GPU_MEM_UTIL": "0.001"}))
    assert done.returncode == 71, done.stderr
    assert done.stderr == f"sparkguard: no reservation can be kept in {world.home / 'run' / 'sparkguard'}: {words}"
