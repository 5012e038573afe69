"""How a verb is run, and how it is interrupted."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from sparkguard.cli.cluster.options import run_async

# Cleans up when it is cancelled, for as long as its stdin is open.
PROGRAM = """
import asyncio, sys
from sparkguard.cli.cluster.options import run_async

async def work():
    try:
        print("works", flush=True)
        await asyncio.Event().wait()
    finally:
        print("cleans up", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        print("is clean", flush=True)

try:
    run_async(work())
except KeyboardInterrupt:
    sys.exit(130)
"""


def working() -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    child = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert child.stdout is not None and child.stdout.readline() == "works\n"
    return child


def test_what_a_verb_returns() -> None:
    """The coroutine's own result."""

    async def work() -> int:
        return 7

    assert run_async(work()) == 7


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_lets_it_clean_up(number: int) -> None:
    """The verb is cancelled once, and its clean-up runs to the end."""
    child = working()
    child.send_signal(number)
    assert child.stdout is not None and child.stdout.readline() == "cleans up\n"
    out, _ = child.communicate("")
    assert (out, child.returncode) == ("is clean\n", 130)


def test_a_second_signal_is_told_and_a_third_ends_it() -> None:
    """While it cleans up, the second says what a third would do; the third ends the process where it stands."""
    child = working()
    child.send_signal(signal.SIGINT)
    assert child.stdout is not None and child.stdout.readline() == "cleans up\n"
    child.send_signal(signal.SIGINT)
    assert child.stderr is not None and child.stderr.readline().startswith("cleaning up; once more leaves everything")
    child.send_signal(signal.SIGINT)
    assert child.wait(20) == 130
    out, _ = child.communicate()
    assert "is clean" not in out
