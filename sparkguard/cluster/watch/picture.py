"""Everything about the cluster at each tick: nodes, models, health. One picture, made of what each source told last.

Each node and each endpoint is watched by a task of its own, and a tick only looks at what they know: what is dead or slow
holds up nothing. Nothing runs on a node once the watching ends.
"""

from __future__ import annotations

import asyncio
import time
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from sparkguard.cluster.bench import leases
from sparkguard.cluster.causes import NodeError, Unreachable
from sparkguard.cluster.transition import state
from sparkguard.cluster.transition.wanted import running_of
from sparkguard.cluster.watch import clock
from sparkguard.cluster.watch.endpoint import Endpoint
from sparkguard.cluster.watch.health import EndpointSeen, RankSeen, TokenSeen, judge
from sparkguard.cluster.watch.node_samples import STALE, NodeSamples
from sparkguard.cluster.watch.songs import Songs
from sparkguard.core.cluster import GONE, READY, STOPPED, UNKNOWN, UNMANAGED, YUE, Allocation, Node
from sparkguard.core.rates import patience
from sparkguard.core.record import Record
from sparkguard.errors import SparkguardError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
    from pathlib import Path
    from typing import Protocol

    from sparkguard.cluster.catalog.read import Catalog

    class Link(Protocol):
        def stream(self, program: str, request: dict[str, Any], *, quiet_seconds: float) -> AsyncIterator[dict[str, Any]]: ...


SCHEMA_VERSION = 1
LEAST_INTERVAL = 0.25
LONGEST_PAUSE = 30.0  # between attempts to reach a node: 1, 2, 4 ... s


class Watched(Record):
    """An allocation as the controller's record has it now."""

    allocation: Allocation
    generation: str
    phase: str
    fabric: str = ""  # what its ranks talk over: "ib", "socket"; "": nobody said


class Found(Record):
    """All allocations of the record, and its transition: the one under way or the last."""

    watched: tuple[Watched, ...]
    transition: dict[str, Any] | None = None


class Watch:
    """`async for tick in Watch(...).ticks()`; ending the iteration ends all that it started."""

    def __init__(
        self,
        links: Mapping[str, Link],
        find: Callable[[], Found],
        state_dir: Path,
        interval: float = 2.0,
        *,
        nodes: Sequence[Node] = (),
        paths: Mapping[str, Sequence[str]] | None = None,
        steady: Callable[[], float] = clock.now,
    ) -> None:
        self._links = links
        self._find = find
        self._state_dir = state_dir
        self._interval = max(LEAST_INTERVAL, interval)
        self._paths = paths or {}
        self._steady = steady
        known = {node.name: node for node in nodes}
        self._song_urls = {name: node.yue_url for name, node in known.items() if node.yue_url}
        hosts = {name: node.ssh for name, node in known.items()}
        self.nodes = {name: NodeSamples(name, self._interval, steady, hosts.get(name)) for name in links}
        self._found = Found(())
        self._record_error: str | None = None
        self._endpoints: dict[tuple[str, str], tuple[Endpoint, asyncio.Task[None]]] = {}
        self._identities: dict[tuple[str, str], tuple[str, ...]] = {}
        self._songs: dict[str, tuple[Songs, asyncio.Task[None]]] = {}

    async def ticks(self) -> AsyncGenerator[dict[str, Any], None]:
        tasks = [asyncio.ensure_future(self._follow(name)) for name in self._links]
        loop = asyncio.get_running_loop()
        last = self._steady()
        try:
            while True:
                for task in (*tasks, *self._tasks()):
                    if task.done():
                        task.result()  # a bug of ours ends the watching with its traceback, and is not hidden behind "stale"
                self._find_allocations()
                now = self._steady()
                yield self.picture(slept=now - last > patience(self._interval))
                last = now
                await asyncio.sleep(clock.pause(loop.time(), self._interval))
        finally:
            tasks += self._tasks()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._endpoints.clear()
            self._songs.clear()

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [task for _, task in (*self._endpoints.values(), *self._songs.values())]

    async def _follow(self, name: str) -> None:
        """A node's lines, and again after a pause when they end."""
        samples = self.nodes[name]
        request = {"interval": self._interval, "paths": list(self._paths.get(name, ()))}
        pause = 1.0
        while True:
            try:
                async for line in self._links[name].stream("sampler", request, quiet_seconds=patience(self._interval)):
                    samples.line(line)
                    pause = 1.0
                samples.lost("its sampler has ended", None, pause)
            except Unreachable as error:
                samples.lost(error.message, error.cause, pause)
            except NodeError as error:
                samples.lost(error.message, error.code, pause)
            await asyncio.sleep(pause)
            pause = min(LONGEST_PAUSE, pause * 2)

    # ---- allocations

    def _find_allocations(self) -> None:
        try:
            self._found, self._record_error = self._find(), None
        except SparkguardError as error:
            self._record_error = error.message  # what was known is still watched
        wanted = {_key(watched): watched for watched in self._found.watched if watched.allocation.mode != YUE}
        for key in [key for key in self._endpoints if key not in wanted]:
            self._endpoints.pop(key)[1].cancel()
            self._identities.pop(key, None)
        for key, watched in wanted.items():
            if key not in self._endpoints and watched.allocation.url:
                endpoint = Endpoint(watched.allocation, self._interval, self._steady)
                work = endpoint.watch(lambda key=key: self._identity(key), lambda it=watched: self._may_ask(it))  # type: ignore[misc]
                self._endpoints[key] = endpoint, asyncio.ensure_future(work)

        singing = {node for watched in self._found.watched if watched.allocation.mode == YUE for node in watched.allocation.nodes}
        for node in [node for node in self._songs if node not in singing]:
            self._songs.pop(node)[1].cancel()
        for node in singing - self._songs.keys():
            if node in self._song_urls:
                songs = Songs(node, self._song_urls[node], self._steady)
                self._songs[node] = songs, asyncio.ensure_future(songs.watch())

    def _identity(self, key: tuple[str, str]) -> tuple[str, ...]:
        """The ids of its containers as last known: a node that cannot be asked for a while has not changed them."""
        watched = next(it for it in self._found.watched if _key(it) == key)
        found = tuple(sorted(rank.container for rank in self.ranks(watched) if rank.container))
        if found:
            self._identities[key] = found
        return (key[1], *self._identities.get(key, ()))

    def _may_ask(self, watched: Watched) -> bool:
        """While somebody measures, one more request would be in the figures."""
        nodes = set(watched.allocation.nodes)
        concerns = leases.concerning(nodes)
        url = _bare(watched.allocation.url or "")
        return not any(concerns(lease) or _bare(lease.url) == url for lease in leases.living(self._state_dir))

    def ranks(self, watched: Watched) -> list[RankSeen]:
        """What docker said last of each container of this allocation."""
        found = []
        for number, node in enumerate(watched.allocation.nodes):
            samples = self.nodes.get(node)
            containers = samples.containers() if samples else None
            if containers is None:
                error = samples.containers_error() if samples else "it is not in the catalog"
                found.append(RankSeen(node, number, None, UNKNOWN, error=error))
                continue
            mine = [it for it in containers if it.get("model") == watched.allocation.model and _same(it, watched.generation)]
            if not mine:
                found.append(RankSeen(node, number, None, GONE))
            for it in mine:
                rank = it.get("rank")
                ended = it.get("exit_code"), bool(it.get("oom_killed"))
                found.append(RankSeen(node, number if rank is None else rank, it["id"], str(it.get("state")), *ended))
        return found

    # ---- the picture

    def picture(self, slept: bool = False) -> dict[str, Any]:
        """All that is known now, as docs/schemas/watch.json has it. slept: no tick was due for so long that lines break here."""
        return {
            "schema_version": SCHEMA_VERSION,
            "type": "sample",
            "at": datetime.fromtimestamp(time.time(), timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "steady_s": round(self._steady(), 3),
            "interval_s": self._interval,
            "gap": slept,
            "record_error": self._record_error,
            "transition": self._found.transition,
            "nodes": [samples.view() for samples in self.nodes.values()],
            "allocations": [self._allocation(watched) for watched in self._found.watched if watched.allocation.mode != YUE],
            "yue": [songs.view() for _, (songs, _) in sorted(self._songs.items())],
        }

    def _allocation(self, watched: Watched) -> dict[str, Any]:
        allocation = watched.allocation
        endpoint, _ = self._endpoints.get(_key(watched), (None, None))
        ranks = self.ranks(watched)
        seen = endpoint.seen if endpoint else EndpointSeen(None)
        token = endpoint.token if endpoint else TokenSeen(None)
        engine = endpoint.view() if endpoint else None
        state, reason = judge(watched.phase, ranks, seen, token)
        if state == READY and engine is not None and engine["state"] == STALE:
            state, reason = STALE, engine["error"] or "its metrics are old"
        return {
            "model": allocation.model,
            "label": allocation.label,
            "mode": allocation.mode,
            "nodes": list(allocation.nodes),
            "served": allocation.served,
            "url": allocation.url,
            "engine_kind": allocation.engine,
            "generation": watched.generation,
            "phase": watched.phase,
            "slow_fabric": watched.fabric == "socket",
            "state": state,
            "age_s": None if engine is None else engine["age_s"],
            "error": reason,
            "ranks": [dict(rank.__dict__) for rank in ranks],
            "endpoint": {"answers": seen.answers, "error": seen.error, "served": seen.served},
            "engine": engine,
            "canary": endpoint.canary_view() if endpoint else None,
        }


def placed(catalog: Catalog, state_dir: Path) -> Found:
    """The allocations that the controller's record places on nodes now. Raises SparkguardError for a record that is damaged."""
    controller = state.load(state_dir)
    found: dict[tuple[str, str], Watched] = {}
    for node in catalog.nodes:
        it = controller.of(node.name)
        if it.model and it.phase not in (UNMANAGED, STOPPED) and (it.model, it.generation) not in found:
            allocation = running_of(catalog, it.model, node.name)
            nodes = it.nodes or (allocation.nodes if allocation else (node.name,))
            if allocation is None:  # the catalog has lost it, and it runs all the same
                allocation = Allocation(it.model, it.model, it.mode, nodes, (), it.digest)
            fabric = it.fabric or allocation.fabric
            found[it.model, it.generation] = Watched(allocation.replace(nodes=nodes), it.generation, it.phase, fabric)
    transition = controller.transition
    kept = ("generation", "verb", "phase", "nodes", "model", "since", "error")
    told = None if transition is None else {name: transition.__dict__[name] for name in kept}
    return Found(tuple(found.values()), told and {**told, "nodes": list(told["nodes"])})


def _bare(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


def _key(watched: Watched) -> tuple[str, str]:
    return watched.allocation.model, watched.generation


def _same(container: dict[str, Any], generation: str) -> bool:
    """A no-op `up` keeps containers of an older generation: those count where the record says so by an empty one."""
    return not generation or container.get("generation") in (generation, "", None)
