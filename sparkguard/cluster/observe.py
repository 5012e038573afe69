"""Looks at all nodes at once. A node that cannot be asked is a NodeView that says why, and delays no other."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sparkguard.cluster.causes import PROTOCOL, NodeError, Unreachable
from sparkguard.core.cluster import RUNNING, UNKNOWN, Container, GpuHolder, Holder, Listener, NodeView, YueView
from sparkguard.core.record import Record
from sparkguard.core.types import UNIFIED, MemoryPool

if TYPE_CHECKING:
    from sparkguard.cluster.ssh import Fleet

SECONDS = 30


class Questions(Record):
    """What a plan wants to know of a node beyond what is always told."""

    images: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    interfaces: tuple[str, ...] = ()
    hcas: tuple[str, ...] = ()
    ports: tuple[int, ...] | None = None  # listeners on these alone; None: on all
    yue: Mapping[str, Any] | None = None  # factory_root, service, python: the catalog's [yue]


async def look(fleet: Fleet, questions: Mapping[str, Questions] | None = None, seconds: float = SECONDS) -> dict[str, NodeView]:
    """A view of each node that is asked about (without questions: of each node), in the order of the fleet."""
    asked = questions if questions is not None else {name: Questions() for name in fleet.names}
    names = [name for name in fleet.names if name in asked]
    views = await asyncio.gather(*(_look(fleet, name, asked[name], seconds) for name in names))
    return dict(zip(names, views))


async def _look(fleet: Fleet, name: str, questions: Questions, seconds: float) -> NodeView:
    request = {key: value for key, value in questions.__dict__.items() if value is not None}
    if questions.yue is not None:
        request["yue"] = dict(questions.yue)
    try:
        return view_of(name, await fleet[name].call("observe", request, seconds=seconds, repeatable=True))
    except Unreachable as error:
        return NodeView(name, error.message, error.cause)
    except NodeError as error:
        return NodeView(name, error.message, error.code)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return NodeView(name, f"{name}: what it answers makes no sense: {error!r}", PROTOCOL)


def view_of(name: str, answer: Mapping[str, Any]) -> NodeView:
    """The program's answer in the words of the core."""
    containers = answer["containers"]
    gpu = answer["gpu"]
    return NodeView(
        name,
        error=answer.get("state_error"),
        cause="state" if answer.get("state_error") else None,
        boot_id=answer["boot_id"],
        daemon=UNKNOWN if containers is None else RUNNING,
        daemon_error=answer.get("containers_error"),
        containers=None if containers is None else tuple(container_of(found) for found in containers),
        gpu=None if gpu is None else tuple(GpuHolder(**holder) for holder in gpu),
        gpu_error=answer.get("gpu_error"),
        listeners=tuple(Listener(**listener) for listener in answer["listeners"]),
        generation=answer.get("generation"),
        lock=holder_of(answer["lock"]),
        pools=pools_of(answer["meminfo"]),
        images=tuple((reference, image) for reference, image in answer["images"] or ()),
        missing=tuple(answer["missing"]),
        interfaces=tuple((name, state) for name, state in answer["interfaces"]),
        hcas=tuple((name, state) for name, state in answer["hcas"]),
        yue=_yue_of(answer),
    )


def container_of(found: Mapping[str, Any]) -> Container:
    fields = {key: found[key] for key in Container._fields if key in found}
    return Container(**fields)


def holder_of(said: Mapping[str, Any] | None) -> Holder | None:
    if said is None:
        return None
    pid, since = said.get("pid"), said.get("since")
    return Holder(
        str(said.get("host", "?")),
        pid if isinstance(pid, int) else 0,
        float(since) if isinstance(since, (int, float)) else 0.0,
        str(said.get("verb", "?")),
        str(said.get("user", "")),
        str(said.get("generation", "")),
    )


def pools_of(meminfo: Mapping[str, int]) -> tuple[MemoryPool, ...]:
    """A Spark has one pool: its GPU takes from the same memory as its processors."""
    if "MemTotal" not in meminfo:
        return ()
    return (MemoryPool("ram", UNIFIED, meminfo["MemTotal"], meminfo.get("MemAvailable"), "NVIDIA GB10"),)


def _yue_of(answer: Mapping[str, Any]) -> YueView | None:
    found = answer.get("yue")
    if found is None:
        return yue_view({}, False, answer["yue_error"]) if answer.get("yue_error") else None
    return yue_view(found.get("status") or {}, bool(found["active"]), found.get("error"))


def yue_view(status: Mapping[str, Any], active: bool, error: str | None = None) -> YueView:
    """From the factory's control interface or its /health, which carry the same keys."""

    def text(key: str) -> str | None:
        value = status.get(key)
        return value if isinstance(value, str) else None

    def flag(key: str) -> bool | None:
        value = status.get(key)
        return value if isinstance(value, bool) else None

    version = status.get("api_version")
    job = status.get("active_job")
    jobs = (str(job["job_id"]),) if isinstance(job, dict) and job.get("job_id") else ()
    owned = status.get("owned_containers")
    return YueView(
        worker=text("worker_id"),
        api_version=version if isinstance(version, int) else None,
        manifest=text("runtime_manifest"),
        generation=text("generation"),
        cuda=flag("cuda"),
        runtime_ok=flag("runtime_ok"),
        assets_ok=flag("assets_ok"),
        ownership_ok=flag("ownership_ok"),
        mock=flag("mock"),
        accepting=flag("accepting"),
        busy=flag("busy"),
        jobs=jobs,
        containers=tuple(str(identity) for identity in owned) if isinstance(owned, list) else (),
        active=active,
        error=error,
    )
