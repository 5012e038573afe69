"""Gives commands to a QEMU through its monitor: qemu_monitor.py SOCKET COMMAND...

The command @WAIT waits for the end of an incoming migration.
Exits with 1, and says why on stderr, where QEMU answered a command with an error.
"""

from __future__ import annotations

import socket
import sys
import time

CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 120.0
PROMPT = b"(qemu)"


def connect(path: str) -> socket.socket:
    """QEMU makes the socket a moment after its start."""
    until = time.monotonic() + CONNECT_SECONDS
    monitor = socket.socket(socket.AF_UNIX)
    while True:
        try:
            monitor.connect(path)
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.02)
        else:
            monitor.settimeout(ANSWER_SECONDS)
            return monitor


def answer(monitor: socket.socket) -> str:
    text = b""
    while not text.rstrip().endswith(PROMPT):
        data = monitor.recv(65536)
        if not data:
            break
        text += data
    return text.decode(errors="replace")


def command(monitor: socket.socket, line: str) -> str:
    monitor.sendall(line.encode() + b"\n")
    return answer(monitor)


def main(path: str, lines: list[str]) -> int:
    monitor = connect(path)
    answer(monitor)
    failed = 0
    for line in lines:
        if line == "@WAIT":
            while "inmigrate" in command(monitor, "info status"):
                time.sleep(0.02)
            continue
        text = command(monitor, line)
        if "Error" in text or "rror:" in text:
            print(f"qemu: {line}: {text}", file=sys.stderr)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
