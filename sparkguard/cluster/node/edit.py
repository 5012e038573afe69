"""A file of settings on a node: read whole, and put in its place whole, if nobody has changed it in between.

Runs on a node: Linux, Python 3.8, the standard library. What is in the file may be secret: it is in no message.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile

from sparkguard.cluster.node.base import CONFIG, TEMPFAIL, Fault, finishing, secret

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from sparkguard.cluster.node.base import Reply

MOST_BYTES = 4 << 20


def main(request: dict[str, Any], reply: Reply) -> None:
    shown = request["path"]
    path = os.path.realpath(os.path.expanduser(shown))
    if request["do"] == "write":
        with finishing():
            _write(path, shown, request["digest"], secret())
        reply({"ok": True})
        return
    data = _read(path, shown)
    try:
        reply({"text": None if data is None else data.decode()})
    except UnicodeDecodeError as error:
        raise Fault("malformed", f"{shown} is no UTF-8 at byte {error.start}", CONFIG) from None


def _read(path: str, shown: str) -> bytes | None:
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode) or found.st_size > MOST_BYTES:
            raise Fault("malformed", f"{shown} is no file of settings", CONFIG)
        with open(path, "rb") as file:
            return file.read(MOST_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Fault("unreadable", f"{shown} cannot be read: {error.strerror}", CONFIG) from None


def _write(path: str, shown: str, digest: str | None, data: bytes) -> None:
    old = _read(path, shown)
    if (None if old is None else hashlib.sha256(old).hexdigest()) != digest:
        raise Fault("changed", f"{shown} was changed by another program just now, and was left as it is", TEMPFAIL)
    try:
        descriptor, new = tempfile.mkstemp(prefix=".spark-serve.", dir=os.path.dirname(path))
        try:
            with os.fdopen(descriptor, "wb") as file:
                if old is not None:
                    found = os.stat(path)
                    os.fchmod(file.fileno(), stat.S_IMODE(found.st_mode))
                    if (found.st_uid, found.st_gid) != (os.geteuid(), os.getegid()):
                        os.fchown(file.fileno(), found.st_uid, found.st_gid)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, path)
        except BaseException:
            os.unlink(new)
            raise
    except OSError as error:
        raise Fault("unwritable", f"{shown} cannot be written: {error.strerror}", CONFIG) from None
