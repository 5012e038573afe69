"""Files over HTTP: resumed where they broke off, hashed as they come, and in place only when the hash is the publisher's.

Runs on a node: Linux, Python 3.8, the standard library. What is read or written here is dropped from the page cache at once:
on a Spark it would take the memory of the model that runs.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import threading
import time
import urllib.parse

from sparkguard.cluster.node import pull_sources
from sparkguard.cluster.node.base import FAILED, Fault, read, write_whole
from sparkguard.cluster.node.pull_base import Job
from sparkguard.cluster.node.pull_sources import File, Plan
from sparkguard.cluster.node.pull_web import Web

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CONNECTIONS = 4
_CHUNK = 1 << 20
_SYNC_BYTES = 64 << 20
_TELL_SECONDS = 1.0


class Hashes:
    """Which files were verified, as they are now: another size, time or inode, and a file is read again."""

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(folder, "hashes.json")
        self._lock = threading.Lock()
        try:
            self._known = json.loads(read(self._path, 64 << 20) or "{}")
        except ValueError:
            self._known = {}

    def knows(self, path: str, digest: str) -> bool:
        return bool(self._known.get(path) == [*_identity(path), digest])

    def remember(self, path: str, digest: str) -> None:
        with self._lock:
            self._known[path] = [*_identity(path), digest]
            write_whole(self._path, json.dumps(self._known))


def _identity(path: str) -> list[int]:
    found = os.stat(path)
    return [found.st_size, found.st_mtime_ns, found.st_ino]


class Progress:
    """Bytes that are here, told every second."""

    def __init__(self, job: Job, total: int) -> None:
        self._job, self._total = job, total
        self._lock = threading.Lock()
        self._done = self._came = 0
        self._told = time.monotonic()
        self._came_then = 0

    def add(self, came: int, there: int = 0) -> None:
        """came: over the network; there: were here already (negative: were not, after all)."""
        with self._lock:
            self._done += came + there
            self._came += came
            now = time.monotonic()
            if now - self._told >= _TELL_SECONDS:
                self._tell(now)

    def _tell(self, now: float) -> None:
        rate = (self._came - self._came_then) / max(1e-9, now - self._told)
        self._told, self._came_then = now, self._came
        self._job.tell("pull_progress", done_bytes=self._done, total_bytes=self._total, bytes_s=round(rate))


def fetch_all(job: Job, web: Web, plans: list[Plan], total: int) -> None:
    """All files of all checkpoints, several at a time; the first failure ends the others."""
    hashes, progress = Hashes(job.folder), Progress(job, total)
    waiting: queue.SimpleQueue[tuple[Plan, File]] = queue.SimpleQueue()
    for plan in plans:
        for file in plan.files:
            waiting.put((plan, file))
    failures: list[BaseException] = []

    def work() -> None:
        while not failures:
            try:
                plan, file = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                _one(job, web, plan, file, hashes, progress)
            except BaseException as error:  # told by the thread that waits
                failures.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive() and not failures:
            thread.join(0.2)
            job.check()  # a thread that waits for a silent server is left behind: the process ends
    if failures:
        raise failures[0]
    for plan in plans:
        pull_sources.finish(plan)
        job.tell("pull_verified", checkpoint=plan.name, files=len(plan.files), bytes=plan.total_bytes())


def _one(job: Job, web: Web, plan: Plan, file: File, hashes: Hashes, progress: Progress) -> None:
    target = plan.target(file)
    if os.path.exists(target) and os.path.getsize(target) == file.size:
        if not job.order["verify"] and hashes.knows(target, file.digest):
            plan.verified.add(file.path)
            progress.add(0, file.size)
            return
        if _hash_file(job, target, file.hasher(), file.size).hexdigest() == file.digest:
            hashes.remember(target, file.digest)
            plan.verified.add(file.path)
            progress.add(0, file.size)
            return
        job.tell("pull_wrong", file=file.path, text="is there, and is not the publisher's: it is fetched anew")
    os.makedirs(os.path.dirname(target), exist_ok=True)
    for attempt in (1, 2):
        if _download(job, web, plan, file, target + ".incomplete", progress):
            os.replace(target + ".incomplete", target)
            hashes.remember(target, file.digest)
            plan.verified.add(file.path)
            job.tell("pull_file", file=file.path, bytes=file.size, checkpoint=plan.name)
            return
        os.unlink(target + ".incomplete")
        progress.add(0, -file.size)
        if attempt == 1:  # an old beginning may have been another file's
            job.order["mirror"] = None  # what the other node verified may have changed on its disk since
            job.tell("pull_wrong", file=file.path, text="came, and is not the publisher's: once more, from its beginning")
    raise Fault("hash", f"{file.path} of {plan.name} has not the publisher's {file.kind} {file.digest}, twice", FAILED)


class _Part:
    """What has come of a file, and its hash so far."""

    def __init__(self, size: int, hasher: Any) -> None:
        self.size = size
        self.hasher = hasher


def _download(job: Job, web: Web, plan: Plan, file: File, partial: str, progress: Progress) -> bool:
    """Whether the whole file came with the right hash; it lies in `partial` either way."""
    if os.path.islink(partial):
        os.unlink(partial)
    with open(partial, "ab") as out:
        there = out.tell()
        if there > file.size:
            out.truncate(0)
            there = 0
        part = _Part(there, _hash_file(job, partial, file.hasher(), there))
        progress.add(0, there)

        def some() -> None:
            url = file.url
            if job.order["mirror"]:
                answer = web.open_mirror(f"{plan.name}/{urllib.parse.quote(file.path)}", part.size)
            else:
                answer = web.open(url, plan.secret, part.size)
            with answer as response:
                if part.size and response.status != 206:  # it sends the whole
                    progress.add(0, -part.size)
                    out.truncate(0)
                    part.size, part.hasher = 0, file.hasher()
                elif part.size:
                    wanted = f"bytes {part.size}-{file.size - 1}/{file.size}"
                    if response.headers.get("Content-Range", "") != wanted:
                        raise Fault("source", f"{url} sends {response.headers.get('Content-Range')} for {wanted}", FAILED)
                _receive(job, response, out, file, part, progress)
            if part.size < file.size:
                raise http.client.IncompleteRead(b"", file.size - part.size)

        while part.size < file.size:
            mirrored = job.order["mirror"]
            try:
                web.patiently(file.path, some, lambda: part.size)
            except Fault as fault:
                if not mirrored or fault.code == "disk":
                    raise
                # The other node cannot give it: the publisher can, and the rest as well.
                job.order["mirror"] = None
                job.tell("pull_alone", text=f"the other node gives nothing any more: {fault.message}")
        out.flush()
        os.fsync(out.fileno())
        _forget(out.fileno())
    return bool(part.hasher.hexdigest() == file.digest)


def _receive(job: Job, response: Any, out: Any, file: File, part: _Part, progress: Progress) -> None:
    unsynced = 0
    while True:
        job.check()
        chunk = response.read(_CHUNK)
        if not chunk:
            return
        if part.size + len(chunk) > file.size:
            raise Fault("source", f"more than {file.size} bytes come for {file.path}", FAILED)
        job.check_room(os.path.dirname(out.name), len(chunk))
        out.write(chunk)
        part.hasher.update(chunk)
        part.size += len(chunk)
        unsynced += len(chunk)
        progress.add(len(chunk))
        if unsynced >= _SYNC_BYTES:
            out.flush()
            os.fdatasync(out.fileno())
            _forget(out.fileno())
            unsynced = 0


def _hash_file(job: Job, path: str, hasher: Any, size: int) -> Any:
    """The hasher, after the first `size` bytes of the file."""
    with open(path, "rb", buffering=0) as file:
        left = size
        while left:
            job.check()
            chunk = file.read(min(left, 8 << 20))
            if not chunk:
                break
            hasher.update(chunk)
            left -= len(chunk)
            _forget(file.fileno())
    return hasher


def _forget(descriptor: int) -> None:
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError:
        pass
