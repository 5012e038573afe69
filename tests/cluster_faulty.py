"""A spark-serve that ends itself at a step of its transition: by kill -9, or as Ctrl-C does."""

from __future__ import annotations

import signal
import subprocess

import pytest
from cluster_laptop import Laptop

# It sends itself a signal at step NUMBER of its transition: as it begins it, in its middle, or when it is done.
FAULTY = """
import asyncio, os, sys
from sparkguard.cli.cluster import main
from sparkguard.cluster.transition import run

number, moment, signal = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
del sys.argv[1:4]
perform, seen = run.perform, 0

async def faulty(step, work):
    global seen
    seen += 1
    mine = seen == number
    if mine and moment == "before":
        os.kill(os.getpid(), signal)
        await asyncio.sleep(0)
    if mine and moment == "middle":
        asyncio.get_running_loop().call_later(0.12, os.kill, os.getpid(), signal)
    await perform(step, work)
    if mine and moment == "after":
        os.kill(os.getpid(), signal)
        await asyncio.sleep(0)

run.perform = faulty
status = main()
sys.exit(status if seen >= number else 99)
"""
MOMENTS = ("before", "middle", "after")
SIGNALS = pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["kill -9", "ctrl-c"])


def faulty(laptop: Laptop, number: int, moment: str, how: int, *words: str) -> subprocess.CompletedProcess[str]:
    """The verb, with the signal at its step. Status 99: it ended before that step."""
    return laptop.run(str(number), moment, str(how), *words, program=FAULTY)
