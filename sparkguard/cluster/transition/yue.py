"""Song workers: drained by their own control, cancelled by job id, and ready only where control and HTTP say the same."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from sparkguard.cluster import commands, http
from sparkguard.cluster.http import Unanswered
from sparkguard.cluster.observe import Questions, look, yue_view
from sparkguard.cluster.transition.discovery import Worker
from sparkguard.cluster.transition.ready import PROBE_SECONDS, StartFailed
from sparkguard.cluster.transition.turn import JobsActive, Work
from sparkguard.cluster.transition.wanted import yue_settings
from sparkguard.core.cluster import YueView
from sparkguard.errors import UNAVAILABLE, SparkguardError

if TYPE_CHECKING:
    from sparkguard.core.cluster import Node, Step

POLL_SECONDS = 1.0
SERVICE = "yue-icl-factory"


async def drain(step: Step, work: Work) -> None:
    await _control(work, step, "drain")


async def cancel(step: Step, work: Work) -> None:
    await _control(work, step, "cancel", job_id=step.target)


async def idle(step: Step, work: Work) -> None:
    """Raises JobsActive (75) for songs that nobody cancelled; waits for the containers of those that were."""
    node = str(step.node)
    last = time.monotonic() + step.seconds
    cancelled = set()
    while True:
        yue = await look_at(work, node)
        if yue.error is not None:
            raise SparkguardError(f"{node}: YuE does not answer: {yue.error}", "whether a song renders is unknown", UNAVAILABLE)
        busy = yue.busy is not False or bool(yue.jobs)
        if not busy and not yue.containers:
            return
        if busy and step.target != "cancel":
            raise JobsActive({node: yue.jobs})
        for job in yue.jobs if step.target == "cancel" else ():
            if job not in cancelled:
                cancelled.add(job)
                await _control(work, step, "cancel", job_id=job)
        if time.monotonic() > last:
            left = ", ".join((*yue.jobs, *(one[:12] for one in yue.containers))) or "it is busy"
            raise SparkguardError(f"{node}: YuE is not idle after {step.seconds:.0f} s: {left}", None, 1)
        await asyncio.sleep(POLL_SECONDS)


async def start(step: Step, work: Work) -> None:
    """The unit runs afterwards; it starts drained."""
    node = str(step.node)
    yue = work.views[node].yue
    if yue is None or not yue.active:
        await commands.unit(work.fleet[node], work.turn, work.catalog.yue.service, "start")


async def admit(step: Step, work: Work) -> None:
    """Lets it take songs once its own checks of CUDA, runtime and assets are content."""
    node = str(step.node)
    last = time.monotonic() + step.seconds
    while True:
        yue = await look_at(work, node)
        unfit = yue.error or _unfit(yue)
        if unfit is None:
            break
        if time.monotonic() > last:
            raise StartFailed(f"{node}: YuE was not admitted: {unfit}", node)
        await asyncio.sleep(POLL_SECONDS)
    work.admitted.append(node)
    await _control(work, step, "admit", admit_generation=work.generation)


async def ready(step: Step, work: Work) -> None:
    """Control and HTTP of every worker agree on who it is, and that it takes songs of this generation."""
    last = time.monotonic() + step.seconds
    found: dict[str, Worker] = {}
    said = ""
    while True:
        reasons = []
        for name in work.nodes:
            if name in found:
                continue
            node = work.catalog.node(name)
            yue = await look_at(work, name)
            worker, reason = await agreed(node, yue, work.generation_on(name))
            if worker is not None:
                found[name] = worker
            else:
                reasons.append(f"{name}: {reason}")
        if not reasons:
            work.workers = tuple(found[name] for name in work.nodes)
            return
        if time.monotonic() > last:
            raise StartFailed(f"YuE is not ready after {step.seconds:.0f} s: {'; '.join(reasons)}")
        if (now := "; ".join(reasons)) != said:
            said = now
            work.emit("waiting", text=now)
        await asyncio.sleep(POLL_SECONDS)


async def agreed(node: Node, control: YueView, generation: str | None) -> tuple[Worker | None, str]:
    """The worker that both interfaces describe; None and why not. generation None: whichever it has."""
    if control.error is not None:
        return None, control.error
    if (unfit := _unfit(control)) is not None:
        return None, unfit
    if not control.accepting:
        return None, "it takes no songs"
    if not control.generation or (generation is not None and control.generation != generation):
        return None, f"it takes songs of generation {control.generation}, not {generation}"
    try:
        answer = await http.ask(f"{node.yue_url}/health", seconds=PROBE_SECONDS)
    except Unanswered as error:
        return None, error.message
    health = answer.json()
    if answer.status != 200 or not isinstance(health, dict) or health.get("service") != SERVICE:
        return None, f"{node.yue_url} is no YuE worker (status {answer.status})"
    seen = yue_view(health, True)
    for what in ("worker", "manifest", "generation"):
        if getattr(seen, what) != getattr(control, what):
            said = (getattr(control, what), getattr(seen, what))
            return None, f"control and HTTP do not agree on its {what}: {said[0]} and {said[1]}"
    if (unfit := _unfit(seen)) is not None or not seen.accepting:
        return None, f"by HTTP {unfit or 'it takes no songs'}"
    assert control.worker is not None and control.manifest is not None and node.yue_url is not None
    return Worker(control.worker, node.yue_url, control.generation, control.manifest, node.name), ""


async def look_at(work: Work, node: str) -> YueView:
    views = await look(work.fleet, {node: Questions(ports=(), yue=yue_settings(work.catalog))})
    view = views[node]
    if view.error is not None:
        raise SparkguardError(view.error, None, UNAVAILABLE)
    assert view.yue is not None
    return view.yue


def _unfit(yue: YueView) -> str | None:
    if yue.api_version != 2:
        return f"it speaks protocol {yue.api_version}, not 2"
    if yue.mock is not False:
        return "it is a mock"
    if not yue.worker or not _is_digest(yue.manifest):
        return "it does not say which worker it is, or what its assets are"
    for name in ("cuda", "runtime_ok", "assets_ok", "ownership_ok"):
        if getattr(yue, name) is not True:
            return f"{name} is {getattr(yue, name)}"
    return None


def _is_digest(text: str | None) -> bool:
    return text is not None and len(text) == 64 and all(char in "0123456789abcdef" for char in text)


async def _control(work: Work, step: Step, verb: str, **words: str) -> YueView:
    link = work.fleet[str(step.node)]
    return await commands.yue(link, work.turn, yue_settings(work.catalog), verb, max(60.0, step.seconds), **words)
