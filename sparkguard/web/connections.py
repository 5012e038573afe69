"""How many clients may be connected at once, so that there are descriptors for the runners whoever connects, and how often."""

from __future__ import annotations

import resource

# The unit's and the shell's soft limit is 1024 for the sake of programs that use select(); ours does not.
_WANTED = 65536
# For runners (some five each), the library, the ledger, and connections that are taken only to be closed.
_OURS = 256
_LEAST = 16
# The accept queue is taken in one go, before any of it can be closed.
_MOST_WAITING = 128


def raise_limit() -> None:
    """Of open files, as far as this user may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def most() -> int:
    """A client takes two: its own connection, and the one to its runner."""
    return max(_LEAST, (_limit() - _OURS) // 2)


def most_waiting() -> int:
    """Not taken yet: the kernel's queue."""
    return max(_LEAST, min(_MOST_WAITING, _limit() // 8))


def _limit() -> int:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _WANTED if soft == resource.RLIM_INFINITY else min(soft, _WANTED)


class Connections:
    """Those that there are."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._now = 0

    def enter(self) -> bool:
        """False: there is no place for another."""
        if self._now >= self._most:
            return False
        self._now += 1
        return True

    def leave(self) -> None:
        self._now -= 1
