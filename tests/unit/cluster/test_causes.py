"""Why a node cannot be reached, by what ssh says."""

from __future__ import annotations

import pytest

from sparkguard.cluster.causes import NO_CHANNEL, Unreachable, cause_of, last_words, never_started


@pytest.mark.parametrize(
    "text, cause",
    [
        ("ssh: connect to host 10.0.0.9 port 22: Connection refused", "refused"),
        ("ssh: connect to host 10.0.0.9 port 22: Connection timed out", "timeout"),
        ("ssh: connect to host 10.0.0.9 port 22: Operation timed out", "timeout"),
        ("Timeout, server 10.0.0.9 not responding.", "timeout"),
        ("Connection timed out during banner exchange\nConnection to 10.0.0.9 port 22 timed out", "banner"),
        ("kex_exchange_identification: Connection closed by remote host", "banner"),
        (
            "No ED25519 host key is known by 10.0.0.9 and you have requested strict checking.\nHost key verification failed.",
            "host_key",
        ),
        ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @", "host_key"),
        ("spark@10.0.0.9: Permission denied (publickey,password).", "auth"),
        ("Received disconnect from 10.0.0.9 port 22:2: Too many authentication failures", "auth"),
        ("ssh: Could not resolve hostname spark-9: nodename nor servname provided, or not known", "transport"),
        ("ssh: connect to host 10.0.0.9 port 22: No route to host", "transport"),
        ("", "transport"),
    ],
)
def test_the_cause(text: str, cause: str) -> None:
    """Texts of OpenSSH on Linux and macOS, and silence."""
    assert cause_of(text) == cause


def test_what_never_began_says_so_itself() -> None:
    """Only our own words prove it: a refusal of ssh's may have other reasons."""
    assert never_started(f"Control socket connect(/x): Connection refused\n{NO_CHANNEL}\n")
    assert not never_started("kex_exchange_identification: Connection closed by remote host")


def test_the_last_line_is_shown() -> None:
    """Without what ssh says of the connection that it was not to open."""
    assert last_words(f"Warning: x\nHost key verification failed.\n{NO_CHANNEL}\n\n") == "Host key verification failed."
    assert last_words("") == "the connection broke without a word"


def test_an_unreachable_node_is_named() -> None:
    """With what to do about it, and status 69."""
    error = Unreachable("head", "auth", "Permission denied")
    assert (error.message, error.node, error.status) == ("head: Permission denied", "head", 69)
    assert "ssh-copy-id" in str(error.hint)
