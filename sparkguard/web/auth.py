"""Who may ask: the API key, and the gate that all our pages have (look/gate.py)."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

from sparkguard.look import gate
from sparkguard.web.errors import ApiError

if TYPE_CHECKING:
    from aiohttp import web


def check_key(keys: tuple[bytes, ...], request: web.Request) -> None:
    """Raises ApiError 401. Takes OpenAI's header and Anthropic's; takes as long for a near miss as for any other."""
    if not keys:
        return
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    given = [token.strip()] if scheme.lower() == "bearer" else []
    given.append(request.headers.get("X-Api-Key", ""))
    matches = [hmac.compare_digest(key, text.encode("utf-8", "surrogateescape")) for key in keys for text in given]
    if not any(matches):
        raise ApiError(401, "the API key is missing or wrong", "invalid_api_key")


def check_host(names: frozenset[str], request: web.Request) -> None:
    """Raises ApiError 403 for a Host that is none of our names."""
    if why := gate.foreign_host(names, request.headers):
        raise ApiError(403, why, "bad_host")


def check_site(request: web.Request) -> None:
    """Raises ApiError 403 for a request that a page of another site has sent."""
    if why := gate.foreign_site(request.headers):
        raise ApiError(403, why, "bad_origin")
