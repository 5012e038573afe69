"""The runs that are kept: benchmarks/ID.json, written whole at each step, so that a crash leaves what was measured by then."""

from __future__ import annotations

import json
import re
import secrets
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from sparkguard.cluster import json_text
from sparkguard.cluster.bench import leases
from sparkguard.cluster.transition import state
from sparkguard.errors import USAGE, SparkguardError

if TYPE_CHECKING:
    from pathlib import Path

FOLDER = "benchmarks"
KEEP = 100
SCHEMA_VERSION = 1
RUNNING, INTERRUPTED = "running", "interrupted"
_ID = re.compile(r"\d{8}T\d{9}Z-[a-z]+-[0-9a-f]{6}")


def new_id(kind: str) -> str:
    """Sorts by time, to the millisecond."""
    now = datetime.now(timezone.utc)
    return f"{now:%Y%m%dT%H%M%S}{now.microsecond // 1000:03}Z-{kind}-{secrets.token_hex(3)}"


class History:
    def __init__(self, state_dir: Path, keep: int = KEEP) -> None:
        self._state = state_dir
        self._keep = keep
        self.folder = state_dir / FOLDER
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def save(self, record: dict[str, Any]) -> None:
        state.write(self.folder / f"{record['id']}.json", json.dumps(record, ensure_ascii=True, allow_nan=False) + "\n")

    def prune(self) -> None:
        """Keeps the newest; what runs is never among those that go."""
        running = {lease.id for lease in leases.living(self._state)}
        old = [path for path in self._paths() if path.stem not in running]
        for path in old[: max(0, len(old) - self._keep)]:
            path.unlink(missing_ok=True)

    def runs(self) -> list[dict[str, Any]]:
        """Newest first, each as it was saved; one that cannot be read is left out, and its file left alone."""
        running = {lease.id for lease in leases.living(self._state)}
        found = (_load(path, running) for path in reversed(self._paths()))
        return [record for record in found if record is not None]

    def get(self, name: str) -> dict[str, Any]:
        """By id, by the beginning of one, by `last`, or by a number that counts back from 1, the newest."""
        paths = self._paths()
        if name == "last" or name.isdecimal():
            place = 1 if name == "last" else int(name)
            chosen = paths[-place : len(paths) - place + 1] if 0 < place <= len(paths) else []
        else:
            chosen = [path for path in paths if path.stem == name] or [
                path for path in paths if name and path.stem.startswith(name)
            ]
        if len(chosen) != 1:
            what = f"{len(chosen)} runs begin with {name}" if chosen else f"there is no run {name}"
            raise SparkguardError(what, "`spark-serve bench list` shows them", USAGE)
        record = _load(chosen[0], {lease.id for lease in leases.living(self._state)})
        if record is None:
            raise SparkguardError(f"{chosen[0]} cannot be read", "it was left as it is", USAGE)
        return record

    def _paths(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("*.json") if _ID.fullmatch(path.stem))


def _load(path: Path, running: set[str]) -> dict[str, Any] | None:
    try:
        record = json_text.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict) or record.get("schema_version") != SCHEMA_VERSION or record.get("id") != path.stem:
        return None
    if record.get("status") == RUNNING and path.stem not in running:
        record |= {"status": INTERRUPTED, "reason": "its process ended without a word: what stands here is what it had by then"}
    return record


def brief(record: dict[str, Any]) -> dict[str, Any]:
    """A row of the list."""
    return {
        "id": record["id"],
        "at": record["at"],
        "kind": record["kind"],
        "model": record["target"]["model"],
        "nodes": record["target"]["nodes"],
        "url": record["target"]["url"],
        "status": record["status"],
        "reason": record["reason"],
        "summary": record["summary"],
    }
