"""sparkguard why: the cause, from what systemd and the journal said of units in a real user manager."""

from __future__ import annotations

from typing import Any

import pytest

from sparkguard.cli import main
from sparkguard.cli.journal import Entry
from sparkguard.cli.why import CAUSES, Facts, judge

UNIT = "vllm-longcontext.service"
INVOCATION = "85549265ea8c4cf5a16b5762e06b637c"
T0 = 1_795_993_488_000_000
PRE = ["/home/spark/.local/bin/vllm_mem_budget.sh", ["/home/spark/.local/bin/vllm_mem_budget.sh", "longcontext"], False]
EXITED, KILLED, DUMPED = 1, 2, 3
FATAL = "FATAL: longcontext wants --gpu-memory-utilization 0.75, which would\n       take the total to 0.85.\n\n       Why."


def pre(status: int) -> list[Any]:
    """A row of ExecStartPre as busctl has it: times, pid, code and status at its end."""
    return [*PRE, T0, 1, T0, 2, 130, EXITED, status]


def facts(
    *lines: str,
    active: str = "failed",
    sub: str = "failed",
    result: str = "success",
    code: int = 0,
    status: int = 0,
    text: str = "",
    starts: list[Any] | None = None,
    refused: dict[str, Any] | None = None,
    killers: tuple[str, ...] = (),
    killer: str = "kernel",
    started: bool = True,
    stopping: bool = False,
    seconds_later: int = 0,
) -> Facts:
    properties = {
        "LoadState": "loaded",
        "ActiveState": active,
        "SubState": sub,
        "InvocationID": INVOCATION if started else "",
        "InactiveExitTimestamp": T0 if started else 0,
        "InactiveEnterTimestamp": T0 + 9_000_000 if started else 0,
        "Result": result,
        "StatusText": text,
        "ExecStartPre": starts or [pre(0)],
        "ExecMainPID": 4242 if code else 0,
        "ExecMainCode": code,
        "ExecMainStatus": status,
        "ExecMainExitTimestamp": T0 + 8_000_000 if code else 0,
        "NRestarts": 0,
    }
    entries = [Entry(T0, line, "vllm-serve.sh", "", INVOCATION, False) for line in lines]
    if stopping:
        entries.append(Entry(T0, "Stopping", "systemd", "de5b426a63be47a7b6ac3eaac82e2f6f", INVOCATION, False))
    said = tuple(Entry(T0 + (8 + seconds_later) * 1_000_000, line, killer, "", "", killer == "kernel") for line in killers)
    return Facts(UNIT, properties, refused, tuple(entries), said)


def forgotten(ended: str, result: str) -> Facts:
    """After reset-failed: only the journal knows."""
    lines = (
        Entry(T0, f"{UNIT}: {ended}", "systemd", "98e322203f7a4ed290d09fe03c09fe15", INVOCATION, False),
        Entry(T0, f"{UNIT}: Failed with result '{result}'.", "systemd", "d9b373ed55a64feb8242e02dbe79a49c", INVOCATION, False),
    )
    return facts(active="inactive", sub="dead", started=False).replace(lines=lines)


OOM = "oom-kill:constraint=CONSTRAINT_MEMCG,task_memcg=/user.slice/vllm-longcontext.service,task=python3,pid=77"
KILL = "Out of memory: Killed process 4242 (VLLM::EngineCor) total-vm:9kB"
CASES = {
    "it runs": (facts(active="active", sub="running"), "running", "running"),
    "it starts": (facts(active="activating", sub="start-pre", text="waits for memory"), "running", "waits for memory"),
    "a refusal, by its record": (
        facts(result="exit-code", starts=[pre(75)], refused={"invocation": INVOCATION, "text": FATAL}),
        "refusal",
        "longcontext wants --gpu-memory-utilization 0.75, which would take the total to 0.85.",
    ),
    "a refusal without a record": (
        facts(result="exit-code", starts=[pre(78)], text="refused: no model is set"),
        "refusal",
        "refused the start: no model is set",
    ),
    "a refusal at the launcher": (
        facts(result="exit-code", code=EXITED, status=75, text="refused: no room"),
        "refusal",
        "refused the start: no room",
    ),
    "an older refusal's record": (
        facts(result="signal", code=KILLED, status=11, refused={"invocation": "0" * 32, "text": FATAL}),
        "signal",
        "killed by SIGSEGV",
    ),
    "somebody else's ExecStartPre=": (
        facts(result="exit-code", starts=[["/bin/x", ["/bin/x"], False, T0, 1, T0, 2, 130, EXITED, 75]]),
        "systemd",
        "/bin/x ended with status 75",
    ),
    "systemd saw the OOM killer": (facts(result="oom-kill", code=KILLED, status=9), "oom-kill", "by the kernel"),
    "the kernel's line names the unit": (
        facts(result="signal", code=KILLED, status=9, killers=(OOM,)),
        "oom-kill",
        "by the kernel",
    ),
    "the kernel's line names the pid": (
        facts(result="signal", code=KILLED, status=9, killers=(KILL,)),
        "oom-kill",
        "by the kernel",
    ),
    "earlyoom's line": (
        facts(result="signal", code=KILLED, status=15, killers=("sending SIGTERM to process 4242 uid 6666",), killer="earlyoom"),
        "oom-kill",
        "by earlyoom",
    ),
    "a kill of another process": (
        facts(result="signal", code=KILLED, status=9, killers=("Out of memory: Killed process 14242 (x)",)),
        "signal",
        "killed by SIGKILL",
    ),
    "a kill long ago": (
        facts(result="signal", code=KILLED, status=9, killers=(KILL,), seconds_later=1000),
        "signal",
        "killed by SIGKILL",
    ),
    "an abort": (facts(result="core-dump", code=DUMPED, status=6), "signal", "killed by SIGABRT, and dumped core"),
    "vLLM's error": (facts(result="exit-code", code=EXITED, status=1), "exit", "exit status 1 (an error that vLLM"),
    "an unknown flag": (
        facts(result="exit-code", code=EXITED, status=2),
        "exit",
        "exit status 2 (arguments that vLLM does not know)",
    ),
    "no program": (
        facts(result="exit-code", code=EXITED, status=127),
        "exit",
        "exit status 127 (the program to start was not found",
    ),
    "an unknown status": (facts(result="exit-code", code=EXITED, status=99), "exit", "exit status 99"),
    "the engine died": (
        facts(active="activating", sub="auto-restart", code=EXITED),
        "exit",
        "exit status 0 (vLLM's API server ends with 0 when its engine has died",
    ),
    "a stop that hung": (facts(result="timeout", code=KILLED, status=9), "timeout", "timeout"),
    "too many starts": (
        facts(result="start-limit-hit", code=EXITED, status=1),
        "start-limit",
        "the last one: exit status 1",
    ),
    "a stop": (facts(active="inactive", sub="dead", stopping=True), "stopped", ""),
    "a stop that systemd has forgotten": (facts(active="inactive", sub="dead", started=False, stopping=True), "stopped", ""),
    "an end that systemd has forgotten": (
        facts("bye", active="inactive", sub="dead", started=False),
        "exit",
        "vLLM's API server",
    ),
    "never started": (facts(active="inactive", sub="dead", started=False), "never-started", ""),
    "no resources": (facts(result="resources"), "systemd", "resources"),
}


@pytest.mark.parametrize(("seen", "cause", "detail"), CASES.values(), ids=CASES)
def test_the_cause(seen: Facts, cause: str, detail: str) -> None:
    """One cause, in one sentence, with systemd's own state among the evidence."""
    answer = judge(seen)
    assert list(answer) == ["schema_version", "unit", "cause", "message", "evidence"]
    assert (answer["unit"], answer["cause"]) == (UNIT, cause)
    assert answer["message"].startswith(CAUSES[cause])
    assert detail in answer["message"]
    assert any(line.startswith("ActiveState=") for line in answer["evidence"])


def test_every_cause_is_tested() -> None:
    """The table of causes and the cases above name the same ones."""
    assert {cause for _, cause, _ in CASES.values()} == set(CAUSES)


def test_the_evidence_of_a_refusal() -> None:
    """The guard's whole text comes first, and its lines are not repeated from the journal."""
    answer = judge(
        facts(*FATAL.split("\n"), "more", result="exit-code", starts=[pre(75)], refused={"invocation": INVOCATION, "text": FATAL})
    )
    assert answer["evidence"] == [
        "FATAL: longcontext wants --gpu-memory-utilization 0.75, which would",
        "       take the total to 0.85.",
        "       Why.",
        "ActiveState=failed SubState=failed Result=exit-code NRestarts=0",
        "vllm-serve.sh: more",
    ]


def test_a_refusal_without_a_record_says_each_thing_once() -> None:
    """The sentence is the guard's status text alone; what the status means stands in the evidence."""
    answer = judge(facts(result="exit-code", starts=[pre(78)], text="refused: no model is set; add a line"))
    assert answer["message"] == f"{CAUSES['refusal']}: no model is set; add a line"
    assert answer["evidence"][:2] == ["no model is set; add a line", "status 78: refused always: bad or impossible configuration"]


def test_a_refusal_of_which_only_the_status_is_known() -> None:
    """Then the status is the sentence."""
    answer = judge(facts(result="exit-code", starts=[pre(75)]))
    assert answer["message"] == f"{CAUSES['refusal']}: status 75: refused now: others hold what it needs"


def test_only_the_last_lines_of_the_last_start() -> None:
    """Twenty lines, and none of an earlier start."""
    seen = facts(*(f"line {i}" for i in range(30)), result="exit-code", code=EXITED, status=1)
    old = Entry(T0 - 1, "old", "vllm-serve.sh", "", "f" * 32, False)
    evidence = judge(seen.replace(lines=(old, *seen.lines)))["evidence"]
    assert evidence[2:] == [f"vllm-serve.sh: line {i}" for i in range(10, 30)]


def test_an_escaped_name_is_shown_unescaped() -> None:
    r"""my\x2dmodel is my-model to people."""
    assert judge(facts().replace(unit=r"vllm-model@my\x2dmodel.service"))["unit"] == "vllm-model@my-model.service"


def test_without_a_manager(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """69: nobody can be asked."""
    monkeypatch.delenv("DBUS_SESSION_BUS_ADDRESS", raising=False)
    assert main(["why", "vllm-longcontext"]) == 69
    assert "no user manager answers" in capsys.readouterr().err
