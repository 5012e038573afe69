"""The page: files of this folder, sent as they are.

They are read once. A browser asks each time whether its copy is current (no-cache), and is told so by the ETag: an upgrade
of the supervisor shows at the next look, and otherwise nothing is sent twice.
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
_HEADERS = {
    "Cache-Control": "no-cache",
    # No script, style or request of anybody else's, and no other page may frame this one: its buttons kill processes.
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def routes() -> list[web.RouteDef]:
    """`/` and `/page/NAME`. They ask for no key: the page asks the person for it."""
    files = {path.name: path.read_bytes() for path in Path(__file__).parent.iterdir() if path.suffix in _TYPES}
    pages = [web.get(f"/page/{name}", _sender(body, _TYPES[Path(name).suffix])) for name, body in sorted(files.items())]
    return [web.get("/", _sender(files[INDEX], _TYPES[".html"])), *pages]


def _sender(body: bytes, kind: str) -> Callable[[web.Request], Awaitable[web.Response]]:
    tag = hashlib.sha256(body).hexdigest()[:32]

    async def send(request: web.Request) -> web.Response:
        current = any(known.value in (tag, "*") for known in request.if_none_match or ())
        response = (
            web.Response(status=304, headers=_HEADERS)
            if current
            else web.Response(body=body, content_type=kind, charset="utf-8", headers=_HEADERS)
        )
        response.etag = ETag(tag)
        return response

    return send
