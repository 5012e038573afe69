"""What a publisher says belongs to a checkpoint: each file's size and hash, from the Hub or from NGC.

Runs on a node: Linux, Python 3.8, the standard library. The Hub gives the SHA-256 of large files and git's own hash of small
ones; NGC gives the SHA-256 of all.
"""

from __future__ import annotations

import base64
import binascii
import fnmatch
import glob
import hashlib
import json
import os
import re
import urllib.parse

from sparkguard.cluster.node.base import FAILED, Fault, read, write_whole
from sparkguard.cluster.node.pull_base import Job
from sparkguard.cluster.node.pull_web import Web

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_MOST_PAGES = 1000
SHA256, GIT = "sha256", "git-sha1"
_INDEX = "model.safetensors.index.json"


class File:
    def __init__(self, path: str, size: int, kind: str, digest: str, url: str) -> None:
        self.path = path
        self.size = size
        self.kind = kind
        self.digest = digest
        self.url = url

    def hasher(self) -> Any:
        if self.kind == SHA256:
            return hashlib.sha256()
        started = hashlib.sha1(usedforsecurity=False) if _takes_purpose() else hashlib.sha1()
        started.update(b"blob %d\0" % self.size)  # as git hashes a file
        return started


def _takes_purpose() -> bool:
    try:
        hashlib.sha1(usedforsecurity=False)
        return True
    except TypeError:  # Python 3.8
        return False


class Plan:
    """A checkpoint on this node: where, and which files."""

    def __init__(self, order: dict[str, Any], folder: str, files: list[File]) -> None:
        self.name = order["name"]
        self.secret = "HF_TOKEN" if order["source"] == "hf" else "NGC_API_KEY"
        self.folder = folder
        self.files = files
        self.verified: set[str] = set()
        self.marker = ""  # written when all are verified
        self.ref = ""  # where the Hub's library looks which commit a branch is
        self.index_suffixes = tuple(order["index_suffixes"])
        self.index_metadata = order["index_metadata"]

    def target(self, file: File) -> str:
        """Where the publisher's file lies. An index that will be cut keeps the whole one beside it."""
        path = os.path.join(self.folder, file.path)
        return path + ".published" if self.index_suffixes and file.path == _INDEX else path

    def total_bytes(self) -> int:
        return sum(file.size for file in self.files)

    def missing_bytes(self) -> int:
        """What is not there, or not whole; what is there but wrong shows only when it is hashed."""
        return sum(max(0, file.size - self._there(file)) for file in self.files)

    def _there(self, file: File) -> int:
        for path in (self.target(file), self.target(file) + ".incomplete"):
            try:
                return os.stat(path).st_size
            except OSError:
                continue
        return 0


def plan(job: Job, web: Web, checkpoint: dict[str, Any]) -> Plan:
    """Asks the publisher. A pinned checkpoint's answer is kept, so that a second look needs no network."""
    source, revision = checkpoint["source"], checkpoint["revision"]
    kept = os.path.join(job.folder, "manifests", checkpoint["key"] + ".json")
    rows = None
    if checkpoint["pinned"]:
        try:
            rows = json.loads(read(kept, 64 << 20) or "null")
        except ValueError:
            rows = None
    if rows is None:
        rows, revision = _hub(job, web, checkpoint) if source == "hf" else (_ngc(job, web, checkpoint), revision)
        rows = [row for row in rows if _wanted(row[0], checkpoint)]
        if not rows:
            raise Fault("source", f"{checkpoint['repo']} at {revision} has no file that is wanted", FAILED)
        if checkpoint["pinned"]:
            os.makedirs(os.path.dirname(kept), exist_ok=True)
            write_whole(kept, json.dumps(rows))
    cache = job.order["cache"]
    in_hub = os.path.join(checkpoint["hub_folder"], "snapshots", revision)
    found = Plan(checkpoint, os.path.join(cache, checkpoint["folder"] or in_hub), [File(*row) for row in rows])
    if checkpoint["pinned"]:
        found.marker = os.path.join(cache, checkpoint["marker"])
    elif not checkpoint["folder"]:
        found.ref = os.path.join(cache, checkpoint["hub_folder"], "refs", checkpoint["revision"])
    return found


def _wanted(path: str, checkpoint: dict[str, Any]) -> bool:
    take = not checkpoint["include"] or any(fnmatch.fnmatchcase(path, pattern) for pattern in checkpoint["include"])
    return take and not any(fnmatch.fnmatchcase(path, pattern) for pattern in checkpoint["exclude"])


def safe(path: Any) -> str:
    """A path of a publisher that stays below its folder."""
    if not isinstance(path, str) or not path or path.startswith("/") or "\\" in path or "\0" in path:
        raise Fault("source", f"the publisher lists a file {path!r}", FAILED)
    if any(part in ("", ".", "..") for part in path.split("/")) or path.endswith(".incomplete"):
        raise Fault("source", f"the publisher lists a file {path!r}", FAILED)
    return path


def _hub(job: Job, web: Web, checkpoint: dict[str, Any]) -> tuple[list[list[Any]], str]:
    endpoint, repo, revision = job.order["hf_endpoint"].rstrip("/"), checkpoint["repo"], checkpoint["revision"]
    if not checkpoint["pinned"]:
        url = f"{endpoint}/api/models/{repo}/revision/{urllib.parse.quote(revision, safe='')}"
        revision = web.json(url, "HF_TOKEN")[0].get("sha", "")
        if not re.match(r"[0-9a-f]{40}\Z", str(revision)):
            raise Fault("source", f"{endpoint} does not say which commit {checkpoint['revision']} of {repo} is", FAILED)
    url = f"{endpoint}/api/models/{repo}/tree/{revision}?recursive=true"
    rows: list[list[Any]] = []
    for _ in range(_MOST_PAGES):
        job.check()
        entries, after = web.json(url, "HF_TOKEN")
        if not isinstance(entries, list):
            raise Fault("source", f"{url} answers no list", FAILED)
        for entry in entries:
            if entry.get("type") != "file":
                continue
            path = safe(entry.get("path"))
            large = entry.get("lfs") or {}
            kind, digest = (SHA256, large.get("oid") or large.get("sha256")) if large else (GIT, entry.get("oid"))
            size = large.get("size", entry.get("size"))
            if not isinstance(size, int) or not re.match(r"[0-9a-f]{40,64}\Z", str(digest)):
                raise Fault("source", f"{repo} gives no size or hash of {path}", FAILED)
            rows.append([path, size, kind, digest, f"{endpoint}/{repo}/resolve/{revision}/{urllib.parse.quote(path)}"])
        if not after:
            return rows, revision
        url = urllib.parse.urljoin(url, after)
    raise Fault("source", f"{repo} has more than {_MOST_PAGES} pages of files", FAILED)


def _ngc(job: Job, web: Web, checkpoint: dict[str, Any]) -> list[list[Any]]:
    base = f"{job.order['ngc_endpoint'].rstrip('/')}/v2/models/{checkpoint['repo']}/versions/{checkpoint['revision']}/files"
    rows: list[list[Any]] = []
    for page in range(_MOST_PAGES):
        job.check()
        answer = web.json(f"{base}?page-number={page}&page-size=1000", "NGC_API_KEY")[0]
        listed = answer.get("modelFiles") or answer.get("files") or []
        for entry in listed:
            path = safe(entry.get("path"))
            size = entry.get("sizeInBytes", entry.get("size"))
            digest = next((_hex(value) for key, value in entry.items() if key.lower().startswith("sha256") and value), None)
            if not isinstance(size, int) or digest is None:
                raise Fault("source", f"NGC gives no size or SHA-256 of {path}", FAILED)
            rows.append([path, size, SHA256, digest, f"{base}/{urllib.parse.quote(path)}"])
        pages = (answer.get("paginationInfo") or {}).get("totalPages", 1)
        if not listed or page + 1 >= pages:
            total = (answer.get("paginationInfo") or {}).get("totalResults")
            if isinstance(total, int) and total != len(rows):
                raise Fault("source", f"NGC lists {len(rows)} files and says that there are {total}", FAILED)
            return rows
    raise Fault("source", f"{checkpoint['repo']} has more than {_MOST_PAGES} pages of files", FAILED)


def _hex(value: str) -> str | None:
    if re.match(r"[0-9a-fA-F]{64}\Z", value):
        return value.lower()
    try:
        raw = base64.b64decode(value, validate=True)
    except (ValueError, binascii.Error):
        return None
    return raw.hex() if len(raw) == 32 else None


def finish(found: Plan) -> None:
    """After all files were verified: the index of a partial checkpoint, the branch's name, the marker."""
    if found.index_suffixes:
        _slim_index(found)
    if found.ref:
        os.makedirs(os.path.dirname(found.ref), exist_ok=True)
        write_whole(found.ref, os.path.basename(found.folder))
    if found.marker:
        rows = sorted([file.path, file.size, file.kind, file.digest] for file in found.files)
        told = {"folder": found.folder, "files": len(rows), "manifest": hashlib.sha256(json.dumps(rows).encode()).hexdigest()}
        os.makedirs(os.path.dirname(found.marker), exist_ok=True)
        for half in glob.glob(glob.escape(found.marker) + ".*.new"):
            os.unlink(half)
        write_whole(found.marker, json.dumps(told) + "\n")


def _slim_index(found: Plan) -> None:
    path = os.path.join(found.folder, _INDEX)
    whole = json.loads(read(path + ".published", 1 << 30) or "{}")
    kept = {name: file for name, file in whole.get("weight_map", {}).items() if name.endswith(found.index_suffixes)}
    listed = {file.path for file in found.files}
    if not kept or not set(kept.values()) <= listed:
        raise Fault(
            "source", f"{path}: the tensors {', '.join(found.index_suffixes)} are not in the files that were taken", FAILED
        )
    metadata = {"total_size": (whole.get("metadata") or {}).get("total_size"), **found.index_metadata}
    write_whole(path, json.dumps({"metadata": metadata, "weight_map": kept}, indent=2) + "\n")
