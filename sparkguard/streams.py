"""stdin, stdout and stderr as one may be started with: closed, full, or read by nobody any more."""

from __future__ import annotations

import os
import sys

from sparkguard.errors import OSERR, SparkguardError


def mend() -> None:
    """Opens what is closed on /dev/null, first thing in a program.

    Else the next file that is opened gets its number: the lock would be a server's stderr, and Python has no sys.stderr.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number is this one
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)


def say(text: str) -> None:
    """To stderr. What cannot be said is lost: the exit status stands."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        discard(2)


def put(text: str) -> None:
    """To stdout. A reader that has gone has had enough; other failures raise SparkguardError (71): a part is missing."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        discard(1)
    except OSError as error:
        discard(1)
        raise SparkguardError(f"stdout cannot be written: {error.strerror}", None, OSERR) from None


def discard(number: int) -> None:
    """To /dev/null with what is still buffered: it would fail again when Python ends, and the exit status would be 120."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, number)
    os.close(null)
