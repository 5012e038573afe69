"""The song factory's control interface, protocol version 2.

A factory of version 1 takes "control" for a request to start a second server: the marker in its source is read before
anything is asked.
"""

from __future__ import annotations

import json
import os

from sparkguard.cluster.node.base import FAILED, UNAVAILABLE, Fault, read, run

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MARKER = "API_VERSION = 2"
FILE = "yue_factory.py"
ROOT = "~/.local/share/artist-twin/yue-factory"


def words_of(verb: str, request: dict[str, Any]) -> list[str]:
    """A verb that changes something, as the factory's own arguments."""
    words = {"cancel": ["--job-id", request.get("job_id", "")], "admit": ["--generation", request.get("admit_generation", "")]}
    return [verb, *words.get(verb, [])]


def control(settings: dict[str, Any], words: list[str], seconds: float, keep: tuple[int, ...] = ()) -> dict[str, Any]:
    """Its answer to one control verb. Fault "yue" when it is not there, of another version, or says no."""
    root = os.path.expanduser(settings.get("factory_root") or ROOT)
    path = os.path.join(root, FILE)
    source = read(path, 4 << 20)
    if source is None:
        raise Fault("yue_absent", f"there is no {path}", UNAVAILABLE)
    if MARKER not in (line.strip() for line in source.splitlines()):
        raise Fault(
            "yue_version", f"{path} lacks the line {MARKER!r}: a factory of another version is not asked anything", FAILED
        )
    python = os.path.expanduser(settings.get("python") or "python3")
    done = run((python, path, "control", *words), seconds, 1 << 20, keep=keep)
    if done.status is None:
        raise Fault("yue", f"its control {words[0]} has not ended within {seconds:.0f} s", UNAVAILABLE)
    try:
        answer = json.loads(done.out) if done.out.strip() else {}
    except ValueError:
        answer = None
    if done.status or not isinstance(answer, dict):
        said = (done.err or done.out).strip()[-500:]
        raise Fault("yue", f"its control {words[0]} failed with status {done.status}: {said}", FAILED)
    return answer


def look(settings: dict[str, Any]) -> dict[str, Any]:
    """Its status, and whether its unit runs."""
    service = settings.get("service") or "yue-icl.service"
    active = run(("systemctl", "--user", "is-active", "--", service), 5).out.strip() in ("active", "activating", "reloading")
    try:
        return {"active": active, "status": control(settings, ["status"], 15)}
    except Fault as fault:
        return {"active": active, "error": fault.message, "code": fault.code}
