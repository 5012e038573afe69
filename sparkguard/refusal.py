"""After a refusal, off the fast path: what it has cost already, and a record of it.

journald may read a short-lived process's cgroup too late and lose its lines for the unit, so the record does not rest on it.
"""

from __future__ import annotations

import json
import os
import time

from sparkguard import ledger
from sparkguard.core import explain
from sparkguard.core.types import Verdict
from sparkguard.probe import bounded, files, procfs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

# Conflicts= stops the peer in the same transaction, and the manager begins our start when the peer has ended: a millisecond
# apart. Somebody who stops one unit and starts the other takes longer.
_SAME_TRANSACTION_SECONDS = 0.5
_SYSTEMCTL_SECONDS = 2.0
_MOST_RECORD_BYTES = 16 << 20  # a thousand claims take half of one


def after_conflict(env: Mapping[str, str]) -> str:
    """Names the peer that Conflicts= has stopped for this refused start, and the command that brings it back; one a line."""
    unit = _own_unit(env)
    if unit is None:
        return ""
    mine = _properties(unit, "Conflicts", "InactiveExitTimestampMonotonic")
    began = int(mine.get("InactiveExitTimestampMonotonic") or 0)
    text = ""
    for peer in mine.get("Conflicts", "").split():
        if not peer.endswith(".service"):
            continue
        ended = int(_properties(peer, "InactiveEnterTimestampMonotonic").get("InactiveEnterTimestampMonotonic") or 0)
        if ended and abs(began - ended) < _SAME_TRANSACTION_SECONDS * 1e6:
            name = procfs.unescape_unit(peer)
            text += f"{name} was stopped for this start (Conflicts=). Bring it back with: systemctl --user start '{peer}'\n"
    return text


def record(verdict: Verdict, env: Mapping[str, str], text: str) -> None:
    """Keeps the last refusal of each unit (or name) until the next boot, for `sparkguard why`; text is what was said of it."""
    key = _own_unit(env) or verdict.wanted.name
    folder = os.path.join(ledger.directory(env), "refused")
    path = os.path.join(folder, procfs.unescape_unit(key).replace("/", "_"))
    entry = {
        **explain.as_json(verdict),
        "unit": key,
        "invocation": env.get("INVOCATION_ID"),
        "time": time.time(),
        "text": text.rstrip("\n"),
    }
    try:
        os.makedirs(folder, 0o700, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK  # no fifo may hold the refusal up
        with open(os.open(path + ".new", flags, 0o600), "w", encoding="utf-8") as file:
            json.dump(entry, file)
        os.replace(path + ".new", path)
    except OSError:
        pass  # The refusal itself must not fail because its record cannot be written; stderr has it all.


def last(name: str, env: Mapping[str, str]) -> dict[str, Any] | None:
    """The recorded refusal of a unit or name, if there is one."""
    path = os.path.join(ledger.directory(env), "refused", procfs.unescape_unit(name).replace("/", "_"))
    try:
        entry = json.loads(files.read_file(path, _MOST_RECORD_BYTES))
    except (OSError, ValueError):
        return None
    return entry if isinstance(entry, dict) else None


def _own_unit(env: Mapping[str, str]) -> str | None:
    if env.get("SYSTEMD_EXEC_PID") != str(os.getpid()):
        return None
    return procfs.unit_of(procfs.cgroup("/proc", "self"))


def _properties(unit: str, *names: str) -> dict[str, str]:
    argv = ["systemctl", "--user", "show", unit, *(f"--property={name}" for name in names)]
    try:
        _, output = bounded.run(argv, _SYSTEMCTL_SECONDS)
    except OSError:
        return {}
    return dict(line.partition("=")[::2] for line in output.decode("utf-8", "replace").splitlines() if "=" in line)
