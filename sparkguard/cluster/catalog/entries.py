"""What a catalog says, read and checked: catalog.py reads it, recipes.py makes it into containers, pull.py fetches it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkguard.core.cluster import Node
from sparkguard.core.record import Record

if TYPE_CHECKING:
    from collections.abc import Iterable

Pairs = tuple[tuple[str, str], ...]

# Engines, by what wraps them in the catalog.
VLLM, DSV4, NIM, TENSORFOLD, SGLANG, LLAMACPP, SONGS = "vllm", "dsv4", "nim", "tensorfold", "sglang", "llamacpp", "yue"
WRAPPERS = (VLLM, DSV4, NIM, TENSORFOLD, SGLANG, LLAMACPP)
DISTRIBUTABLE = (VLLM, DSV4, NIM, TENSORFOLD, SGLANG)


class Mount(Record):
    """A folder of a node inside the container. A source that is no absolute path lies in the node's cache."""

    container: str
    source: str
    on: Pairs = ()  # node -> source, where it differs
    readonly: bool = False

    def source_on(self, node: str) -> str:
        return dict(self.on).get(node, self.source)


class Input(Record):
    """A file that goes into a derived image: whole by its hash, wherever it is fetched from."""

    url: str
    sha256: str
    path: str  # in the image; empty: only beside the Dockerfile


class Build(Record):
    """An image that is derived on the nodes from pinned inputs."""

    base: str  # by digest
    files: tuple[Input, ...] = ()
    before: tuple[tuple[str, ...], ...] = ()  # commands that run in the container, each time, before it serves
    serve: tuple[str, ...] = ()  # what the container then becomes; the arguments follow
    dockerfile: Input | None = None  # the publisher's own, for an image whose id is known


class Checkpoint(Record):
    """Files of one revision of a published model."""

    name: str
    source: str  # "hf", "ngc"
    repo: str
    revision: str  # a commit, a version, or a branch that pull resolves
    folder: str  # below the cache; empty: where the Hub's own library looks
    include: tuple[str, ...] = ()  # glob patterns; empty: all
    exclude: tuple[str, ...] = ()
    index_suffixes: tuple[str, ...] = ()  # the weight index keeps only the tensors whose names end so
    index_metadata: Pairs = ()  # what that index says of itself besides
    bytes: int | None = None  # about how much, for the check of the disk before anything is asked

    @property
    def pinned(self) -> bool:
        """Whether the revision can never mean other files: a commit, or a version of NGC."""
        commit = len(self.revision) == 40 and all(char in "0123456789abcdef" for char in self.revision)
        return commit or self.source == "ngc"


class NimSettings(Record):
    manager_port: int = 20000
    worker_port: int = 8002
    runtime_cache: Mount | None = None
    ffmpeg: Mount | None = None
    handshake_seconds: int = 300


class TensorFoldSettings(Record):
    drafter: str = "mtp"  # dflash2, mtp
    draft_path: str = ""
    parallel: int = 1
    master_port: int = 29551
    max_tokens: int | None = None
    thinking: bool = True
    vision: bool = False
    vision_urls: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    mtp_drafts: int | None = None
    mtp_confidence: float | None = None
    ple_on_ssd: bool = False
    kv_dtype: str = ""  # where the engine takes it as an argument


class Model(Record):
    """One [models.NAME] of the catalog."""

    name: str
    label: str
    wrapper: str
    image: str
    container: str
    served: str
    nodes_needed: int = 1
    aliases: tuple[str, ...] = ()
    hf_id: str = ""
    revision: str = ""
    serve_path: str = ""  # in the container
    tensor_parallel: int = 1
    args: tuple[str, ...] = ()
    env: Pairs = ()
    secrets: tuple[str, ...] = ()
    mounts: tuple[Mount, ...] = ()
    hf_mount: str = "/root/.cache/huggingface"
    default_mount: bool = True
    docker_extra: tuple[str, ...] = ()
    shm_size: str = ""
    privileged: bool = False
    build: Build | None = None
    checkpoints: tuple[Checkpoint, ...] = ()
    nim: NimSettings | None = None
    tensorfold: TensorFoldSettings | None = None
    file: str = ""  # llama.cpp: the GGUF below the cache
    ready_path: str = ""
    ready_seconds: int = 1500
    drain_seconds: int = 120
    preflight: tuple[str, ...] = ()
    preflight_seconds: int = 120
    drop_caches: bool = False
    context: int | None = None
    share: str = ""  # of the node's memory, as the catalog writes it; empty: the engine's default
    memory_gib: float | None = None
    host_ip: Pairs = ()
    provider: str = ""
    client_context: int | None = None
    vision: bool = False
    copy_over_fabric: bool = True
    notes: str = ""
    recipe: str = ""  # its runbook: docs/cluster/RECIPE.md


class Yue(Record):
    """How the song workers are reached; their URLs are the nodes' (Node.yue_url)."""

    service: str = "yue-icl.service"
    factory_root: str = "~/.local/share/artist-twin/yue-factory"
    port: int = 8011
    ready_seconds: int = 180


class ClientSettings(Record):
    """A client on this machine that `use` points at an endpoint."""

    name: str
    kind: str  # hermes, env
    path: str


class Catalog(Record):
    """A whole catalog. It was checked: what is in it can be used without another look."""

    path: str
    nodes: tuple[Node, ...]
    models: tuple[Model, ...]
    caches: Pairs  # node -> the folder of its Hugging Face cache
    master_addr: str
    master_port: int = 29501
    port: int = 8000
    executor: str = "mp"
    nccl: Pairs = ()
    ssh_opts: tuple[str, ...] = ()
    keep_containers: tuple[str, ...] = ()
    stop_names: tuple[str, ...] = ()
    yue: Yue = Yue()
    clients: tuple[ClientSettings, ...] = ()
    budget_share: int = 950_000_000  # of a node's memory, for all that run on it
    reserve_bytes: int = 2 << 30  # that stay free of it
    disk_reserve_bytes: int = 20 << 30  # that pull leaves on a disk

    @property
    def head(self) -> Node:
        return self.nodes[0]

    def node(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)

    def cache(self, node: str) -> str:
        return dict(self.caches)[node]

    def model(self, name: str) -> Model:
        """By name or alias, whatever its case. Raises SparkguardError naming the nearest."""
        from sparkguard.cluster.catalog.select import find_model

        return find_model(self, name)

    def select(self, node: str | None, model: Model | None) -> tuple[Node, ...]:
        """The nodes that a verb means: --node, or what the model needs, or all. Raises SparkguardError."""
        from sparkguard.cluster.catalog.select import find_nodes

        return find_nodes(self, node, model)


def songs(nodes: Iterable[Node]) -> Model:
    """YuE as a model: each node serves by itself, and its factory is no container of ours."""
    return Model("yue", "YuE song workers", SONGS, "", "", "yue", len(tuple(nodes)), recipe="yue")
