"""Ports of this machine, asked of the kernel."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from sparkguard.probe import ports


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_a_port_that_is_listened_on(listener: socket.socket) -> None:
    """It answers, and a server for every address could not have it, though only one address is taken."""
    port = listener.getsockname()[1]
    assert (ports.listens("/proc", port), ports.is_taken("/proc", port)) == (True, True)


def test_a_port_of_another_address() -> None:
    """One that does not answer on loopback's first address is found in the kernel's table, and cannot be had."""
    with socket.create_server(("127.0.0.2", 0)) as server:
        port = server.getsockname()[1]
        assert (ports.listens("/proc", port), ports.is_taken("/proc", port)) == (True, True)


def test_a_free_port(listener: socket.socket) -> None:
    """A port whose listener has gone is free at once, connections that linger or not."""
    port = listener.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port)) as client:
        accepted, _ = listener.accept()
        listener.close()
        accepted.close()
        client.recv(1)
    assert (ports.listens("/proc", port), ports.is_taken("/proc", port)) == (False, False)


def test_looking_leaves_nothing_behind(listener: socket.socket) -> None:
    """A port that was asked about can be had afterwards."""
    port = listener.getsockname()[1]
    listener.close()
    assert not ports.is_taken("/proc", port)
    with socket.create_server(("", port)) as server:
        assert server.getsockname()[1] == port
