"""The public files in the state folder that tell programs on this laptop what they may use.

yue-workers.json is Artist Twin's contract; endpoint.json has the models that are served. Revoked before a drain, written
after readiness, each time whole. A transition that is not the newest one publishes nothing.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from sparkguard.cluster import json_text
from sparkguard.cluster.transition import state
from sparkguard.core.record import Record
from sparkguard.errors import TEMPFAIL, SparkguardError

if TYPE_CHECKING:
    from pathlib import Path

    from sparkguard.core.cluster import Allocation

YUE_FILE, ENDPOINT_FILE = "yue-workers.json", "endpoint.json"
_PUBLIC = 0o644  # no credentials in them, and other users' programs may read them where the folder lets them


class Endpoint(Record):
    model: str
    served: str
    url: str
    nodes: tuple[str, ...]
    generation: str
    engine: str = ""
    context: int | None = None


def endpoint_of(allocation: Allocation, generation: str) -> Endpoint:
    return Endpoint(
        allocation.model,
        allocation.served,
        allocation.url or "",
        allocation.nodes,
        generation,
        allocation.engine,
        allocation.context,
    )


class Worker(Record):
    id: str  # the factory's own, not the SSH alias
    url: str
    generation: str
    runtime_manifest: str
    node: str  # not published


def revoke(state_dir: Path, nodes: tuple[str, ...]) -> None:
    """Nothing on these nodes is announced any more; what runs on other nodes stays announced."""
    endpoints = [endpoint for endpoint in served(state_dir) if not set(endpoint.nodes) & set(nodes)]
    _put_endpoints(state_dir, endpoints)
    _put_workers(state_dir, [worker for worker in workers(state_dir) if worker.node not in nodes])


def publish_endpoint(state_dir: Path, endpoint: Endpoint) -> None:
    """Raises SparkguardError (75) when the controller's record has a newer transition on one of its nodes."""
    _check(state_dir, endpoint.nodes, endpoint.generation)
    others = [other for other in served(state_dir) if not set(other.nodes) & set(endpoint.nodes)]
    _put_endpoints(state_dir, [*others, endpoint])


def publish_workers(state_dir: Path, new: tuple[Worker, ...]) -> None:
    for worker in new:
        _check(state_dir, (worker.node,), worker.generation)
    nodes = {worker.node for worker in new}
    _put_workers(state_dir, [worker for worker in workers(state_dir) if worker.node not in nodes] + list(new))


def served(state_dir: Path) -> list[Endpoint]:
    found = []
    for entry in _entries(state_dir / ENDPOINT_FILE, "endpoints"):
        try:
            found.append(Endpoint(**{**entry, "nodes": tuple(entry["nodes"])}))
        except (KeyError, TypeError):
            continue  # not ours, or damaged: announced no more
    return found


def workers(state_dir: Path) -> list[Worker]:
    """The published workers; which node each is on stands beside the file, as its schema has no place for it."""
    nodes: dict[Any, Any] = {entry.get("id"): entry.get("node") for entry in _entries(state_dir / _NODES_FILE, "workers")}
    found = []
    for entry in _entries(state_dir / YUE_FILE, "workers"):
        try:
            found.append(Worker(**entry, node=nodes[entry["id"]]))
        except (KeyError, TypeError):
            continue
    return found


_NODES_FILE = ".yue-nodes.json"


def _check(state_dir: Path, nodes: tuple[str, ...], generation: str) -> None:
    controller = state.load(state_dir)
    for node in nodes:
        if (newest := controller.of(node).generation) != generation:
            raise SparkguardError(
                f"{node} belongs to a newer transition ({newest[:8] or 'none'}, not {generation[:8]}): nothing was published",
                "see `spark-serve status`",
                TEMPFAIL,
            )


def _put_endpoints(state_dir: Path, endpoints: list[Endpoint]) -> None:
    value = {"version": 1, "endpoints": [{**endpoint.__dict__, "nodes": list(endpoint.nodes)} for endpoint in endpoints]}
    state.write(state_dir / ENDPOINT_FILE, json.dumps(value, indent=1) + "\n", _PUBLIC)


def _put_workers(state_dir: Path, found: list[Worker]) -> None:
    public = [{name: worker.__dict__[name] for name in ("id", "url", "generation", "runtime_manifest")} for worker in found]
    generations = {worker.generation for worker in found}
    value = {
        "version": 1,
        "mode": "yue" if found else "unavailable",
        "generation": generations.pop() if len(generations) == 1 else "",
        "workers": public,
    }
    beside = {"workers": [{"id": worker.id, "node": worker.node} for worker in found]}
    # In this order: a crash in between leaves workers published whose node is known.
    state.write(state_dir / _NODES_FILE, json.dumps(beside) + "\n", _PUBLIC)
    state.write(state_dir / YUE_FILE, json.dumps(value, indent=1) + "\n", _PUBLIC)


def _entries(path: Path, key: str) -> list[dict[str, Any]]:
    try:
        value = json_text.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    found = value.get(key) if isinstance(value, dict) else None
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []
