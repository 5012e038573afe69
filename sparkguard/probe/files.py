"""Reads a file whose path somebody else may have chosen: a fifo, a device or a gigabyte must cost nothing but the answer."""

from __future__ import annotations

import errno
import os

_FORMAT, _REGULAR, _FOLDER = 0o170000, 0o100000, 0o040000  # of inode(7)


def read_file(path: str, most_bytes: int) -> bytes:
    """All of a regular file. Raises OSError, also for one that is larger than most_bytes or is no file."""
    # Without O_NONBLOCK the open() of a fifo waits for a writer that may never come.
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        kind = os.fstat(file).st_mode & _FORMAT
        if kind == _FOLDER:
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if kind != _REGULAR:
            raise OSError(errno.EINVAL, "it is no regular file", path)
        parts = []
        left = most_bytes + 1
        while left and (part := os.read(file, left)):
            parts.append(part)
            left -= len(part)
        if not left:
            raise OSError(errno.EFBIG, f"it is larger than {most_bytes >> 10} KiB", path)
        return b"".join(parts)
    finally:
        os.close(file)
