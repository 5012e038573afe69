"""One spark-runner that has been started already and waits to be told what to be.

Python takes as long to start as a small model to load. Only who wants two models at once waits for that.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from sparkguard.core.record import Record

_COMMAND = (sys.executable, "-I", "-m", "sparkguard.runner", "--standby", "--parent")


class Started(Record):
    """Whoever gets it has to reap the process and to close output."""

    process: subprocess.Popen[bytes]
    output: int  # where its stdout and stderr, and later the engine's, are read


class Standby:
    """To be used from the main thread: the kernel links a child's life to the thread that made it."""

    def __init__(self) -> None:
        self._waiting: Started | None = None

    def prepare(self) -> None:
        """Starts one unless there is one. Should it fail, start() will say why."""
        if self._waiting is None:
            try:
                self._waiting = _start()
            except OSError:
                pass

    def start(self, words: Sequence[str]) -> Started:
        """The process that spark-runner with these arguments is. Raises OSError, and ValueError for what no process can take."""
        if any("\0" in word for word in words):
            raise ValueError("an argument with a zero byte")
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            try:
                _tell(waiting, words)
                return waiting
            except BrokenPipeError:  # somebody has ended it
                pass
        fresh = _start()
        _tell(fresh, words)
        return fresh

    def close(self) -> None:
        if self._waiting is not None:
            end(self._waiting)
            self._waiting = None


def end(started: Started) -> None:
    started.process.kill()
    started.process.wait()
    if started.process.stdin is not None:
        started.process.stdin.close()
    os.close(started.output)


def _start() -> Started:
    reading, writing = os.pipe()
    try:
        # In a process group of its own (spark-runner sees to that), but in our session: Linux gives each session its share of
        # the CPU (autogroup), and a front that others' work keeps from running is of no use to an engine that is not.
        process = subprocess.Popen(
            [*_COMMAND, str(os.getpid())], stdin=subprocess.PIPE, stdout=writing, stderr=writing, bufsize=0
        )
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    return Started(process, reading)


def _tell(waiting: Started, words: Sequence[str]) -> None:
    """It is told once; where that fails, it is ended."""
    stdin = waiting.process.stdin
    assert stdin is not None
    raw = os.fsencode("\0".join(words))
    try:
        with stdin:
            os.set_blocking(stdin.fileno(), False)  # a pipe holds 64 KB; one that does not read must not hold us up
            if os.write(stdin.fileno(), raw) < len(raw):
                raise ValueError(f"{len(raw)} bytes of arguments")
    except BaseException:
        end(waiting)
        raise
