"""From started containers to a model that is ready: exactly these are watched, so that a dead rank ends the wait at once."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from sparkguard.cluster.catalog import recipes
from sparkguard.cluster.observe import container_of
from sparkguard.cluster.transition import ready
from sparkguard.cluster.transition.ready import Readiness, StartFailed
from sparkguard.core.cluster import DISTRIBUTED
from sparkguard.errors import SparkguardError

if TYPE_CHECKING:
    from sparkguard.cluster.transition.turn import Work
    from sparkguard.core.cluster import Container, Rank, Step

POLL_SECONDS = 2.0
FIRST_POLL_SECONDS = 0.2  # a small model is there at once; the pause grows to POLL_SECONDS
TELL_SECONDS = 15.0  # so that a quiet start shows that it goes on
CALL_SECONDS = 20.0
# One look that fails may be a network's hiccup; two in a row, and nobody knows what the ranks do.
UNKNOWN_LOOKS = 2
_TRANSPORT = r"NET/(IB|Socket)"


async def wait(work: Work, seconds: float) -> None:
    """Returns when it is ready. Raises StartFailed (1) with the node, the container's end, or what is still missing."""
    assert work.wanted is not None
    last = time.monotonic() + seconds
    told, said, pause = 0.0, "", FIRST_POLL_SECONDS
    unknown: dict[str, int] = {}
    while True:
        await watch(work, unknown)
        found = await ready.probe(work.wanted, canary=False)
        if found.ready:
            limit = min(ready.FIRST_TOKEN_SECONDS, max(ready.TOKEN_SECONDS, last - time.monotonic()))
            found = await _token(work, limit, unknown)
            if found.ready:
                await watch(work, unknown)  # the same containers, after the token as before it
                break
        now = time.monotonic()
        if now > last:
            raise StartFailed(f"{work.wanted.model} is not ready after {seconds:.0f} s: {found.reason}")
        if found.reason != said or now - told > TELL_SECONDS:
            work.emit("waiting" if not said else "poll", text=found.reason, model=work.wanted.model)
            told, said = now, found.reason
        await asyncio.sleep(pause)
        pause = min(POLL_SECONDS, 1.5 * pause)
    if work.wanted.mode == DISTRIBUTED:
        work.fabric = await _transport(work) or work.wanted.fabric


async def _token(work: Work, seconds: float, unknown: dict[str, int]) -> Readiness:
    """The first token of a cold engine may take minutes: the ranks are watched meanwhile."""
    assert work.wanted is not None
    asking = asyncio.ensure_future(ready.probe(work.wanted, canary=True, token_seconds=seconds))
    try:
        while not (await asyncio.wait({asking}, timeout=POLL_SECONDS))[0]:
            await watch(work, unknown)
        return asking.result()
    finally:
        asking.cancel()


async def watch(work: Work, unknown: dict[str, int]) -> None:
    """One look at the containers of this start, on all their nodes at once."""
    by_node: dict[str, list[Container]] = {}
    for (node, _), container in work.created.items():
        by_node.setdefault(node, []).append(container)
    nodes = list(by_node)
    answers = await asyncio.gather(*(_inspect(work, node, by_node[node]) for node in nodes))
    for node, answer in zip(nodes, answers):
        if isinstance(answer, SparkguardError):
            unknown[node] = unknown.get(node, 0) + 1
            if unknown[node] >= UNKNOWN_LOOKS:
                raise StartFailed(f"what the rank on {node} does is unknown: {answer.message}", node, answer.hint)
            continue
        unknown[node] = 0
        for container in by_node[node]:
            _judge(node, container, answer.get(container.id))


def _judge(node: str, before: Container, now: Container | None) -> None:
    who = f"{node}: {before.name} ({before.id[:12]})"
    if now is None:
        raise StartFailed(f"{who} is gone: somebody removed it", node)
    if now.state == "running":
        if before.started_at and now.started_at != before.started_at:
            raise StartFailed(f"{who} was started again by somebody else", node)
        return
    if now.oom_killed:
        raise StartFailed(
            f"{who} was killed because memory ran out", node, "lower the model's share, or see what else holds memory"
        )
    how = f" with status {now.exit_code}" if now.exit_code is not None and now.state in ("exited", "dead") else ""
    raise StartFailed(f"{who} is {now.state}{how}", node)


async def _inspect(work: Work, node: str, containers: list[Container]) -> dict[str, Container] | SparkguardError:
    request = {"ids": [container.id for container in containers]}
    try:
        answer = await work.fleet[node].call("ranks", request, seconds=CALL_SECONDS, repeatable=True)
        return {found["id"]: container_of(found) for found in answer["containers"]}
    except SparkguardError as error:
        return error


async def learn(step: Step, work: Work) -> None:
    """Waits for what rank 0 prints for the ranks that start after it."""
    rank = step.rank
    assert rank is not None and work.wanted is not None
    node = next(first.node for first in work.wanted.ranks if first.rank == 0)
    container = work.created[(node, 0)]
    last = time.monotonic() + step.seconds
    unknown: dict[str, int] = {}
    while True:
        await watch(work, unknown)
        lines = await _lines(work, node, container, f"{rank.learns}\\s*=")
        try:
            value = recipes.learned(rank, "\n".join(lines))
        except ValueError as error:
            raise StartFailed(f"{node}: {error}", node) from None
        if value is not None:
            work.learned[rank.learns] = value
            return
        if time.monotonic() > last:
            raise StartFailed(f"{node}: rank 0 has not printed {rank.learns} within {step.seconds:.0f} s", node)
        await asyncio.sleep(POLL_SECONDS)


def told(rank: Rank, work: Work) -> Rank:
    return recipes.told(rank, work.learned[rank.learns]) if rank.learns else rank


async def _transport(work: Work) -> str:
    """ "socket" when a rank says that it talks through the kernel's network: half as fast, and otherwise silent. NCCL says
    neither below NCCL_DEBUG=INFO."""
    lines: list[str] = []
    for (node, _), container in work.created.items():
        try:
            lines += await _lines(work, node, container, _TRANSPORT)
        except SparkguardError:
            continue  # the model is ready; only how fast its fabric is stays unsaid
    if any("NET/Socket" in line for line in lines):
        return "socket"
    return "ib" if any("NET/IB" in line for line in lines) else ""


async def _lines(work: Work, node: str, container: Container, expression: str) -> list[str]:
    request: dict[str, Any] = {"ids": [container.id], "find": expression}
    answer = await work.fleet[node].call("ranks", request, seconds=CALL_SECONDS, repeatable=True)
    found = answer["lines"].get(container.id)
    return [str(line) for line in found] if isinstance(found, list) else []
