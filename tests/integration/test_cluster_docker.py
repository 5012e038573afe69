"""Ownership on a real Docker engine: what is ours by its id, and that nothing else is touched."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from cluster_rig import Rig
from cluster_rig.engine_daemon import IMAGE, EngineDaemon

from sparkguard.cluster import commands
from sparkguard.cluster.causes import NodeError
from sparkguard.cluster.commands import Turn
from sparkguard.cluster.observe import Questions, look
from sparkguard.cluster.ssh import Fleet
from sparkguard.core.cluster import RUNNING, UNKNOWN, Container, Holder, NodeView, Rank

T = TypeVar("T")
TOOL = Path(__file__).parents[1] / "tools" / "docker-engine.sh"
TURN = Turn("g1", Holder("laptop", 7, 1000.0, "up m", "mia", "g1"))


@pytest.fixture(scope="session")
def unpacked() -> Path:
    cache = Path(os.environ.get("SPARKGUARD_TEST_CACHE", "/var/cache/sparkguard-tests")) / "docker"
    made = subprocess.run([TOOL, cache], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    return cache


@pytest.fixture
def engine(rig: Rig, unpacked: Path) -> Iterator[EngineDaemon]:
    with EngineDaemon(rig.node("head"), unpacked) as engine:
        yield engine


def on(rig: Rig, work: Callable[[Fleet], Awaitable[T]]) -> T:
    async def run() -> T:
        async with Fleet(rig.nodes(), rig.ssh_opts, str(rig.folder / "s"), linger_seconds=0) as fleet:
            await commands.fence(fleet["head"], TURN)
            return await work(fleet)

    return asyncio.run(run())


def rank(*words: str, name: str = "vllm_m") -> Rank:
    options = ("--name", name, "--network", "host", "--ipc", "host", "--restart", "no")
    labels = ("--label", "sparkguard.model=m", "--label", "sparkguard.rank=0", "--label", "sparkguard.digest=d1")
    return Rank("head", 0, name, IMAGE, (*options, *labels, IMAGE, *words), "d1", None)


async def begun(fleet: Fleet, *words: str) -> str:
    created = await commands.create(fleet["head"], TURN, rank(*words), "m")
    return (await commands.start(fleet["head"], TURN, created.id)).id


async def head(fleet: Fleet, questions: Questions | None = None) -> NodeView:
    return (await look(fleet, {"head": questions or Questions()}))["head"]


async def only(fleet: Fleet) -> Container:
    view = await head(fleet)
    assert view.containers is not None and len(view.containers) == 1
    return view.containers[0]


def test_from_creation_to_removal(rig: Rig, engine: EngineDaemon) -> None:
    """Labels, state, exit status and absence are what the engine says they are."""

    async def work(fleet: Fleet) -> None:
        created = await commands.create(fleet["head"], TURN, rank(), "m")
        assert (created.state, created.generation, created.digest, created.model, created.rank) == ("created", "g1", "d1", "m", 0)
        assert (await commands.start(fleet["head"], TURN, created.id)).state == "running"
        seen = await only(fleet)
        assert (seen.id, seen.owned, seen.name, seen.gpu) == (created.id, True, "vllm_m", False)
        stopped = await commands.stop(fleet["head"], TURN, created.id, 10)
        assert stopped is not None and (stopped.state, stopped.exit_code) == ("exited", 0)
        await commands.remove(fleet["head"], TURN, created.id)
        assert (await head(fleet)).containers == ()
        assert await commands.stop(fleet["head"], TURN, created.id, 1) is None

    on(rig, work)
    assert engine.docker("ps", "--all", "--quiet") == ""


def test_the_daemon_is_asked_without_its_command(rig: Rig, engine: EngineDaemon) -> None:
    """Where both would ask the same daemon its socket is read, and with another context chosen the command is asked."""
    client = rig.node("head").folder / "bin/docker"
    config = rig.node("head").folder / "home/.docker/config.json"
    config.parent.mkdir()

    async def work(fleet: Fleet) -> None:
        identity = await begun(fleet)
        client.write_text("#!/bin/sh\necho the command was asked >&2\nexit 1\n")
        assert (await only(fleet)).id == identity
        config.write_text('{"currentContext": "elsewhere"}')
        view = await head(fleet)
        assert (view.containers, view.daemon_error) == (None, "the command was asked")

    words = client.read_text()
    on(rig, work)
    client.write_text(words)


def test_a_process_on_the_gpu_is_known_by_its_control_group(rig: Rig, engine: EngineDaemon) -> None:
    """The pid that nvidia-smi names leads to the container that it runs in."""

    async def work(fleet: Fleet) -> None:
        identity = await begun(fleet)
        pid = int(engine.docker("inspect", "--format", "{{.State.Pid}}", identity))
        rig.node("head").write("gpu.json", [[pid, "/bin/wait", 512]])
        view = await head(fleet)
        assert view.gpu is not None
        assert [(holder.pid, holder.container) for holder in view.gpu] == [(pid, identity)]

    on(rig, work)


def test_a_container_that_wants_gpus_is_known_before_it_runs(rig: Rig, engine: EngineDaemon) -> None:
    """By the engine's record of --gpus; that this machine has none shows when it is started, in the engine's words."""

    async def work(fleet: Fleet) -> None:
        what = rank()
        created = await commands.create(fleet["head"], TURN, what.replace(create=("--gpus", "all", *what.create)), "m")
        assert created.gpu
        with pytest.raises(NodeError, match="device driver") as failure:
            await commands.start(fleet["head"], TURN, created.id)
        assert failure.value.code == "docker"

    on(rig, work)


def test_a_name_that_is_taken(rig: Rig, engine: EngineDaemon) -> None:
    """The engine's conflict is told with who has the name, who is not touched."""
    theirs = engine.docker("run", "--detach", "--network", "host", "--name", "vllm_m", IMAGE)

    async def work(fleet: Fleet) -> None:
        with pytest.raises(NodeError) as failure:
            await commands.create(fleet["head"], TURN, rank(), "m")
        assert failure.value.code == "name_taken"
        found = failure.value.details["container"]
        assert isinstance(found, dict) and found["id"] == theirs
        with pytest.raises(NodeError) as failure:
            await commands.stop(fleet["head"], TURN, theirs, 1)
        assert failure.value.code == "foreign"
        seen = await only(fleet)
        assert (seen.id, seen.state, seen.owned) == (theirs, "running", False)

    on(rig, work)


def test_a_stop_is_as_patient_as_asked(rig: Rig, engine: EngineDaemon) -> None:
    """What ignores SIGTERM is killed after its grace, and that shows."""

    async def work(fleet: Fleet) -> None:
        stopped = await commands.stop(fleet["head"], TURN, await begun(fleet, "ignore"), 1)
        assert stopped is not None and (stopped.state, stopped.exit_code) == ("exited", 137)

    on(rig, work)


def test_what_ends_by_itself_tells_how(rig: Rig, engine: EngineDaemon) -> None:
    """Its exit status is the program's."""

    async def work(fleet: Fleet) -> None:
        await begun(fleet, "3")
        seen = await only(fleet)
        while seen.state == "running":
            seen = await only(fleet)
        assert (seen.state, seen.exit_code, seen.oom_killed) == ("exited", 3, False)

    on(rig, work)


def test_a_daemon_that_died_hides_nothing(rig: Rig, engine: EngineDaemon) -> None:
    """Meanwhile all is unknown and nothing is done; when it is back, what was ours is ours."""

    async def work(fleet: Fleet) -> None:
        identity = await begun(fleet)
        engine.kill()
        view = await head(fleet)
        assert (view.daemon, view.containers, view.error) == (UNKNOWN, None, None)
        assert "docker daemon" in str(view.daemon_error)
        for refused in (commands.stop(fleet["head"], TURN, identity, 1), commands.remove(fleet["head"], TURN, identity)):
            with pytest.raises(NodeError) as failure:
                await refused
            assert (failure.value.code, failure.value.status) == ("daemon", 69)
        engine.start()
        assert (await head(fleet)).daemon == RUNNING
        seen = await only(fleet)
        assert (seen.id, seen.owned) == (identity, True)

    on(rig, work)


def test_images_by_reference(rig: Rig, engine: EngineDaemon) -> None:
    """One that is there has its id, one that is not has none, and a recipe's check runs in the one."""

    async def work(fleet: Fleet) -> None:
        view = await head(fleet, Questions(images=(IMAGE, "nobody/knows:1")))
        assert view.images == ((IMAGE, engine.docker("image", "inspect", "--format", "{{.Id}}", IMAGE)), ("nobody/knows:1", None))
        check = ["--rm", "--pull", "never", "--network", "none", IMAGE]
        assert (await commands.check(fleet["head"], TURN, [*check, "0"], 30))[0]
        assert not (await commands.check(fleet["head"], TURN, [*check, "3"], 30))[0]
        content, words = await commands.check(fleet["head"], TURN, check, 2)
        assert not content and "within 2 s" in words
        assert (await head(fleet)).containers == ()

    on(rig, work)
