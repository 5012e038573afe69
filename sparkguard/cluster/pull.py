"""Preparing a model on its nodes, from the laptop: one job a node, which goes on without it.

The laptop only begins the jobs and reads what they tell; a second `pull` finds them and reads on. What is compared between the
nodes at the end is the image's id, because two ranks of different images fail late and oddly.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from typing import TYPE_CHECKING, Any

from sparkguard.cluster.catalog import derived, recipes
from sparkguard.cluster.catalog.entries import SONGS
from sparkguard.cluster.causes import NodeError, Unreachable
from sparkguard.core.record import Record
from sparkguard.errors import FAILED, USAGE, SparkguardError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sparkguard.cluster.catalog.entries import Build, Catalog, Checkpoint, Model
    from sparkguard.cluster.events import Emit
    from sparkguard.cluster.ssh import Fleet, Link
    from sparkguard.core.cluster import Node

HUB, NGC = "https://huggingface.co", "https://api.ngc.nvidia.com"
SECRETS = ("HF_TOKEN", "NGC_API_KEY")
_ENDS = ("pull_done", "pull_failed", "pull_cancelled")
# A job's line comes each second while bytes come; hashing 100 GiB or docker's silence may take longer.
_QUIET_SECONDS = 45.0
# How long a node that cannot be reached is tried again; the job there goes on all the while.
_PATIENCE_SECONDS = 300.0
_SHARE_PATIENCE_SECONDS = 1800


class Outcome(Record):
    """How one node's job ended."""

    node: str
    event: str
    image: str | None = None
    message: str = ""
    status: int = FAILED


def order(
    catalog: Catalog, model: Model, node: Node, env: Mapping[str, str], *, verify: bool = False, others: Sequence[str] = ()
) -> dict[str, Any]:
    """What a node is asked to prepare. Pure: it holds no secret, and is the same on each look."""
    cache = catalog.cache(node.name)
    filled = {f"{cache}/{each.folder}" for each in model.checkpoints}  # these come with their files
    what = {
        "model": model.name,
        "node": node.name,
        "cache": cache,
        "folders": [path for path in recipes.mounted(catalog, model, node) if path not in filled],
        "reserve_bytes": catalog.disk_reserve_bytes,
        "hf_endpoint": env.get("HF_ENDPOINT") or HUB,
        "ngc_endpoint": NGC,
        "retry_seconds": 1.0,
        "verify": verify,
        "checkpoints": [_checkpoint(each) for each in model.checkpoints],
        "image": {"reference": recipes.image_of(model), "build": _build(model.name, model.build) if model.build else None},
        "share": None,
        "mirror": None,
    }
    # The same wish from a second laptop finds the job of the first, whatever it would share.
    wish = {name: value for name, value in what.items() if name != "verify"}
    key = hashlib.sha256(json.dumps(wish, sort_keys=True).encode()).hexdigest()
    share = None
    if others and node.fabric_addr:
        share = {"address": node.fabric_addr, "others": list(others), "patience_seconds": _SHARE_PATIENCE_SECONDS}
    return {**what, "key": key, "share": share}


def _checkpoint(each: Checkpoint) -> dict[str, Any]:
    values = [each.source, each.repo, each.revision, *each.include, "|", *each.exclude]
    return {
        "name": each.name,
        "source": each.source,
        "repo": each.repo,
        "revision": each.revision,
        "pinned": each.pinned,
        "folder": each.folder,
        "hub_folder": recipes.hub_folder(each),
        "include": list(each.include),
        "exclude": list(each.exclude),
        "index_suffixes": list(each.index_suffixes),
        "index_metadata": dict(each.index_metadata),
        "marker": recipes.marker(each),
        "key": hashlib.sha256(json.dumps(values).encode()).hexdigest()[:32],
    }


def _build(name: str, build: Build) -> dict[str, Any]:
    files = [{"url": each.url, "sha256": each.sha256, "path": each.path} for each in build.files]
    whole = build.dockerfile
    return {
        "base": build.base,
        "files": files,
        "dockerfile": {"url": whole.url, "sha256": whole.sha256} if whole else None,
        "text": "" if whole else derived.dockerfile(name, build),
        "start": "" if whole else derived.entrypoint(build),
        "start_path": "" if whole else derived.entrypoint_path(name),
    }


async def pull(
    fleet: Fleet,
    catalog: Catalog,
    model: Model,
    nodes: Sequence[Node],
    emit: Emit,
    env: Mapping[str, str] = os.environ,
    *,
    verify: bool = False,
    detach: bool = False,
) -> tuple[Outcome, ...]:
    """Begins or joins the jobs, and follows them to their end unless detached. Raises SparkguardError when one cannot begin."""
    if model.wrapper == SONGS:
        raise SparkguardError("YuE is installed by its own factory", "docs/cluster/yue.md tells how", USAGE)
    secret = json.dumps({name: env[name] for name in SECRETS if env.get(name)}).encode()
    first, rest = nodes[0], list(nodes[1:])
    shares = model.copy_over_fabric and bool(rest) and all(node.fabric_addr for node in nodes)
    others = [node.name for node in rest] if shares else []
    begun = await _begin(fleet[first.name], order(catalog, model, first, env, verify=verify, others=others), secret, emit)
    mirror = begun.get("share") if shares else None
    jobs = {first.name: begun}

    async def begin(node: Node) -> None:
        job = {**order(catalog, model, node, env, verify=verify), "mirror": mirror}
        jobs[node.name] = await _begin(fleet[node.name], job, secret, emit)

    failures = [failure for failure in await asyncio.gather(*map(begin, rest), return_exceptions=True) if failure]
    for failure in failures:
        if not isinstance(failure, SparkguardError):
            raise failure
        emit("pull_failed", text=failure.message)
    if detach:
        if failures and isinstance(failures[0], SparkguardError):
            raise failures[0]
        return ()
    outcomes = await asyncio.gather(*(follow(fleet[name], job, emit) for name, job in jobs.items()))
    for failure in failures:
        assert isinstance(failure, SparkguardError)
        raise failure
    return tuple(outcomes)


def different_images(outcomes: Sequence[Outcome]) -> str | None:
    """What to say when the nodes ended with different images."""
    images = {outcome.node: outcome.image for outcome in outcomes if outcome.event == "pull_done"}
    if len(set(images.values())) < 2:
        return None
    return "the nodes have different images: " + ", ".join(f"{node} {image or 'none'}" for node, image in images.items())


async def _begin(link: Link, job: dict[str, Any], secret: bytes, emit: Emit) -> dict[str, Any]:
    answer = await link.call("pull", {"do": "start", "job": job}, seconds=30, secret=secret)
    attached = answer["state"] == "attached"
    text = f"{job['model']}: joins the preparation that runs here" if attached else f"{job['model']}: the preparation has begun"
    emit("pull_attached" if attached else "pull_begun", node=link.name, model=job["model"], text=text)
    return answer


async def follow(link: Link, job: dict[str, Any], emit: Emit) -> Outcome:
    """The job's events until its end. A connection that breaks is made again; the job does not notice."""
    since, lost = 0, 0.0
    loop = asyncio.get_running_loop()
    while True:
        try:
            request = {"do": "follow", "since": since, "id": job["id"]}
            async for event in link.stream("pull", request, quiet_seconds=_QUIET_SECONDS):
                if event["event"] == "beat":
                    continue
                if lost:
                    emit("pull_back", node=link.name, text="reached again")
                since, lost = event["seq"], 0.0
                fields = {key: value for key, value in event.items() if key not in ("event", "seq", "time", "text")}
                emit(event["event"], **{**fields, "node": link.name, "text": words(event)})
                if event["event"] in _ENDS:
                    status = event.get("status", FAILED)
                    return Outcome(link.name, event["event"], event.get("image"), event.get("message", ""), status)
        except NodeError as error:
            emit("pull_failed", node=link.name, code=error.code, message=error.message, text=error.message)
            return Outcome(link.name, "pull_failed", None, error.message, error.status)
        except Unreachable as error:
            now = loop.time()
            if not lost:
                lost = now
                emit("pull_lost", node=link.name, text=f"{error.message}; the preparation there goes on")
            if now - lost > _PATIENCE_SECONDS:
                return Outcome(link.name, "pull_lost", None, error.message, error.status)
            await asyncio.sleep(1.0)


async def cancel(fleet: Fleet, nodes: Sequence[Node], emit: Emit) -> None:
    """Ends what is being prepared on the nodes; what came so far stays, for the next pull."""

    async def end(node: Node) -> None:
        answer = await fleet[node.name].call("pull", {"do": "cancel"}, seconds=40)
        text = f"{answer['model']}: the preparation has been ended" if answer["cancelled"] else "nothing is being prepared"
        emit("pull_cancelled" if answer["cancelled"] else "pull_idle", node=node.name, model=answer["model"], text=text)

    failures = [failure for failure in await asyncio.gather(*map(end, nodes), return_exceptions=True) if failure]
    if failures:
        raise failures[0]


def words(event: dict[str, Any]) -> str:
    """An event for people."""
    kind = event["event"]
    if kind == "pull_plan":
        missing, total = event["missing_bytes"], event["total_bytes"]
        return f"{event['files']} files, {gib(total)}; {gib(missing)} to fetch" if total else "no files to fetch"
    if kind == "pull_progress":
        done, total, rate = event["done_bytes"], event["total_bytes"], event["bytes_s"]
        left = f", {_duration((total - done) / rate)} left" if rate else ""
        return f"{100 * done // max(1, total)} % of {gib(total)}, {rate / 1e6:.0f} MB/s{left}"
    if kind == "pull_file":
        return f"{event['file']}: {gib(event['bytes'])}, as published"
    if kind == "pull_verified":
        return f"{event['checkpoint']}: {event['files']} files, {gib(event['bytes'])}, each with the publisher's hash"
    if kind == "pull_retry":
        return f"{event['what']}: {event['reason']}; again in {event['in_s']:.0f} s"
    if kind == "pull_done":
        return f"prepared; image {(event.get('image') or 'none')[:19]}"
    return str(event.get("text") or event.get("message") or kind.replace("_", " "))


def gib(amount: int) -> str:
    return f"{amount / (1 << 30):.1f} GiB" if amount >= 1 << 27 else f"{amount / (1 << 20):.1f} MiB"


def _duration(seconds: float) -> str:
    minutes = int(seconds // 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min" if minutes else f"{int(seconds)} s"
