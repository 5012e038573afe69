"""Prepares a model on this node in the background: begun here, told here, and ended here; pull_job.py does the work.

Runs on a node: Linux, Python 3.8, the standard library. The job is a process group of its own that outlives the connection.
It holds pull/lock for as long as it lives, so that whether one runs is never a guess; what it does stands in pull/events.jsonl.
"""

from __future__ import annotations

import fcntl
import glob
import json
import os
import signal
import time

from sparkguard.cluster.node import pull_job
from sparkguard.cluster.node.base import FAILED, TEMPFAIL, Fault, finishing, proc_root, read, secret, state_dir

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from sparkguard.cluster.node.base import Reply

_ENDS = ("pull_done", "pull_failed", "pull_cancelled")
_CANCEL_SECONDS = 20
_SHARE_SECONDS = 10
_BEAT_SECONDS = 10


def main(request: dict[str, Any], reply: Reply) -> None:
    """do: start (job), follow (since), status, or cancel."""
    folder = os.path.join(state_dir(), "pull")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    verb = request["do"]
    if verb == "start":
        reply(_start(folder, request["job"], json.loads(secret() or b"{}")))
    elif verb == "follow":
        _follow(folder, request, reply)
    elif verb == "status":
        reply(_status(folder))
    elif verb == "cancel":
        reply(_cancel(folder))
    else:
        raise Fault("bug", f"pull cannot {verb!r}", 70)


def _locked(folder: str) -> int | None:
    """The descriptor of pull/lock, held; None: a job has it."""
    lock = os.open(os.path.join(folder, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return lock
    except BlockingIOError:
        os.close(lock)
        return None


def _job(folder: str) -> dict[str, Any]:
    try:
        found = json.loads(read(os.path.join(folder, "job.json")) or "{}")
    except ValueError:
        found = {}
    return found if isinstance(found, dict) else {}


def _start(folder: str, job: dict[str, Any], secrets: dict[str, str]) -> dict[str, Any]:
    deadline = time.monotonic() + _SHARE_SECONDS
    lock = _locked(folder)
    while lock is None:
        running = _job(folder)
        if running.get("key") == job["key"]:
            return {"state": "attached", **_told(folder, running)}
        # Another start may hold the lock whose job has not said yet what it is.
        if _lives(running.get("pid")) or time.monotonic() > deadline:
            what = f"{running.get('model', 'another model')} is being prepared here"
            raise Fault("busy", what, TEMPFAIL, model=running.get("model"), pid=running.get("pid"))
        time.sleep(0.05)
        lock = _locked(folder)
    try:
        with finishing():
            # The last job's, and what one left half that was killed while it wrote.
            half = glob.glob(os.path.join(glob.escape(folder), "**", "*.new"), recursive=True)
            for path in (*half, os.path.join(folder, "events.jsonl"), os.path.join(folder, "share.json")):
                try:
                    os.unlink(path)
                except FileNotFoundError:
                    pass
            identity = f"{int(time.time())}-{os.getpid()}"
            _fork(folder, lock, {**job, "id": identity}, secrets)
            _wait_for(folder, identity, share=bool(job.get("share")))
    finally:
        os.close(lock)  # the job has its own copy
    return {"state": "started", **_told(folder, _job(folder))}


def _fork(folder: str, lock: int, job: dict[str, Any], secrets: dict[str, str]) -> None:
    """Twice, with a session between: the job is init's child, and no terminal's."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        os.setsid()
        if os.fork():
            os._exit(0)
        os.setpgid(0, 0)  # a group of its own, which `cancel` ends whole
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        os.dup2(lock, 3)
        os.closerange(4, 1024)
        pull_job.run(folder, job, secrets)
    finally:
        os._exit(0)


def _lives(pid: object) -> bool:
    return isinstance(pid, int) and pid > 1 and os.path.exists(f"{proc_root()}/{pid}")


def _wait_for(folder: str, identity: str, share: bool) -> None:
    deadline = time.monotonic() + _SHARE_SECONDS
    while time.monotonic() < deadline:
        begun = _job(folder).get("id") == identity
        if begun and (not share or os.path.exists(os.path.join(folder, "share.json")) or _last(folder).get("event") in _ENDS):
            return
        time.sleep(0.02)
    raise Fault("start", "the job did not begin", FAILED)


def _told(folder: str, job: dict[str, Any]) -> dict[str, Any]:
    try:
        share = json.loads(read(os.path.join(folder, "share.json")) or "null")
    except ValueError:
        share = None
    return {"id": job.get("id"), "model": job.get("model"), "pid": job.get("pid"), "share": share}


class _Events:
    """What the job tells, read as it grows: a long preparation tells megabytes."""

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(folder, "events.jsonl")
        self._read = 0

    def more(self) -> list[dict[str, Any]]:
        """A last line that is not whole yet is left for the next look."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._read)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


def _last(folder: str) -> dict[str, Any]:
    events = _Events(folder).more()
    ends = [event for event in events if event["event"] in _ENDS]
    return ends[-1] if ends else events[-1] if events else {}


def _follow(folder: str, request: dict[str, Any], reply: Reply) -> None:
    """Each event after the one with the number `since`, until the job has ended; also when it was killed and could not say so."""
    events, since = _Events(folder), request["since"]
    told = time.monotonic()
    while True:
        lock = _locked(folder)  # asked first: what it wrote before its end is read after
        if lock is not None:
            os.close(lock)
        if request.get("id") and _job(folder).get("id") != request["id"]:
            raise Fault("replaced", "another job has begun here since", TEMPFAIL)
        for event in events.more():
            if event["seq"] > since:
                told = time.monotonic()
                reply(event)
            if event["event"] in _ENDS:
                return
        if lock is not None:
            message = "the job has ended without a word: it was killed, or the node went down"
            raise Fault("killed", message, FAILED, model=_job(folder).get("model"))
        if time.monotonic() - told > _BEAT_SECONDS:  # hashing 100 GiB says nothing for minutes, and the laptop wants to know
            told = time.monotonic()
            reply({"event": "beat"})
        time.sleep(0.2)


def _status(folder: str) -> dict[str, Any]:
    lock = _locked(folder)
    if lock is not None:
        os.close(lock)
    return {"running": lock is None, "last": _last(folder), **_told(folder, _job(folder))}


def _cancel(folder: str) -> dict[str, Any]:
    """The group is asked, then killed. Its lock says when it is gone; nothing is killed that does not hold it."""
    job = _job(folder)
    deadline = time.monotonic() + _CANCEL_SECONDS
    asked = False
    with finishing():
        while True:
            lock = _locked(folder)
            if lock is not None:
                os.close(lock)
                return {"cancelled": asked, **_told(folder, job)}
            late = time.monotonic() > deadline
            if not asked or late:
                asked = True
                job = _job(folder)
                if _lives(job.get("pid")):
                    try:
                        os.killpg(job["pid"], signal.SIGKILL if late else signal.SIGTERM)
                    except OSError:
                        pass
            if time.monotonic() > deadline + 5:
                raise Fault("stuck", f"pid {job.get('pid')} does not end", FAILED)
            time.sleep(0.05)
