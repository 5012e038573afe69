"""Reboot and poweroff of nodes: who may, asked on all of them before anything is drained; and whether it came true.

That a machine was rebooted is told by its boot_id: a fast reboot can be missed by asking, and a broken link looks like one.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from sparkguard.cluster.causes import AUTH, HOST_KEY, PROTOCOL, NodeError, Unreachable
from sparkguard.core.cluster import STOPPED
from sparkguard.errors import CONFIG, FAILED, SparkguardError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparkguard.cluster.ssh import Fleet, Link
    from sparkguard.cluster.transition.turn import Work
    from sparkguard.core.cluster import Step

POLL_SECONDS = 1.0
PROBE_SECONDS = 120  # sudo may wait for a network's users database, and says no slowly on purpose
# What ssh says of a machine that is there.
_IT_IS_UP = (AUTH, HOST_KEY, PROTOCOL)


class Power:
    """How sudo lets us on each node, and the password where it wants one. Printed it shows nothing."""

    def __init__(self, ways: dict[str, str], password: bytes | None) -> None:
        self.ways = ways
        self._password = password

    def secret(self, node: str) -> bytes | None:
        return None if self.ways[node] == "free" else self._password


async def plan(fleet: Fleet, nodes: Sequence[str], verb: str, password: bytes | None) -> Power | tuple[str, ...]:
    """Asks sudo on all nodes. Nodes that want a password when there is none come back by name.

    Raises SparkguardError with every node on which it cannot be: wrong password, not allowed, no sudo, not reachable.
    """

    async def ask(node: str) -> str | None:
        request = {"do": "probe", "verb": verb}
        answer = await fleet[node].call("power", request, seconds=PROBE_SECONDS, secret=password, repeatable=True)
        return None if answer["way"] is None else str(answer["way"])

    results = await asyncio.gather(*(ask(node) for node in nodes), return_exceptions=True)
    faults = [result for result in results if isinstance(result, BaseException)]
    for fault in faults:
        if not isinstance(fault, SparkguardError):
            raise fault
    if faults:
        known = [fault for fault in faults if isinstance(fault, SparkguardError)]
        status = max(fault.status for fault in known) if any(isinstance(fault, Unreachable) for fault in known) else FAILED
        raise SparkguardError("; ".join(fault.message for fault in known), "nothing was drained", status)
    wanting = tuple(node for node, way in zip(nodes, results) if way is None)
    if wanting:
        return wanting
    return Power({node: str(way) for node, way in zip(nodes, results)}, password)


def needs_password(nodes: Sequence[str]) -> SparkguardError:
    hint = "in a terminal it is asked for; in a script pass it with --sudo-password-stdin. Nothing was drained"
    return SparkguardError(f"sudo on {', '.join(nodes)} wants a password", hint, CONFIG)


async def send(step: Step, work: Work) -> None:
    """Tells the machine to go down. An answer that the machine took with it is no failure: its boot_id decides."""
    node = str(step.node)
    power = _of(work)
    holder = {**work.turn.holder.__dict__, "generation": work.generation}
    request = {"do": "act", "verb": step.kind, "way": power.ways[node], "generation": work.generation, "holder": holder}
    try:
        await work.fleet[node].call("power", request, seconds=60, secret=power.secret(node))
    except Unreachable as error:
        work.emit("note", node=node, text=f"{error.message}; whether it took the command shows when it goes down")


async def wait_down(step: Step, work: Work) -> None:
    """Its SSH has dropped, or it is a new boot already."""
    node = str(step.node)
    before = work.views[node].boot_id
    await work.fleet[node].close()
    deadline = time.monotonic() + step.seconds
    while True:
        try:
            now = await _boot_id(work.fleet[node])
        except Unreachable as error:
            if error.cause not in _IT_IS_UP:
                break
            raise
        if now != before:
            break
        if time.monotonic() > deadline:
            raise SparkguardError(f"{node} has not gone down within {step.seconds:.0f} s", "see `journalctl -b` there", FAILED)
        await asyncio.sleep(POLL_SECONDS)
    work.emit("host_down", node=node, text="it is down")


async def wait_up(step: Step, work: Work) -> None:
    """It answers, with a boot_id that it had not before."""
    node = str(step.node)
    before = work.views[node].boot_id
    deadline = time.monotonic() + step.seconds
    while True:
        try:
            now = await _boot_id(work.fleet[node])
            if now is not None and now != before:
                work.emit("host_up", node=node, text="it is up again", boot_id=now)
                return
            said = "it answers, and is still the boot that it was"
        except Unreachable as error:
            if error.cause in _IT_IS_UP:
                raise
            said = error.message
        if time.monotonic() > deadline:
            raise SparkguardError(f"{node} is not back within {step.seconds:.0f} s: {said}", "look at the machine itself", FAILED)
        await asyncio.sleep(POLL_SECONDS)


async def done(step: Step, work: Work) -> None:
    work.record(STOPPED)
    if step.target == "reboot":
        text = f"{', '.join(work.nodes)}: rebooted and idle; `spark-serve up` starts a model again"
        work.emit("rebooted", text=text, nodes=list(work.nodes))


async def _boot_id(link: Link) -> str | None:
    try:
        answer: dict[str, Any] = await link.call("power", {"do": "boot_id"}, seconds=5)
    except NodeError:  # it is too busy with its end
        return None
    return None if answer["boot_id"] is None else str(answer["boot_id"])


def _of(work: Work) -> Power:
    if work.power is None:
        raise SparkguardError("sudo was not asked before the drain", None, CONFIG)
    return work.power
