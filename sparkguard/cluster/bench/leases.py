"""Leases: a benchmark that runs is known by a file that it keeps locked, and gives way when a lifecycle command asks.

A lease is benchmarks/leases/ID.json under an exclusive flock of the benchmark. Who wants it gone writes ID.revoked beside it and
waits for the lock: it is free when every request of the benchmark is closed, or its process is dead, however it died. That is
the acknowledgement; there is no other, so a file left behind by a crash means nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import time
from typing import TYPE_CHECKING, Any

from sparkguard.cluster import json_text
from sparkguard.cluster.transition import state
from sparkguard.core.record import Record
from sparkguard.errors import OSERR, TEMPFAIL, SparkguardError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

FOLDER = "benchmarks/leases"
ACKNOWLEDGE_SECONDS = 5.0
_LOOK_SECONDS = 0.1


class Lease(Record):
    """Who measures what. since: the laptop's clock, Unix seconds."""

    id: str
    pid: int
    host: str
    since: float
    url: str
    model: str
    nodes: tuple[str, ...] = ()  # empty: an endpoint outside of the catalog, which no lifecycle command concerns


class Revoked(SparkguardError):
    """The benchmark has been told to end, and why."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the benchmark gave way: {reason}", "start it again when that is through", TEMPFAIL)
        self.reason = reason


class Held:
    """A lease of this process."""

    def __init__(self, lease: Lease, marker: Path) -> None:
        self.lease = lease
        self._marker = marker

    def revoked(self) -> str | None:
        """Why, once it is; None: it still holds."""
        try:
            return self._marker.read_text(encoding="utf-8")
        except OSError:
            return None

    async def until_revoked(self) -> str:
        while (reason := self.revoked()) is None:
            await asyncio.sleep(_LOOK_SECONDS)
        return reason


@contextlib.contextmanager
def held(state_dir: Path, lease: Lease) -> Iterator[Held]:
    """Take it under the controller's lock, so that no transition is between its own revoking and its end."""
    folder = _folder(state_dir)
    path, marker = folder / f"{lease.id}.json", folder / f"{lease.id}.revoked"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise SparkguardError(f"{path} cannot be made: {error.strerror}", None, OSERR) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with contextlib.suppress(OSError):  # a full disk: a lease that says nothing concerns every node
            os.write(descriptor, json.dumps({**lease.__dict__, "nodes": list(lease.nodes)}).encode())
        yield Held(lease, marker)
    finally:
        path.unlink(missing_ok=True)
        marker.unlink(missing_ok=True)
        os.close(descriptor)


def living(state_dir: Path) -> list[Lease]:
    """The benchmarks that run now; what crashed ones left is removed. A canary does not ask while there is one."""
    found = []
    for path in sorted(_folder(state_dir).glob("*.json")):
        lease = _look(path)
        if lease is not None:
            found.append(lease)
    return found


def concerning(nodes: set[str]) -> Callable[[Lease], bool]:
    """One that cannot be read may concern any node."""
    return lambda lease: not lease.pid or bool(nodes.intersection(lease.nodes))


def revoke_all(
    state_dir: Path,
    seconds: float = ACKNOWLEDGE_SECONDS,
    *,
    reason: str = "a lifecycle command came",
    which: Callable[[Lease], bool] = lambda lease: True,
) -> list[Lease]:
    """Ends benchmarks and returns them. Blocks, up to `seconds` for all of them together.

    Raises SparkguardError (75) naming those that have not ended by then: the caller must not go on.
    """
    asked = [lease for lease in living(state_dir) if which(lease)]
    folder = _folder(state_dir)
    for lease in asked:
        state.write(folder / f"{lease.id}.revoked", reason)
    last = time.monotonic() + seconds
    left = asked
    while left := [lease for lease in left if _look(folder / f"{lease.id}.json") is not None]:
        if time.monotonic() >= last:
            names = ", ".join(f"{lease.id} on {lease.host}, pid {lease.pid}" for lease in left)
            hint = "nothing was changed. End that process, then repeat the command"
            raise SparkguardError(f"a benchmark has not ended within {seconds:g} s: {names}", hint, TEMPFAIL)
        time.sleep(_LOOK_SECONDS / 2)
    for lease in asked:
        (folder / f"{lease.id}.revoked").unlink(missing_ok=True)
    return asked


def _folder(state_dir: Path) -> Path:
    folder = state_dir / FOLDER
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _look(path: Path) -> Lease | None:
    """The lease, if somebody holds it; else its file goes."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read(descriptor, path)
    else:
        # Between its making and its lock a lease is empty for a moment: that one is not a crashed one's.
        if os.fstat(descriptor).st_size:
            path.unlink(missing_ok=True)
        return None
    finally:
        os.close(descriptor)


def _read(descriptor: int, path: Path) -> Lease:
    """A lease that is held counts also where it cannot be read: fail closed."""
    try:
        value: Any = json_text.loads(os.pread(descriptor, 65_536, 0))
        return Lease(**{**{name: value[name] for name in Lease._fields}, "nodes": tuple(value["nodes"])})
    except (ValueError, KeyError, TypeError):
        return Lease(path.stem, 0, "this laptop", 0.0, "", "")
