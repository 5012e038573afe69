"""sparkguard why: what became of a unit's last start, and what says so."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import click

from sparkguard import refusal, units
from sparkguard.cli import journal
from sparkguard.cli.names import complete_models
from sparkguard.cli.terminal import HELP, bold, epilog, printable, printable_lines, say, show, show_json
from sparkguard.core.explain import SCHEMA_VERSION
from sparkguard.core.record import Record
from sparkguard.errors import CONFIG, NOT_FOUND, OK, OSERR, STATUSES, TEMPFAIL, UNAVAILABLE, SparkguardError
from sparkguard.probe.procfs import unescape_unit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sparkguard.cli.journal import Entry

_EXAMPLES = """
sparkguard why vllm-longcontext
sparkguard why mymodel                                   vllm-model@mymodel
sparkguard why vllm-embeddings --json | jq -r .cause
"""
CAUSES = {
    "running": "it runs, or is about to",
    "refusal": "the guard refused the start",
    "oom-kill": "it was killed because memory ran out",
    "exit": "the server ended by itself",
    "signal": "a signal ended it",
    "timeout": "systemd gave up waiting for it",
    "start-limit": "it was started too often in too short a time",
    "stopped": "somebody, or a Conflicts= peer, stopped it",
    "never-started": "it was not started since the user manager was",
    "systemd": "systemd could not start it",
}
_UNIT_PROPERTIES = ("LoadState", "ActiveState", "SubState", "InvocationID", "InactiveExitTimestamp", "InactiveEnterTimestamp")
_SERVICE_PROPERTIES = (
    "Result",
    "StatusText",
    "ExecStartPre",
    "ExecMainPID",
    "ExecMainCode",
    "ExecMainStatus",
    "ExecMainExitTimestamp",
    "NRestarts",
)
_LAST_LINES = 20
_LINES_OF_A_START = 500
_KERNEL_LINES = 2000
_KERNEL_WINDOW = 120 * 1_000_000
# Messages of systemd's own catalogue: a stop job has begun; a unit has failed with a result; a process of it has ended.
_STOPPING = "de5b426a63be47a7b6ac3eaac82e2f6f"
_FAILED = "d9b373ed55a64feb8242e02dbe79a49c"
_ENDED = "98e322203f7a4ed290d09fe03c09fe15"
_KILLERS = ("earlyoom", "systemd-oomd")
_RESULTS = {
    "exit-code": "exit",
    "signal": "signal",
    "core-dump": "signal",
    "timeout": "timeout",
    "watchdog": "timeout",
    "oom-kill": "oom-kill",
    "start-limit-hit": "start-limit",
}
_EXITED = 1  # CLD_EXITED of waitid(); 2 and 3 are killed and dumped
_GUARD = {TEMPFAIL, CONFIG, OSERR}
_MEANINGS = {
    0: "vLLM's API server ends with 0 when its engine has died; the engine's error stands above its last lines",
    1: "an error that vLLM or the program reports in its last lines",
    2: "arguments that vLLM does not know",
    NOT_FOUND: "the program to start was not found (VLLM_BIN)",
    130: "SIGINT",
    132: "SIGILL: the program was built for another CPU",
    134: "SIGABRT",
    137: "SIGKILL, as a container's client reports it; the OOM killer is one sender, and not the only one",
    139: "SIGSEGV",
    143: "SIGTERM",
    203: "systemd could not execute the program",
}


class Facts(Record):
    """What is known of a unit: systemd's properties, the guard's record, the lines of its last start, the killers' lines."""

    unit: str
    properties: dict[str, Any]
    refused: dict[str, Any] | None
    lines: tuple[Entry, ...]
    killers: tuple[Entry, ...]


@click.command(
    "why", context_settings=HELP, epilog=epilog(_EXAMPLES, OK, CONFIG, UNAVAILABLE), short_help="why a unit is not running"
)
@click.argument("unit", shell_complete=complete_models)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(unit: str, as_json: bool) -> int:
    """Tells what became of a unit's last start, with the evidence: systemd's properties, the guard's record of its refusal, the
    journal's last lines of the unit, and the kernel's where it killed for memory.

    \b
    causes: running, refusal, oom-kill, exit, signal, timeout, start-limit, stopped, never-started, systemd
    """
    facts, journal_read = gather(unit, os.environ)
    if not journal_read:
        say(f"sparkguard: {journal.MISSING}")
    answer = judge(facts)
    if as_json:
        show_json(answer)
    else:
        show(f"{bold(printable(answer['unit']))}: {printable(answer['message'])}")
        show("\n".join("  " + line for text in answer["evidence"] for line in printable_lines(text).split("\n")))
    return OK


def gather(text: str, env: Mapping[str, str]) -> tuple[Facts, bool]:
    """The facts, and whether the journal could be asked. Raises SparkguardError for no manager (69) and no such unit (78)."""
    base = text.removesuffix(".service")
    is_other = "@" not in base and units.find(f"{base}.service", env) is not None  # any unit's end can be asked about
    unit = f"{base}.service" if is_other else units.resolve(text, env)[0]
    of_unit = units.properties(unit, "Unit", _UNIT_PROPERTIES, env)
    of_service = units.properties(unit, "Service", _SERVICE_PROPERTIES, env)
    if of_unit is None or of_service is None:
        raise SparkguardError("no user manager answers", "see: systemctl --user status", UNAVAILABLE)
    if of_unit["LoadState"] == "not-found":
        raise SparkguardError(f"there is no unit {unescape_unit(unit)}", "see them all: systemctl --user list-unit-files")
    properties = {**of_unit, **of_service, "InvocationID": bytes(of_unit["InvocationID"]).hex()}
    mine = {"_UID": str(os.getuid())}
    began = properties["InactiveExitTimestamp"] or None
    # Lines of an earlier boot, or manager, tell nothing of what this one did.
    manager = units.properties("", "Manager", ("UserspaceTimestamp",), env)
    since = manager["UserspaceTimestamp"] if manager else None
    lines = journal.last([{**mine, "_SYSTEMD_USER_UNIT": unit}, {**mine, "USER_UNIT": unit}], _LINES_OF_A_START, since, env)
    if unit.startswith(units.TEMPLATE) and not (began or lines or os.path.exists(units.spec(units.resolve(unit, env)[1], env))):
        raise SparkguardError(f"there is no unit of the name {text!r}, and no spec", "see them all: sparkguard plan")
    killers: list[Entry] = []
    if began is not None:
        asked = [{"_TRANSPORT": "kernel"}, *({"SYSLOG_IDENTIFIER": name} for name in _KILLERS)]
        killers = journal.last(asked, _KERNEL_LINES, began, env) or []
    return Facts(unit, properties, refusal.last(unit, env), tuple(lines or ()), tuple(killers)), lines is not None


def judge(facts: Facts) -> dict[str, Any]:
    """The JSON: {schema_version, unit, cause, message, evidence}. Evidence begins with what decided."""
    cause, detail, evidence = _cause(facts)
    said = {"", *(line.strip() for line in evidence)}
    tail = [_shown(entry) for entry in _of_last_start(facts)[-_LAST_LINES:] if entry.message.strip() not in said]
    return {
        "schema_version": SCHEMA_VERSION,
        "unit": unescape_unit(facts.unit),
        "cause": cause,
        "message": CAUSES[cause] + (f": {detail}" if detail else ""),
        "evidence": evidence + tail,
    }


def _cause(facts: Facts) -> tuple[str, str, list[str]]:
    seen = facts.properties
    active, sub, result = seen["ActiveState"], seen["SubState"], seen["Result"]
    state = f"ActiveState={active} SubState={sub} Result={result} NRestarts={seen['NRestarts']}"
    if active in ("active", "reloading", "deactivating") or (active == "activating" and sub != "auto-restart"):
        return "running", seen["StatusText"] or sub, [state]
    if refused := _refusal(facts):
        opening = " ".join(refused.partition("\n\n")[0].removeprefix("FATAL: ").split())
        return "refusal", opening, [*(line for line in refused.split("\n") if line), state]
    kills = [entry for entry in facts.killers if _is_kill(entry, facts)]
    if result == "oom-kill" or kills:
        by = kills[-1].identifier if kills and not kills[-1].kernel else "the kernel"
        return "oom-kill", f"by {by}", [state, *(_shown(entry) for entry in kills)]
    main = _main(seen)
    if result == "start-limit-hit":
        return "start-limit", f"the last one: {main}" if main else "", [state, *([main] if main else [])]
    if result == "exit-code" and not main:
        return "systemd", _pre(seen), [state, _pre(seen)]
    if result in _RESULTS:
        detail = result if _RESULTS[result] == "timeout" else main
        return _RESULTS[result], detail, [state, detail]
    if result != "success":
        return "systemd", result, [state]
    if not seen["InactiveExitTimestamp"]:
        return *_from_journal(facts), [state]
    if any(entry.message_id == _STOPPING for entry in _of_last_start(facts)):
        return "stopped", "", [state]
    return "exit", main, [state, main]


def _from_journal(facts: Facts) -> tuple[str, str]:
    """systemd forgets a unit that ended well, or whose failure was reset; the journal does not."""
    if not facts.lines:
        return "never-started", ""
    last = {entry.message_id: entry.message for entry in _of_last_start(facts)}
    ended = last.get(_ENDED, "")
    result = last.get(_FAILED, "").partition("'")[2].partition("'")[0]
    if not result:
        return ("stopped", "") if _STOPPING in last else ("exit", ended or _MEANINGS[0])
    if "Control process" in ended:
        return ("refusal" if any(f"status={status}/" in ended for status in _GUARD) else "systemd"), ended
    return _RESULTS.get(result, "systemd"), ended or result


def _refusal(facts: Facts) -> str | None:
    """The guard's text, if it was the guard that ended the last start."""
    seen = facts.properties
    invocation = seen["InvocationID"] or _last_invocation(facts)
    if facts.refused and invocation and facts.refused.get("invocation") == invocation:
        return str(facts.refused.get("text") or seen["StatusText"])
    failed = next((pre for pre in seen["ExecStartPre"] if pre[-2:] != [_EXITED, 0] and pre[-1]), None)
    status = failed[-1] if failed else seen["ExecMainStatus"] if seen["ExecMainCode"] == _EXITED else 0
    ours = failed is None or any("vllm_mem_budget" in word for word in failed[1])
    if status in _GUARD and ours and (failed or seen["StatusText"].startswith("refused:")):
        text = seen["StatusText"].removeprefix("refused:").strip()
        meaning = f"status {status}: {STATUSES[status][1]}"
        return f"{text}\n\n{meaning}" if text else meaning
    return None


def _main(seen: Mapping[str, Any]) -> str:
    """How the main process ended; '' when it never ran, or still does."""
    status = seen["ExecMainStatus"]
    if not seen["ExecMainExitTimestamp"] or not seen["ExecMainCode"]:
        return ""
    if seen["ExecMainCode"] != _EXITED:
        return f"killed by {_signal(status)}" + (", and dumped core" if seen["ExecMainCode"] == 3 else "")
    meaning = _MEANINGS.get(status) or (STATUSES[status][1] if status in STATUSES else "")
    return f"exit status {status}" + (f" ({meaning})" if meaning else "")


def _pre(seen: Mapping[str, Any]) -> str:
    failed = next((pre for pre in seen["ExecStartPre"] if pre[-1]), None)
    return f"{' '.join(failed[1])} ended with status {failed[-1]}" if failed else "ExecStartPre= failed"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _is_kill(entry: Entry, facts: Facts) -> bool:
    """Whether the kernel, earlyoom or systemd-oomd says here that it kills a process of this unit, near the unit's end."""
    text = entry.message
    if not any(words in text for words in ("Killed process", "oom-kill:", "Killed /", "sending SIG")):
        return False
    seen = facts.properties
    numbers = "".join(char if char.isdigit() else " " for char in text).split()
    ended = seen["ExecMainExitTimestamp"] or seen["InactiveEnterTimestamp"]
    near = not ended or abs(entry.microseconds - ended) < _KERNEL_WINDOW
    return near and (facts.unit in text or str(seen["ExecMainPID"] or "no pid") in numbers)


def _of_last_start(facts: Facts) -> Sequence[Entry]:
    """The lines of the last invocation; all of them where systemd no longer knows which that was."""
    invocation = facts.properties["InvocationID"] or _last_invocation(facts)
    of_start = [entry for entry in facts.lines if entry.invocation == invocation]
    return of_start or facts.lines


def _last_invocation(facts: Facts) -> str:
    return facts.lines[-1].invocation if facts.lines else ""


def _shown(entry: Entry) -> str:
    return f"{entry.identifier}: {entry.message}" if entry.identifier else entry.message
