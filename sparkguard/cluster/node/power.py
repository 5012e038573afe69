"""Reboot and poweroff of a node, by sudo. sudoers is never touched, and the password stays in this process and sudo's stdin.

`way` is how sudo lets us: "free" (it asks for nothing), "stdin" (it takes the password from its stdin), "terminal" (only from
a terminal, which it is given). It is found out with a harmless command, before anything is drained.
"""

from __future__ import annotations

import os
import pty
import re
import selectors
import subprocess
import time

from sparkguard.cluster.node import act, records
from sparkguard.cluster.node.base import FAILED, UNAVAILABLE, Fault, proc_root, read, run, secret

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from sparkguard.cluster.node.base import Reply

FREE, STDIN, TERMINAL = "free", "stdin", "terminal"
SYSTEMCTL = "/usr/bin/systemctl"
HARMLESS = (SYSTEMCTL, "--version")
SECONDS = 25

# sudo's own words (with LC_ALL=C), of 1.8 to 1.9 and of sudo-rs.
_NO_TERMINAL = re.compile(r"a terminal is required|must have a tty|no tty present", re.IGNORECASE)
_WRONG = re.compile(
    r"incorrect password|Sorry, try again|no password was provided|Authentication failed|incorrect authentication"
)
_FORBIDDEN = re.compile(r"not in the sudoers file|is not allowed to|may not run sudo|I'm sorry|not allowed to execute")


def main(request: dict[str, Any], reply: Reply) -> None:
    verb = request["do"]
    if verb == "boot_id":
        reply({"boot_id": boot_id()})
    elif verb == "probe":
        reply({"way": probe(request["verb"], secret()), "boot_id": boot_id()})
    else:
        records.take("node.lock", request["holder"], records.WAIT_SECONDS)
        act.check(records.load(), request)
        before = boot_id()
        status, words = _sudo((SYSTEMCTL, request["verb"], "--no-block"), request["way"], secret())
        if status != 0:
            raise Fault("power", f"systemctl {request['verb']} failed: {words or status}", FAILED)
        reply({"ok": True, "boot_id": before})


def boot_id() -> str | None:
    return read(proc_root() + "/sys/kernel/random/boot_id")


def probe(verb: str, password: bytes) -> str | None:
    """How sudo lets us; None: it wants a password, and there is none. Fault: the password is wrong, or we may not at all."""
    done = run(("sudo", "-n", "--", *HARMLESS), SECONDS, env=_environment())
    if done.status == 0 or _is_listed_free(verb):
        return FREE
    if _FORBIDDEN.search(done.err):
        raise Fault("sudo_forbidden", f"sudo does not let this user: {_last(done.err)}", FAILED)
    if not password:
        return None
    status, words = _sudo(HARMLESS, STDIN, password)
    way = STDIN
    if status != 0 and _NO_TERMINAL.search(words):
        way = TERMINAL
        status, words = _sudo(HARMLESS, TERMINAL, password)
    if status == 0:
        return way
    if status is None:
        raise Fault("timeout", f"sudo has not ended within {SECONDS} s", UNAVAILABLE)
    if _FORBIDDEN.search(words):
        raise Fault("sudo_forbidden", f"sudo does not let this user: {_last(words)}", FAILED)
    if _WRONG.search(words):
        raise Fault("wrong_password", "sudo does not take this password", FAILED)
    raise Fault("sudo", f"sudo failed: {_last(words) or status}", FAILED)


def _is_listed_free(verb: str) -> bool:
    """A rule may be for the one command line alone, which --version does not match."""
    done = run(("sudo", "-n", "-l"), SECONDS, env=_environment())
    if done.status != 0:
        return False
    wanted = f"{SYSTEMCTL} {verb} --no-block"
    for line in done.out.splitlines():
        _, found, commands = line.partition("NOPASSWD:")
        if found and any(command.strip() in (wanted, "ALL", SYSTEMCTL) for command in commands.split(",")):
            return True
    return False


def _sudo(command: tuple[str, ...], way: str, password: bytes) -> tuple[int | None, str]:
    """Its status (None: it did not end) and what it said, without the password."""
    if way == FREE:
        done = run(("sudo", "-n", "--", *command), SECONDS, env=_environment())
        return done.status, done.err
    if way == STDIN:  # -k: what sudo remembers of an earlier call is no proof that the password is right
        done = run(("sudo", "-k", "-S", "-p", "", "--", *command), SECONDS, data=password + b"\n", env=_environment())
        return done.status, _redacted(done.err, password)
    return _on_a_terminal(("sudo", "-k", "-p", "password:", "--", *command), password)


def _on_a_terminal(argv: tuple[str, ...], password: bytes) -> tuple[int | None, str]:
    """The password is typed once, when it is asked for: by then the terminal does not show it."""
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        argv, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=_take_terminal, close_fds=True, env=_environment()
    )
    os.close(theirs)
    said, typed = b"", False
    poll = selectors.DefaultSelector()
    poll.register(ours, selectors.EVENT_READ)
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if not poll.select(max(0.0, deadline - time.monotonic())):
            break
        try:
            data = os.read(ours, 4096)
        except OSError:  # the other side is closed
            data = b""
        if not data:
            break
        said = (said + data)[-65536:]
        if b"password:" in said and not typed:
            typed = True
            os.write(ours, password + b"\n")
        elif typed and said.count(b"password:") > 1:
            break  # it asks again
    try:
        status: int | None = child.wait(0.5 if typed and said.count(b"password:") > 1 else max(0.5, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        status = 1 if typed else None
    os.close(ours)
    return status, _redacted(said.decode("utf-8", "replace"), password)


def _take_terminal() -> None:
    import fcntl
    import termios

    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _environment() -> dict[str, str]:
    return {**os.environ, "LC_ALL": "C"}


def _redacted(words: str, password: bytes) -> str:
    text = password.decode("utf-8", "replace")
    return words.replace(text, "***") if text else words


def _last(words: str) -> str:
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
