"""The front's added latency over llama-server itself, beside llama-server's own router mode; and what a swap of models takes.

    python bench/front.py [--engine LLAMA_SERVER] [--rounds 400] [--model FILE.gguf]

Contenders take turns, so that a slow moment of the machine hits all of them. Prints a table; asserts nothing.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

CACHE = Path(os.environ.get("SPARKGUARD_TEST_CACHE", "/var/cache/sparkguard-tests"))
STREAMS = 20
JSON = {"Content-Type": "application/json"}
SWAPS = 15
NAME, OTHER = "bench", "other"
WORKLOADS = {
    "tokenize": ("/tokenize", {"content": "hello"}),
    "chat of 1 token": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}),
    "stream of 200": ("/v1/completions", {"prompt": "hi", "max_tokens": 200, "stream": True}),
}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def started(command: list[str | Path], says: str, **env: str) -> Iterator[None]:
    """A program, once its stderr has said so."""
    process = subprocess.Popen(
        command, env={**os.environ, **env}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    assert process.stderr is not None
    try:
        if not any(says in line for line in process.stderr):
            raise SystemExit(f"{command[0]} did not start")
        reader = threading.Thread(target=process.stderr.read)
        reader.start()
        yield
    finally:
        process.terminate()
        process.wait()
        reader.join()


class Client:
    """One kept connection, as a client library has it; a stream ends its connection on the engine itself."""

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)

    def ask(self, path: str, body: dict[str, object]) -> float:
        began = time.perf_counter()
        self.connection.request("POST", path, json.dumps(body), JSON)
        answer = self.connection.getresponse()
        if answer.status != 200:
            raise SystemExit(f"{path}: {answer.status} {answer.read()!r}")
        answer.read()
        if "event-stream" in (answer.headers["Content-Type"] or ""):
            self.connection.close()
        return (time.perf_counter() - began) * 1000


def percentile(times: list[float], share: float) -> float:
    return sorted(times)[min(len(times) - 1, int(len(times) * share))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", type=Path, default=CACHE / "llama" / "engine" / "llama-server")
    parser.add_argument("--model", type=Path, help="a GGUF file; by default a tiny one is made")
    parser.add_argument("--rounds", type=int, default=400)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        home = Path(folder)
        models = home / "models"
        models.mkdir()
        (home / "run").mkdir(mode=0o700)
        model = models / f"{NAME}.gguf"
        model.symlink_to(options.model.resolve() if options.model else make_model(home / "tiny.gguf"))
        (models / f"{OTHER}.gguf").symlink_to(model.resolve())
        port, router_port, front_port = free_port(), free_port(), free_port()
        one = [options.engine, "-t", "1", "-c", "2048", "-np", "1", "--cache-ram", "0"]
        stack.enter_context(started([*one, "-m", model, "--port", str(port)], "listening"))
        router = [*one, "--models-dir", models, "--models-max", "1", "--port", str(router_port)]
        stack.enter_context(started(router, "listening"))
        settings = {
            "HOME": folder,
            "XDG_RUNTIME_DIR": str(home / "run"),
            "MODELS_DIR": str(models),
            "SPARK_LLAMA_SERVER": str(options.engine),
            "SPARK_PORT": str(front_port),
            "SPARK_MAX_LOADED_MODELS": "1",
            "SPARK_THREADS": "1",
            "SPARK_MEMORY_RESERVE_MB": "64",
        }
        stack.enter_context(started([sys.executable, "-m", "sparkguard", "serve"], "the page is at", **settings))
        clients = {"llama-server": Client(port), "its router": Client(router_port), "sparkguard": Client(front_port)}
        print(f"{'ms':18}" + "".join(f"{name + ' p50':>20}{'p99':>9}" for name in clients))
        for workload in WORKLOADS:
            rounds = options.rounds if workload != "stream of 200" else min(STREAMS, options.rounds)
            times: dict[str, list[float]] = {name: [] for name in clients}
            for turn in range(rounds + 1):
                for name, client in clients.items():
                    took = client.ask(*_asked(workload))
                    if turn:  # the first one may load the model
                        times[name].append(took)
            print(f"{workload:18}{row(times)}")
        swaps: dict[str, list[float]] = {name: [] for name in clients}
        for turn in range(SWAPS):
            swaps["llama-server"].append(start_by_hand([*one, "-m", model]))
            for name in ("its router", "sparkguard"):
                swaps[name].append(clients[name].ask(*_asked("chat of 1 token", OTHER if turn % 2 == 0 else NAME)))
        print(f"{'swap, first token':18}{row(swaps)}   (llama-server: started by hand, nothing to stop)")


def make_model(path: Path) -> Path:
    """In a process of its own: this folder's gguf.py would hide the package of that name."""
    maker = "import sys; from pathlib import Path; import mkgguf; mkgguf.make(Path(sys.argv[1]), layers=4, width=256)"
    subprocess.run([sys.executable, "-c", maker, path], cwd=Path(__file__).parents[1] / "tests", check=True)
    return path


def row(times: dict[str, list[float]]) -> str:
    return "".join(f"{percentile(list_, 0.5):>20.2f}{percentile(list_, 0.99):>9.2f}" for list_ in times.values())


def start_by_hand(command: list[str | Path]) -> float:
    """Milliseconds from the start of an engine to its first token."""
    port = free_port()
    began = time.perf_counter()
    with started([*command, "--port", str(port)], "listening"):
        Client(port).ask(*_asked("chat of 1 token"))
        return (time.perf_counter() - began) * 1000


def _asked(workload: str, model: str = NAME) -> tuple[str, dict[str, object]]:
    path, body = WORKLOADS[workload]
    return path, {"model": model, **body}


if __name__ == "__main__":
    main()
