"""What systemd wants to hear from a Type=notify service (sd_notify(3)), and how often it wants to hear that we live."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping


class Notifier:
    """Says nothing where there is nobody to hear it: without NOTIFY_SOCKET."""

    def __init__(self, env: Mapping[str, str] = os.environ) -> None:
        address = env.get("NOTIFY_SOCKET", "")
        # '@' stands for the zero byte of an abstract address.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        watchdog = env.get("WATCHDOG_USEC", "")
        ours = env.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        # Half the time, as sd_watchdog_enabled(3) advises.
        self.watchdog_seconds = int(watchdog) / 2e6 if watchdog.isdigit() and ours and self._address else None

    @property
    def heard(self) -> bool:
        """Whether anybody listens."""
        return bool(self._address)

    def ready(self, status: str = "") -> bool:
        return self._send("READY=1", *_status(status))

    def status(self, text: str) -> bool:
        return self._send(*_status(text))

    def watchdog(self) -> bool:
        return self._send("WATCHDOG=1")

    def reloading(self) -> bool:
        """To be followed by ready(). The clock is for Type=notify-reload."""
        return self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, status: str = "") -> bool:
        return self._send("STOPPING=1", *_status(status))

    def extend(self, seconds: float) -> bool:
        """A start or a stop that takes longer than its timeout, and is not stuck."""
        return self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def _send(self, *lines: str) -> bool:
        if not self._address or not lines:
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | getattr(socket, "SOCK_CLOEXEC", 0)) as sender:
            sender.setblocking(False)  # a manager that does not read must not stop the loop that does all the work
            try:
                sender.sendto("\n".join(lines).encode(), self._address)
            except OSError:
                return False  # the manager is restarting; our work does not depend on it
        return True


def _status(text: str) -> tuple[str, ...]:
    return (f"STATUS={' '.join(text.split())}",) if text else ()
