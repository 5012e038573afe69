"""Lines for the journal with fields of their own, by its native protocol (systemd.io/JOURNAL_NATIVE_PROTOCOL).

What is written to stderr arrives there too, but as text and priority only: nobody could ask for the lines of one model.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Mapping

ADDRESS = "/run/systemd/journal/socket"


def send(fields: Mapping[str, str], address: str = ADDRESS) -> None:
    """Raises OSError: no journal, or a line too long for it. It may wait for a journal that is busy."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | getattr(socket, "SOCK_CLOEXEC", 0)) as link:
        link.sendto(b"".join(_field(key, value) for key, value in fields.items()), address)


def is_there(address: str = ADDRESS) -> bool:
    return os.path.exists(address)


def _field(key: str, value: str) -> bytes:
    raw = value.encode("utf-8", "replace")
    if b"\n" not in raw:
        return b"%s=%s\n" % (key.encode(), raw)
    return b"%s\n%s%s\n" % (key.encode(), struct.pack("<Q", len(raw)), raw)
