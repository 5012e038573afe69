"""Nodes as they would be seen, for tests of what is decided from them."""

from __future__ import annotations

from typing import Any

from sparkguard.core.cluster import (
    DISTRIBUTED,
    RUNNING,
    SINGLE,
    YUE,
    Allocation,
    Container,
    GpuHolder,
    NodeView,
    Rank,
    YueView,
)
from sparkguard.core.ownership import Known, Rules
from sparkguard.core.share import WHOLE
from sparkguard.core.types import UNIFIED, Hold, MemoryPool

GIB = 1 << 30
TOTAL = 120 * GIB
IMAGE = "vllm/vllm-openai:v0.30"
IMAGE_ID = "sha256:" + "1" * 64


def identifier(text: str) -> str:
    """64 hex digits that stand for a name."""
    return (text.encode().hex() * 64)[:64]


def container(name: str, **changes: Any) -> Container:
    given: dict[str, Any] = {"gpu": True, "state": "running"} | changes
    return Container(identifier(name), name, IMAGE_ID, **given)


def owned(name: str, model: str, rank: int | None = 0, **changes: Any) -> Container:
    given = {"generation": "g1", "digest": f"digest-{model}-{rank}"} | changes
    return container(name, owned=True, model=model, rank=rank, **given)


def holder(one: Container | None, gib: float | None = 90, **changes: Any) -> GpuHolder:
    used = None if gib is None else int(gib * GIB)
    return GpuHolder(**({"pid": 77, "name": "python3", "used_bytes": used, "container": one.id if one else None} | changes))


def node(name: str = "head", *containers: Container, **changes: Any) -> NodeView:
    """A Spark with nothing on it but these containers."""
    alive = [one for one in containers if one.gpu and one.state == "running"]
    available = TOTAL - 4 * GIB - sum(90 * GIB for one in alive)
    given: dict[str, Any] = {
        "boot_id": f"boot-{name}",
        "daemon": RUNNING,
        "containers": containers,
        "gpu": tuple(holder(one) for one in alive),
        "listeners": (),
        "generation": "g1",
        "pools": (MemoryPool("ram", UNIFIED, TOTAL, max(0, available)),),
        "images": ((IMAGE, IMAGE_ID),),
        "interfaces": (("enp1s0f1np1", "up"),),
        "hcas": (("rocep1s0f1", "active"),),
    } | changes
    return NodeView(name, **given)


def lost(name: str) -> NodeView:
    return NodeView(name, error="no answer within 10 s", cause="timeout")


def rank(node: str, number: int, model: str = "ds4", **changes: Any) -> Rank:
    given: dict[str, Any] = {
        "create": ("--name", f"spark-{model}", IMAGE),
        "digest": f"digest-{model}-{number}",
        "port": 8000 if number == 0 else None,
        "holds": (Hold("ram", 85 * WHOLE // 100, None),),
        "paths": ("/models",),
        "interfaces": ("enp1s0f1np1",),
        "hcas": ("rocep1s0f1",),
    } | changes
    return Rank(node, number, f"spark-{model}", IMAGE, **given)


def pair(model: str = "ds4", **changes: Any) -> Allocation:
    """A model over both nodes."""
    ranks = (rank("head", 0, model), rank("worker", 1, model))
    given: dict[str, Any] = {"served": model, "url": "http://head:8000", "client": "spark"} | changes
    return Allocation(model, model, DISTRIBUTED, ("head", "worker"), **({"ranks": ranks, "digest": f"all-{model}"} | given))


def solo(on: str = "head", model: str = "small", **changes: Any) -> Allocation:
    given: dict[str, Any] = {"served": model, "url": f"http://{on}:8000", "client": "spark"} | changes
    ranks = (rank(on, 0, model, interfaces=(), hcas=()),)
    return Allocation(model, model, SINGLE, (on,), **({"ranks": ranks, "digest": f"all-{model}"} | given))


def songs(*on: str) -> Allocation:
    return Allocation("yue", "YuE", YUE, on or ("head", "worker"), (), "yue", ready_seconds=180)


def yue(**changes: Any) -> YueView:
    """A worker that takes songs."""
    fit: dict[str, Any] = dict.fromkeys(("cuda", "runtime_ok", "assets_ok", "ownership_ok", "accepting"), True)
    rest = {
        "worker": "w-1",
        "api_version": 2,
        "manifest": "a" * 64,
        "generation": "g1",
        "mock": False,
        "busy": False,
        "active": True,
    }
    return YueView(**(fit | rest | changes))


RULES = Rules(
    ("head", "worker"),
    (
        Known("ds4", ("head", "worker"), (8000,), 120),
        Known("glm", ("head", "worker"), (8000,), 60),
        Known("small", (), (8000,), 30),
    ),
    keep=("embeddings",),
    stop_names=("old-vllm", "embeddings"),
    master_port=29501,
)
