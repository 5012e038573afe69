"""What the server is started with: its environment, its cores, its container."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
from process_tree import ProcessTree

from sparkguard import command, guard, launch, ledger
from sparkguard.core.types import Verdict
from sparkguard.errors import NOT_FOUND, OK, USAGE
from sparkguard.ledger import Reservation
from sparkguard.probe import procfs
from sparkguard.settings import Settings, load


@pytest.fixture
def spec(home: Path) -> Path:
    path = home / ".config" / "spark" / "models" / "m.env"
    path.parent.mkdir(parents=True)
    (home / "models" / "local").mkdir(parents=True)
    return path


def settings_of(spec: Path, text: str, **env: str) -> Settings:
    spec.write_text(text)
    return load({"HOME": str(spec.parents[3]), **env}, "m")


def install_vllm(home: Path, version: str | None) -> str:
    program = home / "venv" / "bin" / "vllm"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    if version:
        (home / "venv" / "lib" / "python3.12" / "site-packages" / f"vllm-{version}.dist-info").mkdir(parents=True)
    return str(program)


COMPILE = {"MAX_JOBS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
STABLE = {"CUDA_LAUNCH_BLOCKING": "1", **COMPILE}
PROFILES = {
    "stable, a vLLM that knows VLLM_USE_V1": ("", {}, "0.8.5", {"VLLM_USE_V1": "0", **STABLE}),
    "stable, the last that knows it": ("", {}, "0.11.2", {"VLLM_USE_V1": "0", **STABLE}),
    "stable, before it": ("", {}, "0.8.4", STABLE),
    "stable, after it": ("", {}, "0.12.0", STABLE),
    "stable, a vLLM of no known version": ("", {}, None, STABLE),
    "fast": ("VLLM_ENV_PROFILE=fast", {}, "0.9.0", COMPILE),
    "fast by drop-in": ("VLLM_ENV_PROFILE=stable", {"VLLM_ENV_PROFILE": "fast"}, "0.9.0", COMPILE),
    "what a drop-in has set stays": ("", {"CUDA_LAUNCH_BLOCKING": "0"}, None, COMPILE),
    "what the spec has set stays": ("CUDA_LAUNCH_BLOCKING=0", {}, None, COMPILE),
}  # fmt: skip


@pytest.mark.parametrize(("text", "env", "version", "lines"), PROFILES.values(), ids=PROFILES)
def test_profile(spec: Path, home: Path, text: str, env: dict[str, str], version: str | None, lines: dict[str, str]) -> None:
    """The environment defaults of a profile, for the vLLM at hand."""
    assert launch.profile(settings_of(spec, text, **env), env, install_vllm(home, version)) == lines


def test_environment_of_the_server(spec: Path, home: Path) -> None:
    """The environment beats the spec, the spec beats the profile, and none of our settings reaches vLLM."""
    env = {
        "HOME": str(home), "PATH": "/bin", "LANG": "C", "HF_TOKEN": "from the drop-in", "INVOCATION_ID": "aaaa",
        "VLLM_PORT": "8001", "VLLM_GPU_MEM_UTIL": "0.4", "VLLM_MEM_BUDGET": "0.8", "VLLM_CPU_SHARE": "0.8", "VLLM_BIN": "vllm",
        "VLLM_MODEL": "o/n", "VLLM_EXTRA_ARGS": "--x", "MODELS_DIR": "/m", "SPARK_MEMORY_POOL": "ram", "SPARK_CPUS": "0",
        "NOTIFY_SOCKET": "/run/x", "VLLM_LOGGING_LEVEL": "DEBUG",
    }  # fmt: skip
    settings = settings_of(spec, "HF_TOKEN=from the spec\nCUDA_LAUNCH_BLOCKING=0\nVLLM_WORKER=x\nVLLM_IMAGE=", **env)
    assert launch.child_environment(settings, env, None) == {
        "HOME": str(home), "PATH": "/bin", "LANG": "C", "HF_TOKEN": "from the drop-in", "INVOCATION_ID": "aaaa",
        "VLLM_LOGGING_LEVEL": "DEBUG", "CUDA_LAUNCH_BLOCKING": "0", "VLLM_WORKER": "x", **COMPILE,
    }  # fmt: skip


RUN = ["/usr/bin/docker", "run", "--rm", "--oom-score-adj=500"]
DOCKER = {
    "a hub id": (
        "VLLM_MODEL=Qwen/Qwen3-8B\nVLLM_PORT=8001\nVLLM_GPU_MEM_UTIL=0.40\nVLLM_IMAGE=vllm/vllm-openai:v0.20.0",
        {},
        "--name vllm-m --cpuset-cpus=0-15 --env CUDA_LAUNCH_BLOCKING --env MAX_JOBS"
        " --env TORCHINDUCTOR_COMPILE_THREADS --gpus all --ipc host --network host --entrypoint vllm"
        " vllm/vllm-openai:v0.20.0 serve Qwen/Qwen3-8B --port 8001 --gpu-memory-utilization 0.40",
    ),
    "a folder of this machine": (
        "VLLM_MODEL=local\nVLLM_IMAGE=i\nVLLM_ENV_PROFILE=fast\nVLLM_DOCKER_ARGS=--gpus all",
        {},
        "--name vllm-m --cpuset-cpus=0-15 --env MAX_JOBS --env TORCHINDUCTOR_COMPILE_THREADS"
        " --volume {models}/local:{models}/local:ro --gpus all --entrypoint vllm i serve {models}/local --port 8000",
    ),
    "what the spec hands on, and a drop-in retunes": (
        "VLLM_MODEL=o/n\nVLLM_IMAGE=i\nVLLM_DOCKER_ARGS=\nVLLM_ENV_PROFILE=fast\nHF_HUB_OFFLINE=1\nHF_TOKEN='a b'\nMAX_JOBS=2",
        {"HF_HUB_OFFLINE": "0", "TORCHINDUCTOR_COMPILE_THREADS": "8", "SECRET": "stays here"},
        "--name vllm-m --cpuset-cpus=0-15 --env TORCHINDUCTOR_COMPILE_THREADS --env HF_HUB_OFFLINE"
        " --env HF_TOKEN --env MAX_JOBS --entrypoint vllm i serve o/n --port 8000",
    ),
    "a name of the user's": (
        "VLLM_MODEL=o/n\nVLLM_IMAGE=i\nVLLM_ENV_PROFILE=fast\nVLLM_DOCKER_ARGS=--name mine --label 'a b'",
        {},
        "--cpuset-cpus=0-15 --env MAX_JOBS --env TORCHINDUCTOR_COMPILE_THREADS --name mine"
        " --label 'a b' --entrypoint vllm i serve o/n --port 8000",
    ),
    "a value that looks like a name": (
        "VLLM_MODEL=o/n\nVLLM_IMAGE=i\nVLLM_ENV_PROFILE=fast\nVLLM_DOCKER_ARGS=--label --name=x",
        {},
        "--name vllm-m --cpuset-cpus=0-15 --env MAX_JOBS --env TORCHINDUCTOR_COMPILE_THREADS"
        " --label --name=x --entrypoint vllm i serve o/n --port 8000",
    ),
}


@pytest.mark.parametrize(("text", "env", "line"), DOCKER.values(), ids=DOCKER)
def test_docker_argv(spec: Path, home: Path, text: str, env: dict[str, str], line: str) -> None:
    """A spec with an image becomes exactly this command line, and its values stay out of it: HF_TOKEN may be one of them."""
    settings = settings_of(spec, text, **env)
    start = command.build(settings, "m", ())
    argv = launch.docker_argv("/usr/bin/docker", start, settings, env, tuple(range(16)), "vllm-m")
    assert argv == RUN + shlex.split(line.replace("{models}", str(home / "models")))


def test_docker_argv_without_cores(spec: Path) -> None:
    """Where the system cannot pin, the container is not pinned either."""
    settings = settings_of(spec, "VLLM_MODEL=o/n\nVLLM_IMAGE=i")
    argv = launch.docker_argv("docker", command.build(settings, "m", ()), settings, {}, (), "c")
    assert not [word for word in argv if word.startswith("--cpuset")]


UNITS = {
    "its unit's": ("vllm-longcontext.service", "vllm-longcontext"),
    "a template's": (r"vllm-model@my\x2dmodel.service", "vllm-model.my-model"),
    "a unit of any bytes": (r"vllm-model@a\x40\xc3\xa4.service", "vllm-model.a.\xe4"),
}


@pytest.mark.parametrize(("unit", "name"), UNITS.values(), ids=UNITS)
def test_container_name_in_a_unit(tmp_path: Path, unit: str, name: str) -> None:
    """The container is called as its unit, in docker's letters."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text(f"0::/user.slice/user-1.slice/user@1.service/inference.slice/{unit}\n")
    env = {"INVOCATION_ID": "aaaa", "SYSTEMD_EXEC_PID": str(os.getpid())}
    assert launch.container_name("m", env, guard.Roots(proc=str(tmp_path))) == name


def test_container_name_by_hand() -> None:
    """Outside a unit it is called after the model, also in a terminal that is a unit itself."""
    assert launch.container_name("m", {}, guard.Roots()) == "sparkguard-m"
    assert launch.container_name("m", {"INVOCATION_ID": "aaaa", "SYSTEMD_EXEC_PID": "1"}, guard.Roots()) == "sparkguard-m"


def sysfs(root: Path, cores: int) -> str:
    """A machine of so many alike cores."""
    for cpu in range(cores):
        (root / "devices/system/cpu" / f"cpu{cpu}/topology").mkdir(parents=True)
        (root / "devices/system/cpu" / f"cpu{cpu}/topology/thread_siblings_list").write_text(f"{cpu}\n")
    return str(root)


CPUS = {
    "the default": ({}, 20, "cpus=0-15 of 0-19 share=0.80\n"),
    "half": ({"VLLM_CPU_SHARE": "0.5"}, 20, "cpus=0-9 of 0-19 share=0.50\n"),
    "all": ({"VLLM_CPU_SHARE": "1"}, 20, "cpus=0-19 of 0-19 share=1.00\n"),
    "one core": ({}, 1, "cpus=0 of 0 share=0.80\n"),
}


@pytest.mark.parametrize(("env", "cores", "line"), CPUS.values(), ids=CPUS)
def test_cpus(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    env: dict[str, str], cores: int, line: str,
) -> None:  # fmt: skip
    """--cpus prints the cores, those there are, and the share: the line of vllm_env.sh."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert launch.main(["--cpus"], {"HOME": str(home), **env}, guard.Roots(sys=sysfs(tmp_path, cores))) == OK
    assert capsys.readouterr() == (line, "")


def test_env(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """--env prints KEY=VALUE lines: the profile, and SPARK_CPUS for taskset; nothing that is set already."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(20)))
    env = {"HOME": str(home), "PATH": "/nowhere", "MAX_JOBS": "3"}
    assert launch.main(["--env"], env, guard.Roots(sys=sysfs(tmp_path, 20))) == OK
    assert capsys.readouterr() == ("CUDA_LAUNCH_BLOCKING=1\nTORCHINDUCTOR_COMPILE_THREADS=1\nSPARK_CPUS=0-15\n", "")


ARGUMENTS = {
    "nothing": ([], USAGE, "", "usage: vllm-serve.sh NAME"),
    "help": (["--help"], OK, "usage: vllm-serve.sh NAME", ""),
    "an option for a name": (["--frobnicate"], USAGE, "", "usage: vllm-serve.sh NAME"),
    "release without a name": (["--release"], USAGE, "", "usage: vllm-serve.sh NAME"),
    "a bad name": (["a/b"], 78, "", "'a/b' cannot be a model's name"),
    "no spec": (["nobody"], 78, "", "no model is set for nobody\n  there is no {home}/.config/spark/models/nobody.env: write it"),
    "no vLLM": (
        ["m"],
        NOT_FOUND,
        "",
        "vllm was not found (VLLM_BIN in default)\n  set VLLM_BIN in {home}/.config/spark/spark.conf",
    ),
}


@pytest.mark.parametrize(("words", "status", "out", "err"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_nothing_is_started(
    spec: Path, home: Path, capsys: pytest.CaptureFixture[str], words: list[str], status: int, out: str, err: str
) -> None:
    """What cannot be started says why, on stderr, with its status."""
    spec.write_text("VLLM_MODEL=o/n\n")
    assert launch.main(words, {"HOME": str(home), "PATH": "/nowhere", "XDG_RUNTIME_DIR": str(home / "run")}) == status
    said = capsys.readouterr()
    assert out in said.out
    assert err.format(home=home) in said.err
    assert bool(said.out) == bool(out)


def test_a_release_never_fails(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """ExecStopPost= succeeds whatever it finds, and says what it found."""
    env = {"HOME": str(home), "XDG_RUNTIME_DIR": str(home / "run")}
    assert launch.main(["--release", "m"], env) == OK
    (home / "run" / "sparkguard" / "lock").unlink()
    (home / "run" / "sparkguard").rmdir()
    (home / "run" / "sparkguard").write_text("")
    assert launch.main(["--release", "m"], env) == OK
    assert "no reservation can be kept in" in capsys.readouterr().err


class Started(BaseException):
    """In place of exec: the program, its words and its environment."""


def unit_process(tmp_path: Path, home: Path, unit: str) -> tuple[dict[str, str], guard.Roots]:
    """This process as the main process of an active unit, on an idle machine made of files."""
    tree = ProcessTree(tmp_path / "proc", meminfo={"MemTotal": 100 << 20, "MemAvailable": 90 << 20})
    (tree.root / "self" / "cgroup").write_text(f"0::/user.slice/user-1.slice/user@1.service/inference.slice/{unit}\n")
    links = home / "run" / "systemd" / "units"
    links.mkdir(parents=True)
    (links / f"invocation:{unit}").symlink_to("aaaa")
    env = {"HOME": str(home), "XDG_RUNTIME_DIR": str(home / "run"), "VLLM_BIN": "/bin/true", "VLLM_MEM_WAIT": "0"}
    roots = guard.Roots(str(tree.root), str(tmp_path / "no sys"), str(tmp_path / "no dev"))
    return {**env, "INVOCATION_ID": "aaaa", "SYSTEMD_EXEC_PID": str(os.getpid())}, roots


def reserve(env: dict[str, str], roots: guard.Roots, invocation: str, *args: str) -> None:
    asked = command.asked(command.build(load(env, "m"), "m", args, model_required=False))
    held = Reservation("m", 2**22 + 1, 1, procfs.boot_id(roots.proc), (), "vllm-m.service", invocation, asked=asked)
    with ledger.Ledger(ledger.directory(env), roots.proc) as lock:
        lock.hold(held)


@pytest.mark.parametrize(
    ("reserved", "asks"),
    [(["aaaa"], False), (["aaaa", "--gpu-memory-utilization", "0.1"], True), (["bbbb"], True), ([], True)],
    ids=["its own", "its own, for other arguments", "an old start's", "none"],
)
def test_admission_by_exec_start_pre_is_enough(
    spec: Path, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, reserved: list[str], asks: bool
) -> None:
    """The main process asks again only where no ExecStartPre= of this very start has been admitted."""
    spec.write_text("VLLM_MODEL=o/n\nVLLM_GPU_MEM_UTIL=0.4\n")
    env, roots = unit_process(tmp_path, home, "vllm-m.service")
    if reserved:
        reserve(env, roots, *reserved)
    asked = []
    decide = guard.decide

    def counted(*args: object) -> Verdict:
        asked.append(args)
        return decide(*args)  # type: ignore[arg-type]

    def started(program: str, argv: list[str], env: dict[str, str]) -> None:
        assert argv == ["/bin/true", "serve", "o/n", "--port", "8000", "--gpu-memory-utilization", "0.4"]
        raise Started

    monkeypatch.setattr(guard, "decide", counted)
    monkeypatch.setattr(os, "execve", started)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    monkeypatch.setattr(launch, "offer_to_the_oom_killer", lambda: None)
    with pytest.raises(Started):
        launch.main(["m"], env, roots)
    assert bool(asked) == asks
    with ledger.Ledger(ledger.directory(env), roots.proc) as held:
        assert [reservation.invocation for reservation in held.live()] == ["aaaa"]


def test_a_release_ends_this_starts_reservation(tmp_path: Path, home: Path) -> None:
    """ExecStopPost= gives back what this start has reserved, and nothing of another's."""
    env, roots = unit_process(tmp_path, home, "vllm-m.service")
    reserve(env, roots, "aaaa")
    reserve(env, roots, "bbbb")
    assert launch.main(["--release", "m"], env) == OK
    left = [path.name for path in (home / "run" / "sparkguard").glob("*.reservation")]
    assert left == ["bbbb.reservation"]
