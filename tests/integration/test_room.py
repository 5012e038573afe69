"""A start of vLLM that lacks memory, beside a real supervisor with real llama-servers: whom it unloads, and whom it does not."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mkgguf
import pytest
from world import World

from sparkguard.core.share import format_share, parse_share

CACHE = Path(os.environ.get("SPARKGUARD_TEST_CACHE", "/var/cache/sparkguard-tests"))
ENGINE = CACHE / "llama" / "engine" / "llama-server"
SECONDS = 30.0
BUDGET = parse_share("0.05")


class Runners:
    """Models a, b and c, which is pinned; a and b are loaded, a before b."""

    def __init__(self, world: World) -> None:
        self.world = world
        models = world.home / "models"
        models.mkdir()
        for name in "abc":
            mkgguf.make(models / f"{name}.gguf")
        (world.config / "runners.toml").write_text("[models.c]\nunload_when_idle = false\n")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        settings = {
            "MODELS_DIR": str(models),
            "SPARK_LLAMA_SERVER": str(ENGINE),
            "SPARK_PORT": str(self.port),
            "SPARK_THREADS": "1",
            "NOTIFY_SOCKET": str(world.home / "notify"),
        }
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices:
            notices.bind(settings["NOTIFY_SOCKET"])
            notices.settimeout(SECONDS)
            command = [sys.executable, "-m", "sparkguard", "serve"]
            self.process = world.inside.popen(command, env=world.env(settings), stderr=subprocess.DEVNULL)
            while b"READY=1" not in notices.recv(4096):
                pass
        self._connections: list[http.client.HTTPConnection] = []
        self.load("a")
        self.load("b")

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self.process.terminate()
        self.process.wait(SECONDS)

    def ask(self, method: str, path: str, body: object = None) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        self._connections.append(connection)
        connection.request(method, path, None if body is None else json.dumps(body))
        return connection.getresponse()

    def load(self, model: str) -> None:
        with self.ask("POST", f"/api/models/{model}/load") as answer:
            assert answer.status == 200, answer.read()

    def loaded(self) -> list[str]:
        with self.ask("GET", "/running") as answer:
            return sorted(runner["id"] for runner in json.loads(answer.read())["running"])

    def start(self, models: float, **env: str) -> subprocess.CompletedProcess[str]:
        """A guard for a share which fits under the budget once so many of the loaded models are gone."""
        verdict = json.loads(self.world.guard("--json", "model", VLLM_GPU_MEM_UTIL="0.01").stdout)
        held = parse_share(next(claim["share"] for claim in verdict["claims"] if claim["source"] == "reservation"))
        share = BUDGET - held + int(held * models / len(self.loaded()))
        return self.world.guard(
            "model",
            VLLM_MEM_BUDGET=format_share(BUDGET),
            VLLM_GPU_MEM_UTIL=format_share(share),
            **{"VLLM_MEM_ASK_RUNNERS": "1", **env},
        )


@pytest.fixture
def runners(world: World) -> Iterator[Runners]:
    runners = Runners(world)
    yield runners
    runners.close()


def test_by_default_nobody_is_asked(runners: Runners) -> None:
    """The start is refused as ever, and both models stay."""
    refused = runners.start(0.5, VLLM_MEM_ASK_RUNNERS="0")
    assert refused.returncode == 75
    assert "runners were" not in refused.stderr
    assert runners.loaded() == ["a", "b"]


def test_the_least_recently_used_model_makes_room(runners: Runners) -> None:
    """The start is admitted, says who was unloaded for it, and the other model stays."""
    admitted = runners.start(0.5)
    assert admitted.returncode == 0, admitted.stderr
    assert admitted.stderr.startswith(
        "sparkguard: a unloaded by the runners, to make room for model\nsparkguard: model is admitted"
    )
    assert runners.loaded() == ["b"]


def test_all_idle_models_go_if_they_have_to(runners: Runners) -> None:
    """And the runners can load again afterwards."""
    admitted = runners.start(1.5)
    assert admitted.returncode == 0, admitted.stderr
    assert "sparkguard: a, b unloaded by the runners" in admitted.stderr
    assert runners.loaded() == []
    runners.load("a")


def test_nobody_busy_or_pinned_is_unloaded_and_nobody_in_vain(runners: Runners) -> None:
    """c is pinned and a answers a request: b alone is not enough, so that all stay and the refusal says why."""
    runners.load("c")
    stream = runners.ask("POST", "/v1/completions", {"model": "a", "prompt": "x", "max_tokens": 1900, "stream": True})
    assert stream.readline().startswith(b"data: ")
    refused = runners.start(1.5)
    assert refused.returncode == 75
    assert refused.stderr.startswith("FATAL: model wants --gpu-memory-utilization")
    assert "(model: the runners were asked to make room: idle models hold " in refused.stderr
    assert "(a is busy, c is pinned))" in refused.stderr
    assert runners.loaded() == ["a", "b", "c"]
    assert stream.read().endswith(b"data: [DONE]\n\n")


def test_nobody_is_asked_in_vain(runners: Runners) -> None:
    """A start whose port is taken, or that lacks more than they hold, leaves them alone."""
    refused = runners.start(0.5, VLLM_PORT=str(runners.port))
    assert refused.returncode == 75
    assert "runners were" not in refused.stderr
    runners.world.serve_by_hand("org/other", "--gpu-memory-utilization", "0.01")
    refused = runners.start(1.9)
    assert refused.returncode == 75
    assert "(model: the runners were not asked to make room: all that they hold would not be enough)" in refused.stderr
    assert runners.loaded() == ["a", "b"]
