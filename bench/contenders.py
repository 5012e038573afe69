"""llama-server itself, its router mode, and sparkguard: the same models, the same settings, each on a port of its own."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"
JSON = {"Content-Type": "application/json"}
SECONDS = 600


@contextmanager
def started(command: list[str | Path], says: str, **env: str) -> Iterator[int]:
    """The pid of a program that has said so on its stderr."""
    process = subprocess.Popen(
        command, env={**os.environ, **env}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    assert process.stderr is not None
    said: list[str] = []
    try:
        for line in process.stderr:
            said.append(line)
            if says in line:
                break
        else:
            raise SystemExit(f"{command[0]} did not start:\n{''.join(said[-20:])}")
        reader = threading.Thread(target=lambda: [None for _ in process.stderr or ()], daemon=True)
        reader.start()
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:  # an engine may overhear a SIGTERM in its first moments
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Contender:
    """One that answers on a port, and the pid of its main process."""

    def __init__(self, name: str, port: int, pid: int) -> None:
        self.name = name
        self.port = port
        self.pid = pid
        self.client = Client(port)

    def resident_mb(self) -> float:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


class Client:
    """One kept connection, as a client library has it; a stream ends its connection on the engine itself."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)

    def ask(self, path: str, body: dict[str, object]) -> float:
        """Milliseconds until the answer is whole. Raises Failed for any status but 200."""
        began = time.perf_counter()
        self._connection.request("POST", path, json.dumps(body), JSON)
        answer = self._connection.getresponse()
        read = answer.read()
        if "event-stream" in (answer.headers["Content-Type"] or ""):
            self._connection.close()
        if answer.status != 200:
            raise Failed(f"{path}: {answer.status} {read[:500]!r}")
        return (time.perf_counter() - began) * 1000

    def close(self) -> None:
        self._connection.close()


class Failed(Exception):
    """A request without the answer that it should have had."""


def engine(program: Path) -> list[str | Path]:
    """As sparkguard starts it: one slot, one thread, the default context, no cache of prompts."""
    return [program, "-t", "1", "-c", "4096", "-np", "1", "-b", "512", "--cache-ram", "0"]


@contextmanager
def alone(program: Path, model: Path) -> Iterator[Contender]:
    port = free_port()
    with started([*engine(program), "-m", model, "--port", str(port)], "listening") as pid:
        yield Contender("llama-server", port, pid)


@contextmanager
def router(program: Path, models: Path, most_loaded: int) -> Iterator[Contender]:
    port = free_port()
    command = [*engine(program), "--models-dir", models, "--models-max", str(most_loaded), "--port", str(port)]
    with started(command, "listening") as pid:
        yield Contender("its router", port, pid)


@contextmanager
def sparkguard(program: Path, models: Path, most_loaded: int, home: Path) -> Iterator[Contender]:
    port = free_port()
    (home / "run").mkdir(mode=0o700, parents=True, exist_ok=True)
    settings = {
        "HOME": str(home),
        "XDG_RUNTIME_DIR": str(home / "run"),
        "XDG_CACHE_HOME": str(home / "cache"),
        "MODELS_DIR": str(models),
        "SPARK_LLAMA_SERVER": str(program),
        "SPARK_PORT": str(port),
        "SPARK_MAX_LOADED_MODELS": str(most_loaded),
        "SPARK_QUEUE_LIMIT": "1000",
        "SPARK_THREADS": "1",
        "VLLM_CPU_SHARE": "1",  # the others may run on any core too
        "SPARK_MEMORY_RESERVE_MB": "64",
    }
    with started([sys.executable, "-m", "sparkguard", "serve"], "the page is at", **settings) as pid:
        yield Contender("sparkguard", port, pid)


def start_by_hand(program: Path, model: Path, path: str, body: dict[str, object], **env: str) -> float:
    """Milliseconds from the start of an engine to its first token."""
    port = free_port()
    began = time.perf_counter()
    with started([*engine(program), "-m", model, "--port", str(port)], "listening", **env):
        Client(port).ask(path, body)
        return (time.perf_counter() - began) * 1000


def make_model(path: Path) -> Path:
    """In a process of its own: this folder's gguf.py would hide the package of that name."""
    maker = "import sys; from pathlib import Path; import mkgguf; mkgguf.make(Path(sys.argv[1]), layers=4, width=256)"
    subprocess.run([sys.executable, "-c", maker, path], cwd=TESTS, check=True)
    return path


def link_models(folder: Path, model: Path, names: list[str]) -> Path:
    """The same file under several names: for a server these are different models."""
    folder.mkdir()
    for name in names:
        (folder / f"{name}.gguf").symlink_to(model.resolve())
    return folder
