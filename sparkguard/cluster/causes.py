"""Why a node could not be reached, from what ssh(1) says: it has one status, 255, for all of it."""

from __future__ import annotations

from sparkguard.errors import UNAVAILABLE, SparkguardError

REFUSED, TIMEOUT, BANNER, HOST_KEY, AUTH = "refused", "timeout", "banner", "host_key", "auth"
TRANSPORT, PROTOCOL = "transport", "protocol"

# The first that matches: "timed out during banner exchange" is no plain timeout. Texts of OpenSSH 7.9 to 10.
_TEXTS = (
    (HOST_KEY, ("Host key verification failed", "REMOTE HOST IDENTIFICATION HAS CHANGED", "host key is known by")),
    (
        AUTH,
        ("Permission denied", "Too many authentication failures", "No supported authentication methods", "no mutual signature"),
    ),
    (BANNER, ("banner exchange", "kex_exchange_identification", "ssh_exchange_identification")),
    (REFUSED, ("Connection refused",)),
    (TIMEOUT, ("timed out", "Timeout, server")),
)
# Said by what ssh runs in place of a login of its own, when there is no master, or the master opens no channel: nothing of
# our program was started then.
NO_CHANNEL = "spark-serve: no channel"
CHANNELS_FULL = "Session open refused by peer"

# What ssh says of the program that it ran for a connection.
_NOISE = (NO_CHANNEL, "UNKNOWN port 65535")

_HINTS = {
    REFUSED: "the machine is up, but its sshd does not listen there",
    TIMEOUT: "is it on, and on this network? `ping` tells; sshd may also be starved while memory is short",
    BANNER: "its sshd accepts but says nothing: the machine may be out of memory (ping would still answer)",
    HOST_KEY: "compare the key with the machine's own, then: ssh-keygen -R HOST; ssh HOST",
    AUTH: "`ssh -o BatchMode=yes HOST true` must work without a question: ssh-copy-id, or add the key to the agent",
}


class Unreachable(SparkguardError):
    """A node that could not be asked: what it runs is unknown."""

    def __init__(self, node: str, cause: str, message: str) -> None:
        super().__init__(f"{node}: {message}", _HINTS.get(cause), UNAVAILABLE)
        self.node = node
        self.cause = cause


class NodeError(SparkguardError):
    """A node's own answer that it could not do what was asked. code: locked, stale, daemon, timeout, foreign, ..."""

    def __init__(self, node: str, code: str, message: str, status: int, details: dict[str, object] | None = None) -> None:
        super().__init__(f"{node}: {message}", None, status)
        self.node = node
        self.code = code
        self.details = details or {}


def cause_of(text: str) -> str:
    """The cause that ssh's words tell; "transport" for those that tell none."""
    return next((cause for cause, needles in _TEXTS if any(needle in text for needle in needles)), TRANSPORT)


def never_started(text: str) -> bool:
    return NO_CHANNEL in text


def last_words(text: str) -> str:
    """What to show of ssh's stderr: its last line that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not any(word in line for word in _NOISE)]
    return lines[-1] if lines else "the connection broke without a word"
