"""What the supervisor's parts promise each other; the front, the page's API and the processes are written against this.

    front (web/*)  --lease, load, models-->  Supervisor (loop.py)  --spawn, stop-->  Effects (effects.py)
                                                   |         <--post(event)--            |
                                                   +--scan, describe-->  Library (library.py)
                                                   +--read, reserve-->   Memory (memory.py)

One asyncio task owns all state (loop.py); everything here is called in its thread and returns at once unless it is async.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from sparkguard.errors import TEMPFAIL, SparkguardError

if TYPE_CHECKING:
    from asyncio import Future
    from types import TracebackType

    from sparkguard.core.events import Event, Model, Placement, Reading

Json = dict[str, Any]


class Refused(SparkguardError):
    """A request that gets no runner. http_status is HTTP's, code a word for programs, retry_after in seconds."""

    def __init__(self, http_status: int, code: str, message: str, retry_after: int | None = None) -> None:
        super().__init__(message, status=TEMPFAIL)
        self.http_status = http_status
        self.code = code
        self.retry_after = retry_after


class RunnerDied(SparkguardError):
    """A leased runner ended under a request of which bytes were sent already, so it cannot run again."""


class LogRing(Protocol):
    """The last lines of one model's runners, oldest first."""

    def lines(self) -> list[str]: ...

    def follow(self) -> AsyncIterator[str]:
        """The lines from now on. A slow reader loses lines and gets one that says how many; it never blocks the runner."""
        ...


class Lease(Protocol):
    """A runner's promise to one request: `async with await supervisor.lease(ID) as lease:`.

    Leaving the block by an exception (CancelledError included: the client is gone) gives it back as not ok.
    """

    model: str
    generation: int
    socket: str  # where the runner listens: a path (begins with '/'), or 'http://127.0.0.1:PORT' where it cannot
    key: str | None  # the start's nonce, to be sent as 'Authorization: Bearer KEY'; None: a private path needs none

    async def __aenter__(self) -> Lease: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def first_byte(self) -> None:
        """The client has been sent something: a death from now on cannot be replayed."""

    def tokens(self, prompt: int, generated: int) -> None:
        """Adds to what this request has used. May be called more than once."""

    def failed(self) -> None:
        """The request has ended badly although no exception leaves the block; counts as not ok."""

    @property
    def death(self) -> Future[str]:
        """Done when the runner has died or is being stopped, with a sentence why. To be looked at, never to be cancelled.

        The upstream connection must then be closed at once: a stop waits for it (llama-server's SIGTERM hangs on an
        open request).
        """
        ...

    async def replay(self) -> None:
        """After a death or a lost connection before first_byte(): waits, first in the queue, for the next runner.

        model stays, generation, socket, key and death change. Raises Refused (also after too many attempts), and RunnerDied
        when first_byte() was called.
        """


class Supervisor(Protocol):
    """What the front sees. ids are models' ids; a runner's id is its model's id."""

    async def lease(self, model: str, on_position: Callable[[int], None] | None = None) -> Lease:
        """Waits for a turn. on_position hears the place in the queue (1: next) whenever it changes. Raises Refused.

        Cancelling gives the place up.
        """
        ...

    def resolve(self, name: str) -> str | None:
        """The id of a name: an id, an alias, or a file's name."""
        ...

    def models(self) -> list[Json]: ...

    def warning(self) -> str | None:
        """What to know about the list of models: that not all of the folder was looked at."""
        ...

    def model(self, id: str) -> Json | None: ...

    def runners(self) -> list[Json]: ...

    def devices(self) -> list[Json]: ...

    async def load(self, id: str) -> None:
        """Returns when the model is ready. Raises Refused."""

    async def unload(self, id: str) -> None:
        """Running requests end first, waiting ones are refused; returns when the process is gone."""

    async def kill(self, runner_id: str) -> None:
        """SIGKILL, as a crash: the model is loaded again. Raises Refused(404) when there is no such runner."""

    async def make_room(self, amounts: Mapping[str, int]) -> tuple[str, ...]:
        """For a server of somebody else: unloads idle models that hold so many bytes of the pools together, and names them.

        Returns when they are gone and the ledger says so. Pinned, busy and loading models stay; when the others do not hold
        enough, nothing is unloaded, and it raises Refused. Nothing is kept free afterwards.
        """

    async def patch(self, id: str, changes: Json) -> Json:
        """Changes settings; returns the model's new JSON. A running request ends under the old ones. Raises SparkguardError."""
        ...

    async def reload(self) -> None:
        """Reads settings and the library again; drops no running request."""

    def log(self, runner_id: str) -> LogRing | None: ...

    def subscribe(self) -> AsyncIterator[Json]:
        """Events from now on; bounded, a slow reader loses some. Drop the iterator to end it.

        {"type": "model", ...its JSON}, or {"type": "model", "id": ID, "state": "removed"}; {"type": "runner", ...its JSON}, of
        one that is gone only "id", "model" and "state": "stopped"; {"type": "queue", "model": ID, "queue": N};
        {"type": "library", "warning": TEXT or None}; {"type": "devices", "devices": [...]};
        {"type": "dropped", "count": N} where events were lost.
        """
        ...

    def counters(self) -> list[Json]:
        """Per model since the start: model, requests, failed, prompt_tokens, generated_tokens, loads, crashes, seconds, queue."""
        ...


class Effects(Protocol):
    """Processes. Nothing here waits or raises for what a process does: it is posted as an event.

    attach() is called once, before anything else. For each spawn, in this order: Started when there is a process (never
    when it could not be started), Ready when it answers, and exactly one Exited when it is reaped, whatever happened.
    """

    def attach(self, post: Callable[[Event], None]) -> None: ...

    def spawn(self, model: str, generation: int, placement: Placement) -> None:
        """Starts a runner. placement says the device and the host's layers of experts; the rest is the library's."""

    def stop(self, model: str, generation: int, grace_seconds: float) -> None:
        """SIGTERM, a second one, SIGKILL within the grace; 0: SIGKILL now. Called again, the shorter deadline counts."""

    def busy(self, model: str, generation: int, requests: int) -> None:
        """How many requests it runs now, for the watch on hangs."""

    def endpoint(self, model: str, generation: int) -> tuple[str, str | None]:
        """(socket, key) as a Lease has them; ('', None) of one that has ended, whose Exited is under way."""
        ...

    def pid(self, model: str, generation: int) -> int | None: ...

    def progress(self, model: str) -> float | None:
        """Share loaded, 0 to 1, of a runner that is starting."""
        ...

    def log(self, model: str) -> LogRing | None: ...

    async def close(self) -> None:
        """Ends what is left, at once."""


class Library(Protocol):
    """Models and their settings."""

    async def scan(self) -> tuple[Model, ...]:
        """Every model as files and settings are now, with the placements it may have, best first (core/events.py)."""
        ...

    async def watch(self) -> None:
        """Returns when a file or a setting may have changed."""

    def resolve(self, name: str) -> str | None: ...

    def describe(self, id: str) -> Json:
        """The library's part of a model's JSON: everything but state, queue, device, error and fits."""
        ...

    def warning(self) -> str | None:
        """What to know about the list as a whole."""
        ...

    def largest_context(self, id: str, rooms: Sequence[Mapping[str, int]]) -> int | None:
        """The longest context that would fit one of these rooms ({pool: bytes}); None: not even the shortest, or unknown."""
        ...

    def devices(self) -> list[Json]:
        """The devices as found at the start, each with "pool", the id of the pool it takes memory of."""
        ...

    async def patch(self, id: str, changes: Json) -> None:
        """Raises SparkguardError, and then nothing has changed."""


class Memory(Protocol):
    """The machine's memory, read and reserved under the ledger's lock, so that no other start comes in between."""

    async def read(self, pids: Mapping[tuple[str, int], int], decide: Callable[[Reading], Mapping[str, int]]) -> None:
        """Locks, reads, has decide() say what all runners together will hold ({pool: bytes}), reserves that, unlocks.

        pids: the runners' processes by (model, generation). Raises SparkguardError, and then decide() was not called.
        """

    async def hold(self, amounts: Callable[[], Mapping[str, int]]) -> None:
        """Locks, asks what all runners together hold now, reserves that, unlocks. Raises SparkguardError."""
