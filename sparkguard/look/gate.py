"""The defence of a local port against pages of other sites.

A page of any site can send requests to 127.0.0.1 from its visitor's browser (CSRF), and with a name of its own that it points
there it can read the answers as well (DNS rebinding). The browser tells in Host, Origin and Sec-Fetch-Site.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Mapping


def own_names(host: str) -> frozenset[str]:
    """Names that a server on `host` may be called by; addresses are always fine, since rebinding needs a name."""
    name = socket.gethostname().lower()
    return frozenset({"localhost", host.lower(), name, name.partition(".")[0], name.partition(".")[0] + ".local"})


def foreign_host(names: frozenset[str], headers: Mapping[str, str]) -> str | None:
    """Why this Host is refused; None: it is ours."""
    host = _host_name(headers.get("Host", ""))
    if host in names or host.endswith(".localhost") or _is_address(host):
        return None
    return f"Host {host!r} is not this server's name; use its address or one of its names"


def foreign_site(headers: Mapping[str, str]) -> str | None:
    """Why a request that changes something is refused; None: no page of another site has sent it."""
    origin = headers.get("Origin")
    if origin is not None and _place(origin) != headers.get("Host", "").lower():
        return f"a page of {origin!r} may not do this"
    if headers.get("Sec-Fetch-Site") in ("cross-site", "same-site"):
        return "a page of another site may not do this"
    return None


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
