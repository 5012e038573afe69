"""Whether an allocation is ready, from what was last seen of its ranks, its endpoint, and the last token that it made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkguard.core.cluster import GONE, READY, RUNNING, UNKNOWN
from sparkguard.core.record import Record

if TYPE_CHECKING:
    from collections.abc import Sequence

DEAD = "dead"  # not ready, although it should be: a rank ended, or nobody is served


class RankSeen(Record):
    """state is what docker says, "gone", or "unknown" with the reason in `error`."""

    node: str
    rank: int | None
    container: str | None
    state: str
    exit_code: int | None = None
    oom_killed: bool = False
    error: str | None = None


class EndpointSeen(Record):
    """Whether the right model answers there. None: not asked yet."""

    answers: bool | None
    error: str | None = None
    served: str | None = None


class TokenSeen(Record):
    """The last proof, or disproof, that tokens come."""

    came: bool | None
    age: float | None = None
    error: str | None = None


def judge(phase: str, ranks: Sequence[RankSeen], endpoint: EndpointSeen, token: TokenSeen) -> tuple[str, str | None]:
    """READY, DEAD, UNKNOWN, or the phase that it is in, and why. What is known to be broken comes before what is unknown."""
    for rank in ranks:
        if rank.state not in (RUNNING, UNKNOWN, GONE, "created"):
            return DEAD, _ended(rank)
    if phase != READY:
        return phase, None
    for rank in ranks:
        if rank.state not in (RUNNING, UNKNOWN):
            return DEAD, _ended(rank)
    if endpoint.answers is False:
        return DEAD, endpoint.error or "its endpoint does not answer"
    if token.came is False:
        return DEAD, token.error or "no token came"
    for rank in ranks:
        if rank.state == UNKNOWN:
            return UNKNOWN, f"{rank.node} cannot be asked: {rank.error or 'no reason is known'}"
    if endpoint.answers is None:
        return UNKNOWN, "its endpoint has not been asked yet"
    if token.came is None:
        return UNKNOWN, token.error or "no token has been seen yet"
    return READY, None


def _ended(rank: RankSeen) -> str:
    what = f"rank {rank.rank}" if rank.rank is not None else "its container"
    if rank.state == GONE:
        return f"{rank.node}: {what} is gone"
    code = "" if rank.exit_code is None or rank.state != "exited" else f" with status {rank.exit_code}"
    return f"{rank.node}: {what} is {rank.state}{code}{', out of memory' if rank.oom_killed else ''}"
