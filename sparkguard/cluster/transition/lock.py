"""controller.lock: one transition at a time on this laptop.

A kernel lock, so that it vanishes with its holder however that ends. What the file says is for people: who holds it.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import json
import os
import socket
import time
from typing import TYPE_CHECKING, Any

from sparkguard.cluster import json_text
from sparkguard.core.cluster import Holder
from sparkguard.errors import OSERR, TEMPFAIL, SparkguardError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FILE = "controller.lock"
_LOOK_SECONDS = 0.2


class Locked(SparkguardError):
    """Another transition is under way."""

    code = "locked"

    def __init__(self, holder: Holder | None, now: float) -> None:
        who = "another spark-serve, which does not say who it is," if holder is None else describe(holder, now)
        hint = "wait until it has ended; `spark-serve status` shows how far it is"
        super().__init__(f"{who} is at work on this laptop", hint, TEMPFAIL)
        self.holder = holder


def describe(holder: Holder, now: float) -> str:
    """`up ds4` by mia on laptop, pid 123, since 12:03:04 (2 min). The clock is the holder's own."""
    by = f" by {holder.user}" if holder.user else ""
    since = time.strftime("%H:%M:%S", time.localtime(holder.since))
    return f"`{holder.verb}`{by} on {holder.host}, pid {holder.pid}, since {since} ({_lasting(now - holder.since)}),"


def myself(verb: str, generation: str = "") -> Holder:
    """This process, for the locks that it takes."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return Holder(socket.gethostname(), os.getpid(), time.time(), verb, user, generation)


@contextlib.contextmanager
def held(state_dir: Path, holder: Holder) -> Iterator[None]:
    """Raises Locked at once when somebody else has it."""
    try:
        descriptor = os.open(state_dir / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise SparkguardError(f"{state_dir / FILE} cannot be opened: {error.strerror}", None, OSERR) from None
    try:
        _take(descriptor)
        os.ftruncate(descriptor, 0)
        with contextlib.suppress(OSError):  # a full disk: the lock holds also where it cannot say whose it is
            os.pwrite(descriptor, json.dumps(holder.__dict__).encode(), 0)
        try:
            yield
        finally:
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _take(descriptor: int) -> None:
    """holder_of() has the lock for some microseconds: an attempt that meets it must not be refused."""
    last = time.monotonic() + _LOOK_SECONDS
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > last:
                raise Locked(_read(descriptor), time.time()) from None
            time.sleep(_LOOK_SECONDS / 20)


def holder_of(state_dir: Path) -> Holder | None:
    """Who is at work on this laptop now; None: nobody."""
    try:
        descriptor = os.open(state_dir / FILE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # A shared lock is refused exactly while a transition has its exclusive one.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read(descriptor) or Holder("this laptop", 0, time.time(), "a transition")
    finally:
        os.close(descriptor)
    return None


def _read(descriptor: int) -> Holder | None:
    """None when the holder has taken the lock but not yet said who it is."""
    try:
        value: Any = json_text.loads(os.pread(descriptor, 4096, 0))
        return Holder(**{name: value[name] for name in Holder._fields})
    except (ValueError, KeyError, TypeError):
        return None


def _lasting(seconds: float) -> str:
    seconds = max(0, int(seconds))
    return f"{seconds} s" if seconds < 120 else f"{seconds // 60} min" if seconds < 7200 else f"{seconds // 3600} h"
