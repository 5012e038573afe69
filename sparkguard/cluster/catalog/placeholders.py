"""What the example catalog leaves open, and was not filled in: found wherever it stands, and told with what belongs there."""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator

# RFC 5737 keeps these for documents, RFC 2606 the names: nobody's cluster can have them.
_NETWORKS = tuple(ipaddress.ip_network(text) for text in ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24"))
_YOU = re.compile(r"(?<![A-Za-z])YOU(?![A-Za-z])")
_WANTED = {
    "head": "what `ssh` takes for the head: an alias of ~/.ssh/config, or user@host",
    "worker": "what `ssh` takes for the worker",
    "ssh": "what `ssh` takes for this node",
    "master_addr": "the head's address on the fabric: `ip -br address show enp1s0f1np1` there",
    "worker_addr": "the worker's address on the fabric: `ip -br address show enp1s0f1np1` there",
    "fabric_addr": "this node's address on the fabric",
    "lan_url": "where clients reach the head: http://ADDRESS:8000",
    "worker_lan_url": "where clients reach the worker: http://ADDRESS:8000",
    "hf_cache_host": "the folder on the nodes: `ssh HOST 'echo ~/.cache/huggingface'`",
}


def placeholders(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(where, what is wrong), for each value that still is the example's."""
    for where, key, value in _texts(document, ""):
        if is_placeholder(value):
            wanted = _WANTED.get(key, "the value of your cluster")
            yield f"{where} {key}" if where else key, f"is still the example's {value!r}; write {wanted}"


def is_placeholder(value: str) -> bool:
    if _YOU.search(value):
        return True
    host = urlsplit(value).hostname if "://" in value else value.rpartition("@")[2]
    if not host:
        return False
    if host.endswith(".example"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return any(address in network for network in _NETWORKS)


def _texts(value: Any, where: str, key: str = "") -> Iterator[tuple[str, str, str]]:
    if isinstance(value, str):
        yield where, key, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            inside = (f"{where[:-1]}.{name}]" if where else f"[{name}]") if isinstance(inner, dict) else where
            yield from _texts(inner, inside, name)
    elif isinstance(value, list):
        for number, inner in enumerate(value, 1):
            inside = f"{where[:-1]}.{key}[{number}]]" if isinstance(inner, dict) and where else where
            yield from _texts(inner, inside, key)
