"""spark-runner before it becomes the engine: its options, the engine's arguments and environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparkguard.errors import NOT_FOUND, OK, SparkguardError
from sparkguard.runner import MOST_SOCKET_BYTES, child_environment, engine_argv, main, parse

LEAST = ("--model", "/m/a.gguf", "--device", "cpu", "--socket", "/s/a.sock")


def test_options_and_what_follows() -> None:
    """What stands behind -- is the engine's, a further -- too."""
    options, rest = parse([*LEAST[:4], "--socket=/s/a.sock", "--id", "x/y", "--", "-c", "1", "--", "--id", "z"])
    assert options == {"model": "/m/a.gguf", "device": "cpu", "socket": "/s/a.sock", "id": "x/y"}
    assert rest == ["-c", "1", "--", "--id", "z"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (LEAST[:4], "--socket is missing"),
        ((*LEAST, "--nope", "1"), "unknown option --nope"),
        ((*LEAST, "word", "1"), "unknown option word"),
        ((*LEAST, "--id"), "--id wants a value"),
        ((*LEAST[:4], "--socket", "/s/a"), "does not end in .sock"),
        ((*LEAST[:4], "--socket", "/" + "x" * MOST_SOCKET_BYTES + ".sock"), "too long"),
        ((*LEAST[:3], "gpu", *LEAST[4:]), "'gpu' is no device"),
        ((*LEAST[:3], "cuda:", *LEAST[4:]), "'cuda:' is no device"),
    ],
)
def test_bad_options(words: tuple[str, ...], said: str) -> None:
    """Each is told by its name."""
    with pytest.raises(SparkguardError, match=said):
        parse(words)


def test_the_engine_is_called_by_the_model() -> None:
    """The title first; on the CPU no device at all, so that no GPU's memory is touched."""
    options, _ = parse(LEAST)
    assert engine_argv(options, ["-c", "1"]) == [
        "spark-runner: a", "--model", "/m/a.gguf", "--host", "/s/a.sock", "--device", "none", "-c", "1"
    ]  # fmt: skip
    assert "none" not in engine_argv({**options, "device": "cuda:0"}, [])


@pytest.mark.parametrize(("device", "visible"), [("cpu", ""), ("cuda:1", "1"), ("cuda:GPU-a", "GPU-a"), ("cuda", None)])
def test_the_engine_sees_its_gpu_alone(device: str, visible: str | None) -> None:
    """By NVML's numbers."""
    env = child_environment(device, {"PATH": "/bin"})
    assert env.get("CUDA_VISIBLE_DEVICES") == visible
    assert (env.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID") == device.startswith("cuda:")


def test_what_the_engine_does_not_inherit() -> None:
    """Arguments by environment, which the estimate does not know of, and what is between us and systemd."""
    env = {"LLAMA_ARG_CTX_SIZE": "1", "LLAMA_API_KEY": "k", "NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "1", "HF_HOME": "/h"}
    assert child_environment("cuda", env) == {"HF_HOME": "/h", "GGML_NO_BACKTRACE": "1", "GGML_DISABLE_VULKAN": "1"}


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    """Asks for nothing else."""
    assert main(["--help"]) == OK and "--socket PATH" in capsys.readouterr().out


def run(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-m", "sparkguard.runner", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **more}, timeout=30)


def test_by_hand(tmp_path: Path) -> None:
    """SPARK_LLAMA_SERVER says whose process it becomes; a socket that is left there is removed; no core is dumped."""
    program = tmp_path / "llama-server"
    program.write_text('#!/bin/sh\nulimit -c; cat /proc/self/oom_score_adj; ps -o pgid= -p $$ | tr -d " "; echo $$ "$@"\n')
    program.chmod(0o755)
    socket = tmp_path / "a.sock"
    socket.touch()
    done = run("--model", "a.gguf", "--device", "cpu", "--socket", str(socket), "--", "-c", "1", SPARK_LLAMA_SERVER=str(program))
    core, score, group, said = done.stdout.splitlines()
    pid, words = said.split(" ", 1)
    assert (core, score, group) == ("0", "500", pid)
    assert words == f"--model a.gguf --host {socket} --device none -c 1"
    assert not socket.exists()


def test_no_engine(tmp_path: Path) -> None:
    """The status is the shell's for a program that was not found."""
    done = run(*LEAST[:4], "--socket", str(tmp_path / "a.sock"), SPARK_LLAMA_SERVER="/no/such")
    assert done.returncode == NOT_FOUND and "SPARK_LLAMA_SERVER='/no/such' is no program" in done.stderr


def test_an_orphan_does_not_start(tmp_path: Path) -> None:
    """Its parent died before the kernel could be asked to link their lives: then there is nobody to serve for."""
    program = tmp_path / "engine"
    program.write_text("#!/bin/sh\necho started\n")
    program.chmod(0o755)
    words = (*LEAST[:4], "--socket", str(tmp_path / "a.sock"), "--engine", str(program))
    assert run(*words, "--parent", "1").stdout == ""
    assert run(*words, "--parent", str(os.getpid())).stdout == "started\n"
