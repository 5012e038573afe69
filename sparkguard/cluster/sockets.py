"""Where ssh's control sockets lie: in a folder that is ours alone, under a path that is short enough."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import stat
from collections.abc import AsyncIterator, Callable

# macOS has 104 bytes for a socket's path, its end included; the master first binds PATH.XXXXXXXXXXXXXXXX.
MOST_PATH_BYTES = 104 - 1 - 17


def socket_folder(state_dir: str | None, notice: Callable[[str], None]) -> str | None:
    """Where control sockets fit; None: nowhere, and every call costs a login."""
    wanted = os.path.join(state_dir or os.path.expanduser("~/.local/state/spark-serve"), "ssh")
    short = f"/tmp/spark-serve-{os.getuid()}"
    why: list[str] = []
    for folder in (wanted, short):
        if len(os.fsencode(folder)) + 13 > MOST_PATH_BYTES:
            why.append(f"{folder} is too long a path for ssh's control sockets (104 bytes)")
        elif not is_private(folder):
            why.append(f"{folder} is no folder of yours alone, or is read-only: ssh's control sockets cannot be there")
        else:
            for reason in why:
                notice(f"{reason}; {folder} has them")
            return folder
    notice(f"every call to a node costs a login of its own: {'; '.join(why)}")
    return None


def is_private(folder: str) -> bool:
    """Makes it; whether it is ours alone. A socket in a folder of another's would hand them our connection."""
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        found = os.lstat(folder)
    except OSError:
        return False
    if not os.access(folder, os.W_OK):  # a file system that became read-only
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


@contextlib.asynccontextmanager
async def file_lock(path: str) -> AsyncIterator[None]:
    with open(path, "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(0.02)
        yield
