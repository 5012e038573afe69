"""The front's added latency over llama-server itself, and over its own router mode: interleaved in one run.

    python bench/front.py [--engine LLAMA_SERVER] [--rounds 400] [--model FILE.gguf]

Prints one table: milliseconds at p50 and p99 of a /tokenize, a chat of one token, and a stream of 200 tokens.
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

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import mkgguf
from stand_in import World

CACHE = Path(os.environ.get("SPARKGUARD_TEST_CACHE", "/var/cache/sparkguard-tests"))
STREAMS = 20
JSON = {"Content-Type": "application/json"}
NAME = "bench"
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
def engine(server: Path, *arguments: str | Path) -> Iterator[None]:
    process = subprocess.Popen(
        [server, "-t", "1", "-c", "2048", "-np", "1", "--cache-ram", "0", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        if not any("listening" in line for line in process.stderr):
            raise SystemExit(f"{server} did not start")
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield
    finally:
        process.kill()
        process.wait()


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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", type=Path, default=CACHE / "llama" / "engine" / "llama-server")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=400)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        models = Path(folder, "models")
        models.mkdir()
        model = models / f"{NAME}.gguf"
        if options.model:
            model.symlink_to(options.model.resolve())
        else:
            mkgguf.make(model, layers=4, width=256)
        path, port, router_port = f"{folder}/engine.sock", free_port(), free_port()
        stack.enter_context(engine(options.engine, "-m", model, "--port", str(port)))
        stack.enter_context(engine(options.engine, "-m", model, "--host", path, "--alias", NAME))
        stack.enter_context(engine(options.engine, "--models-dir", models, "--port", str(router_port)))
        world = World(Path(folder))
        stack.callback(world.close)
        world.loop.call(world.supervisor.start, NAME, path)
        clients = {"llama-server": Client(port), "its router": Client(router_port), "sparkguard": Client(world.port)}
        for name in clients:  # loads the router's model
            clients[name].ask(*_asked("tokenize"))
        print(f"{'ms':18}" + "".join(f"{name + ' p50':>20}{'p99':>9}" for name in clients))
        for workload in WORKLOADS:
            rounds = options.rounds if workload != "stream of 200" else min(STREAMS, options.rounds)
            times: dict[str, list[float]] = {name: [] for name in clients}
            for _ in range(rounds):
                for name, client in clients.items():
                    times[name].append(client.ask(*_asked(workload)))
            cells = "".join(f"{percentile(list_, 0.5):>20.2f}{percentile(list_, 0.99):>9.2f}" for list_ in times.values())
            print(f"{workload:18}{cells}")


def _asked(workload: str) -> tuple[str, dict[str, object]]:
    path, body = WORKLOADS[workload]
    return path, {"model": NAME, **body}


if __name__ == "__main__":
    main()
