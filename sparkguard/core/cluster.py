"""The words of a cluster: nodes, what is wanted on them, what was seen on them, and the steps between the two.

Three answers to every question about a node: yes, no, and nobody can tell. What nobody can tell is None, UNKNOWN, or a
NodeView whose `error` says why; it is never taken for "no".
"""

from __future__ import annotations

from sparkguard.core.record import Record
from sparkguard.core.types import Hold, MemoryPool

# What a container, a rank or a worker is doing. UNKNOWN: the node or its docker daemon cannot be asked.
RUNNING, GONE, UNKNOWN = "running", "gone", "unknown"

# Phases of the controller's record, and of a node in `status`.
UNMANAGED, DRAINING, STOPPED, STARTING, READY, FAILED = "unmanaged", "draining", "stopped", "starting", "ready", "failed"
REBOOTING, POWERING_OFF, PREPARING = "rebooting", "powering_off", "preparing"

# How an allocation uses nodes: one, several that share one model, or song workers that share nothing.
SINGLE, DISTRIBUTED, YUE = "single", "distributed", "yue"


class Node(Record):
    """One machine of the cluster, as the catalog names it; the first is the head."""

    name: str  # "head", "worker", or the name in [[cluster.nodes]]
    ssh: str  # what ssh(1) takes: an alias, or user@host
    lan_url: str  # where clients reach what it serves: http://192.168.1.10:8000
    fabric_addr: str | None = None  # its address on the QSFP fabric
    yue_url: str | None = None


class Rank(Record):
    """One container of an allocation."""

    node: str
    rank: int
    name: str  # the container's
    image: str  # reference or sha256 id
    create: tuple[str, ...]  # arguments of `docker create`, whole
    digest: str  # of everything that decides how it runs; kept as a label, so that "as wanted" is a comparison
    port: int | None  # where it serves; None: a headless rank
    holds: tuple[Hold, ...] = ()  # what admit() is asked for
    paths: tuple[str, ...] = ()  # must exist on the node
    interfaces: tuple[str, ...] = ()  # network interfaces that must be up
    hcas: tuple[str, ...] = ()  # RoCE devices that must be active: NCCL falls back to sockets silently without them
    preflight: tuple[str, ...] = ()  # arguments of a `docker run` that checks the recipe; empty: none
    preflight_seconds: int = 120
    secrets: tuple[str, ...] = ()  # names of variables that `create` passes on without a value: the laptop gives them per call
    learns: str = ""  # a variable that rank 0 prints as NAME=VALUE: rank 0 starts first, and recipes.told() puts the value in
    learn_seconds: int = 300  # until it has to be printed


class Allocation(Record):
    """A model on the nodes that it needs: what `up` wants."""

    model: str
    label: str
    mode: str  # SINGLE, DISTRIBUTED, YUE
    nodes: tuple[str, ...]
    ranks: tuple[Rank, ...]
    digest: str
    served: str = ""  # the id in /v1/models
    url: str | None = None  # the endpoint that clients use
    health_path: str | None = None  # asked before /v1/models where the engine has a better one
    metrics_paths: tuple[str, ...] = ("/metrics",)
    engine: str = "vllm"  # how its metrics are read: vllm, nim, sglang, llamacpp, tensorfold, ds4
    ready_seconds: int = 1500
    drain_seconds: int = 120  # for running requests before SIGTERM, and then again for the engine
    drop_caches: bool = False
    context: int | None = None
    vision: bool = False
    client: str | None = None  # the provider's name in the clients that `use` retargets
    fabric: str = ""  # what NCCL is told to use and nothing else: "ib", or "socket", which is slow; "": it chooses


class Container(Record):
    """A container as docker tells it."""

    id: str  # 64 hex digits
    name: str
    image: str  # id of its image
    state: str  # created, running, paused, restarting, removing, exited, dead
    exit_code: int | None = None
    oom_killed: bool = False
    started_at: str = ""  # the node's clock: to compare with itself alone
    gpu: bool = False  # asks for GPUs
    owned: bool = False  # its id is in this node's receipts
    model: str = ""  # our labels
    rank: int | None = None
    generation: str = ""
    digest: str = ""


class GpuHolder(Record):
    """A process that computes on a GPU."""

    pid: int
    name: str
    used_bytes: int | None
    container: str | None = None  # id
    exempt: bool = False  # the desktop's remote session, verified


class Listener(Record):
    port: int
    pid: int | None
    name: str


class Holder(Record):
    """Who holds a lock."""

    host: str
    pid: int
    since: float  # the holder's clock, Unix seconds
    verb: str
    user: str = ""
    generation: str = ""


class YueView(Record):
    """A song worker by its control interface; None: it does not say."""

    worker: str | None
    api_version: int | None
    manifest: str | None
    generation: str | None
    cuda: bool | None
    runtime_ok: bool | None
    assets_ok: bool | None
    ownership_ok: bool | None
    mock: bool | None
    accepting: bool | None
    busy: bool | None
    jobs: tuple[str, ...] = ()
    containers: tuple[str, ...] = ()
    active: bool = False  # its unit runs
    error: str | None = None


class NodeView(Record):
    """A node at one moment. error: it could not be asked, and everything else is unknown."""

    node: str
    error: str | None = None
    cause: str | None = None  # refused, timeout, host_key, auth, banner, protocol: kind of error
    boot_id: str | None = None
    daemon: str = UNKNOWN  # docker
    daemon_error: str | None = None
    containers: tuple[Container, ...] | None = None  # all of them, running or not; None: the daemon cannot be asked
    gpu: tuple[GpuHolder, ...] | None = None
    gpu_error: str | None = None
    listeners: tuple[Listener, ...] | None = None
    generation: str | None = None  # the fence's
    lock: Holder | None = None
    pools: tuple[MemoryPool, ...] = ()
    images: tuple[tuple[str, str | None], ...] = ()  # reference asked for -> id, None: not there
    missing: tuple[str, ...] = ()  # paths asked for that are not there
    interfaces: tuple[tuple[str, str], ...] = ()  # name asked for -> "up", "down", "absent"
    hcas: tuple[tuple[str, str], ...] = ()  # name asked for -> "active", "down", "absent"
    yue: YueView | None = None


class Step(Record):
    """One thing to do. It describes itself: --dry-run prints the text, and the runner does what `kind` says."""

    kind: str
    text: str
    node: str | None = None
    target: str = ""  # container id, url, model, job: what the kind acts on
    seconds: float = 0.0  # how long it may take
    rank: Rank | None = None


class Plan(Record):
    steps: tuple[Step, ...]
    unchanged: bool = False  # everything runs as wanted
    notes: tuple[str, ...] = ()


class Blocked(Record):
    """Why nothing is done: one line a reason, with who it is, and what to do about it."""

    status: int
    reasons: tuple[str, ...]
    hint: str = ""
    code: str = "blocked"  # foreign, busy, unreachable, preflight, memory, jobs, scope, image_differs ...
