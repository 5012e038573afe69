"""Verbs that the page asks for: one at a time, everything they say kept, busy until the last of their cleanup."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from sparkguard.cluster.ui.children import Child, ask
from sparkguard.cluster.ui.feed import Ring
from sparkguard.errors import OK

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sparkguard.cluster.ui.feed import Feed

ACTIVITY = 1000  # lines of the activity log
PROGRESS = ("pull_progress",)  # of each node only the newest is kept, here and on the page (store.js)


class Busy(Exception):
    """Another verb runs."""


class BadAction(Exception):
    """The request names no verb, or an argument that the verb does not have."""


# Verb -> its flags by the JSON key that asks for them; a key of "MODEL" is the argument. Nothing else reaches a command line.
VERBS: dict[str, dict[str, str]] = {
    "up": {
        "model": "MODEL", "node": "--node", "cancel_jobs": "--cancel-jobs", "no_hermes": "--no-hermes",
        "hermes_target": "--hermes-target",
    },
    "stop": {"node": "--node", "cancel_jobs": "--cancel-jobs"},
    "use": {"node": "--node", "hermes_target": "--hermes-target"},
    "pull": {"model": "MODEL", "node": "--node"},
    "reboot": {"cancel_jobs": "--cancel-jobs"},
    "shutdown": {"cancel_jobs": "--cancel-jobs"},
}  # fmt: skip
SUDO = ("reboot", "shutdown")


def command(asked: Mapping[str, Any]) -> tuple[list[str], str | None]:
    """The arguments of spark-serve and the password, if any. Raises BadAction."""
    verb = asked.get("verb")
    if not isinstance(verb, str) or verb not in VERBS:
        raise BadAction(f"verb must be one of {', '.join(VERBS)}")
    flags = VERBS[verb]
    argv, last = [verb, "--json"], []
    for key, value in asked.items():
        if key in ("verb", "password") or value in (None, False, ""):
            continue
        if key not in flags:
            raise BadAction(f"{verb} does not take {key!r}")
        flag = flags[key]
        if value is True and flag.startswith("--"):
            argv.append(flag)
        elif isinstance(value, str) and not value.startswith("-"):
            # With "=", a value can never be read as a flag of its own.
            last.append(value) if flag == "MODEL" else argv.append(f"{flag}={value}")
        else:
            raise BadAction(f"{key}={value!r} is no value for {verb}")
    if "MODEL" in flags.values() and not last:
        raise BadAction(f"{verb} needs a model")
    password = asked.get("password")
    if password is not None:
        if verb not in SUDO or not isinstance(password, str) or "\n" in password:
            raise BadAction("a password is for reboot and shutdown alone")
        argv.append("--sudo-password-stdin")
    return argv + last, password


class Actions:
    def __init__(self, program: Sequence[str], feed: Feed) -> None:
        self._program = program
        self._feed = feed
        self._activity = Ring(ACTIVITY)
        self._child: Child | None = None
        self._task: asyncio.Task[None] | None = None
        self.running: dict[str, Any] | None = None  # verb, model, node, since
        self.status: dict[str, Any] | None = None  # the last `spark-serve status --json`

    def activity(self) -> list[dict[str, Any]]:
        return self._activity.items()

    def begin(self, asked: Mapping[str, Any]) -> None:
        """Starts a verb. Raises Busy and BadAction."""
        argv, password = command(asked)
        if self.running is not None:
            raise Busy(f"{self.running['verb']} is running")
        self.running = {"verb": asked["verb"], "model": asked.get("model"), "node": asked.get("node"), "since": time.time()}
        self._tell_busy()
        self._task = asyncio.create_task(self._run(argv, password))

    def interrupt(self) -> bool:
        """As Ctrl-C would: the verb cleans up, and stays busy until it has. False: nothing runs."""
        if self._child is None:
            return False
        self._child.interrupt()
        return True

    async def look(self) -> dict[str, Any]:
        """Asks for the status, and tells the viewers."""
        self.status = await ask(self._program, "status", "--json")
        self._feed.put({"type": "status", "status": self.status})
        return self.status

    async def close(self) -> None:
        """A verb that runs is told to end, and is waited for: what it started must not be left half done."""
        if self._child is not None:
            await self._child.stop()
        if self._task is not None:
            await self._task

    async def _run(self, argv: list[str], password: str | None) -> None:
        verb = argv[0]
        try:
            self._say({"event": "begin", "words": " ".join(["spark-serve", *argv])})
            self._child = await Child.start(self._program, argv, password)
            async for event in self._child.lines():
                self._say(event)
            ended = await self._child.ended()
            for line in ended.said.splitlines():
                self._say({"event": "said", "words": line})
            self._say({"event": "end", "status": ended.status, "words": f"{verb} {_outcome(ended.status)}"})
        except OSError as error:
            self._say({"event": "end", "status": 70, "words": f"{verb} could not be started: {error}"})
        finally:
            self._child = None
            self.running = None
            self._tell_busy()
        await self.look()

    def _say(self, event: dict[str, Any]) -> None:
        line = {"at": time.time(), **event}
        if line.get("event") in PROGRESS:
            self._activity.supersede(line, ("event", "node"))
        else:
            self._activity.add(line)
        self._feed.put({"type": "activity", "line": line})

    def _tell_busy(self) -> None:
        self._feed.put({"type": "busy", "running": self.running})


def _outcome(status: int) -> str:
    return "is done" if status == OK else f"ended with status {status}"
