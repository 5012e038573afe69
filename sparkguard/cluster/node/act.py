"""What changes a node: each under node.lock and the fence, and answered with what is there afterwards.

The fence: a transition has a generation, and the node keeps the one whose turn it is. An older one that arrives late changes
nothing (Fault "stale", 75). The lock is inherited by the process that does the work, so it outlives this one.
"""

from __future__ import annotations

import json
import os

from sparkguard.cluster.node import docker, records
from sparkguard.cluster.node.base import FAILED, TEMPFAIL, UNAVAILABLE, Fault, at_end, finishing, run, seconds_left, secret

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from sparkguard.cluster.node.base import Reply
    from sparkguard.cluster.node.records import Record


def main(request: dict[str, Any], reply: Reply) -> None:
    verb = request["do"]
    wait = min(records.WAIT_SECONDS, request.get("lock_seconds", records.WAIT_SECONDS))
    lock = records.take("node.lock", request["holder"], wait)
    record = records.load()
    if verb == "fence":
        _fence(record, request)
        reply({"ok": True, "generation": record.generation})
        return
    check(record, request)
    if verb == "run":
        reply(_run(request))
        return
    with finishing():
        reply(_EFFECTS[verb](record, request, lock))


def check(record: Record, request: dict[str, Any]) -> None:
    """Is it this request's turn? Fault "stale" or "locked" (75) when it is not."""
    mine = request["generation"]
    if record.generation != mine:
        message = "generation {} is over: this node is at {}".format(mine, record.generation or "none")
        raise Fault("stale", message, TEMPFAIL, generation=record.generation)
    holder = records.holder_of("hold.lock")
    if holder is not None and not records.is_same(holder, request["holder"]):
        raise records.locked(holder)


def _fence(record: Record, request: dict[str, Any]) -> None:
    """From here on only this generation's commands are carried out. `previous`: those it may replace; None: any."""
    holder = records.holder_of("hold.lock")
    if holder is not None and not records.is_same(holder, request["holder"]):
        raise records.locked(holder)
    previous = request.get("previous")
    if previous is not None and record.generation not in (*previous, request["generation"], None):
        message = f"this node is at generation {record.generation}, which another laptop's command began"
        raise Fault("stale", message, TEMPFAIL, generation=record.generation)
    record.generation = request["generation"]
    records.save(record)


def _create(record: Record, request: dict[str, Any], lock: int) -> dict[str, Any]:
    """Nothing runs yet. The intent is on disk before docker is asked, so that no container of ours is ever a stranger."""
    receipt = os.urandom(16).hex()
    facts = {key: request.get(key) for key in ("name", "model", "rank", "digest", "generation")}
    record.intents[receipt] = facts
    records.save(record)
    labels = ("--label", "sparkguard.generation=" + request["generation"], "--label", "sparkguard.receipt=" + receipt)
    # `--env NAME` in the arguments takes the value from here, so that it stands in no command line and no file of ours.
    env = dict(os.environ, **json.loads(secret() or b"{}"))
    done = docker.docker("create", *labels, *request["argv"], seconds=_seconds(request, 60), keep=(lock,), env=env)
    if done.status:
        del record.intents[receipt]
        records.save(record)
        if "is already in use" in done.err:
            taken = docker.one(request["name"])
            message = "the name {} is taken by another container".format(request["name"])
            raise Fault("name_taken", message, TEMPFAIL, container=taken)
        raise Fault("docker", done.err or "docker create failed", FAILED)
    identity = done.out.split()[-1] if done.out.split() else ""
    if len(identity) != 64 or not all(char in "0123456789abcdef" for char in identity):
        raise Fault("docker", f"docker create answers no container's id: {done.out[:200]!r}", FAILED)
    record.receipts[identity] = facts
    del record.intents[receipt]
    records.save(record)
    return _seen(identity)


def _start(record: Record, request: dict[str, Any], lock: int) -> dict[str, Any]:
    _own(record, request)
    done = docker.docker("start", request["id"], seconds=_seconds(request, 60), keep=(lock,))
    if done.status:
        raise Fault("docker", done.err or "docker start failed", FAILED, container=docker.one(request["id"]))
    return _seen(request["id"])


def _stop(record: Record, request: dict[str, Any], lock: int) -> dict[str, Any]:
    """SIGTERM, and SIGKILL after grace_seconds. What still runs then was not stopped, whatever docker said."""
    _own(record, request)
    grace = request.get("grace_seconds", 10)
    done = docker.docker("stop", "-t", str(grace), request["id"], seconds=_seconds(request, grace + 30), keep=(lock,))
    after = docker.one(request["id"])
    if after is not None and after["state"] in ("running", "paused", "restarting", "removing"):
        words = done.err or "docker stop said nothing, and the container is {}".format(after["state"])
        raise Fault("docker", words, FAILED, container=after)
    return {"ok": True, "container": after}


def _kill(record: Record, request: dict[str, Any], lock: int) -> dict[str, Any]:
    _own(record, request)
    done = docker.docker("kill", request["id"], seconds=_seconds(request, 30), keep=(lock,))
    after = docker.one(request["id"])
    if after is not None and after["state"] == "running":
        raise Fault("docker", done.err or "docker kill failed", FAILED, container=after)
    return {"ok": True, "container": after}


def _remove(record: Record, request: dict[str, Any], lock: int) -> dict[str, Any]:
    """The receipt goes when the container is seen to be gone, and no sooner."""
    container = _own(record, request)
    if container is not None:
        done = docker.docker("rm", request["id"], seconds=_seconds(request, 60), keep=(lock,))
        after = docker.one(request["id"])
        if after is not None:
            raise Fault("docker", done.err or "docker rm failed", FAILED, container=after)
        record.intents.pop(container["receipt"], None)
    record.receipts.pop(request["id"], None)
    records.save(record)
    return {"ok": True, "container": None}


def _own(record: Record, request: dict[str, Any]) -> dict[str, Any] | None:
    """The container, which must be ours, or one that the user's catalog names (stop_names); None: gone."""
    container = docker.one(request["id"])
    if container is None:
        return None
    if container["id"] != request["id"]:
        raise Fault("foreign", "{} is no whole id of a container".format(request["id"]), TEMPFAIL)
    if not record.owns(container) and container["name"] not in request.get("named", ()):
        message = "container {} ({}) is not ours".format(container["name"], container["id"][:12])
        raise Fault("foreign", message, TEMPFAIL, container=container)
    return container


def _seen(identity: str) -> dict[str, Any]:
    container = docker.one(identity)
    if container is None:
        raise Fault("docker", f"container {identity[:12]} is gone again", FAILED)
    return {"ok": True, "container": container}


def _run(request: dict[str, Any]) -> dict[str, Any]:
    """A short-lived `docker run`, which ends with whoever asked for it."""
    name = "sparkguard-check-" + os.urandom(6).hex()

    def kill() -> None:
        run(("docker", "rm", "--force", name), 20)

    at_end(kill)
    labels = ("--name", name, "--label", "sparkguard.generation=" + request["generation"])
    done = run(("docker", "run", *labels, *request["argv"]), _seconds(request, 120), 64 << 10, tail=True)
    if done.status is None:
        kill()
    return {"ok": done.status == 0, "status": done.status, "out": done.out, "err": done.err, "timed_out": done.status is None}


def _drop_caches(record: Record, request: dict[str, Any], lock: int) -> dict[str, Any]:
    """Only where sudo asks for nothing; elsewhere nothing is done, and that is no failure."""
    os.sync()
    done = run(("sudo", "-n", "tee", "/proc/sys/vm/drop_caches"), _seconds(request, 30), data=b"3\n", keep=(lock,))
    return {"ok": True, "dropped": done.status == 0, "why": done.err[-300:]}


def _yue(record: Record, request: dict[str, Any], lock: int) -> dict[str, Any]:
    from sparkguard.cluster.node import yue

    words = yue.words_of(request["verb"], request)
    return {"ok": True, "status": yue.control(request["yue"], words, _seconds(request, 60), (lock,))}


def _unit(record: Record, request: dict[str, Any], lock: int) -> dict[str, Any]:
    """start or stop of a user's unit."""
    done = run(("systemctl", "--user", request["verb"], "--", request["service"]), _seconds(request, 60), keep=(lock,))
    if done.status:
        raise Fault("unit", done.err or "systemctl --user {} {} failed".format(request["verb"], request["service"]), FAILED)
    return {"ok": True}


def _seconds(request: dict[str, Any], default: float) -> float:
    """For one child, so that this program's own answer still comes in time."""
    left = seconds_left() - 2
    if left <= 0:
        raise Fault("timeout", "no time was left when the lock was free", UNAVAILABLE)
    return min(float(request.get("seconds") or default), left)


_EFFECTS = {
    "create": _create,
    "start": _start,
    "stop": _stop,
    "kill": _kill,
    "remove": _remove,
    "drop_caches": _drop_caches,
    "yue": _yue,
    "unit": _unit,
}
