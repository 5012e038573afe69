"""The picture at each tick: of nodes and endpoints that come, go, hang and lie. The links are stand-ins, the HTTP is real."""

from __future__ import annotations

import asyncio
import fcntl
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from spark_tree import Tree
from stand_in_engine import Engine, engine

from sparkguard.cluster.catalog import read as catalog
from sparkguard.cluster.causes import Unreachable
from sparkguard.cluster.node.host import Host
from sparkguard.cluster.transition import state
from sparkguard.cluster.transition.state import Controller, Placed
from sparkguard.cluster.watch import endpoint as endpoint_module
from sparkguard.cluster.watch import picture as watch_module
from sparkguard.cluster.watch.picture import Found, Watch, Watched, placed
from sparkguard.core.cluster import DISTRIBUTED, READY, SINGLE, Allocation

SCHEMA = json.loads((Path(__file__).parents[4] / "docs" / "schemas" / "watch.json").read_text())
ENGINE = ("Engine.serve", "_accept_connection2")  # the stand-in's, in the same loop: a request that it answers, or accepts
SECONDS = 30.0  # for what takes one on an idle machine
GENERATION = "g1"


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done every few seconds is done several times a second."""
    monkeypatch.setattr(endpoint_module, "MODELS_SECONDS", 0.3)
    monkeypatch.setattr(endpoint_module, "TOKEN_LOOK_SECONDS", 0.1)


class Link:
    """A node: it can be dead, silent, or send the lines of a sampler that a test puts in."""

    def __init__(self, name: str, tree: Tree) -> None:
        self.name = name
        self.host = Host(str(tree.proc), str(tree.sys))
        self.cause: str | None = None
        self.attempts = 0
        self.containers: list[dict[str, Any]] | None = []
        self.steady = 0.0

    async def stream(self, program: str, request: dict[str, Any], *, quiet_seconds: float) -> AsyncIterator[dict[str, Any]]:
        assert (program, quiet_seconds) == ("sampler", max(6.0, 3 * request["interval"]))
        self.attempts += 1
        if self.cause:
            raise Unreachable(self.name, self.cause, f"{self.cause}!")
        yield {"hello": self.host.about()}
        while not self.cause:
            self.steady += request["interval"]
            told = {"steady_s": self.steady, "gpus": None, "gpu_error": "none", "cost": {"own_s": 0.0, "children_s": 0.0}}
            yield {"tick": {**self.host.quick(), **told}}
            yield {"slow": self.host.slow([])}
            yield {"holders": {"found": [], "error": None}}
            yield {"containers": {"found": self.containers, "error": None if self.containers is not None else "no daemon"}}
            await asyncio.sleep(request["interval"])
        raise Unreachable(self.name, self.cause, f"{self.cause}!")


def container(rank: int, state: str = "running", **more: Any) -> dict[str, Any]:
    return {"id": str(rank) * 64, "state": state, "rank": rank, "model": "m", "generation": GENERATION, **more}


class Bench:
    """Two nodes, one model, and a watch over them."""

    def __init__(self, folder: Path, served: Engine) -> None:
        self.folder = folder
        self.engine = served
        self.links = {name: Link(name, Tree(folder / name)) for name in ("head", "worker")}
        for rank, link in enumerate(self.links.values()):
            link.containers = [container(rank)]
        self.allocation = Allocation("m", "M", DISTRIBUTED, ("head", "worker"), (), "d", "m", served.url)
        self.found = Found((Watched(self.allocation, GENERATION, READY),))
        self.offset = 0.0
        self.watch = Watch(self.links, lambda: self.found, folder / "state", 0.25, steady=self.steady)

    def steady(self) -> float:
        return asyncio.get_running_loop().time() + self.offset

    async def until(self, wanted: Callable[[dict[str, Any]], Any], ticks: AsyncIterator[dict[str, Any]]) -> dict[str, Any]:
        async def look() -> dict[str, Any]:
            async for tick in ticks:
                jsonschema.validate(tick, SCHEMA)
                if wanted(tick):
                    return tick
            raise AssertionError("it ended")

        return await asyncio.wait_for(look(), SECONDS)


def run(tmp_path: Path, work: Callable[[Bench, AsyncIterator[dict[str, Any]]], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        (tmp_path / "state").mkdir()
        async with engine() as served:
            bench = Bench(tmp_path, served)
            async with aclosing(bench.watch.ticks()) as ticks:
                await work(bench, ticks)
        mine = {asyncio.current_task()}
        left = [repr(task.get_coro()) for task in asyncio.all_tasks() - mine]
        assert [task for task in left if not any(it in task for it in ENGINE)] == []

    asyncio.run(main())


def health(tick: dict[str, Any]) -> str:
    return str(tick["allocations"][0]["state"])


def test_a_model_across_two_nodes_is_one_endpoint(tmp_path: Path) -> None:
    """Both nodes are fresh, the model stands there once, and it is ready after one token."""

    async def work(bench: Bench, ticks: AsyncIterator[dict[str, Any]]) -> None:
        tick = await bench.until(lambda it: health(it) == "ready", ticks)
        assert [node["state"] for node in tick["nodes"]] == ["ok", "ok"]
        (only,) = tick["allocations"]
        assert (only["nodes"], only["engine"]["running"], only["engine"]["path"]) == (["head", "worker"], 0, "/metrics")
        assert [rank["rank"] for rank in only["ranks"]] == [0, 1]
        assert bench.engine.asked["/v1/chat/completions"] == 1
        assert only["canary"]["ok"] is True

    run(tmp_path, work)


def test_tokens_per_second_are_of_the_interval(tmp_path: Path) -> None:
    """The engine counts, the laptop divides; an idle engine has 0."""

    async def work(bench: Bench, ticks: AsyncIterator[dict[str, Any]]) -> None:
        await bench.until(lambda it: it["allocations"][0]["engine"]["generation_tokens_s"] == 0, ticks)

        def working(tick: dict[str, Any]) -> bool:
            bench.engine.tokens += 100
            return bool(tick["allocations"][0]["engine"]["generation_tokens_s"])

        tick = await bench.until(working, ticks)
        assert tick["allocations"][0]["engine"]["totals"]["generation_tokens"] > 100

    run(tmp_path, work)


def test_a_dead_node_does_not_hold_up_the_other(tmp_path: Path) -> None:
    """It is unreachable with its cause, the model is unknown, and the other node stays fresh."""

    async def work(bench: Bench, ticks: AsyncIterator[dict[str, Any]]) -> None:
        await bench.until(lambda it: health(it) == "ready", ticks)
        bench.links["worker"].cause = "timeout"
        tick = await bench.until(lambda it: it["nodes"][1]["state"] == "unknown", ticks)
        assert (tick["nodes"][0]["state"], tick["nodes"][1]["cause"], health(tick)) == ("ok", "timeout", "unknown")
        assert "worker cannot be asked" in tick["allocations"][0]["error"]
        bench.links["worker"].cause = None
        await bench.until(lambda it: health(it) == "ready", ticks)

    run(tmp_path, work)


def test_attempts_to_reach_a_node_become_rarer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1, 2, 4 ... 30 s, and from 1 s again once it was reached."""
    pauses: list[float] = []
    real = asyncio.sleep

    async def work(bench: Bench, ticks: AsyncIterator[dict[str, Any]]) -> None:
        link = bench.links["worker"]
        link.cause = "refused"

        async def sleep(seconds: float) -> None:
            if seconds >= 1:
                pauses.append(seconds)
                if len(pauses) == 8:
                    link.cause = None
                if len(pauses) == 9:
                    raise RuntimeError("enough")
                seconds = 0
            await real(seconds)

        async def stream(*_: Any, **__: Any) -> AsyncIterator[dict[str, Any]]:
            if link.cause is None:
                link.cause = "refused"
                yield {"hello": {}}
            raise Unreachable("worker", "refused", "refused!")

        monkeypatch.setattr(watch_module.asyncio, "sleep", sleep)
        monkeypatch.setattr(link, "stream", stream)
        with pytest.raises(RuntimeError, match="enough"):
            await bench.watch._follow("worker")
        monkeypatch.undo()

    async def main() -> None:
        (tmp_path / "state").mkdir()
        async with engine() as served:
            bench = Bench(tmp_path, served)
            async with aclosing(bench.watch.ticks()) as ticks:
                await work(bench, ticks)

    asyncio.run(main())
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30, 1]


def test_a_rank_that_dies_is_seen_although_the_head_answers(tmp_path: Path) -> None:
    """By its container: the engine's own health is not asked to notice."""

    async def work(bench: Bench, ticks: AsyncIterator[dict[str, Any]]) -> None:
        await bench.until(lambda it: health(it) == "ready", ticks)
        bench.links["worker"].containers = [container(1, "exited", exit_code=1)]
        tick = await bench.until(lambda it: health(it) == "dead", ticks)
        assert tick["allocations"][0]["error"] == "worker: rank 1 is exited with status 1"
        bench.links["worker"].containers = None
        tick = await bench.until(lambda it: health(it) == "unknown", ticks)
        assert "no daemon" in tick["allocations"][0]["error"]

    run(tmp_path, work)


def test_a_container_of_another_generation_is_not_its_rank(tmp_path: Path) -> None:
    """What an older start left behind does not make this one ready."""

    async def work(bench: Bench, ticks: AsyncIterator[dict[str, Any]]) -> None:
        bench.links["worker"].containers = [container(1, generation="g0")]
        tick = await bench.until(lambda it: health(it) == "dead", ticks)
        assert tick["allocations"][0]["error"] == "worker: rank 1 is gone"

    run(tmp_path, work)


def test_another_model_on_the_port_is_not_ready(tmp_path: Path) -> None:
    """And its metrics are not taken for this one's."""

    async def work(bench: Bench, ticks: AsyncIterator[dict[str, Any]]) -> None:
        bench.engine.model = "other"
        tick = await bench.until(lambda it: health(it) == "dead", ticks)
        assert "misrouted" in tick["allocations"][0]["error"]
        tick = await bench.until(lambda it: it["allocations"][0]["engine"]["foreign_models"], ticks)
        assert (tick["allocations"][0]["engine"]["running"], tick["allocations"][0]["engine"]["foreign_models"]) == (
            None,
            ["other"],
        )
        assert bench.engine.asked["/v1/chat/completions"] == 0

    run(tmp_path, work)


@pytest.mark.parametrize("why", ["busy", "silent", "lease"])
def test_no_token_is_asked_for_where_it_would_disturb(tmp_path: Path, why: str) -> None:
    """Not of an engine that works, nor of one that does not say, nor while a benchmark holds a lease."""

    async def work(bench: Bench, ticks: AsyncIterator[dict[str, Any]]) -> None:
        folder = tmp_path / "state/benchmarks/leases"
        folder.mkdir(parents=True)
        with open(folder / "b.json", "w") as lease:
            if why == "busy":
                bench.engine.running = 1
            elif why == "silent":
                bench.engine.metrics = "nothing 1\n"
            else:
                lease.write("{}")
                lease.flush()
                fcntl.flock(lease, fcntl.LOCK_EX)
            await bench.until(lambda it: bench.engine.asked["/metrics"] >= 6 and bench.engine.asked["/v1/models"], ticks)
            assert bench.engine.asked["/v1/chat/completions"] == 0
            tick = await bench.until(lambda it: True, ticks)
            assert (health(tick), tick["allocations"][0]["error"]) == ("unknown", "no token has been seen yet")
            if why == "busy":  # tokens that others are given prove as much
                bench.engine.tokens += 5
                await bench.until(lambda it: health(it) == "ready", ticks)
                return
        bench.engine.metrics = None
        await bench.until(lambda it: health(it) == "ready", ticks)
        assert bench.engine.asked["/v1/chat/completions"] == 1

    run(tmp_path, work)


def test_an_engine_that_hangs_on_the_token_is_still_scraped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And when its time is over, it is not ready, whatever /v1/models says."""
    monkeypatch.setattr(endpoint_module, "CANARY_DEADLINE_SECONDS", 0.6)

    async def work(bench: Bench, ticks: AsyncIterator[dict[str, Any]]) -> None:
        bench.engine.hangs = True
        await bench.until(lambda it: bench.engine.asked["/v1/chat/completions"], ticks)
        asked = bench.engine.asked["/metrics"]
        tick = await bench.until(lambda it: health(it) == "dead", ticks)
        assert "no answer within 0.6 s" in tick["allocations"][0]["error"]
        assert tick["allocations"][0]["engine"]["state"] == "ok"
        assert bench.engine.asked["/metrics"] > asked

    run(tmp_path, work)


def test_nim_metrics_are_looked_for_elsewhere_on_404_alone(tmp_path: Path) -> None:
    """/v1/metrics, then /metrics; an engine that is broken is not asked at another door."""

    async def work(bench: Bench, ticks: AsyncIterator[dict[str, Any]]) -> None:
        bench.found = Found(
            (Watched(bench.allocation.replace(engine="nim", metrics_paths=("/v1/metrics", "/metrics")), "g2", READY),)
        )
        bench.engine.status["/v1/metrics"] = 503
        tick = await bench.until(lambda it: it["allocations"][0]["engine"]["error"], ticks)
        assert "/v1/metrics answers 503" in tick["allocations"][0]["engine"]["error"]
        assert bench.engine.asked["/metrics"] == 0
        bench.engine.status["/v1/metrics"] = 404
        tick = await bench.until(lambda it: it["allocations"][0]["engine"]["path"], ticks)
        assert tick["allocations"][0]["engine"]["path"] == "/metrics"

    run(tmp_path, work)


def test_a_body_of_three_mebibytes_is_refused(tmp_path: Path) -> None:
    """The values are unknown, and why is said."""

    async def work(bench: Bench, ticks: AsyncIterator[dict[str, Any]]) -> None:
        bench.engine.metrics = "#" * (3 << 20)
        tick = await bench.until(lambda it: it["allocations"][0]["engine"]["error"], ticks)
        assert "larger than 2048 KiB" in tick["allocations"][0]["engine"]["error"]
        assert tick["allocations"][0]["engine"]["running"] is None

    run(tmp_path, work)


def test_a_laptop_that_slept_says_so(tmp_path: Path) -> None:
    """One tick is marked; everything is old until it was heard again, and nothing is green meanwhile."""

    async def work(bench: Bench, ticks: AsyncIterator[dict[str, Any]]) -> None:
        before = await bench.until(lambda it: health(it) == "ready", ticks)
        assert before["gap"] is False
        bench.offset += 600
        tick = await bench.until(lambda it: it["gap"], ticks)
        assert {node["state"] for node in tick["nodes"]} <= {"stale", "ok"}
        assert health(tick) != "ready" or all(node["age_s"] < 1 for node in tick["nodes"])
        engine = tick["allocations"][0]["engine"]
        assert engine["generation_tokens_s"] is None or engine["age_s"] < 1
        after = await bench.until(lambda it: health(it) == "ready", ticks)
        assert after["gap"] is False

    run(tmp_path, work)


def test_allocations_come_and_go_with_the_record(tmp_path: Path) -> None:
    """A record that is damaged is said to be, and what was known is watched on."""

    async def work(bench: Bench, ticks: AsyncIterator[dict[str, Any]]) -> None:
        await bench.until(lambda it: health(it) == "ready", ticks)
        bench.found = Found(())
        await bench.until(lambda it: it["allocations"] == [], ticks)
        asked = bench.engine.asked["/metrics"]
        for _ in range(3):
            await bench.until(lambda it: True, ticks)
        assert bench.engine.asked["/metrics"] <= asked + 1
        single = Allocation("m", "M", SINGLE, ("head",), (), "d", "m", bench.engine.url)
        bench.found = Found((Watched(single, GENERATION, READY),))
        await bench.until(lambda it: it["allocations"] and health(it) == "ready", ticks)

    run(tmp_path, work)


def test_a_slow_fabric_is_told_for_as_long_as_it_serves(tmp_path: Path) -> None:
    """What NCCL said at the start stands at the model, else what it was told to use; what nobody knows is not called slow."""
    models = tmp_path / "models.toml"
    text = """
        [cluster]
        head = "one"
        worker = "two"
        master_addr = "10.0.0.1"
        lan_url = "http://10.1.0.1:8000"
        worker_lan_url = "http://10.1.0.2:8000"
        hf_cache_host = "/cache"
        [models.m]
        image = "i"
        hf_id = "a/b"
        nnodes = 2
        """
    told = []
    for said, env in (("socket", ""), ("", '[models.m.env]\nNCCL_NET = "Socket"'), ("", "")):
        models.write_text(text + env)
        told_now = Placed(READY, DISTRIBUTED, "m", GENERATION, "d", ("head", "worker"), fabric=said)
        state.save(tmp_path, Controller((("head", told_now), ("worker", told_now))))
        watch = Watch({}, lambda: Found(()), tmp_path / "state")
        watch._found = placed(catalog.load(models), tmp_path)
        (only,) = watch.picture()["allocations"]
        told.append(only["slow_fabric"])
    assert told == [True, True, False]
