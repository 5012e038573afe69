"""The spark-runner that waits to be told what to be."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkguard.supervisor.standby import Standby


@pytest.fixture
def standby() -> Iterator[Standby]:
    standby = Standby()
    yield standby
    standby.close()


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Of an engine that says what it was given, and ends."""
    engine = tmp_path / "engine"
    engine.write_text('#!/bin/sh\necho "$SPARK_RUNNER" "$@"; cat\n')
    engine.chmod(0o755)
    named = {"model": "/m/ü.gguf", "device": "cuda", "socket": "/s/a.sock", "engine": str(engine), "mark": "here"}
    return [word for key, value in named.items() for word in (f"--{key}", value)]


def said(standby: Standby, words: list[str]) -> tuple[int, str]:
    """The process that became of it, and all that it says until it ends."""
    started = standby.start(words)
    with os.fdopen(started.output, "rb") as output:
        text = output.read().decode()
    assert started.process.wait(30) == 0
    return started.process.pid, text


def children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def test_it_becomes_what_it_is_told(standby: Standby, words: list[str]) -> None:
    """The one that waits is the one that runs; its arguments arrive as they were said, and its stdin is empty."""
    standby.prepare()
    (waiting,) = children()
    standby.prepare()
    assert children() == [waiting]
    pid, text = said(standby, [*words, "--", "--x", "a b", "ä", ""])
    assert pid == waiting
    assert text == "here --model /m/ü.gguf --host /s/a.sock --x a b ä \n"


def test_it_has_a_group_of_its_own_in_our_session(standby: Standby, words: list[str], tmp_path: Path) -> None:
    """What a terminal sends is not for it; but Linux shares the CPU out by sessions, and it works for ours."""
    (tmp_path / "engine").write_text("#!/bin/sh\nps -o pgid=,sid= -p $$\n")
    pid, text = said(standby, words)
    assert text.split() == [str(pid), str(os.getsid(0))]


def test_there_need_be_none(standby: Standby, words: list[str]) -> None:
    """Two models in a row: the second is started from the beginning."""
    assert said(standby, words)[1] == said(standby, words)[1]


def test_one_that_was_ended_is_replaced(standby: Standby, words: list[str]) -> None:
    """Nobody hears of it, and it leaves no process."""
    standby.prepare()
    (waiting,) = children()
    os.kill(waiting, 9)
    os.waitid(os.P_PID, waiting, os.WEXITED | os.WNOWAIT)
    pid, text = said(standby, words)
    assert pid != waiting and text.startswith("here")
    assert children() == []


@pytest.mark.parametrize("argument", ["\0", "x" * 100_000])
def test_what_no_process_can_take(standby: Standby, words: list[str], argument: str) -> None:
    """It is an error of the arguments, and leaves no process that waits for more."""
    with pytest.raises(ValueError, match="argument"):
        standby.start([*words, "--", argument])
    assert children() == []


def test_it_ends_with_its_parent() -> None:
    """However that ends: the kernel sees to it, and where it cannot, the end of stdin."""
    code = """
import os, sys
from sparkguard.supervisor.standby import Standby
waiting = Standby()
waiting.prepare()
print(open(f"/proc/self/task/{os.getpid()}/children").read(), flush=True)
sys.stdin.read()
os.kill(os.getpid(), 9)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        ends = os.pidfd_open(int(parent.stdout.readline()))
        parent.stdin.close()
        assert parent.wait(30) == -9
    assert select.select([ends], [], [], 30)[0]
    os.close(ends)


def test_close_leaves_nothing(words: list[str]) -> None:
    """No process and no descriptor."""
    before = sorted(os.listdir("/proc/self/fd"))
    standby = Standby()
    standby.prepare()
    standby.close()
    standby.close()
    assert children() == []
    assert sorted(os.listdir("/proc/self/fd")) == before
