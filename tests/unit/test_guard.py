"""The verdict before a start: what is seen, counted, reserved and said, on machines made of files."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from process_tree import USER, ProcessTree

from sparkguard import command, guard, refusal, room
from sparkguard.core.types import GpuProcess, Hold, Verdict
from sparkguard.errors import CONFIG, OK, OSERR, TEMPFAIL, SparkguardError
from sparkguard.ledger import Ledger, Reservation, directory
from sparkguard.probe import nvml
from sparkguard.settings import load

GIB_KB = 1 << 20
BOOT = "11111111-2222-3333-4444-555555555555"


class Machine:
    """An idle machine of 100 GiB, without a GPU unless SPARK_MEMORY_POOL says otherwise, and a home with one spec."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.home = home
        self.tree = ProcessTree(folder / "proc", meminfo={"MemTotal": 100 * GIB_KB, "MemAvailable": 95 * GIB_KB})
        for name in ("sys", "dev"):
            (folder / name).mkdir()
        self.roots = guard.Roots(str(self.tree.root), str(folder / "sys"), str(folder / "dev"))
        (home / ".config" / "spark" / "models").mkdir(parents=True)
        self.spec("m", "VLLM_MODEL=org/name\nVLLM_GPU_MEM_UTIL=0.40\n")

    def spec(self, name: str, text: str) -> None:
        (self.home / ".config" / "spark" / "models" / f"{name}.env").write_text(text)

    def env(self, **more: str) -> dict[str, str]:
        ours = {"HOME": str(self.home), "XDG_RUNTIME_DIR": str(self.home / "run"), "PATH": "/nowhere"}
        return {**ours, "VLLM_BIN": "/bin/true", "VLLM_MEM_WAIT": "0", **more}

    def vllm(self, pid: int, share: str, port: int = 8000, **how: object) -> int:
        argv = ["/v/bin/python3", "/v/bin/vllm", "serve", "o/n", "--port", str(port), "--gpu-memory-utilization", share]
        return self.tree.add(pid, argv, **how)  # type: ignore[arg-type]

    def decide(self, name: str = "m", args: Sequence[str] = (), **env: str) -> Verdict:
        return guard.decide(name, args, self.env(**env), self.roots)

    def main(self, *words: str, **env: str) -> int:
        return guard.main(words, self.env(**env), self.roots)

    def reserve(self, **changes: object) -> None:
        """Another start under way: process 500 unless it says otherwise."""
        holds = (Hold("ram", 300_000_000, 30 << 30),)
        with self.ledger() as held:
            held.hold(Reservation("other", 500, 1_000, BOOT, holds, port=8001).replace(**changes))

    def ledger(self) -> Ledger:
        return Ledger(directory(self.env()), self.roots.proc)

    def as_unit(self, unit: str, invocation: str = "aaaa") -> dict[str, str]:
        """The environment of a process that systemd started as part of this unit; the unit is active."""
        (self.tree.root / "self").mkdir(exist_ok=True)
        (self.tree.root / "self" / "cgroup").write_text(f"0::{USER}/{unit}\n")
        folder = self.home / "run" / "systemd" / "units"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"invocation:{unit}").symlink_to(invocation)
        return {"INVOCATION_ID": invocation, "SYSTEMD_EXEC_PID": str(os.getpid())}


@pytest.fixture
def machine(tmp_path: Path, home: Path) -> Machine:
    return Machine(tmp_path, home)


def shares(verdict: Verdict) -> list[tuple[int | None, int | None, str]]:
    return [(claim.pid, claim.holds[0].share, claim.source) for claim in verdict.claims]


def test_the_text_that_was_asked_for(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    """longcontext 0.95 beside pid 8123 on port 8001 at 0.10, on unified memory, prints the customer's text and is 78."""
    machine.spec("longcontext", "VLLM_MODEL=org/name\nVLLM_GPU_MEM_UTIL=0.95\n")
    machine.vllm(8123, "0.10", 8001)
    assert machine.main("longcontext", SPARK_MEMORY_POOL="unified") == CONFIG
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(
        "FATAL: longcontext wants --gpu-memory-utilization 0.95, which would\n"
        "       take the GPU-memory total to 1.05, over the 0.80 budget.\n"
        "\n"
        "       Each fraction is a share of TOTAL SYSTEM RAM (unified memory),\n"
        "       not free headroom. Already reserved (0.10):\n"
        "  pid 8123 port 8001 at 0.10\n"
    )


STATUSES = {
    "admitted": ("0.40", {}, OK),
    "not now": ("0.50", {}, TEMPFAIL),
    "never": ("0.90", {}, CONFIG),
    "a larger budget": ("0.50", {"VLLM_MEM_BUDGET": "0.90"}, OK),
    "memory that is not there": ("0.40", {"SPARK_MEMORY_RESERVE_MB": "60000"}, TEMPFAIL),
    "no such pool": ("0.40", {"SPARK_MEMORY_POOL": "discrete"}, OSERR),
    "bad configuration": ("0.40", {"VLLM_MEM_WAIT": "soon"}, CONFIG),
    "bad pool": ("0.40", {"SPARK_MEMORY_POOL": "vram"}, CONFIG),
}


@pytest.mark.parametrize(("share", "env", "status"), STATUSES.values(), ids=STATUSES)
def test_status(machine: Machine, capsys: pytest.CaptureFixture[str], share: str, env: dict[str, str], status: int) -> None:
    """Beside a server of 0.40, a start has this exit status, and stderr says why."""
    machine.vllm(300, "0.40", anonymous_bytes=40 << 30)
    assert machine.main("m", VLLM_GPU_MEM_UTIL=share, **env) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("sparkguard: m is admitted at" if status == OK else ("FATAL: ", "sparkguard: "))


def test_json_for_both_answers(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    """--json, before or behind the name, prints the object for an admission and for a refusal."""
    for words, share, word in ((("--json", "m"), "0.40", "admitted"), (("m", "--json"), "0.90", "refused")):
        machine.main(*words, VLLM_GPU_MEM_UTIL=share)
        entry = json.loads(capsys.readouterr().out)
        assert (entry["verdict"], entry["wanted"]["share"]) == (word, share)


def test_json_for_an_error(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    """A configuration that cannot be judged is an object, too, with the complaint as its hint."""
    assert machine.main("m", "--json", VLLM_GPU_MEM_UTIL="40%") == CONFIG
    out, err = capsys.readouterr()
    entry = json.loads(out)
    assert (entry["verdict"], entry["reason"], entry["name"]) == ("refused", "error", "m")
    assert "write 0.40 for 40%" in entry["hint"] and "write 0.40 for 40%" in err


PRECEDENCE = {
    "spec": ([], {}, 400_000_000),
    "environment over spec": ([], {"VLLM_GPU_MEM_UTIL": "0.50"}, 500_000_000),
    "arguments over environment": (["--gpu-memory-utilization", "0.30"], {"VLLM_GPU_MEM_UTIL": "0.50"}, 300_000_000),
}


@pytest.mark.parametrize(("args", "env", "share"), PRECEDENCE.values(), ids=PRECEDENCE)
def test_judges_what_would_be_executed(machine: Machine, args: list[str], env: dict[str, str], share: int) -> None:
    """The share that is judged is that of the command line, whoever wrote it."""
    assert machine.decide("m", args, **env).wanted.holds[0].share == share


def test_hidden_processes(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    """Where /proc hides others' processes the machine cannot be read: 71, unless the override says to go on."""
    machine.tree.remove(1)
    machine.vllm(300, "0.10")
    assert machine.main("m") == OSERR
    assert "hides other users' processes (hidepid=)" in capsys.readouterr().err
    assert machine.main("m", VLLM_MEM_ALLOW_UNKNOWN="1") == OK


def test_no_proc(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a /proc the status is 71."""
    (machine.tree.root / "meminfo").unlink()
    assert machine.main("m") == OSERR
    assert "meminfo cannot be read" in capsys.readouterr().err


def test_an_override_is_said(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    """VLLM_MEM_ALLOW_UNKNOWN=1 admits beside an orphan, and names it on stderr and in the object."""
    machine.tree.add(77, b"VLLM::EngineCore" + b"\0" * 100)
    assert machine.main("m") == TEMPFAIL
    assert "an engine whose server is gone" in capsys.readouterr().err
    assert machine.main("m", "--json", VLLM_MEM_ALLOW_UNKNOWN="1") == OK
    out, err = capsys.readouterr()
    assert "VLLM_MEM_ALLOW_UNKNOWN=1: pid 77 (vllm) is counted as nothing" in err
    assert (json.loads(out)["allow_unknown"], json.loads(out)["overridden"]) == (True, [77])


def test_a_start_under_way_is_counted(machine: Machine) -> None:
    """Another start's reservation is a claim before its server is in sight, and only while its process runs."""
    machine.tree.add(500, ["python3", "-I", "-c", "guard"])
    machine.reserve()
    assert shares(machine.decide(VLLM_GPU_MEM_UTIL="0.60")) == [(500, 300_000_000, "reservation")]
    machine.tree.remove(500)
    assert shares(machine.decide(VLLM_GPU_MEM_UTIL="0.60")) == []


BECOME = {
    "the process itself": {"pid": 500},
    "a child of it": {"pid": 501, "ppid": 500},
    "another process of its unit": {"pid": 502, "cgroup": f"{USER}/vllm-other.service"},
}


@pytest.mark.parametrize("how", BECOME.values(), ids=BECOME)
def test_a_start_that_has_become_a_server_is_counted_once(machine: Machine, how: dict[str, object]) -> None:
    """Once the server is in sight its command line counts, and the reservation no more."""
    if how["pid"] != 500:
        machine.tree.add(500, ["sh", "-c", "wrapper"])
    machine.vllm(**{"share": "0.30", **how})  # type: ignore[arg-type]
    machine.reserve(unit="vllm-other.service")
    assert shares(machine.decide()) == [(how["pid"], 300_000_000, "argument")]


def test_another_users_unit_of_the_same_name_is_another_server(machine: Machine) -> None:
    """It stands for no start of ours, and is not gone when ours is."""
    machine.tree.add(500, ["sh", "-c", "wrapper"])
    theirs = f"/user.slice/user-1.slice/user@{os.getuid() + 1}.service/app.slice/vllm-other.service"
    machine.vllm(300, "0.10", cgroup=theirs)
    machine.reserve(unit="vllm-other.service")
    assert shares(machine.decide()) == [(300, 100_000_000, "argument"), (500, 300_000_000, "reservation")]
    env = machine.env()
    settings = load(env, "m")
    start = command.build(settings, "m", ())
    with machine.ledger() as held:
        verdict = guard.judge(start, settings, env, machine.roots, held, ["vllm-other.service"])
    assert shares(verdict) == [(300, 100_000_000, "argument")]


def test_a_reused_pid_is_another_start(machine: Machine) -> None:
    """The reservation of a unit's start counts although its guard has ended and this guard has got its pid."""
    machine.as_unit("vllm-other.service", "bbbb")
    machine.tree.add(os.getpid(), ["python3", "-I", "-c", "guard"], starttime=2_000)
    machine.reserve(pid=os.getpid(), unit="vllm-other.service", invocation="bbbb")
    assert shares(machine.decide()) == [(os.getpid(), 300_000_000, "reservation")]


def test_its_own_reservation_is_not_in_its_way(machine: Machine) -> None:
    """The launcher of the same start, asked again, is not refused because of what ExecStartPre= reserved."""
    env = machine.as_unit("vllm-m.service")
    machine.reserve(pid=2**22 + 1, unit="vllm-m.service", invocation="aaaa")
    assert shares(machine.decide(VLLM_GPU_MEM_UTIL="0.80", **env)) == []


def test_another_units_reservation_is(machine: Machine) -> None:
    """The reservation of another unit's start counts as long as systemd says that this start goes on."""
    machine.as_unit("vllm-other.service", "bbbb")
    env = machine.as_unit("vllm-m.service")
    machine.reserve(pid=2**22 + 1, unit="vllm-other.service", invocation="bbbb")
    assert shares(machine.decide(**env)) == [(2**22 + 1, 300_000_000, "reservation")]


def test_what_is_reserved(machine: Machine) -> None:
    """An admission keeps name, share, bytes, port and the unit's start; a refusal keeps nothing."""
    env = machine.as_unit("vllm-m.service")
    machine.decide(VLLM_GPU_MEM_UTIL="0.90", **env)
    with machine.ledger() as held:
        assert held.live() == ()
    machine.decide(**env)
    with machine.ledger() as held:
        (kept,) = held.live()
    assert (kept.name, kept.unit, kept.invocation, kept.port) == ("m", "vllm-m.service", "aaaa", 8000)
    assert kept.holds == (Hold("ram", 400_000_000, 40 << 30),)


INVOCATIONS = {
    "systemd's own process": ({"INVOCATION_ID": "0a1b", "SYSTEMD_EXEC_PID": "{pid}"}, ("vllm-m.service", "0a1b")),
    "a child of a unit, such as a shell": ({"INVOCATION_ID": "0a1b", "SYSTEMD_EXEC_PID": "1"}, None),
    "an old systemd": ({"INVOCATION_ID": "0a1b"}, None),
    "no unit": ({}, None),
    "a path for an id": ({"INVOCATION_ID": "../x", "SYSTEMD_EXEC_PID": "{pid}"}, None),
}


@pytest.mark.parametrize(("env", "found"), INVOCATIONS.values(), ids=INVOCATIONS)
def test_invocation(machine: Machine, env: dict[str, str], found: tuple[str, str] | None) -> None:
    """Only the process that systemd itself started belongs to the unit's start."""
    machine.as_unit("vllm-m.service")
    env = {key: value.format(pid=os.getpid()) for key, value in env.items()}
    assert guard.invocation(env, machine.roots) == found


def test_gone_ones_are_not_counted_and_give_back(machine: Machine) -> None:
    """For a switch of models the old one counts as ended: its share is free, and its memory available."""
    machine.vllm(300, "0.50", anonymous_bytes=45 << 30, cgroup=f"{USER}/vllm-old.service")
    (machine.tree.root / "meminfo").write_text(f"MemTotal: {100 * GIB_KB} kB\nMemAvailable: {50 * GIB_KB} kB\n")
    env = machine.env(VLLM_GPU_MEM_UTIL="0.70")
    settings = load(env, "m")
    start = command.build(settings, "m", ())
    with machine.ledger() as held:
        assert guard.judge(start, settings, env, machine.roots, held).reason == "over_budget"
        for gone in ("vllm-old.service", "300"):
            verdict = guard.judge(start, settings, env, machine.roots, held, [gone])
            assert verdict.admitted
            assert verdict.claims == ()
            assert verdict.sums[0].pool.available_bytes == 95 << 30
        assert held.live() == ()


def test_a_unified_machine_with_declared_claims_asks_no_driver(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the command lines say everything, NVML is not asked: it would take longer than all the rest."""
    driver = machine.tree.root / "driver" / "nvidia"
    driver.mkdir(parents=True)
    (driver / "version").write_text("NVRM version: 580.95\n")
    asked = []

    def ask(**_: object) -> nvml.Report:
        asked.append(1)
        return nvml.Report(driver="580.95", count=1, gpus=(nvml.Gpu("gpu0", name="NVIDIA GB10", error=nvml.NOT_SUPPORTED),))

    monkeypatch.setattr(nvml, "ask", ask)
    used = {"MemFree": 95, "Buffers": 1, "Cached": 2, "AnonPages": 2}
    (machine.tree.root / "meminfo").write_text(
        f"MemTotal: {100 * GIB_KB} kB\nMemAvailable: {95 * GIB_KB} kB\n"
        + "".join(f"{key}: {value * GIB_KB} kB\n" for key, value in used.items())
    )
    first = machine.decide()
    assert first.sums[0].pool.kind == "unified"
    assert len(asked) == 1  # once for this boot and driver
    machine.vllm(300, "0.10")
    machine.decide()
    assert len(asked) == 1
    machine.tree.add(301, ["ollama", "serve"])  # it does not say how much it holds
    machine.decide()
    assert len(asked) == 2


def test_memory_that_nobody_claims_makes_it_ask_the_driver(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a unified machine CUDA's memory is in no line of meminfo: what is missing there has a holder, and NVML knows whom."""
    driver = machine.tree.root / "driver" / "nvidia"
    driver.mkdir(parents=True)
    (driver / "version").write_text("NVRM version: 580.95\n")
    gpu = nvml.Gpu("gpu0", name="NVIDIA GB10", error=nvml.NOT_SUPPORTED)
    held = nvml.Report("580.95", 1, (gpu,), (GpuProcess(400, "gpu0", 30 << 30),))
    machine.tree.add(400, ["python3", "train.py"])
    asked = []
    monkeypatch.setattr(nvml, "ask", lambda **_: asked.append(1) or held)
    machine.decide()  # keeps what the machine is
    for free, asks in ((94, 0), (64, 1)):
        used = {"MemFree": free, "Buffers": 1, "Cached": 2, "AnonPages": 3}
        (machine.tree.root / "meminfo").write_text(
            f"MemTotal: {100 * GIB_KB} kB\nMemAvailable: {free * GIB_KB} kB\n"
            + "".join(f"{key}: {value * GIB_KB} kB\n" for key, value in used.items())
        )
        asked.clear()
        verdict = machine.decide(VLLM_GPU_MEM_UTIL="0.55")
        assert len(asked) == asks
    assert verdict.reason == "over_budget"
    assert [(claim.pid, claim.engine, claim.source) for claim in verdict.claims] == [(400, "other", "measured")]
    assert shares(verdict) == [(400, 300_000_000, "measured")]


class Clock:
    """Time that passes only while somebody sleeps; what happens meanwhile is the test's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, machine: Machine, available_gib: Sequence[int]) -> None:
        self.now = 1000.0
        self.slept: list[float] = []
        self._path = machine.tree.root / "meminfo"
        self._available = list(available_gib)
        self._next()
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "sleep", self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        self._next()

    def _next(self) -> None:
        gib = self._available.pop(0) if len(self._available) > 1 else self._available[0]
        self._path.write_text(f"MemTotal: {100 * GIB_KB} kB\nMemAvailable: {gib * GIB_KB} kB\n")


def test_waits_until_the_memory_is_back(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It looks again until the bytes are there, and says once what it waits for."""
    clock = Clock(monkeypatch, machine, [10, 20, 30, 45])
    assert machine.decide(VLLM_MEM_WAIT="60").admitted
    assert len(clock.slept) == 3
    assert capsys.readouterr().err == "sparkguard: m waits up to 60 s for 35.0 GiB more memory to come back\n"


def test_the_wait_is_bounded(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives up after VLLM_MEM_WAIT seconds of a clock that no correction of the time moves."""
    clock = Clock(monkeypatch, machine, [10])
    monkeypatch.setattr(time, "time", lambda: pytest.fail("a clock that jumps"))
    assert machine.decide(VLLM_MEM_WAIT="60").reason == "memory_taken"
    assert sum(clock.slept) == pytest.approx(60, abs=0.02)


def test_no_wait_for_what_no_wait_changes(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the budget, unknown or impossible is refused at once, and so is everything with VLLM_MEM_WAIT=0."""
    clock = Clock(monkeypatch, machine, [10])
    assert machine.decide(VLLM_MEM_WAIT="0").reason == "memory_taken"
    assert machine.decide(VLLM_MEM_WAIT="60", VLLM_GPU_MEM_UTIL="0.9").reason == "never_fits"
    machine.vllm(300, "0.50")
    assert machine.decide(VLLM_MEM_WAIT="60").reason == "over_budget"
    machine.tree.add(77, b"VLLM::EngineCore\0")
    assert machine.decide(VLLM_MEM_WAIT="60").reason == "orphan"
    assert clock.slept == []


@pytest.mark.parametrize(("wait", "after"), [("60", 5.0), ("2", 2.0), ("0", 0.0)])
def test_the_runners_are_asked_once_memory_has_had_time_to_come_back(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, wait: str, after: float
) -> None:
    """Then once, and what they unload has 5 s to come back, however short the wait."""
    clock = Clock(monkeypatch, machine, [10])
    asked: list[float] = []

    def ask(verdict: Verdict, folder: str) -> room.Answer:
        asked.append(clock.now - 1000)
        clock._available = [10, 10, 45]
        return room.Answer(("a",))

    monkeypatch.setattr(room, "ask", ask)
    assert machine.decide(VLLM_MEM_WAIT=wait, VLLM_MEM_ASK_RUNNERS="1").admitted
    assert asked == [pytest.approx(after, abs=0.02)]


def test_a_start_that_is_still_refused_says_who_was_unloaded(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The room that was made is there for anybody, and somebody else was quicker."""
    machine.vllm(300, "0.50")
    monkeypatch.setattr(room, "ask", lambda verdict, folder: room.Answer(("a", "b")))
    verdict = machine.decide(VLLM_MEM_ASK_RUNNERS="1")
    assert (verdict.reason, verdict.wanted.note) == ("over_budget", "a, b unloaded by the runners, to make room for m")


def test_the_runners_are_asked_for_no_start_that_they_cannot_help(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fits, one that never fits, one whose port is taken; and nobody is asked unless it was allowed."""
    monkeypatch.setattr(room, "_exchange", lambda *_: pytest.fail("asked"))
    assert machine.decide(VLLM_MEM_ASK_RUNNERS="1").admitted
    assert machine.decide(VLLM_GPU_MEM_UTIL="0.9", VLLM_MEM_ASK_RUNNERS="1").reason == "never_fits"
    machine.reserve(name="runners", engine="llama-server", holds=(Hold("ram", 500_000_000, 50 << 30),))
    machine.tree.add(500, ["/v/bin/python3", "/v/bin/sparkguard", "serve"])
    assert machine.decide().reason == "over_budget"
    machine.tree.listen("self", 8000)
    assert machine.decide(VLLM_MEM_ASK_RUNNERS="1").reason == "over_budget"


def test_the_lock_is_free_while_it_waits(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may be judged meanwhile."""
    clock = Clock(monkeypatch, machine, [10, 50])
    pass_time = time.sleep

    def look(seconds: float) -> None:
        with machine.ledger() as held:
            assert held.live() == ()
        pass_time(seconds)

    monkeypatch.setattr(time, "sleep", look)
    assert machine.decide(VLLM_MEM_WAIT="60").admitted
    assert len(clock.slept) == 1


@pytest.mark.parametrize("abstract", [False, True], ids=["a path", "an abstract address"])
def test_tells_systemd(machine: Machine, home: Path, abstract: bool) -> None:
    """The unit's status line is the verdict; without a listener nothing fails."""
    address = f"@sparkguard-{os.getpid()}" if abstract else str(home / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(address.replace("@", "\0", 1) if abstract else address)
        machine.main("m", NOTIFY_SOCKET=address)
        assert listener.recv(4096).startswith(b"STATUS=admitted: 0.40 of the 0.80 budget of system RAM")
        machine.main("m", NOTIFY_SOCKET=address, VLLM_GPU_MEM_UTIL="0.90")
        assert listener.recv(4096).startswith(b"STATUS=refused: m wants --gpu-memory-utilization 0.90, which would take")
        machine.main("m", NOTIFY_SOCKET=address, VLLM_GPU_MEM_UTIL="40%")
        assert listener.recv(4096).startswith(b"STATUS=refused: VLLM_GPU_MEM_UTIL in the environment is '40%'")
    assert machine.main("m", NOTIFY_SOCKET=address) == OK


def test_a_refusal_is_kept_for_later(machine: Machine) -> None:
    """`why` finds the last refusal with the facts and the text; an admission is none."""
    env = machine.env()
    machine.main("m")
    assert refusal.last("m", env) is None
    machine.main("m", VLLM_GPU_MEM_UTIL="0.90")
    entry = refusal.last("m", env)
    assert entry is not None
    assert (entry["reason"], entry["wanted"]["share"]) == ("never_fits", "0.90")
    assert entry["text"].startswith("FATAL: m wants --gpu-memory-utilization 0.90")


@pytest.mark.parametrize("name", ["../m", "a/b", "a b", r"a\x2fb", ""], ids=ascii)
def test_a_bad_name_is_refused(machine: Machine, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """A name that could leave the folder of specs is 78."""
    assert machine.main(name) == CONFIG
    assert "cannot be a model's name" in capsys.readouterr().err


def test_an_escaped_name_is_shown_plain(machine: Machine) -> None:
    r"""systemd's my\x2dmodel is my-model's spec, and is called so."""
    machine.spec("my-model", "VLLM_MODEL=o/n\nVLLM_GPU_MEM_UTIL=0.2\n")
    assert machine.decide(r"my\x2dmodel").wanted.name == "my-model"


def test_no_reservation_no_admission(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the reservation cannot be written, there is no verdict but an error."""

    def fail(*_: object) -> None:
        raise SparkguardError("full", status=OSERR)

    monkeypatch.setattr(Ledger, "hold", fail)
    with pytest.raises(SparkguardError, match="full"):
        machine.decide()


@pytest.mark.parametrize(
    ("words", "spec", "reason"),
    [
        ((), "", "port_taken"),
        (("--port", "8010"), "", "fits"),
        (("--host", "10.0.0.7"), "", "fits"),
        (("--headless",), "", "fits"),
        ((), "VLLM_IMAGE=vllm/vllm-openai\nVLLM_DOCKER_ARGS=--gpus all\n", "fits"),
        ((), "VLLM_IMAGE=vllm/vllm-openai\nVLLM_DOCKER_ARGS=--network=host\n", "port_taken"),
    ],
    ids=["its port", "another port", "an address of its own", "no port", "a bridged container", "the host's network"],
)
def test_a_taken_port(machine: Machine, words: tuple[str, ...], spec: str, reason: str) -> None:
    """A port that is listened on is refused at once: vLLM would find out after 20 seconds, six times."""
    machine.spec("m", f"VLLM_MODEL=org/name\nVLLM_GPU_MEM_UTIL=0.40\n{spec}")
    machine.tree.listen("self", 8000)
    assert machine.decide(args=words).reason == reason


def test_who_holds_the_port(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    """The refusal names the server on the port, and how to stop it."""
    machine.tree.listen("self", 8000)
    machine.vllm(700, "0.10", cgroup=f"{USER}/vllm-old.service")
    assert machine.main("m") == TEMPFAIL
    said = capsys.readouterr().err
    assert "FATAL: m would fit at 0.40, but its port 8000 is taken by pid 700 (vllm-old.service)." in said
    assert "stop vllm-old.service: systemctl --user stop 'vllm-old.service'" in said


def test_a_port_that_its_holder_will_have_left(machine: Machine) -> None:
    """Who is counted as gone holds no port either."""
    machine.tree.listen("self", 8000)
    machine.vllm(700, "0.10", cgroup=f"{USER}/vllm-old.service")
    settings = load(machine.env(), "m")
    with machine.ledger() as held:
        start = command.build(settings, "m", ())
        assert guard.judge(start, settings, machine.env(), machine.roots, held, ("vllm-old.service",)).admitted


def test_runners_are_counted_by_their_reservation(machine: Machine) -> None:
    """A llama-server says nothing of its size; its supervisor's reservation does, for all of them, and once."""
    machine.tree.add(500, ["python3", "/v/bin/sparkguard", "serve"])
    for pid in (501, 502):
        machine.tree.add(pid, ["/b/llama-server", "--port", str(pid)], ppid=500, anonymous_bytes=2 << 30)
    machine.reserve(name="runners", port=None)
    verdict = machine.decide()
    (claim,) = verdict.claims
    assert (claim.pid, claim.source) == (500, "reservation")
    assert claim.holds == (Hold("ram", 300_000_000, 30 << 30, 4 << 30),)
    assert verdict.sums[0].outstanding_bytes == 26 << 30
