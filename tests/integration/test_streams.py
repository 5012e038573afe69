"""The programs with their streams closed, full or unread: the status is the verdict's, and nothing is a bug."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ADMITTED, REFUSED, BROKEN = ("model", 0), ("huge", 78), ("..", 78)


@pytest.fixture
def environment(home: Path) -> dict[str, str]:
    config = home / ".config" / "spark"
    (config / "models").mkdir(parents=True)
    (config / "spark.conf").write_text("SPARK_MEMORY_POOL=ram\nVLLM_MEM_BUDGET=1\nSPARK_MEMORY_RESERVE_MB=0\nVLLM_MEM_WAIT=0\n")
    # Small enough beside whatever this machine runs.
    (config / "models" / "model.env").write_text("VLLM_MODEL=o/n\nVLLM_GPU_MEM_UTIL=0.000001\nVLLM_MEM_ALLOW_UNKNOWN=1\n")
    (config / "models" / "huge.env").write_text("VLLM_MODEL=o/n\nVLLM_GPU_MEM_UTIL=1\nVLLM_MEM_BUDGET=0.5\n")
    return {"HOME": str(home), "XDG_RUNTIME_DIR": str(home / "run"), "PATH": "/usr/bin:/bin"}


def status(environment: dict[str, str], module: str, words: str, redirection: str) -> int:
    code = f"import sys; from sparkguard.{module} import main; sys.exit(main(sys.argv[1:]))"
    script = f'"$0" -I -c "$1" {words} {redirection}'
    argv = ["bash", "-c", script, sys.executable, code]
    return subprocess.run(argv, env=environment, stdin=subprocess.DEVNULL, timeout=60, check=False).returncode


@pytest.mark.parametrize("redirection", [">&-", "2>&-", "<&- >&- 2>&-", "2>/dev/full"])
@pytest.mark.parametrize(("name", "expected"), [ADMITTED, REFUSED, BROKEN])
def test_the_status_of_the_guard_stands(environment: dict[str, str], name: str, expected: int, redirection: str) -> None:
    """What cannot be said changes no verdict: a unit would take Python's own 1 or 120 for vLLM's."""
    assert status(environment, "guard", f"{name} --json", redirection) == expected


@pytest.mark.parametrize("words", ["--cpus", "--env", "--help", "--release model"])
@pytest.mark.parametrize("redirection", [">&-", "<&- >&- 2>&-"])
def test_the_launcher_without_streams(environment: dict[str, str], words: str, redirection: str) -> None:
    """Nor does the launcher need any."""
    assert status(environment, "launch", words, redirection) == 0


@pytest.mark.parametrize(
    ("module", "words"),
    [("guard", "model --json"), ("launch", "--cpus"), ("cli", "status"), ("cli", "status --json"), ("cli", "status --watch 1")]
    + [("cli", "--help"), ("cli", "check --help"), ("cli", "--version")],
)
def test_output_that_cannot_be_written(environment: dict[str, str], module: str, words: str) -> None:
    """A full disk under stdout is 71: who asked for the object has half of it. It is nobody's bug, and one line says so."""
    assert status(environment, module, words, ">/dev/full") == 71


@pytest.fixture
def unread() -> Iterator[int]:
    """A pipe whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


def test_a_reader_that_has_gone(environment: dict[str, str], unread: int) -> None:
    """`vllm_mem_budget.sh NAME --json | head -c0` is no failure of the guard's, and prints no traceback."""
    code = "import sys; from sparkguard.guard import main; sys.exit(main(sys.argv[1:]))"
    argv = [sys.executable, "-I", "-c", code, "model", "--json"]
    done = subprocess.run(argv, env=environment, stdout=unread, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (0, 1)
    assert done.stderr.startswith("sparkguard: model is admitted")


def test_a_server_gets_streams(environment: dict[str, str], home: Path) -> None:
    """A server whose launcher had no stderr writes its own to /dev/null, not into the next file that it opens."""
    server = home / "vllm"
    server.write_text(f'#!/bin/sh\nreadlink /proc/$$/fd/0 /proc/$$/fd/1 /proc/$$/fd/2 >"{home}/streams"\n')
    server.chmod(0o755)
    environment["VLLM_BIN"] = str(server)
    assert status(environment, "launch", "model", "<&- >&- 2>&-") == 0
    assert (home / "streams").read_text().split() == ["/dev/null", f"{home}/streams", "/dev/null"]
