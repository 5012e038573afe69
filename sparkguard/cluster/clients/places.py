"""Where a client's file is: on this machine, or on a node."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from sparkguard.cluster.transition import state
from sparkguard.errors import CONFIG, OSERR, TEMPFAIL, SparkguardError

if TYPE_CHECKING:
    from sparkguard.cluster.ssh import Link

MOST_BYTES = 4 << 20
SECONDS = 20.0


class Place(Protocol):
    async def read(self) -> str | None:
        """None: there is no such file."""
        ...

    async def write(self, old: str | None, new: str) -> None:
        """In place of the old text, which must still be there. Its mode is kept; a new file is its owner's alone."""
        ...


class Here:
    """A path that may begin with ~. Where it is a link, what it leads to is written, and the link stays."""

    def __init__(self, path: str) -> None:
        self._shown = path
        self._path = Path(os.path.realpath(Path(path).expanduser()))

    def __str__(self) -> str:
        return self._shown

    async def read(self) -> str | None:
        try:
            self._check()
            return decoded(self._path.read_bytes(), self._shown)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SparkguardError(f"{self._shown} cannot be read: {error.strerror}", None, OSERR) from None

    def _check(self) -> None:
        found = self._path.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > MOST_BYTES:
            raise SparkguardError(f"{self._shown} is no file of settings", None, CONFIG)

    async def write(self, old: str | None, new: str) -> None:
        if await self.read() != old:
            raise changed(self._shown)
        mode = 0o600 if old is None else stat.S_IMODE(self._path.stat().st_mode)
        state.write(self._path, new, mode)


class OnNode:
    """A file on a node, by the program node/edit.py. Its text may hold keys: it goes over ssh, and into no message and no log."""

    def __init__(self, link: Link, path: str) -> None:
        self._link = link
        self._path = path

    def __str__(self) -> str:
        return f"{self._path} on {self._link.name}"

    async def read(self) -> str | None:
        answer = await self._link.call("edit", {"do": "read", "path": self._path}, seconds=SECONDS, repeatable=True)
        text = answer.get("text")
        return text if isinstance(text, str) else None

    async def write(self, old: str | None, new: str) -> None:
        digest = None if old is None else hashlib.sha256(old.encode()).hexdigest()
        request = {"do": "write", "path": self._path, "digest": digest}
        await self._link.call("edit", request, seconds=SECONDS, secret=new.encode())


def decoded(data: bytes, shown: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise SparkguardError(f"{shown} is no UTF-8 at byte {error.start}", None, CONFIG) from None


def changed(shown: str) -> SparkguardError:
    return SparkguardError(f"{shown} was changed by another program just now, and was left as it is", "try again", TEMPFAIL)
