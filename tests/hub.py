"""A publisher of models on this machine: the Hub's and NGC's listings and files, and what goes wrong with them."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import threading
import urllib.parse
from types import TracebackType
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """with Hub() as hub: hub.files["a/b"]["x.bin"] = b"..."; what is set on it counts from the next request on."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.served: dict[str, bytes] = {}  # path -> what is sent instead of the published bytes
        self.cuts: dict[str, list[int]] = {}  # path -> after how many bytes of each answer its connection breaks
        self.statuses: dict[str, list[int]] = {}  # path -> statuses of the next answers
        self.holds: dict[str, int] = {}  # path -> after so many bytes it waits for `go`
        self.go = threading.Event()
        self.holding = threading.Event()
        self.ranges = True
        self.elsewhere: Hub | None = None  # where files are redirected to
        self.page = 1000
        self.log: list[tuple[str, str, str]] = []  # path, Range, Authorization
        self._server = http.server.ThreadingHTTPServer((address, 0), _Handler)
        self._server.daemon_threads = True
        self._server.hub = self  # type: ignore[attr-defined]
        self.port = self._server.server_address[1]
        self.url = f"http://{address}:{self.port}"

    def __enter__(self) -> Hub:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.go.set()
        self._server.shutdown()
        self._server.server_close()

    def fetched(self, name: str) -> list[str]:
        """The ranges in which a file was asked for."""
        return [span for path, span, _ in self.log if path.endswith("/" + name)]


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        url = urllib.parse.urlsplit(self.path)
        path, query = urllib.parse.unquote(url.path), dict(urllib.parse.parse_qsl(url.query))
        hub.log.append((path, self.headers.get("Range", ""), self.headers.get("Authorization", "")))
        if statuses := hub.statuses.get(path):
            self.say(statuses.pop(0), b"")
            return
        if path.startswith("/api/models/"):
            self.listing(hub, path, query)
        elif path.startswith("/v2/models/"):
            self.ngc(hub, path, query)
        elif "/resolve/" in path:
            repo, _, rest = path[1:].partition("/resolve/")
            self.file(hub, path, hub.files[repo][rest.partition("/")[2]])
        else:
            self.say(404, b"")

    def listing(self, hub: Hub, path: str, query: dict[str, str]) -> None:
        repo = "/".join(path.split("/")[3:5])
        if "/revision/" in path:
            self.say(200, json.dumps({"sha": COMMIT}).encode())
            return
        rows = [_row(name, data) for name, data in sorted(hub.files[repo].items())]
        begin = int(query.get("cursor", 0))
        after = {"Link": f'<{path}?cursor={begin + hub.page}>; rel="next"'} if begin + hub.page < len(rows) else {}
        self.say(200, json.dumps([{"type": "directory", "path": "d"}, *rows[begin : begin + hub.page]]).encode(), after)

    def ngc(self, hub: Hub, path: str, query: dict[str, str]) -> None:
        repo, _, rest = path[len("/v2/models/") :].partition("/versions/")
        name = rest.partition("/files")[2].lstrip("/")
        if name:
            self.file(hub, path, hub.files[repo][name])
            return
        rows = [
            {"path": name, "sizeInBytes": len(data), "sha256_base64": base64.b64encode(hashlib.sha256(data).digest()).decode()}
            for name, data in sorted(hub.files[repo].items())
        ]
        page = int(query["page-number"])
        info = {"totalPages": -(-len(rows) // hub.page), "totalResults": len(rows)}
        listed = rows[page * hub.page : (page + 1) * hub.page]
        self.say(200, json.dumps({"modelFiles": listed, "paginationInfo": info}).encode())

    def file(self, hub: Hub, path: str, data: bytes) -> None:
        if hub.elsewhere is not None:
            self.say(302, b"", {"Location": hub.elsewhere.url + self.path})
            return
        name = path.rpartition("/")[2]
        data = hub.served.get(name, data)
        span = self.headers.get("Range", "")
        start = int(span[len("bytes=") : -1]) if span and hub.ranges else 0
        if start > len(data):
            self.say(416, b"")
            return
        body = data[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        cuts = hub.cuts.get(name)
        try:
            if cuts:
                self.wfile.write(body[: cuts.pop(0)])
                self.wfile.flush()
                self.close_connection = True
                self.connection.shutdown(2)
                return
            held = hub.holds.get(name)
            if held is not None and not hub.go.is_set():
                self.wfile.write(body[:held])
                self.wfile.flush()
                hub.holding.set()
                hub.go.wait(60)
                body = body[held:]
            self.wfile.write(body)
        except OSError:
            self.close_connection = True

    def say(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _row(name: str, data: bytes) -> dict[str, Any]:
    git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    if name.endswith((".bin", ".safetensors")):
        large = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
        return {"type": "file", "path": name, "size": len(data), "oid": git, "lfs": large}
    return {"type": "file", "path": name, "size": len(data), "oid": git}
