"""Who may ask: the API key, and the defence of a local port against pages of other sites.

A page of any site can send requests to 127.0.0.1 from its visitor's browser (CSRF), and with a name of its own that it points
there it can read the answers as well (DNS rebinding). The browser tells in Host and Origin.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

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


def own_names(host: str) -> frozenset[str]:
    """Names that this server may be called by; addresses are always fine, since rebinding needs a name."""
    name = socket.gethostname().lower()
    return frozenset({"localhost", host.lower(), name, name.partition(".")[0], name.partition(".")[0] + ".local"})


def check_host(names: frozenset[str], request: web.Request) -> None:
    """Raises ApiError 403 for a Host that is none of our names."""
    host = _host_name(request.headers.get("Host", ""))
    if host in names or host.endswith(".localhost") or _is_address(host):
        return
    raise ApiError(403, f"Host {host!r} is not this server's name; use its address or one of its names", "bad_host")


def check_site(request: web.Request) -> None:
    """Raises ApiError 403 for a request that a page of another site has sent."""
    origin = request.headers.get("Origin")
    if origin is not None and _place(origin) != request.headers.get("Host", "").lower():
        raise ApiError(403, f"a page of {origin!r} may not do this", "bad_origin")
    if request.headers.get("Sec-Fetch-Site") in ("cross-site", "same-site"):
        raise ApiError(403, "a page of another site may not do this", "bad_origin")


def _place(origin: str) -> str:
    """Host and port; none of an Origin that is no URL."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _host_name(header: str) -> str:
    """Without the port; an IPv6 address without its brackets."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.rpartition(":")[0].lower() if ":" in header else header.lower()


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
