"""What a transition does to a node, one function a deed: node/act.py carries it out under the fence.

Each raises Unreachable when nobody can tell whether it was done, NodeError when the node says that it was not. `stale` and
`locked` are somebody else's turn (75).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sparkguard.cluster.causes import PROTOCOL, Unreachable
from sparkguard.cluster.observe import container_of, yue_view
from sparkguard.core.cluster import Container, Holder, Rank, YueView
from sparkguard.core.record import Record

if TYPE_CHECKING:
    from sparkguard.cluster.ssh import Link


class Turn(Record):
    """Whose turn it is: one transition."""

    generation: str
    holder: Holder


async def fence(link: Link, turn: Turn, previous: Sequence[str] | None = None, seconds: float = 40) -> None:
    """From now on the node refuses every other generation's commands. previous: those that may be replaced; None: any."""
    await _act(link, turn, "fence", seconds, previous=None if previous is None else list(previous))


@contextlib.asynccontextmanager
async def hold(link: Link, turn: Turn) -> AsyncIterator[None]:
    """Everybody else is told meanwhile that this transition is at work on the node, and who runs it."""
    stream = link.stream("hold", {"holder": _holder(turn)}, quiet_seconds=20)
    async with contextlib.aclosing(stream):
        async for reply in stream:
            if reply.get("held"):
                break
        else:
            raise Unreachable(link.name, PROTOCOL, "the lock was not taken")
        yield


async def create(
    link: Link, turn: Turn, rank: Rank, model: str, seconds: float = 90, secrets: Mapping[str, str] | None = None
) -> Container:
    """The rank's container, which does not run yet. `name_taken` when another has its name. secrets: values of rank.secrets."""
    words = {"argv": list(rank.create), "name": rank.name, "model": model, "rank": rank.rank, "digest": rank.digest}
    request = {"do": "create", "generation": turn.generation, "holder": _holder(turn), **words}
    answer = await link.call("act", request, seconds=seconds, secret=json.dumps(dict(secrets or {})).encode())
    return container_of(answer["container"])


async def start(link: Link, turn: Turn, container: str, seconds: float = 90) -> Container:
    return container_of((await _act(link, turn, "start", seconds, id=container))["container"])


async def stop(link: Link, turn: Turn, container: str, grace_seconds: int, named: Sequence[str] = ()) -> Container | None:
    """SIGTERM, SIGKILL after grace_seconds; as it was seen afterwards, None: gone. named: the catalog's stop_names."""
    seconds = grace_seconds + 70
    answer = await _act(link, turn, "stop", seconds, id=container, grace_seconds=grace_seconds, named=list(named))
    return None if answer["container"] is None else container_of(answer["container"])


async def kill(link: Link, turn: Turn, container: str, named: Sequence[str] = (), seconds: float = 70) -> Container | None:
    answer = await _act(link, turn, "kill", seconds, id=container, named=list(named))
    return None if answer["container"] is None else container_of(answer["container"])


async def remove(link: Link, turn: Turn, container: str, named: Sequence[str] = (), seconds: float = 100) -> None:
    """The container is gone afterwards, and with it its receipt."""
    await _act(link, turn, "remove", seconds, id=container, named=list(named))


async def check(link: Link, turn: Turn, argv: Sequence[str], seconds: float) -> tuple[bool, str]:
    """A short `docker run` of a recipe's own preflight: whether it was content, and what it said."""
    answer = await _act(link, turn, "run", seconds + 40, argv=list(argv), seconds=seconds)
    words = f"no answer within {seconds:.0f} s" if answer["timed_out"] else str(answer["err"] or answer["out"]).strip()
    return bool(answer["ok"]), words


async def drop_caches(link: Link, turn: Turn, seconds: float = 70) -> bool:
    """Whether the page cache was dropped: only where sudo asks for no password."""
    return bool((await _act(link, turn, "drop_caches", seconds))["dropped"])


async def yue(link: Link, turn: Turn, settings: Mapping[str, Any], verb: str, seconds: float = 120, **words: str) -> YueView:
    """verb: drain, cancel (job_id), admit (admit_generation), manifest. What the factory says afterwards."""
    answer = await _act(link, turn, "yue", seconds, yue=dict(settings), verb=verb, **words)
    return yue_view(answer["status"], True)


async def unit(link: Link, turn: Turn, service: str, verb: str, seconds: float = 120) -> None:
    """start or stop of a unit of the node's user."""
    await _act(link, turn, "unit", seconds, service=service, verb=verb)


async def _act(link: Link, turn: Turn, do: str, within: float, **words: Any) -> dict[str, Any]:
    request = {"do": do, "generation": turn.generation, "holder": _holder(turn), **words}
    return await link.call("act", request, seconds=within)


def _holder(turn: Turn) -> dict[str, Any]:
    return {**turn.holder.__dict__, "generation": turn.generation}
