"""What systemd hears, on a socket like its own."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkguard.supervisor.notify import Notifier


@pytest.fixture(params=["path", "abstract"])
def heard(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, socket.socket]]:
    address = str(tmp_path / "notify") if request.param == "path" else f"@sparkguard-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(address if address[0] == "/" else "\0" + address[1:])
        listening.settimeout(5)
        yield address, listening


def test_each_word(heard: tuple[str, socket.socket]) -> None:
    """As sd_notify(3) names them, one datagram each."""
    address, listening = heard
    notifier = Notifier({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "20000000", "WATCHDOG_PID": str(os.getpid())})
    assert notifier.watchdog_seconds == 10
    assert notifier.ready("3 models\nare there") and listening.recv(200) == b"READY=1\nSTATUS=3 models are there"
    assert notifier.status("x") and listening.recv(200) == b"STATUS=x"
    assert notifier.watchdog() and listening.recv(200) == b"WATCHDOG=1"
    assert notifier.reloading() and listening.recv(200).startswith(b"RELOADING=1\nMONOTONIC_USEC=")
    assert notifier.stopping() and listening.recv(200) == b"STOPPING=1"
    assert notifier.extend(1.5) and listening.recv(200) == b"EXTEND_TIMEOUT_USEC=1500000"


def test_nobody_listens() -> None:
    """In a terminal, or while the manager restarts, nothing happens."""
    assert not Notifier({}).ready() and Notifier({}).watchdog_seconds is None
    assert not Notifier({"NOTIFY_SOCKET": "/no/such"}).ready()


def test_somebody_elses_watchdog() -> None:
    """The variables are inherited by children, whom nobody waits for."""
    assert Notifier({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1"}).watchdog_seconds is None
