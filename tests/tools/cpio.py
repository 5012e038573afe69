"""Writes a folder to stdout as a cpio archive of the kind that the kernel takes for an initrd: cpio.py DIR.

cpio itself is one more package to install, for these few lines.
"""

from __future__ import annotations

import os
import sys

HEADER_FIELDS = 13  # of the "newc" format, each eight hex digits: kernel documentation, initramfs-buffer-format


def entry(number: int, name: str, mode: int, data: bytes) -> bytes:
    raw = name.encode() + b"\0"
    fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(raw), 0)
    assert len(fields) == HEADER_FIELDS
    head = b"070701" + b"".join(b"%08X" % field for field in fields) + raw
    return head + b"\0" * (-len(head) % 4) + data + b"\0" * (-len(data) % 4)


def main(top: str) -> None:
    paths = [os.path.join(root, name) for root, folders, files in os.walk(top) for name in folders + files]
    number = 0
    for number, path in enumerate(sorted(paths), 1):
        data = b""
        if not os.path.isdir(path):
            with open(path, "rb") as file:
                data = file.read()
        sys.stdout.buffer.write(entry(number, os.path.relpath(path, top), os.stat(path).st_mode, data))
    sys.stdout.buffer.write(entry(number + 1, "TRAILER!!!", 0, b""))


if __name__ == "__main__":
    main(sys.argv[1])
