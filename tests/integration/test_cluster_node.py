"""The programs that nodes run, on real nodes: what they tell, and the fence around what they do."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
from cluster_rig import Rig, image_id

from sparkguard.cluster import commands
from sparkguard.cluster.causes import NodeError, Unreachable
from sparkguard.cluster.commands import Turn
from sparkguard.cluster.observe import Questions, look
from sparkguard.cluster.ssh import Fleet
from sparkguard.core.cluster import RUNNING, UNKNOWN, Holder, Rank

T = TypeVar("T")
IMAGE = "vllm/vllm-openai:v0.30.0"


def on(rig: Rig, work: Callable[[Fleet], Awaitable[T]]) -> T:
    async def run() -> T:
        async with Fleet(rig.nodes(), rig.ssh_opts, str(rig.folder / "state"), linger_seconds=0) as fleet:
            return await work(fleet)

    return asyncio.run(run())


def turn(generation: str = "g1", verb: str = "up m") -> Turn:
    return Turn(generation, Holder("laptop", 7, 1000.0, verb, "mia", generation))


def rank(node: str = "head", name: str = "vllm_m", number: int = 0) -> Rank:
    words = ("--name", name, "--gpus", "all", "--label", "sparkguard.model=m", "--label", f"sparkguard.rank={number}")
    served = ("serve", "m", "--served-model-name", "m", "--port", "8000")
    return Rank(node, number, name, IMAGE, (*words, IMAGE, *served, *(("--headless",) if number else ())), "d1", 8000)


async def begun(fleet: Fleet, node: str = "head", which: Turn | None = None, what: Rank | None = None) -> str:
    """A running container of ours: its id."""
    await commands.fence(fleet[node], which or turn())
    created = await commands.create(fleet[node], which or turn(), what or rank(), "m")
    await commands.start(fleet[node], which or turn(), created.id)
    return created.id


def test_a_container_from_creation_to_removal(rig: Rig) -> None:
    """Created it does not run; started it holds the GPU and its port, known as ours; stopped and removed it is gone."""

    async def work(fleet: Fleet) -> None:
        link = fleet["head"]
        await commands.fence(link, turn())
        created = await commands.create(link, turn(), rank(), "m")
        assert (created.state, created.gpu, created.generation, created.rank, len(created.id)) == ("created", True, "g1", 0, 64)
        assert (await commands.start(link, turn(), created.id)).state == "running"
        view = (await look(fleet, {"head": Questions(ports=(8000,))}))["head"]
        while not view.listeners:
            view = (await look(fleet, {"head": Questions(ports=(8000,))}))["head"]
        assert view.containers is not None and view.gpu is not None
        assert [(found.id, found.owned, found.model) for found in view.containers] == [(created.id, True, "m")]
        assert [(holder.container, holder.used_bytes) for holder in view.gpu] == [(created.id, 51200 << 20)]
        assert [listener.port for listener in view.listeners] == [8000]
        stopped = await commands.stop(link, turn(), created.id, 10)
        assert stopped is not None and (stopped.state, stopped.exit_code) == ("exited", 0)
        await commands.remove(link, turn(), created.id)
        assert (await look(fleet))["head"].containers == ()

    on(rig, work)


def test_an_older_generation_that_arrives_late_changes_nothing(rig: Rig) -> None:
    """Its command ends with status 75, and docker was not asked."""

    async def work(fleet: Fleet) -> str:
        identity = await begun(fleet)
        await commands.fence(fleet["head"], turn("g2"), previous=("g1",))
        before = len(rig.node("head").calls())
        link = fleet["head"]
        for late in (commands.stop(link, turn(), identity, 1), commands.create(link, turn(), rank(name="x"), "m")):
            with pytest.raises(NodeError) as failure:
                await late
            assert (failure.value.code, failure.value.status) == ("stale", 75)
        assert len(rig.node("head").calls()) == before
        return identity

    assert on(rig, work)
    assert "running" in rig.node("head").docker("ps")


def test_a_generation_that_is_not_to_be_replaced_stays(rig: Rig) -> None:
    """A fence that expects another generation than the node has is refused as stale."""

    async def work(fleet: Fleet) -> None:
        await commands.fence(fleet["head"], turn("theirs"))
        with pytest.raises(NodeError, match="theirs") as failure:
            await commands.fence(fleet["head"], turn("g2"), previous=("g1",))
        assert failure.value.code == "stale"

    on(rig, work)


def test_a_second_laptop_is_told_who_is_at_work(rig: Rig) -> None:
    """While one transition holds a node, another's fence and hold are refused with holder, host, pid and verb."""
    theirs = Turn("g2", Holder("other", 9, 2000.0, "stop", "tom", "g2"))

    async def work(fleet: Fleet) -> None:
        link = fleet["head"]
        await commands.fence(link, turn())
        async with commands.hold(link, turn()):
            view = (await look(fleet))["head"]
            assert view.lock == Holder("laptop", 7, 1000.0, "up m", "mia", "g1")
            for refused in (commands.fence(link, theirs), _hold(link, theirs)):
                with pytest.raises(NodeError, match=r"`up m` by mia on laptop, pid 7") as failure:
                    await refused
                assert (failure.value.code, failure.value.status) == ("locked", 75)
            await commands.create(link, turn(), rank(), "m")
        await commands.fence(link, theirs)
        assert (await look(fleet))["head"].lock is None

    async def _hold(link: object, who: Turn) -> None:
        async with commands.hold(link, who):  # type: ignore[arg-type]
            raise AssertionError

    on(rig, work)


def test_a_dead_daemon_is_unknown(rig: Rig) -> None:
    """Its containers are None and never "none", its words are kept, and the other node is seen as it is."""
    rig.node("head").dead_daemon()

    async def work(fleet: Fleet) -> None:
        views = await look(fleet)
        assert (views["head"].daemon, views["head"].containers) == (UNKNOWN, None)
        assert "Cannot connect to the Docker daemon" in str(views["head"].daemon_error)
        assert (views["worker"].daemon, views["worker"].containers) == (RUNNING, ())

    on(rig, work)


def test_a_stop_outlives_the_laptop_that_asked_for_it(rig: Rig) -> None:
    """Its ssh is killed while the engine drains: the lock is held until it has ended, and whoever comes next waits for that."""
    rig.node("head").behave("vllm_m", ignore_term=True)

    async def work(fleet: Fleet) -> None:
        identity = await begun(fleet)
        stop = asyncio.create_task(commands.stop(fleet["head"], turn(), identity, 2))
        while (await look(fleet))["head"].lock is None:
            assert not stop.done()
        stop.cancel()
        await asyncio.wait([stop])
        view = (await look(fleet))["head"]
        assert view.lock is not None and view.lock.verb == "up m"
        await commands.fence(fleet["head"], turn("g2"), previous=("g1",))
        view = (await look(fleet))["head"]
        assert view.containers is not None
        assert [found.state for found in view.containers] == ["exited"]

    on(rig, work)


def test_a_docker_that_is_killed_says_nothing_about_containers(rig: Rig) -> None:
    """Without a word of its own that a container is missing, it is not: all of it is unknown."""
    head = rig.node("head")

    async def work(fleet: Fleet) -> None:
        identity = await begun(fleet)
        client = head.folder / "bin/docker"
        words = client.read_text()
        client.write_text(f"#!/bin/sh\ncase $1 in ps) echo {identity} ;; *) kill -9 $$ ;; esac\n")
        view = (await look(fleet))["head"]
        assert (view.daemon, view.containers) == (UNKNOWN, None)
        with pytest.raises(NodeError) as failure:
            await commands.stop(fleet["head"], turn(), identity, 1)
        assert failure.value.code == "daemon"
        client.write_text(words)

    on(rig, work)


def test_a_missing_container_is_not_a_dead_daemon(rig: Rig) -> None:
    """Stopping what is gone is done; stopping behind a dead daemon is an error."""

    async def work(fleet: Fleet) -> None:
        await commands.fence(fleet["head"], turn())
        assert await commands.stop(fleet["head"], turn(), "ab" * 32, 1) is None
        rig.node("head").dead_daemon()
        with pytest.raises(NodeError, match="Cannot connect") as failure:
            await commands.stop(fleet["head"], turn(), "ab" * 32, 1)
        assert (failure.value.code, failure.value.status) == ("daemon", 69)

    on(rig, work)


def test_what_a_plan_asks_for_is_told(rig: Rig) -> None:
    """Image ids, missing paths, interfaces that are up or absent, RoCE devices that are active, down or absent, and memory."""
    rig.node("head").set_hca("roceP2p1s0f1", "1: DOWN")

    async def work(fleet: Fleet) -> None:
        asked = Questions(
            images=(IMAGE, "nobody/knows:1"), paths=("/root", "/root/none"), interfaces=("enp1s0f1np1", "enp1s0f0np0"),
            hcas=("rocep1s0f1", "roceP2p1s0f1", "mlx5_9"),
        )  # fmt: skip
        view = (await look(fleet, {"head": asked}))["head"]
        assert view.images == ((IMAGE, image_id(IMAGE)), ("nobody/knows:1", None))
        assert view.missing == ("/root/none",)
        assert view.interfaces == (("enp1s0f1np1", "up"), ("enp1s0f0np0", "absent"))
        assert view.hcas == (("rocep1s0f1", "active"), ("roceP2p1s0f1", "down"), ("mlx5_9", "absent"))
        assert view.pools[0].available_bytes == 110 << 30
        assert view.boot_id == rig.node("head").boot_id

    on(rig, work)


def test_a_name_that_another_container_has(rig: Rig) -> None:
    """The creation is refused with that container; it is not touched, and no receipt is left."""
    rig.node("head").docker("create", "--name", "vllm_m", IMAGE, "serve")

    async def work(fleet: Fleet) -> None:
        await commands.fence(fleet["head"], turn())
        with pytest.raises(NodeError, match="vllm_m is taken") as failure:
            await commands.create(fleet["head"], turn(), rank(), "m")
        assert failure.value.code == "name_taken"
        found = failure.value.details["container"]
        assert isinstance(found, dict)
        assert (found["name"], found["state"]) == ("vllm_m", "created")
        view = (await look(fleet))["head"]
        assert view.containers is not None
        assert [(container.name, container.owned) for container in view.containers] == [("vllm_m", False)]

    on(rig, work)


def test_a_foreign_container_is_not_stopped(rig: Rig) -> None:
    """Only what a receipt names is ours; what the catalog names to be stopped may be stopped as well."""
    identity = rig.node("head").docker("run", "-d", "--name", "theirs", IMAGE, "serve")

    async def work(fleet: Fleet) -> None:
        await commands.fence(fleet["head"], turn())
        with pytest.raises(NodeError, match=r"theirs .* is not ours"):
            await commands.stop(fleet["head"], turn(), identity, 1)
        assert "running" in rig.node("head").docker("ps")
        stopped = await commands.stop(fleet["head"], turn(), identity, 5, named=("theirs",))
        assert stopped is not None and stopped.state == "exited"

    on(rig, work)


def test_a_stop_that_was_not_permitted_is_a_failure(rig: Rig) -> None:
    """docker's words are told, and the container stays ours."""

    async def work(fleet: Fleet) -> None:
        identity = await begun(fleet)
        rig.node("head").deny("stop")
        with pytest.raises(NodeError, match="permission denied") as failure:
            await commands.stop(fleet["head"], turn(), identity, 1)
        assert failure.value.code == "docker"
        view = (await look(fleet))["head"]
        assert view.containers is not None
        assert [(found.state, found.owned) for found in view.containers] == [("running", True)]

    on(rig, work)


def test_a_creation_whose_program_is_killed_is_ours_nonetheless(rig: Rig) -> None:
    """Its container is known as ours by the label of the intent, and the lock is held for as long as docker is at it."""
    head = rig.node("head")
    (head.folder / "docker/hang_create").write_text("30")

    async def work(fleet: Fleet) -> None:
        await commands.fence(fleet["head"], turn())
        creation = asyncio.create_task(commands.create(fleet["head"], turn(), rank(), "m"))
        while not head.docker("ps", "--all", "--quiet"):
            await asyncio.sleep(0.01)
        for pid, line in head.programs().items():
            if "python3 -I -S -u" in line:
                os.kill(pid, signal.SIGKILL)
        with pytest.raises(Unreachable):
            await creation
        view = (await look(fleet))["head"]
        assert view.containers is not None and view.lock is not None and view.lock.verb == "up m"
        assert [(found.name, found.owned) for found in view.containers] == [("vllm_m", True)]

    on(rig, work)


def test_the_desktop_is_exempt_only_when_it_is_the_desktop(rig: Rig) -> None:
    """A process that has only its name blocks; unknown memory is None."""
    head = rig.node("head")
    head.write("gpu.json", [[next(iter(head.pids())), "/usr/libexec/gnome-remote-desktop-daemon", "[N/A]"]])

    async def work(fleet: Fleet) -> None:
        view = (await look(fleet))["head"]
        assert view.gpu is not None
        assert [(holder.name, holder.used_bytes, holder.exempt) for holder in view.gpu] == [
            ("/usr/libexec/gnome-remote-desktop-daemon", None, False)
        ]

    on(rig, work)


def test_a_gpu_that_does_not_answer_is_unknown(rig: Rig) -> None:
    """nvidia-smi's words are kept, and its holders are None."""
    (rig.node("head").folder / "gpu_dead").write_text("NVIDIA-SMI has failed because it couldn't communicate with the driver.")
    view = on(rig, look)["head"]
    assert view.gpu is None and "couldn't communicate" in str(view.gpu_error)


def test_a_damaged_record_is_not_overwritten(rig: Rig) -> None:
    """node.json says what is ours: when it cannot be read, nothing is done, and the file stays as it is."""
    path = rig.node("head").state_dir / "node.json"
    path.parent.mkdir(parents=True)
    for text in ('{"version": 1, "gener', '{"version": 9, "generation": null, "receipts": {}, "intents": {}}'):
        path.write_text(text)

        async def work(fleet: Fleet) -> None:
            with pytest.raises(NodeError, match=r"node\.json") as failure:
                await commands.fence(fleet["head"], turn())
            assert (failure.value.code, failure.value.status) == ("state", 78)
            assert (await look(fleet))["head"].cause == "state"

        on(rig, work)
        assert path.read_text() == text


def test_the_song_factory_is_asked_only_when_it_is_of_our_version(rig: Rig) -> None:
    """Its status is told; a factory without the marker is not called at all."""
    head = rig.node("head")
    settings = {"factory_root": str(head.folder / "factory"), "service": "yue-icl.service"}
    head.factory(active_job={"job_id": "song-1"})

    async def work(fleet: Fleet) -> None:
        asked = {"head": Questions(yue=settings)}
        view = (await look(fleet, asked))["head"].yue
        assert view is not None
        assert (view.worker, view.api_version, view.busy, view.jobs, view.active) == ("yue-head", 2, True, ("song-1",), False)
        await commands.fence(fleet["head"], turn())
        await commands.unit(fleet["head"], turn(), "yue-icl.service", "start")
        after = await commands.yue(fleet["head"], turn(), settings, "cancel", job_id="song-1")
        assert (after.busy, after.jobs) == (False, ())
        admitted = await commands.yue(fleet["head"], turn(), settings, "admit", admit_generation="g1")
        assert (admitted.accepting, admitted.generation) == (True, "g1")
        view = (await look(fleet, asked))["head"].yue
        assert view is not None and view.active
        path = head.folder / "factory/yue_factory.py"
        path.write_text(path.read_text().replace("API_VERSION = 2", "API_VERSION = 1"))
        before = (head.folder / "factory/controls").read_text()
        view = (await look(fleet, asked))["head"].yue
        assert view is not None and view.worker is None and "another version" in str(view.error)
        with pytest.raises(NodeError, match="another version"):
            await commands.yue(fleet["head"], turn(), settings, "drain")
        assert (head.folder / "factory/controls").read_text() == before

    on(rig, work)


def test_a_recipes_check_ends_with_its_time(rig: Rig) -> None:
    """A check says what it found by its status; one that hangs is killed, and leaves no container."""

    async def work(fleet: Fleet) -> None:
        await commands.fence(fleet["head"], turn())
        assert await commands.check(fleet["head"], turn(), ["--rm", "check:1", "true"], 20) == (True, "")
        complaint = ("sh", "-c", "echo no config.json >&2; exit 3")
        fine, words = await commands.check(fleet["head"], turn(), ["--rm", "check:1", *complaint], 20)
        assert (fine, words) == (False, "no config.json")
        started = time.monotonic()
        fine, words = await commands.check(fleet["head"], turn(), ["--rm", "check:1", "sleep", "300"], 1)
        assert not fine and "within 1 s" in words and time.monotonic() - started < 20
        assert rig.node("head").docker("ps", "--all", "--quiet") == ""

    on(rig, work)


def test_caches_are_dropped_only_where_sudo_asks_nothing(rig: Rig) -> None:
    """Elsewhere nothing is dropped, and that is no failure."""
    head = rig.node("head")

    async def work(fleet: Fleet) -> None:
        await commands.fence(fleet["head"], turn())
        head.sudo(password="x")
        assert not await commands.drop_caches(fleet["head"], turn())
        head.sudo(passwordless=True)
        assert await commands.drop_caches(fleet["head"], turn())
        assert (head.folder / "tee.log").read_text() == "/proc/sys/vm/drop_caches 3\n"

    on(rig, work)
