"""The words between the supervisor's core and the world: what there is, what happened, what is to be done."""

from __future__ import annotations

from sparkguard.core.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

# Why a runner ended. A file that the engine cannot load, an abort while loading included; settings that it refuses; memory that
# it did not get; no progress while a request ran (whoever watches has killed it); on purpose; anything else.
BAD_FILE, BAD_SETTINGS, OUT_OF_MEMORY, HANG, STOPPED, CRASH = (
    "bad_file",
    "bad_settings",
    "out_of_memory",
    "hang",
    "stopped",
    "crash",
)
CAUSES = (BAD_FILE, BAD_SETTINGS, OUT_OF_MEMORY, HANG, STOPPED, CRASH)


class Placement(Record):
    """One way to run a model: the device, and the bytes of each pool that it takes there.

    rank orders the ways: a later one is taken only where no earlier one can ever fit beside what others hold. Within a
    rank the first that fits now is taken, so that a model goes to the GPU that has room.
    """

    device: str  # "cpu", "cuda:0"
    amounts: tuple[tuple[str, int], ...]  # (pool, bytes), each pool once
    rank: int = 0
    host_expert_layers: int = 0  # SPARK_HOST_EXPERTS: so many first layers keep their routed experts in host memory
    expert_cache_mib: int = 0  # SPARK_EXPERT_CACHE_PERCENT of those, in the device's memory and among the amounts


class Problem(Record):
    """Why a model cannot run as it is set: a GPU that is not there, a header that cannot be read. HTTP's status."""

    status: int
    code: str
    message: str


class Model(Record):
    """What dispatch must know of one model."""

    id: str
    placements: tuple[Placement, ...]
    version: object = None  # changes when file or launch settings do: (mtime, size, settings); compared, never looked into
    parallel: int = 1
    pinned: bool = False  # "unloaded when idle" is off: no idle unload, evicted last, started again when it had to end
    problem: Problem | None = None


class Pool(Record):
    """One pool's memory as read now, this supervisor's runners and their memory taken left out of `others`."""

    id: str
    total_bytes: int
    available_bytes: int
    reserve_bytes: int  # to be left free
    others_bytes: int = 0  # claimed by everybody else: vLLM, reservations, a foreign llama-server
    outstanding_bytes: int = 0  # of that, what they have not taken yet
    blocked: str | None = None  # why nothing can be started here: somebody's size is unknown


class Reading(Record):
    """The pools, and what each runner has taken of them: {(model, generation): {pool: bytes}}. Missing: nothing yet."""

    pools: tuple[Pool, ...]
    taken: Mapping[tuple[str, int], Mapping[str, int]] = {}


class Event(Record):
    """Something that happened."""


class Asked(Event):
    """A request for a model. ticket: any name not used before."""

    ticket: int
    model: str


class Gone(Event):
    """The client has left, wherever its request is; a generation has been cancelled."""

    ticket: int


class Done(Event):
    """A granted request has ended. replay: its runner died before a byte was sent, so it goes first in the queue again."""

    ticket: int
    ok: bool = True
    tokens: int = 0
    replay: bool = False


class Started(Event):
    model: str
    generation: int
    pid: int


class Ready(Event):
    """The runner answers. measured: what it really holds, where it says so: (pool, bytes)."""

    model: str
    generation: int
    measured: tuple[tuple[str, int], ...] | None = None


class Exited(Event):
    """The runner's process is reaped, or never came to be. words: the last that it said, for people."""

    model: str
    generation: int
    cause: str
    words: str = ""


class Load(Event):
    """By hand; the ticket is answered by Loaded or Refuse. It holds no runner."""

    ticket: int
    model: str


class MakeRoom(Event):
    """Somebody else needs so much of what runners hold: idle ones end, if that is enough; pinned and busy ones never do.

    The ticket is answered at once, by MadeRoom or Refuse. Nothing keeps the room free: whoever asked must be quick.
    """

    ticket: int
    amounts: tuple[tuple[str, int], ...]


class Unload(Event):
    model: str


class Kill(Event):
    """The same as a crash, except that it is not held against the runner."""

    model: str


class Changed(Event):
    """The library as it is now. A model that is not there any more is unloaded when its requests have ended."""

    models: tuple[Model, ...]


class Limits(Event):
    """Settings as they are now. idle_seconds 0: never; most_loaded 0: memory decides."""

    idle_seconds: float = 1800.0
    most_loaded: int = 0
    queue_limit: int = 100  # waiting requests of one model
    stop_seconds: float = 10.0


class Free(Event):
    """The answer to Measure."""

    reading: Reading


class Unread(Event):
    """Measure failed: nothing can be started now. message says why."""

    message: str


class Tick(Event):
    """The time of Wake has come."""


class Close(Event):
    """The supervisor ends: nothing new, waiting ones are refused, running ones end, then their runners."""


class Halt(Event):
    """The deadline of Close has passed: runners end with what they run."""


class Effect(Record):
    """Something to be done."""


class Spawn(Effect):
    model: str
    generation: int
    placement: Placement


class Stop(Effect):
    """grace_seconds 0: at once."""

    model: str
    generation: int
    grace_seconds: float


class Grant(Effect):
    """The request has the runner until its Done or Gone."""

    ticket: int
    model: str
    generation: int


class Loaded(Effect):
    """The answer to Load."""

    ticket: int
    model: str


class MadeRoom(Effect):
    """The answer to MakeRoom: these have been told to stop, and the room is there when they have ended."""

    ticket: int
    leaving: tuple[tuple[str, int], ...]  # (model, generation)


class Refuse(Effect):
    """HTTP's status. rooms: what there could be for the model, per placement, where memory is what lacks."""

    ticket: int
    status: int
    code: str
    message: str
    retry_after: int | None = None
    model: str = ""
    rooms: tuple[Mapping[str, int], ...] = ()


class Position(Effect):
    """1: next."""

    ticket: int
    place: int


class Measure(Effect):
    """Read the memory; Free or Unread answers. Never asked for twice at once."""


class Wake(Effect):
    """Send a Tick then; replaces the one before. None: no more."""

    at: float | None


class Turned(Effect):
    """Something that people see of a model has changed."""

    model: str
