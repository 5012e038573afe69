"""A runner's life: its states, what an exit means, and how long a restart waits."""

from __future__ import annotations

from sparkguard.core.events import BAD_FILE, BAD_SETTINGS, OUT_OF_MEMORY
from sparkguard.core.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from sparkguard.core.events import Model, Placement

# The only words for a runner's state, here, on the page and in JSON. Draining: it finishes what it runs and takes nothing
# new. Backoff: it died, and waits before it is started again. Failed: it cannot be loaded until its file or settings change.
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
    if cause in (BAD_FILE, BAD_SETTINGS):
        return After(FAILED, GIVE_UP)
    if cause == OUT_OF_MEMORY:
        return After(STOPPED, REPLACE) if elsewhere else After(BACKOFF, GIVE_UP)
    return After(BACKOFF, GIVE_UP if failed_starts >= MOST_FAILED_STARTS else RESTART)


def backoff_seconds(deaths: int) -> float:
    """How long the restart after so many deaths in a row (1 or more) waits: 1 s, doubled up to a minute."""
    return min(MOST_BACKOFF_SECONDS, LEAST_BACKOFF_SECONDS * 2.0 ** min(deaths - 1, 16))


class Runner:
    """What is known of one model's process, or of why there is none."""

    def __init__(self, model: Model) -> None:
        self.id = model.id
        self.model: Model | None = model  # None: gone from the library
        self.state = STOPPED
        self.generation = 0
        self.pid: int | None = None
        self.placement: Placement | None = None
        self.held: dict[str, int] = {}
        self.version: object = None  # of the model as it was started, or failed
        self.parallel = 1
        self.started_at = self.ready_at = self.used_at = 0.0
        self.leases: set[int] = set()
        self.queue: list[tuple[int, int]] = []  # (order, ticket)
        self.loads: list[tuple[int, int]] = []
        self.restart: int | None = None  # the order of a wish to be started again that nobody waits for
        self.killed = False
        self.suspect_until = 0.0
        self.deaths = self.failed_starts = 0
        self.retry_at = 0.0
        self.ran_out: set[Placement] = set()
        self.words = ""  # of the last death
        self.cause = ""
        self.seconds_each = 0.0  # a request's time on the runner, smoothed

    def wants_since(self) -> int | None:
        """The order of the oldest wish for this model; None: there is none."""
        orders = [order for order, _ in (*self.queue[:1], *self.loads[:1])]
        if self.restart is not None:
            orders.append(self.restart)
        return min(orders, default=None)

    def own_until(self) -> float:
        """Until when it need not give way to an older wish: for as long as its load has taken."""
        return self.ready_at + (self.ready_at - self.started_at)

    def waits(self) -> bool:
        return bool(self.queue or self.loads)
