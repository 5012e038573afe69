"""vLLM in a container: client and container are one claim, a stop drains, and no container outlives its unit."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from world import World, serving

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="a daemon that starts containers is root")

SOURCE = Path(__file__).parents[1] / "fakes" / "docker.c"
NAME = "sparkguard-boxed"


@pytest.fixture(scope="module")
def docker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("docker") / "docker"
    subprocess.run(["cc", "-O", "-Wall", "-Werror", "-o", program, SOURCE], check=True, timeout=60)
    return program


class Boxes:
    """A world with docker, and a spec that runs in a container."""

    def __init__(self, world: World, docker: Path) -> None:
        self.world = world
        (world.bin / "docker").symlink_to(docker)
        self.folder = world.home / "containers"
        self.folder.mkdir()
        self.env = {"FAKE_DOCKER": str(self.folder)}
        world.spec("boxed", "VLLM_MODEL=org/name\nVLLM_IMAGE=vllm/vllm-openai:v0.20.0\nVLLM_GPU_MEM_UTIL=0.010\n")

    def start(self) -> subprocess.Popen[str]:
        return self.world.launch("boxed", **self.env)

    def claims(self) -> list[dict[str, object]]:
        done = self.world.guard("--json", "model", VLLM_GPU_MEM_UTIL="0.001")
        claims: list[dict[str, object]] = json.loads(done.stdout)["claims"]
        return claims


@pytest.fixture
def boxes(world: World, docker: Path) -> Boxes:
    return Boxes(world, docker)


def test_client_and_container_are_one_claim(boxes: Boxes) -> None:
    """What docker runs is counted once: the client before the container is there, the container's process with it."""
    start = boxes.start()
    facts = serving(start)
    assert facts is not None
    assert facts["pid"] == 1  # it is a container
    assert facts["argv"] == ["serve", "org/name", "--port", "8000", "--gpu-memory-utilization", "0.010"]
    (claim,) = boxes.claims()
    assert (claim["share"], claim["port"], claim["engine"]) == ("0.01", 8000, "vllm")


def test_a_container_that_somebody_else_started_is_a_claim(boxes: Boxes) -> None:
    """After its client was killed the container holds its share all the same."""
    start = boxes.start()
    assert serving(start) is not None
    start.kill()
    start.wait(20)
    (claim,) = boxes.claims()
    assert (claim["share"], claim["source"]) == ("0.01", "argument")


def test_it_is_admitted_the_same_way(boxes: Boxes) -> None:
    """A container over the budget is refused before docker is asked."""
    start = boxes.world.launch("boxed", VLLM_MEM_BUDGET="0.015", **boxes.env)
    assert serving(start) is not None
    second = boxes.world.guard("boxed", VLLM_MEM_BUDGET="0.015")
    assert second.returncode == 75
    assert "take the GPU-memory total to 0.02, over the 0.015 budget." in second.stderr


def test_a_stop_drains_the_container(boxes: Boxes) -> None:
    """SIGTERM to the main process, the client, reaches the server inside, which ends in its own time; nothing is left."""
    start = boxes.start()
    assert serving(start) is not None
    start.terminate()
    out, _ = start.communicate(timeout=20)
    assert (start.returncode, out) == (0, "drained\n")
    assert list(boxes.folder.iterdir()) == []
    assert boxes.claims() == []


def test_release_removes_a_leftover_container(boxes: Boxes) -> None:
    """A client killed -9 leaves its container behind: --release, as ExecStopPost= calls it, ends it, and the name is free."""
    start = boxes.start()
    assert serving(start) is not None
    start.kill()
    start.wait(20)
    assert [path.name for path in boxes.folder.iterdir()] == [NAME]
    release = boxes.world.launch("--release", "boxed", **boxes.env)
    out, err = release.communicate(timeout=30)
    assert (release.returncode, out, err) == (0, "", "")
    assert list(boxes.folder.iterdir()) == []
    assert boxes.claims() == []
    assert serving(boxes.start()) is not None


def test_release_finds_the_users_own_name(boxes: Boxes) -> None:
    """A --name in VLLM_DOCKER_ARGS is the one that is removed."""
    boxes.world.spec("boxed", "VLLM_MODEL=org/name\nVLLM_IMAGE=i\nVLLM_GPU_MEM_UTIL=0.01\nVLLM_DOCKER_ARGS=--name mine\n")
    start = boxes.start()
    assert serving(start) is not None
    start.kill()
    start.wait(20)
    assert [path.name for path in boxes.folder.iterdir()] == ["mine"]
    assert boxes.world.launch("--release", "boxed", **boxes.env).wait(30) == 0
    assert list(boxes.folder.iterdir()) == []


def test_release_without_a_container(boxes: Boxes) -> None:
    """None left, or no docker at all, is no failure of a stop."""
    assert boxes.world.launch("--release", "boxed", **boxes.env).wait(30) == 0
    (boxes.world.bin / "docker").unlink()
    assert boxes.world.launch("--release", "boxed", **boxes.env, PATH="/nowhere").wait(30) == 0
