"""Runs a program that may hang, and never waits for it longer than agreed.

A driver's library can block inside the kernel, where not even SIGKILL ends a process at once: such a child is left
behind rather than waited for. subprocess would cost the guard's fast path 11 ms of imports, so this stands on
posix_spawn.
"""

from __future__ import annotations

import os
import select
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Importing signal costs 3 ms for its enums; the number is the same on Linux and macOS.
_SIGKILL = 9
_GRACE_SECONDS = 0.1
# Far more than any of our children prints; one that floods the pipe counts as one that does not answer.
_MOST_BYTES = 1 << 20

_left_behind: set[int] = set()


def run(argv: Sequence[str], seconds: float, env: Mapping[str, str] | None = None) -> tuple[int | None, bytes]:
    """Runs argv (found on PATH) and returns its exit status and what it wrote to stdout.

    The status is negative for a signal, and None when the program had to be killed at the deadline, together with its
    children; what it wrote until then is returned all the same. stdin and stderr are /dev/null, env None is the
    caller's environment. Raises OSError when the program cannot be started.
    """
    for pid in tuple(_left_behind):
        if _status(pid) is not None:
            _left_behind.discard(pid)
    deadline = time.monotonic() + seconds
    output, child_end = os.pipe()
    try:
        try:
            pid = os.posix_spawnp(
                argv[0],
                list(argv),
                os.environ if env is None else env,
                # The pipe comes first: its end may be descriptor 0 or 2 itself, when the caller had those closed.
                file_actions=(
                    (os.POSIX_SPAWN_DUP2, child_end, 1),
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
                ),
                setpgroup=0,
                setsigmask=(),
            )
        finally:
            os.close(child_end)
        status = None
        try:
            text, complete = _read(output, deadline)
            if complete:
                status = _wait(pid, deadline)
        finally:
            if status is None:
                _kill(pid)
                if _wait(pid, time.monotonic() + _GRACE_SECONDS) is None:
                    _left_behind.add(pid)
        return status, text
    finally:
        os.close(output)


def _read(output: int, deadline: float) -> tuple[bytes, bool]:
    """What comes until the end of the pipe, and whether the end came before the deadline."""
    poller = select.poll()
    poller.register(output, select.POLLIN)
    text = b""
    while len(text) < _MOST_BYTES:
        left = deadline - time.monotonic()
        if left <= 0 or not poller.poll(left * 1000):
            return text, False
        chunk = os.read(output, 65536)
        if not chunk:
            return text, True
        text += chunk
    return text, False


def _wait(pid: int, deadline: float) -> int | None:
    """The exit status, or None at the deadline. The end of the pipe precedes the end of the process by microseconds."""
    pause = 0.0001
    while True:
        status = _status(pid)
        if status is not None or time.monotonic() >= deadline:
            return status
        time.sleep(pause)
        pause = min(2 * pause, 0.01)


def _status(pid: int) -> int | None:
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return 0  # SIGCHLD is ignored here (some parents hand that on): the kernel threw the status away
    return os.waitstatus_to_exitcode(status) if ended else None


def _kill(pid: int) -> None:
    try:
        os.killpg(pid, _SIGKILL)
    except (ProcessLookupError, PermissionError):  # gone already; macOS refuses for a group of zombies
        pass
