"""docker on a node, in three answers: here, gone, and nobody can tell.

A dead daemon and a missing container both end `docker inspect` with status 1; only the daemon's own words tell them apart.
"""

from __future__ import annotations

import json

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
    done = docker("ps", "--all", "--quiet", "--no-trunc")
    if done.status:
        raise Fault("daemon", done.err or "docker ps failed", UNAVAILABLE)
    ids = done.out.split()
    return inspect(ids) if ids else []


def inspect(ids: Sequence[str]) -> list[dict[str, Any]]:
    """Those of the ids that are there, as this project tells them."""
    done = docker("inspect", "--type", "container", *ids)
    if done.status and not all(is_missing(line) for line in done.err.splitlines()):
        raise Fault("daemon", done.err or "docker inspect failed", UNAVAILABLE)
    try:
        return [_told(found) for found in json.loads(done.out or "[]")]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Fault("daemon", f"docker inspect answers what is no container: {error!r}", UNAVAILABLE) from None


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
