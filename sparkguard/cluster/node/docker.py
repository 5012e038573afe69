"""docker on a node, in three answers: here, gone, and nobody can tell.

A dead daemon and a missing container both end `docker inspect` with status 1; only the daemon's own words tell them apart.
"""

from __future__ import annotations

import json

from sparkguard.cluster.node import docker_api
from sparkguard.cluster.node.base import UNAVAILABLE, Fault, run

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from sparkguard.cluster.node.base import Done

# `docker inspect` and `docker image inspect` of what is not there; every other failure says nothing about what there is.
_MISSING = ("no such object", "no such container", "no such image", "reference does not exist")
LABEL = "sparkguard."


def docker(
    *words: str, seconds: float = 20, keep: tuple[int, ...] = (), limit: int = 4 << 20, env: dict[str, str] | None = None
) -> Done:
    """Fault "missing" without a docker, "daemon" when it does not end in time."""
    done = run(("docker", *words), seconds, limit, keep=keep, env=env)
    if done.status is None:
        raise Fault("daemon", f"docker {words[0]} has not ended within {seconds:.0f} s", UNAVAILABLE)
    return done


def containers() -> list[dict[str, Any]]:
    """All of them, running or not. Fault "daemon" (69) when they cannot be told."""
    listed = docker_api.get("/containers/json?all=true")
    if listed is not None:
        status, rows = listed
        if status != 200:
            raise Fault("daemon", f"the Docker daemon says {status}: {_words(rows)}", UNAVAILABLE)
        return inspect([row["Id"] for row in rows])
    done = docker("ps", "--all", "--quiet", "--no-trunc")
    if done.status:
        raise Fault("daemon", done.err or "docker ps failed", UNAVAILABLE)
    return inspect(done.out.split())


def inspect(ids: Sequence[str]) -> list[dict[str, Any]]:
    """Those of the ids (or names) that are there, as this project tells them. Each is seen, or surely missing, or this is a
    Fault "daemon": a docker that was killed says nothing at all."""
    try:
        return [_told(found) for found in _inspected(ids)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Fault("daemon", f"docker inspect answers what is no container: {error!r}", UNAVAILABLE) from None


def _inspected(ids: Sequence[str]) -> list[dict[str, Any]]:
    found = []
    for identity in ids:
        answer = docker_api.get(f"/containers/{identity}/json")
        if answer is None:
            return _inspected_by_command(ids)
        status, body = answer
        if status == 200:
            found.append(body)
        elif status != 404 or not is_missing(_words(body)):
            raise Fault("daemon", f"the Docker daemon says {status}: {_words(body)}", UNAVAILABLE)
    return found


def _inspected_by_command(ids: Sequence[str]) -> list[dict[str, Any]]:
    done = docker("inspect", "--type", "container", *ids)
    missing = sum(is_missing(line) for line in done.err.splitlines())
    found: list[dict[str, Any]] = json.loads(done.out or "[]")
    if len(found) + missing != len(ids):
        raise Fault("daemon", done.err or f"docker inspect failed with status {done.status}", UNAVAILABLE)
    return found


def _words(body: Any) -> str:
    return str(body.get("message", body)) if isinstance(body, dict) else str(body)


def one(identity: str) -> dict[str, Any] | None:
    """A container by id or name; None: surely not there. Fault when nobody can tell."""
    found = inspect([identity])
    return found[0] if found else None


def image_id(reference: str) -> str | None:
    done = docker("image", "inspect", "--format", "{{.Id}}", reference)
    if done.status:
        if is_missing(done.err):
            return None
        raise Fault("daemon", done.err or "docker image inspect failed", UNAVAILABLE)
    return done.out.strip()


def is_missing(words: str) -> bool:
    return any(text in words.lower() for text in _MISSING)


def container_of(cgroup: str) -> str | None:
    """The id in the text of /proc/PID/cgroup."""
    for word in cgroup.replace(".scope", "").replace("docker/", "docker-").replace("/", "\n").split():
        tail = word.rpartition("-")[2]
        if len(tail) == 64 and all(char in "0123456789abcdef" for char in tail):
            return tail
    return None


def _told(found: dict[str, Any]) -> dict[str, Any]:
    state, host = found["State"], found.get("HostConfig") or {}
    labels = (found.get("Config") or {}).get("Labels") or {}
    rank = labels.get(LABEL + "rank", "")
    devices = [str(device.get("PathOnHost", "")) for device in host.get("Devices") or []]
    return {
        "id": found["Id"],
        "name": found["Name"].lstrip("/"),
        "image": found["Image"],
        "state": state["Status"],
        "exit_code": state.get("ExitCode"),
        "oom_killed": bool(state.get("OOMKilled")),
        "started_at": state.get("StartedAt", ""),
        "gpu": bool(host.get("DeviceRequests")) or host.get("Runtime") == "nvidia" or any("nvidia" in path for path in devices),
        "model": labels.get(LABEL + "model", ""),
        "rank": int(rank) if rank.isdigit() else None,
        "generation": labels.get(LABEL + "generation", ""),
        "digest": labels.get(LABEL + "digest", ""),
        "receipt": labels.get(LABEL + "receipt", ""),
    }
