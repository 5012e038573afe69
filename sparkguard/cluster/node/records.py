"""node.json: whose turn it is on this node, and which containers are ours. And the two locks.

node.lock is held for as long as one side effect takes, inherited by the process that carries it out. hold.lock is held for a
whole transition by the program `hold`, so that a second laptop is told who is at work. Both are the kernel's, and vanish
with their holders. What stands in the lock files is for people.
"""

from __future__ import annotations

import fcntl
import json
import os
import time

from sparkguard.cluster.node.base import CONFIG, TEMPFAIL, Fault, read, state_dir, unwritable, write_whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

VERSION = 1
WAIT_SECONDS = 30


class Record:
    """node.json, whole."""

    def __init__(self, generation: str | None, receipts: dict[str, dict[str, Any]], intents: dict[str, dict[str, Any]]) -> None:
        self.generation = generation
        self.receipts = receipts  # container id -> what it was created as
        self.intents = intents  # label of a creation that was begun -> the same

    def owns(self, container: dict[str, Any]) -> bool:
        """An id from a receipt, or a container whose creation ended after we did: nobody else has its label."""
        return container["id"] in self.receipts or container.get("receipt") in self.intents


def load() -> Record:
    """Fault "state" (78) for a damaged file, or a newer version's: it is never overwritten, since it says what is ours."""
    path = os.path.join(state_dir(), "node.json")
    text = read(path)
    if text is None:
        if os.path.exists(path):
            raise Fault("state", f"{path} cannot be read", CONFIG)
        return Record(None, {}, {})
    try:
        kept = json.loads(text)
        version = kept["version"]
        record = Record(kept["generation"], dict(kept["receipts"]), dict(kept["intents"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        advice = "see what `docker ps -a` shows with a label sparkguard.generation, then move the file away"
        raise Fault("state", f"{path} is damaged; it says which containers are ours: {advice}", CONFIG) from None
    if version != VERSION:
        raise Fault("state", f"{path} is of version {version!r}, and this spark-serve knows {VERSION}: use a newer one", CONFIG)
    return record


def save(record: Record) -> None:
    kept = {"version": VERSION, "generation": record.generation, "receipts": record.receipts, "intents": record.intents}
    write_whole(os.path.join(state_dir(), "node.json"), json.dumps(kept, indent=1) + "\n")


def take(name: str, holder: dict[str, Any], wait_seconds: float) -> int:
    """The lock's descriptor, to be inherited by children. Fault "locked" (75) with its holder when it stays another's."""
    path = os.path.join(state_dir(), name)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise unwritable(path, error) from None
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            if time.monotonic() >= deadline:
                other = _said(descriptor)
                os.close(descriptor)
                raise locked(other) from None
            time.sleep(0.02)
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode(), 0)
    except OSError as error:
        os.close(descriptor)
        raise unwritable(path, error) from None
    return descriptor


def holder_of(name: str) -> dict[str, Any] | None:
    """Who holds a lock now; {} when somebody does and does not say who."""
    try:
        descriptor = os.open(os.path.join(state_dir(), name), os.O_RDONLY)
    except (OSError, Fault):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except OSError:
        return _said(descriptor)
    finally:
        os.close(descriptor)


def is_same(holder: dict[str, Any], asking: dict[str, Any]) -> bool:
    """The same process: it has another generation for what it starts and for its clean-up after that."""
    return all(holder.get(key) == asking.get(key) for key in ("host", "pid", "since"))


def locked(holder: dict[str, Any]) -> Fault:
    if not holder:
        return Fault("locked", "another spark-serve, which does not say who it is, is at work on this node", TEMPFAIL)
    by = " by {}".format(holder["user"]) if holder.get("user") else ""
    who = "`{}`{} on {}, pid {}".format(holder.get("verb"), by, holder.get("host"), holder.get("pid"))
    return Fault("locked", who + ", is at work on this node", TEMPFAIL, holder=holder)


def _said(descriptor: int) -> dict[str, Any]:
    try:
        said = json.loads(os.pread(descriptor, 4096, 0))
    except (ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}
