"""Asks the runners' supervisor to unload idle models for a start that lacks their memory; off the fast path.

The supervisor listens on a Unix socket in the folder of the reservations, which is its user's alone: nothing of it is on any
network, and it needs neither the front's address nor a key. One line of JSON each way: what has to go, and what came of it.
"""

from __future__ import annotations

import json
import os
import socket

from sparkguard.core.admission import excess_share, missing_bytes
from sparkguard.core.record import Record
from sparkguard.core.share import bytes_of
from sparkguard.core.types import Claim, Verdict

NAME = "room.sock"
# A runner that is told to stop has 10 s to end, then it is killed.
SECONDS = 20.0
MOST_BYTES = 1 << 16


class Answer(Record):
    """The models that were unloaded; with none, why not."""

    unloaded: tuple[str, ...] = ()
    complaint: str = ""


def lacking(verdict: Verdict) -> dict[str, int] | None:
    """Bytes of each pool that the runners would have to give up for the start to fit; None: their end would not be enough."""
    if verdict.reason not in ("over_budget", "memory_taken"):
        return None
    amounts = {}
    for total in verdict.sums:
        holds = [hold for claim in runners(verdict) for hold in claim.holds if hold.pool == total.pool.id]
        held = sum(hold.bytes or 0 for hold in holds)
        excess, missing = excess_share(verdict.budget, total), missing_bytes(total)
        if excess > sum(hold.share or 0 for hold in holds) or missing > held:
            return None
        # Shares round up, so that the bytes of all of theirs may be some more than they hold.
        short = min(held, max(bytes_of(excess, total.pool.total_bytes or 0), missing))
        if short > 0:
            amounts[total.pool.id] = short
    return amounts


def runners(verdict: Verdict) -> list[Claim]:
    """What `sparkguard serve` has reserved for its models."""
    return [claim for claim in verdict.claims if claim.is_runners]


def ask(verdict: Verdict, folder: str, seconds: float = SECONDS) -> Answer:
    """Returns when the models are gone and the ledger says so, or nothing was unloaded. folder: the reservations'."""
    amounts = lacking(verdict)
    if amounts is None:
        if not runners(verdict):
            return Answer(complaint="no runners hold memory, so none could be asked to make room")
        return Answer(complaint="the runners were not asked to make room: all that they hold would not be enough")
    line = json.dumps({"for": verdict.wanted.name, "pools": amounts}).encode() + b"\n"
    try:
        answer = json.loads(_exchange(os.path.join(folder, NAME), line, seconds))
        unloaded, refused = tuple(map(str, answer["unloaded"])), str(answer["refused"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else "its answer cannot be read"
        return Answer(complaint=f"the runners' supervisor was asked to make room and did not answer: {reason}")
    return Answer(unloaded, "" if unloaded else f"the runners were asked to make room: {refused}")


def _exchange(path: str, line: bytes, seconds: float) -> bytes:
    # The time is for each step; the other side writes its one line at once, so that it is for all of them nearly.
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(seconds)
        link.connect(path)
        link.sendall(line)
        answer = b""
        while not answer.endswith(b"\n") and len(answer) < MOST_BYTES:
            part = link.recv(MOST_BYTES)
            if not part:
                break
            answer += part
        return answer
