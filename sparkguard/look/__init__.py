"""What the pages share: how their files are sent, who may ask for them, and their look.

A page is a folder of plain files. They are read once. A browser asks each time whether its copy is current (no-cache), and is
told so by the ETag: an upgrade shows at the next look, and otherwise nothing is sent twice.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import ETag, web

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

INDEX = "index.html"
# The system's own table of types differs from machine to machine, and a browser refuses a module of the wrong one.
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
# No script, style or request of anybody else's, and no other page may frame this one: its buttons end processes.
POLICY = "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"


def routes(folder: Path, policy: str = POLICY) -> list[web.RouteDef]:
    """`/`, `/page/NAME` of the folder and `/look/NAME` of what all pages share."""
    index = (folder / INDEX).read_bytes()
    pages = [web.get(f"/page/{path.name}", _sender(path, policy)) for path in _files(folder)]
    shared = [web.get(f"/look/{path.name}", _sender(path, policy)) for path in _files(Path(__file__).parent)]
    return [web.get("/", sender(index, _TYPES[".html"], policy)), *pages, *shared]


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in _TYPES)


def _sender(path: Path, policy: str) -> Callable[[web.Request], Awaitable[web.Response]]:
    return sender(path.read_bytes(), _TYPES[path.suffix], policy)


def sender(body: bytes, kind: str, policy: str = POLICY) -> Callable[[web.Request], Awaitable[web.Response]]:
    """A handler that sends these bytes, or says that the browser has them already."""
    tag = hashlib.sha256(body).hexdigest()[:32]
    headers = {
        "Cache-Control": "no-cache",
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }

    async def send(request: web.Request) -> web.Response:
        current = any(known.value in (tag, "*") for known in request.if_none_match or ())
        response = (
            web.Response(status=304, headers=headers)
            if current
            else web.Response(body=body, content_type=kind, charset="utf-8", headers=headers)
        )
        response.etag = ETag(tag)
        return response

    return send
