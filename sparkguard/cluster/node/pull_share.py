"""Gives the other nodes what this one has verified, over the fabric: a checkpoint is downloaded once.

Runs on a node: Linux, Python 3.8, the standard library. A plain HTTP server at the fabric's address alone, behind a word that
only the other jobs know; it gives the files of this pull, read-only, for as long as the others want them. Each file has the
publisher's hash there as well.
"""

from __future__ import annotations

import http.server
import json
import os
import secrets
import subprocess
import threading
import time
import urllib.parse

from sparkguard.cluster.node import docker
from sparkguard.cluster.node.base import Fault, write_whole
from sparkguard.cluster.node.pull_base import Job
from sparkguard.cluster.node.pull_sources import Plan

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Share:
    def __init__(self, job: Job) -> None:
        self._job = job
        self._plans: dict[str, Plan] = {}
        self.image: str | None = None
        self._done: set[str] = set()
        self._asked = time.monotonic()
        self._word = secrets.token_urlsafe(24)
        self._server = _Server((job.order["share"]["address"], 0), _Handler)
        self._server.share = self
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True).start()
        address, port = str(job.order["share"]["address"]), self._server.server_address[1]
        host = f"[{address}]" if ":" in address else address
        write_whole(os.path.join(job.folder, "share.json"), json.dumps(f"http://{host}:{port}/{self._word}"))

    def offer(self, plans: list[Plan]) -> None:
        self._plans = {plan.name: plan for plan in plans}

    def wait(self) -> None:
        """Until each of the others has said that it is through, or has been silent for long."""
        wanted, patience = set(self._job.order["share"]["others"]), self._job.order["share"]["patience_seconds"]
        while not wanted <= self._done and time.monotonic() - self._asked < patience and not self._job.stopped.is_set():
            self._job.stopped.wait(0.2)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def file(self, path: str) -> tuple[int, str | None, str]:
        """Status, the file to send, and what to say. 503: not yet."""
        self._asked = time.monotonic()
        word, _, rest = path.lstrip("/").partition("/")
        if not secrets.compare_digest(word.encode(), self._word.encode()):
            return 404, None, ""
        kind, _, name = rest.partition("/")
        if kind == "done":
            self._done.add(name)
            return 204, None, ""
        if kind == "image":
            return (200, None, self.image) if self.image == name else (503, None, "")
        plan = self._plans.get(kind)
        if plan is None:
            return (503 if not self._plans else 404), None, ""
        file = next((each for each in plan.files if each.path == name), None)
        if file is None:
            return 404, None, ""
        return (200, plan.target(file), "") if name in plan.verified else (503, None, "")


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    share: Share


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    timeout = 120

    def do_GET(self) -> None:
        status, path, image = self.server.share.file(urllib.parse.unquote(self.path))
        if path is not None:
            self._send(path)
        elif image:
            self._save(image)
        else:
            self.send_response(status)
            if status != 204:
                self.send_header("Content-Length", "0")
            self.end_headers()

    def _send(self, path: str) -> None:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = _start(self.headers.get("Range", ""), size)
            if start is None:
                self.send_error(416)
                return
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(size - start))
            if start:
                self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
            self.end_headers()
            file.seek(start)
            try:
                while True:
                    chunk = file.read(4 << 20)
                    if not chunk:
                        return
                    self.wfile.write(chunk)
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            except OSError:
                return  # it comes again

    def _save(self, reference: str) -> None:
        try:
            if docker.image_id(reference) is None:
                self.send_error(404)
                return
        except Fault:
            self.send_error(500)
            return
        self.send_response(200)
        self.end_headers()
        child = subprocess.Popen(["docker", "save", reference], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        assert child.stdout is not None
        try:
            while True:
                chunk = child.stdout.read(1 << 20)
                if not chunk:
                    break
                self.wfile.write(chunk)
        except OSError:
            child.kill()
        child.wait()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the paths hold the word."""


def _start(header: str, size: int) -> int | None:
    """0: from the beginning; None: a range that is none of ours."""
    if not header:
        return 0
    unit, _, span = header.partition("=")
    first, _, last = span.partition("-")
    return int(first) if unit == "bytes" and first.isdigit() and not last and int(first) < size else None
