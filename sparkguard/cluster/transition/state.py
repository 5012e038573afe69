"""controller.json: what this laptop last wanted of the nodes, and the transition under way or the last one that ended.

It is intent and history, never proof: what runs is asked of the nodes. A file that cannot be understood is refused and
left as it is, because a person may still read in it which containers are theirs.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkguard.cluster import json_text
from sparkguard.core.cluster import UNMANAGED
from sparkguard.core.record import Record
from sparkguard.errors import CONFIG, OSERR, SparkguardError

if TYPE_CHECKING:
    from collections.abc import Mapping

VERSION = 1
FILE = "controller.json"


class Placed(Record):
    """What a node is meant to do."""

    phase: str = UNMANAGED
    mode: str = ""
    model: str = ""
    generation: str = ""
    digest: str = ""
    nodes: tuple[str, ...] = ()  # of the whole allocation
    at: float = 0.0  # this laptop's clock, Unix seconds
    error: str | None = None
    fabric: str = ""  # what NCCL chose: "ib", or "socket", which is slow


class Transition(Record):
    """The one under way, or the last."""

    generation: str
    verb: str
    phase: str
    nodes: tuple[str, ...]
    model: str = ""
    host: str = ""
    pid: int = 0
    since: float = 0.0
    ended: bool = False  # not ended and nobody holds the lock: it was killed
    error: str | None = None
    cleanup_error: str | None = None
    evidence: str | None = None  # the folder in diagnostics/


class Controller(Record):
    nodes: tuple[tuple[str, Placed], ...] = ()
    transition: Transition | None = None

    def of(self, node: str) -> Placed:
        return dict(self.nodes).get(node, Placed())

    def with_node(self, node: str, placed: Placed) -> Controller:
        return self.replace(nodes=tuple(sorted({**dict(self.nodes), node: placed}.items())))


def folder(env: Mapping[str, str]) -> Path:
    """$SPARK_SERVE_STATE_DIR or ~/.local/state/spark-serve, for its owner alone. Raises SparkguardError (71, 78)."""
    path = Path(env.get("SPARK_SERVE_STATE_DIR") or Path(env.get("HOME") or Path.home(), ".local", "state", "spark-serve"))
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
    except OSError as error:
        raise SparkguardError(
            f"the state folder {path} cannot be made: {error.strerror}", "see SPARK_SERVE_STATE_DIR", OSERR
        ) from None
    # Who can write there can hand programs on this laptop an endpoint of theirs, and this command a link to follow.
    if found.st_uid != os.getuid():
        hint = "run it as that user (not by sudo), or name another folder in SPARK_SERVE_STATE_DIR"
        raise SparkguardError(f"the state folder {path} is another user's (uid {found.st_uid})", hint, CONFIG)
    if found.st_mode & 0o022:
        raise SparkguardError(f"other users may write in the state folder {path}", f"chmod 700 {path}", CONFIG)
    return path


def load(state_dir: Path) -> Controller:
    """Raises SparkguardError (78) for a file that is cut off, of a newer version, or of another program's making."""
    path = state_dir / FILE
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return Controller()
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, f"cannot be read: {error}") from None
    try:
        value = json_text.loads(text)
    except ValueError:
        raise _unreadable(path, "is cut off or damaged") from None
    version = value.get("version") if isinstance(value, dict) else None
    if isinstance(version, int) and version > VERSION:
        raise SparkguardError(
            f"{path} is of version {version}, and this spark-serve knows {VERSION}",
            "use the newer spark-serve that wrote it; it was left as it is",
            CONFIG,
        )
    if version != VERSION:
        raise _unreadable(path, "has no version that this spark-serve knows")
    try:
        return _read(value)
    except (KeyError, TypeError, ValueError, AttributeError):
        if isinstance(value, dict) and "nodes" not in value:
            raise _unreadable(path, "was written by another spark-serve") from None
        raise _unreadable(path, "is damaged") from None


def save(state_dir: Path, controller: Controller) -> None:
    value = {
        "version": VERSION,
        "nodes": {name: _dict(placed) for name, placed in controller.nodes},
        "transition": None if controller.transition is None else _dict(controller.transition),
    }
    write(state_dir / FILE, json.dumps(value, indent=1) + "\n")


def write(path: Path, text: str, mode: int = 0o600) -> None:
    """All of it or nothing, also when the machine dies: a new file, synced, renamed, and the folder synced."""
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                os.fchmod(file.fileno(), mode)
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise SparkguardError(f"{path} cannot be written: {error.strerror}", None, OSERR) from None


def _dict(record: Record) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in record.__dict__.items()}


def _read(value: dict[str, Any]) -> Controller:
    nodes = tuple(sorted((name, _record(Placed, placed)) for name, placed in value["nodes"].items()))
    transition = value["transition"]
    return Controller(nodes, None if transition is None else _record(Transition, transition))


def _record(kind: Any, value: dict[str, Any]) -> Any:
    known = {name: tuple(value[name]) if name == "nodes" else value[name] for name in kind._fields if name in value}
    return kind(**known)


def _unreadable(path: Path, what: str) -> SparkguardError:
    return SparkguardError(
        f"{path} {what}",
        f"it was left as it is. Look at it, then move it away (mv {path} {path}.old): "
        "`spark-serve status` asks the nodes what runs, and `spark-serve stop` ends what is the catalog's",
        CONFIG,
    )
