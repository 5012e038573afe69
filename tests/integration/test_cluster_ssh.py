"""The nodes over ssh: real sshds, links that fail in every way that they do, and nothing that stays behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest
from cluster_rig import Rig, RigNode

from sparkguard.cluster import channel, commands, program, sockets
from sparkguard.cluster.causes import NodeError, Unreachable
from sparkguard.cluster.commands import Turn
from sparkguard.cluster.observe import look
from sparkguard.cluster.ssh import Fleet
from sparkguard.core.cluster import Holder

T = TypeVar("T")
QUICK = ("-o", "ConnectTimeout=1")

PROGRAMS = {
    "echo": "def main(request, reply):\n    reply(request)\n",
    "wait": "import threading\ndef main(request, reply):\n    reply({'begun': True})\n    threading.Event().wait()\n",
    "ticks": "import time\ndef main(request, reply):\n    n = 0\n    while True:\n"
    "        reply({'n': n})\n        n += 1\n        time.sleep(0.02)\n",
    "child": "from sparkguard.cluster.node.base import run\n"
    "def main(request, reply):\n    done = run(('sleep', '300'), 200)\n    reply({'status': done.status})\n",
    "long": "from sparkguard.cluster.node.base import finishing, run, state_dir\n"
    "def main(request, reply):\n    with finishing():\n        open(state_dir() + '/begun', 'a').write('x')\n"
    "        run(('sh', '-c', 'until [ -e ' + state_dir() + '/go ]; do sleep 0.02; done'), 30)\n"
    "        open(state_dir() + '/done', 'w').close()\n    reply({'ok': True})\n",
    "huge": "import os\ndef main(request, reply):\n    while True:\n        os.write(1, b'x' * 65536)\n",
    "endless": "def main(request, reply):\n    while True:\n        reply({})\n",
    "wordy": "def main(request, reply):\n    raise ValueError('x' * 1000000 + ' the end')\n",
    "noise": "import os\ndef main(request, reply):\n    os.write(1, b'this is no JSON\\n')\n",
    "scalar": "import os\ndef main(request, reply):\n    os.write(1, b'[1, 2]\\n')\n",
    "mute": "import os\ndef main(request, reply):\n    os._exit(3)\n",
    "silent": "def main(request, reply):\n    pass\n",
    "bug": "def main(request, reply):\n    reply({'x': 1 / request['zero']})\n",
    "secret": "from sparkguard.cluster.node.base import secret\n"
    "def main(request, reply):\n    import sys\n    text = secret()\n"
    "    reply({'length': len(text), 'again': len(secret()), 'argv': sys.argv, 'request': request})\n",
}  # fmt: skip


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small programs beside the real ones."""
    real = program._source
    monkeypatch.setattr(program, "_source", lambda name: f'"""{name}"""\n{PROGRAMS[name]}' if name in PROGRAMS else real(name))
    program._modules.cache_clear()


def on(rig: Rig, work: Callable[[Fleet], Awaitable[T]], opts: tuple[str, ...] = QUICK, linger: int = 0) -> T:
    async def run() -> T:
        async with Fleet(rig.nodes(), (*rig.ssh_opts, *opts), str(rig.folder / "s"), linger_seconds=linger) as fleet:
            return await work(fleet)

    return asyncio.run(run())


async def until(holds: Callable[[], bool], call: asyncio.Task[object]) -> None:
    """Returns when it holds, while the call is under way."""
    while not holds():
        if call.done():
            raise AssertionError(f"it has ended: {call.result()!r}")
        await asyncio.sleep(0.01)


def sleeps(node: RigNode) -> bool:
    return any("sleep" in line for line in node.programs().values())


async def gone(node: RigNode) -> None:
    """Returns when no program of ours runs on the node."""
    async with asyncio_timeout(10):
        while node.programs():
            await asyncio.sleep(0.01)


class asyncio_timeout:
    """asyncio.timeout of Python 3.11, as far as it is needed here."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._handle = asyncio.get_running_loop().call_later(self._seconds, task.cancel)

    async def __aexit__(self, *_: object) -> None:
        self._handle.cancel()


def ssh_processes(rig: Rig) -> dict[int, str]:
    """The ssh processes of this rig, by pid."""
    lines = subprocess.run(["ps", "-ww", "-eo", "pid=,args="], capture_output=True, text=True, check=True).stdout.splitlines()
    split = (line.strip().partition(" ") for line in lines)
    return {int(pid): words for pid, _, words in split if words.startswith("ssh ") and str(rig.folder) in words}


def masters(rig: Rig) -> list[int]:
    return [pid for pid, words in ssh_processes(rig).items() if " -MNf " in words]


def kill_masters(rig: Rig) -> None:
    for pid in masters(rig):
        os.kill(pid, signal.SIGKILL)


def test_one_login_serves_all_calls(rig: Rig) -> None:
    """Twelve calls at once are answered over one connection, four at a time."""

    async def work(fleet: Fleet) -> None:
        answers = await asyncio.gather(*(fleet["head"].call("echo", {"n": n}, seconds=20) for n in range(12)))
        assert [answer["n"] for answer in answers] == list(range(12))

    on(rig, work)
    assert rig.node("head").relay.connections == 1


def test_a_connection_outlives_its_command(rig: Rig) -> None:
    """A second command finds the first one's connection, which ends by itself when it is not used."""

    async def work(fleet: Fleet) -> None:
        await fleet["head"].call("echo", {}, seconds=20)

    on(rig, work, linger=60)
    on(rig, work, linger=60)
    assert rig.node("head").relay.connections == 1
    assert len(masters(rig)) == 1
    on(rig, lambda fleet: fleet["head"].close(), linger=60)


def test_more_calls_than_sshd_has_sessions(rig: Rig) -> None:
    """Beyond MaxSessions calls wait for their turn: none fails, and none logs in by itself."""
    head = rig.node("head")
    head.sshd_config["MaxSessions"] = "2"
    head.restart_sshd()

    async def work(fleet: Fleet) -> None:
        before = head.relay.connections
        others = await asyncio.gather(*(fleet["head"].call("echo", {"n": n}, seconds=20) for n in range(8)))
        assert [answer["n"] for answer in others] == list(range(8))
        assert head.relay.connections == before + 1

    on(rig, work)


def test_two_processes_start_one_connection(rig: Rig) -> None:
    """Commands that begin at the same moment share a master; none is left without."""

    async def work() -> None:
        fleets = [Fleet(rig.nodes(), rig.ssh_opts, str(rig.folder / "s")) for _ in range(4)]
        await asyncio.gather(*(fleet["head"].call("echo", {}, seconds=20) for fleet in fleets))
        await fleets[0]["head"].close()

    asyncio.run(work())
    assert rig.node("head").relay.connections == 1


def test_a_master_that_was_killed_is_replaced(rig: Rig) -> None:
    """Its socket stays behind; reads and writes find a new connection."""

    async def work(fleet: Fleet) -> None:
        for repeatable in (True, False):
            await fleet["head"].call("echo", {}, seconds=20)
            kill_masters(rig)
            assert await fleet["head"].call("echo", {"n": 1}, seconds=20, repeatable=repeatable) == {"n": 1}

    on(rig, work)
    assert rig.node("head").relay.connections == 3


def test_a_read_is_asked_again_and_a_write_is_not(rig: Rig) -> None:
    """When the connection breaks under a program, a repeatable one runs a second time; any other fails, having run once."""
    begun = rig.node("head").state_dir / "begun"

    async def broken(fleet: Fleet, repeatable: bool, runs: int) -> str:
        call = asyncio.create_task(fleet["head"].call("long", {}, seconds=20, repeatable=repeatable))
        await until(begun.exists, call)
        kill_masters(rig)
        if runs == 2:
            while begun.read_text() != "xx" and not call.done():
                await asyncio.sleep(0.01)
        (begun.parent / "go").touch()
        try:
            await call
        except Unreachable as error:
            return f"{error.cause}: {error.message}"
        return "answered"

    async def work(fleet: Fleet) -> None:
        assert (await broken(fleet, False, 1)).startswith("transport")
        assert begun.read_text() == "x"
        await gone(rig.node("head"))
        for name in ("begun", "go"):
            (begun.parent / name).unlink()
        assert await broken(fleet, True, 2) == "answered"

    on(rig, work)


def test_what_must_be_finished_is(rig: Rig) -> None:
    """A program that was in the middle of a side effect when its ssh was killed ends it, and only then is gone."""
    head = rig.node("head")

    async def work(fleet: Fleet) -> None:
        call = asyncio.create_task(fleet["head"].call("long", {}, seconds=20))
        await until((head.state_dir / "begun").exists, call)
        call.cancel()
        await asyncio.wait([call])
        assert not (head.state_dir / "done").exists() and head.programs()
        (head.state_dir / "go").touch()
        await gone(head)
        assert (head.state_dir / "done").exists()

    on(rig, work)


def test_a_cancelled_call_leaves_nothing(rig: Rig) -> None:
    """Neither an ssh here nor the program or its child there."""
    head = rig.node("head")

    async def work(fleet: Fleet) -> None:
        call = asyncio.create_task(fleet["head"].call("child", {}, seconds=300))
        await until(lambda: sleeps(head), call)
        call.cancel()
        await asyncio.wait([call])
        await gone(head)
        assert sorted(ssh_processes(rig)) == sorted(masters(rig))

    on(rig, work)


def test_a_killed_laptop_leaves_nothing(rig: Rig) -> None:
    """After kill -9 of the whole command its program on the node ends, and with it its child."""
    head = rig.node("head")
    script = (
        "import asyncio, sys\nfrom sparkguard.cluster import program\nfrom sparkguard.cluster.ssh import Fleet\n"
        "from sparkguard.core.cluster import Node\nreal = program._source\n"
        f"program._source = lambda name: {PROGRAMS['child']!r} if name == 'child' else real(name)\n"
        f"fleet = Fleet([Node('head', 'head', '')], {(*rig.ssh_opts,)!r}, {str(rig.folder / 's')!r}, linger_seconds=1)\n"
        "asyncio.run(fleet['head'].call('child', {}, seconds=300))\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], start_new_session=True) as laptop:

        async def work() -> None:
            while not sleeps(head):
                await asyncio.sleep(0.01)
            laptop.kill()
            await gone(head)

        asyncio.run(work())


def test_a_program_ends_at_its_deadline_although_the_link_is_dead(rig: Rig) -> None:
    """The node needs nobody to tell it."""
    head = rig.node("head")

    async def work(fleet: Fleet) -> None:
        call = asyncio.create_task(fleet["head"].call("child", {}, seconds=2))
        await until(lambda: sleeps(head), call)
        head.relay.half_open()
        await gone(head)
        call.cancel()
        await asyncio.wait([call])
        head.relay.forward()

    on(rig, work)


def test_a_program_that_does_not_end_says_so(rig: Rig) -> None:
    """At its deadline the node's own answer is a timeout: the node is there."""
    with pytest.raises(NodeError, match="child has not ended within 1 s") as failure:
        on(rig, lambda fleet: fleet["head"].call("child", {}, seconds=1))
    assert failure.value.code == "timeout"


def test_a_refused_connection(rig: Rig) -> None:
    """Nobody listens: "refused", at once, and the other node is seen."""
    rig.node("worker").relay.refuse()
    views = on(rig, look)
    assert (views["worker"].cause, views["head"].error) == ("refused", None)
    assert views["worker"].containers is None


def test_a_banner_that_never_comes(rig: Rig) -> None:
    """sshd accepts and says nothing: "banner", within the time for a connection."""
    rig.node("worker").relay.hang_banner()
    started = time.monotonic()
    views = on(rig, look)
    assert (views["worker"].cause, views["head"].error) == ("banner", None)
    assert time.monotonic() - started < 10


def test_a_node_that_is_frozen(rig: Rig) -> None:
    """Its kernel accepts and its sshd does not: "banner", as if no memory were left on it."""
    rig.node("worker").freeze()
    views = on(rig, look)
    assert (views["worker"].cause, views["head"].error) == ("banner", None)


def test_a_link_that_goes_silent(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm connection that swallows everything is a timeout, and is given up: the next call connects anew."""
    monkeypatch.setattr(channel, "BEGIN_SECONDS", 1)
    worker = rig.node("worker")

    async def work(fleet: Fleet) -> None:
        await fleet["worker"].call("echo", {}, seconds=20)
        worker.relay.half_open()
        with pytest.raises(Unreachable) as failure:
            await fleet["worker"].call("echo", {}, seconds=20)
        assert failure.value.cause == "timeout"
        views = await look(fleet)
        assert (views["worker"].cause, views["head"].error) == ("banner", None)
        worker.relay.forward()
        assert await fleet["worker"].call("echo", {"n": 1}, seconds=20) == {"n": 1}

    on(rig, work)


def test_a_slow_link(rig: Rig) -> None:
    """A tenth of a second each way is slow, and no fault."""
    rig.node("worker").relay.delay_seconds = 0.1
    assert on(rig, look, ("-o", "ConnectTimeout=10"))["worker"].error is None


def test_a_stream_that_goes_silent(rig: Rig) -> None:
    """After quiet_seconds without a line the node counts as unreachable."""

    async def work(fleet: Fleet) -> None:
        seen = 0
        with pytest.raises(Unreachable, match="said nothing") as failure:
            async for reply in fleet["head"].stream("ticks", {}, quiet_seconds=1):
                seen = reply["n"]
                if seen == 3:
                    rig.node("head").relay.half_open()
        assert seen >= 3 and failure.value.cause == "timeout"
        rig.node("head").relay.forward()

    on(rig, work)


def test_a_stream_ends_with_its_reader(rig: Rig) -> None:
    """When nobody listens any more its program is gone from the node."""

    async def work(fleet: Fleet) -> None:
        stream = fleet["head"].stream("ticks", {}, quiet_seconds=5)
        assert [await anext(stream) for _ in range(3)] == [{"n": 0}, {"n": 1}, {"n": 2}]
        await stream.aclose()
        await gone(rig.node("head"))

    on(rig, work)


def test_a_stream_whose_laptop_went_silent(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node does not wait for a link that is dead: without the laptop's beat its program ends, and with it its lock."""
    monkeypatch.setattr(channel, "BEAT_SECONDS", 0.2)
    head = rig.node("head")

    async def work(fleet: Fleet) -> None:
        turn = Turn("g1", Holder("laptop", 7, 1000.0, "up m"))
        async with commands.hold(fleet["head"], turn):
            assert (await look(fleet))["head"].lock is not None
            head.relay.half_open()
            await gone(head)
            head.relay.forward()
        assert (await look(fleet))["head"].lock is None

    on(rig, work)


def test_a_host_key_that_changed(rig: Rig) -> None:
    """It is not trusted, and the cause says so."""
    known = rig.folder / "known_hosts"
    lines = known.read_text().splitlines()
    known.write_text("\n".join((lines[0].split()[0] + " " + " ".join(lines[1].split()[1:]), lines[1])) + "\n")
    views = on(rig, look)
    assert (views["head"].cause, views["worker"].error) == ("host_key", None)


def test_a_key_that_is_not_known_there(rig: Rig) -> None:
    """Without a way in the cause is "auth", and nobody is asked for a password."""
    (rig.folder / "key.pub").write_text("")
    assert on(rig, look)["head"].cause == "auth"


def test_a_name_that_means_nothing(rig: Rig) -> None:
    """No such host: "transport", in ssh's own words."""

    async def work() -> None:
        nodes = tuple(node.replace(ssh="nowhere.invalid") for node in rig.nodes()[:1])
        view = (await look(Fleet(nodes, rig.ssh_opts, str(rig.folder / "s"))))["head"]
        assert view.cause == "transport" and "nowhere.invalid" in str(view.error)

    asyncio.run(work())


def test_a_node_without_python(rig: Rig) -> None:
    """The shell's status is not ssh's: "protocol", with what is missing."""
    head = rig.node("head")
    head.sshd_config["SetEnv"] = f"PATH={head.folder}/bin"
    head.restart_sshd()
    view = on(rig, look)["head"]
    assert view.cause == "protocol" and "no python3" in str(view.error)


def test_a_login_shell_that_talks(rig: Rig) -> None:
    """What ~/.bashrc prints before our program, with or without an end of line, is skipped."""
    (rig.node("head").folder / "home/.bashrc").write_text('echo "Welcome to DGX OS"; printf "{}"; echo careful >&2\n')
    assert on(rig, lambda fleet: fleet["head"].call("echo", {"n": 1}, seconds=20)) == {"n": 1}


def test_a_login_shell_that_never_stops_talking(rig: Rig) -> None:
    """It is given up on, as a fault of the protocol."""
    (rig.node("head").folder / "home/.bashrc").write_text("while :; do echo Welcome to DGX OS; done\n")
    assert on(rig, look)["head"].cause == "protocol"


@pytest.mark.parametrize(
    "name, words",
    [
        ("huge", "longer than 16 MiB"),
        ("endless", "without end"),
        ("noise", "no JSON object: 'this is no JSON'"),
        ("scalar", "no JSON object"),
        ("mute", "status 3"),
        ("silent", "without an answer"),
    ],
)
def test_an_answer_that_is_none(rig: Rig, name: str, words: str) -> None:
    """Output without end, text, other JSON, an early end and silence are faults of the protocol."""
    with pytest.raises(Unreachable, match=words) as failure:
        on(rig, lambda fleet: fleet["head"].call(name, {}, seconds=60))
    assert failure.value.cause == "protocol"


def test_a_bug_in_a_program_is_shown(rig: Rig) -> None:
    """Its traceback arrives, with the status of a bug."""
    with pytest.raises(NodeError, match="ZeroDivisionError") as failure:
        on(rig, lambda fleet: fleet["head"].call("bug", {"zero": 0}, seconds=20))
    assert (failure.value.code, failure.value.status) == ("bug", 70)


def test_what_is_told_of_a_bug_is_bounded(rig: Rig) -> None:
    """Nobody's terminal is filled by a node; the end of it is what tells."""
    with pytest.raises(NodeError, match="the end") as failure:
        on(rig, lambda fleet: fleet["head"].call("wordy", {}, seconds=20))
    assert len(failure.value.message) < 10_000


def test_a_folder_that_became_read_only_is_not_used(rig: Rig) -> None:
    """Control sockets go elsewhere, and the node is asked all the same."""
    told: list[str] = []
    state = Path(tempfile.mkdtemp(prefix="kept-"))  # short, as a control socket's path must be
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=700", "none", str(state)], check=True)
    try:
        (state / "ssh").mkdir(mode=0o700)
        subprocess.run(["mount", "-o", "remount,ro", str(state)], check=True)

        async def work() -> None:
            async with Fleet(rig.nodes(), rig.ssh_opts, str(state), notice=told.append, linger_seconds=0) as fleet:
                assert await fleet["head"].call("echo", {"n": 1}, seconds=20) == {"n": 1}

        asyncio.run(work())
    finally:
        subprocess.run(["umount", "--lazy", str(state)], check=True)
        state.rmdir()
    assert len(told) == 1 and "read-only" in told[0]


def test_a_secret_is_on_no_command_line(rig: Rig) -> None:
    """It reaches the program once, beside the request."""
    answer = on(rig, lambda fleet: fleet["head"].call("secret", {"a": 1}, seconds=20, secret=b"hunter2"))
    assert (answer["length"], answer["again"], answer["request"]) == (7, 0, {"a": 1})
    assert "hunter2" not in str(answer)


def test_a_control_path_that_is_too_long(rig: Rig, tmp_path: Path) -> None:
    """A shorter folder is taken, which is said, and calls are multiplexed nonetheless."""
    told: list[str] = []
    deep = tmp_path / ("d" * 60) / ("e" * 60)

    async def work() -> None:
        async with Fleet(rig.nodes(), rig.ssh_opts, str(deep), notice=told.append, linger_seconds=0) as fleet:
            for n in range(2):
                assert await fleet["head"].call("echo", {"n": n}, seconds=20) == {"n": n}

    asyncio.run(work())
    assert rig.node("head").relay.connections == 1
    assert len(told) == 1 and "104 bytes" in told[0]


def test_without_a_folder_for_sockets(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call logs in by itself, which is said, and works."""
    told: list[str] = []
    monkeypatch.setattr(sockets, "is_private", lambda folder: False)

    async def work() -> None:
        async with Fleet(rig.nodes(), rig.ssh_opts, str(tmp_path), notice=told.append) as fleet:
            for n in range(2):
                assert await fleet["head"].call("echo", {"n": n}, seconds=20) == {"n": n}

    asyncio.run(work())
    assert rig.node("head").relay.connections == 2
    assert len(told) == 1 and "a login of its own" in told[0]


def test_a_folder_of_somebody_elses_is_not_used(tmp_path: Path) -> None:
    """A socket where others may enter would hand them the connection."""
    for mode, private in ((0o700, True), (0o755, False)):
        folder = tmp_path / oct(mode)
        folder.mkdir()
        folder.chmod(mode)
        assert sockets.is_private(str(folder)) is private
    (tmp_path / "link").symlink_to(tmp_path / "0o700")
    assert not sockets.is_private(str(tmp_path / "link"))
