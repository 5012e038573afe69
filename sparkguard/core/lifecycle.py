"""A runner's life: its states, what an exit means, and how long a restart waits."""

from __future__ import annotations

from sparkguard.core.events import BAD_FILE, OUT_OF_MEMORY
from sparkguard.core.record import Record

# The only words for a runner's state, here, on the page and in JSON. Draining: it finishes what it runs and takes nothing
# new. Backoff: it died, and waits before it is started again. Failed: its file cannot be loaded until it changes.
STOPPED, STARTING, READY, DRAINING, STOPPING, BACKOFF, FAILED = (
    "stopped",
    "starting",
    "ready",
    "draining",
    "stopping",
    "backoff",
    "failed",
)
HAS_PROCESS = frozenset({STARTING, READY, DRAINING, STOPPING})
TRANSITIONS = {
    STOPPED: frozenset({STARTING}),
    STARTING: frozenset({READY, STOPPING, STOPPED, BACKOFF, FAILED}),
    READY: frozenset({DRAINING, STOPPING, BACKOFF}),
    DRAINING: frozenset({STOPPING, STOPPED}),
    STOPPING: frozenset({STOPPED, BACKOFF}),
    BACKOFF: frozenset({STOPPED, STARTING}),
    FAILED: frozenset({STOPPED}),
}

LEAST_BACKOFF_SECONDS, MOST_BACKOFF_SECONDS = 1.0, 60.0
HEALTHY_SECONDS = 60.0  # after so long in the state ready, earlier deaths are forgotten
# A start that fails is tried again for those who wait, but not for ever: an argument that the engine does not know stays wrong.
MOST_FAILED_STARTS = 3

RESTART, REPLACE, GIVE_UP, END = "restart", "replace", "give up", "end"


class After(Record):
    """What an exit leads to: the state, and what becomes of those who wait."""

    state: str
    then: str  # RESTART after the back-off, REPLACE elsewhere at once, GIVE_UP: refuse the waiting, END: as was asked for


def after_exit(state: str, cause: str, killed: bool, failed_starts: int, elsewhere: bool) -> After:
    """What follows when a process of this state ends. killed: by hand, which is as a crash.

    failed_starts: starts in a row that came to nothing, this one included. elsewhere: there is a placement that has not run out
    of memory yet. That the engine calls a file bad counts only while it loads: what was loaded once is not bad.
    """
    if state not in HAS_PROCESS:
        raise ValueError(f"a runner that is {state} has no process to exit")
    if state in (STOPPING, DRAINING):
        return After(BACKOFF, RESTART) if killed else After(STOPPED, END)
    if state == READY:
        return After(BACKOFF, RESTART)
    if cause == BAD_FILE:
        return After(FAILED, GIVE_UP)
    if cause == OUT_OF_MEMORY:
        return After(STOPPED, REPLACE) if elsewhere else After(BACKOFF, GIVE_UP)
    return After(BACKOFF, GIVE_UP if failed_starts >= MOST_FAILED_STARTS else RESTART)


def backoff_seconds(deaths: int) -> float:
    """How long the restart after so many deaths in a row (1 or more) waits: 1 s, doubled up to a minute."""
    return min(MOST_BACKOFF_SECONDS, LEAST_BACKOFF_SECONDS * 2.0 ** min(deaths - 1, 16))
