"""The command lines of container clients."""

from __future__ import annotations

import shlex

import pytest

from sparkguard.probe import containers
from sparkguard.probe.containers import Container


def read(line: str) -> Container | None:
    return containers.read_client(shlex.split(line))


@pytest.mark.parametrize(
    "options",
    [
        "",
        "--rm -it",
        "-itd",
        "--rm=true --init",
        "-v /a:/b --volume=/c:/d",
        "-itv /a:/b",
        "-e A=1 -eB=2 --env C --env-file f",
        "--gpus all --ipc=host --ulimit memlock=-1",
        "-p 8001:8000 -p8002:8002",
        "--name x --entrypoint y",
        "--network host --restart no --cpus 4",
        "-u 1000:1000 -w /x -h name --label a=b",
        "--passwd --replace --rmi --tls-verify",
        "-d --",
    ],
)
@pytest.mark.parametrize(
    "client", ["docker", "/usr/bin/docker", "podman", "nerdctl", "docker container", "docker -l debug", "podman --root /r"]
)
def test_where_the_image_stands(client: str, options: str) -> None:
    """Between run and the image there may be any options, with values of their own."""
    found = read(f"{client} run {options} img cmd -x --name z")
    assert found is not None
    assert (found.image, found.command) == ("img", ("cmd", "-x", "--name", "z"))


def test_exec() -> None:
    """exec names a container in place of an image."""
    assert read("docker exec -it -e A=1 box vllm serve") == Container(None, ("vllm", "serve"), "box", environment=("A=1",))


@pytest.mark.parametrize(
    "line", ["docker", "docker run", "docker run -it", "docker ps", "docker build -t x .", "dockerd run x", "docker compose up"]
)
def test_no_start(line: str) -> None:
    """Other verbs, other programs."""
    assert read(line) is None


@pytest.mark.parametrize(
    "options, local",
    [
        ("-H tcp://x:2375", False),
        ("-H=ssh://x", False),
        ("-Hssh://x", False),
        ("--host ssh://x", False),
        ("--host unix:///run/docker.sock", True),
        ("-c spark-2", False),
        ("--context default", True),
        ("--url ssh://x", False),
        ("--remote", False),
        ("--config /c", True),
    ],
)
def test_where_the_daemon_is(options: str, local: bool) -> None:
    """A client of another machine starts nothing here."""
    assert (read(f"docker {options} run img") is not None) is local


@pytest.mark.parametrize(
    "options, devices",
    [
        ("", None),
        ("--gpus all", None),
        ("""--gpus '"device=0,1"'""", "0,1"),
        ("""--gpus='"device=0,1",capabilities=utility'""", "0,1"),
        ("--gpus device=GPU-3a23c669", "GPU-3a23c669"),
        ("--gpus 2", "0,1"),
        ("--gpus count=1", "0"),
        ("--device nvidia.com/gpu=1", "1"),
        ("--device nvidia.com/gpu=0 --device=nvidia.com/gpu=2 --device /dev/dri", "0,2"),
        ("--device nvidia.com/gpu=all", "all"),
    ],
)
def test_devices(options: str, devices: str | None) -> None:
    """The GPUs that a container gets, in the words of NVIDIA_VISIBLE_DEVICES."""
    found = read(f"docker run {options} img")
    assert found is not None and found.devices == devices


@pytest.mark.parametrize(
    "options, ports",
    [
        ("-p 8001:8000", ((8000, 8001),)),
        ("--publish=127.0.0.1:8001:8000/tcp", ((8000, 8001),)),
        ("-p8001:8000", ((8000, 8001),)),
        ("-p 8000", ()),
        ("-p 8000-8010:8000-8010", ()),
        ("-p 53:53/udp -p 1:2", ((2, 1),)),
        ("-P", ()),
    ],
)
def test_ports(options: str, ports: tuple[tuple[int, int], ...]) -> None:
    """Which of the machine's ports stands for the container's."""
    found = read(f"docker run {options} img")
    assert found is not None and found.published == ports


def test_name_and_environment() -> None:
    """The rest that is read of a start."""
    found = read("docker run --name a --name=b -e A=1 -e A=x=y --env B img")
    assert found is not None and found.name == "b" and found.environment == ("A=1", "A=x=y", "B")


ENVIRONMENTS = {
    "later ones win": ("-e A=1 -e A=2", {"A": "2"}),
    "a name alone is the client's": ("-e A -e C", {"A": "client"}),
    "a file comes first": ("-e B=1 --env-file f", {"B": "1", "A": "client", "D": "x=y"}),
    "a file that cannot be read": ("-e A=1 --env-file none", None),
}


@pytest.mark.parametrize(("options", "environment"), ENVIRONMENTS.values(), ids=ENVIRONMENTS)
def test_what_the_container_sees(options: str, environment: dict[str, str] | None) -> None:
    """The variables that the client hands on, and unknown where they cannot be read."""
    found = read(f"docker run {options} img")
    assert found is not None
    files = {"f": "# words\n\nB=file\nA\n D=x=y \n"}
    assert containers.environment_of(found, {"A": "client"}, files.get) == environment


def test_another_users_client() -> None:
    """Its own environment is closed to us, which matters only where it is handed on."""
    given, inherited = read("docker run -e A=1 img"), read("docker run -e A img")
    assert given is not None and containers.environment_of(given, None, lambda path: None) == {"A": "1"}
    assert inherited is not None and containers.environment_of(inherited, None, lambda path: None) is None


@pytest.mark.parametrize(
    "options, detached",
    [("-d", True), ("-itd", True), ("--detach", True), ("--detach=false", False), ("-it --dns 1.1.1.1", False)],
)
def test_detached(options: str, detached: bool) -> None:
    """Whether the client ends before its container does."""
    found = read(f"docker run {options} img")
    assert found is not None and found.detached is detached
