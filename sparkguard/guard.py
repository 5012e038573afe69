"""The verdict before a start: ExecStartPre= of every unit, and the launcher's own check.

Called for every start, so it imports next to nothing (docs/adr/0002-start-time.md; tests/unit/test_startup_imports.py).
The order is: settings, then under one lock: see the machine, admit or refuse, reserve. It never waits with the lock held.
"""

from __future__ import annotations

import os
import time

from sparkguard import command, ledger, streams
from sparkguard.core import explain
from sparkguard.core.admission import admit, missing_bytes
from sparkguard.core.record import Record
from sparkguard.core.types import UNIFIED, Budget, Claim, GpuProcess, Hold, Machine, MemoryPool, Verdict, Wanted
from sparkguard.errors import INTERRUPTED, OK, OSERR, SOFTWARE, USAGE, SparkguardError, report
from sparkguard.probe import amdgpu, claims, engines, facts, nvml, ports, procfs
from sparkguard.settings import Settings, check_name, load

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

USAGE_TEXT = """\
usage: vllm_mem_budget.sh NAME [--json] [vllm arguments...]

Admits or refuses the start of the model NAME beside every server on this machine.
Exit status: 0 admitted, 75 refused now, 78 refused always or bad configuration, 71 the machine cannot be read.
"""
POLL_SECONDS = 0.5
# The memory of a server that has just ended comes back by itself within so long, and then no model has to go for it.
SETTLE_SECONDS = 5.0
# Memory that a driver holds shows in no process and no cache of /proc/meminfo: what is left of MemTotal after these.
_EXPLAINED = (
    "MemFree",
    "Buffers",
    "Cached",
    "AnonPages",
    "Slab",
    "PageTables",
    "KernelStack",
    "SwapCached",
    "VmallocUsed",
    "Percpu",
    "Hugetlb",
)


class Roots(Record):
    """Where the machine is read from; tests give others."""

    proc: str = "/proc"
    sys: str = "/sys"
    dev: str = "/dev"


class View(Record):
    """One look at the machine."""

    machine: Machine
    pools: tuple[MemoryPool, ...]
    seen: tuple[claims.Seen, ...]
    hidden: bool  # there are processes that this user may not see
    nvml_error: str | None = None


def main(argv: Sequence[str], env: Mapping[str, str] | None = None, roots: Roots | None = None) -> int:
    """argv: NAME [--json] [vllm arguments...]. Returns the exit status."""
    streams.mend()
    env = os.environ if env is None else env
    words = list(argv)
    name = ""
    as_json = False
    try:
        while words and words[0] in ("--json", "--help", "-h"):
            if words.pop(0) != "--json":
                streams.put(USAGE_TEXT)
                return OK
            as_json = True
        if not words:
            streams.say(USAGE_TEXT)
            return USAGE
        name, args = words[0], words[1:]
        if args[:1] == ["--json"]:
            as_json, args = True, args[1:]
        verdict = decide(name, args, env, roots or Roots())
        if as_json:
            _write_json(explain.as_json(verdict))
        return announce(verdict, env)
    except SparkguardError as error:
        return _fail(error, name, as_json, env)
    except KeyboardInterrupt:  # while it waits for memory
        return INTERRUPTED
    except Exception:
        return bug()


def _fail(error: SparkguardError, name: str, as_json: bool, env: Mapping[str, str]) -> int:
    from sparkguard import refusal

    cost = refusal.after_conflict(env)
    if as_json:
        try:
            _write_json(explain.error_json(name, error))
        except SparkguardError:
            pass  # the status and stderr say it as well
    streams.say(report(error) + _indented(cost, 2))
    _tell_systemd(env, "; ".join(filter(None, (f"refused: {error.message}", error.hint, cost))))
    return error.status


def _write_json(value: dict[str, Any]) -> None:
    import json

    streams.put(json.dumps(value, indent=2) + "\n")


def bug() -> int:
    """The last handler of an entry point: Python's own status would be 1, which the units take for vLLM's and restart."""
    import traceback

    streams.say(traceback.format_exc() + "sparkguard: this is a bug in sparkguard; the lines above say where\n")
    return SOFTWARE


def announce(verdict: Verdict, env: Mapping[str, str]) -> int:
    """Says the verdict on stderr, to systemd and, when refused, in the record that `sparkguard why` reads."""
    text = ("" if not verdict.admitted else "sparkguard: ") + explain.describe(verdict) + "\n"
    for claim in verdict.overridden:
        text += f"sparkguard: VLLM_MEM_ALLOW_UNKNOWN=1: pid {claim.pid} ({claim.engine}) is counted as nothing\n"
    cost = ""
    if not verdict.admitted:
        from sparkguard import refusal

        cost = refusal.after_conflict(env)
        text += _indented(cost, 7)
        refusal.record(verdict, env, text)
    streams.say(text)
    _tell_systemd(env, f"{explain.summary(verdict)} {cost}")
    return explain.status_of(verdict)


def _indented(text: str, blanks: int) -> str:
    return "".join("\n" + " " * blanks + line + "\n" for line in text.splitlines())


def decide(name: str, args: Sequence[str], env: Mapping[str, str], roots: Roots) -> Verdict:
    """Admits and reserves, or refuses; waits for memory that is still coming back. Raises SparkguardError."""
    name = check_name(name)
    settings = load(env, name)
    ours = not args or os.path.exists(settings.spec or "")  # else the server is started by somebody else's launcher
    start = command.build(settings, name, args, model_required=ours)
    if ours and invocation(env, roots):
        command.program_of(start, settings, env)  # the launcher would see it too, but after `systemctl start` has succeeded
    seconds = settings.seconds("VLLM_MEM_WAIT")
    asks_runners = settings.flag("VLLM_MEM_ASK_RUNNERS")
    began = time.monotonic()
    deadline = began + seconds
    waiting = False
    note = ""
    while True:
        with ledger.Ledger(ledger.directory(env), roots.proc) as held:
            verdict = judge(start, settings, env, roots, held)
            if verdict.admitted:
                held.hold(_reservation(verdict.wanted, command.asked(start), env, roots))
                return verdict
        now = time.monotonic()
        if asks_runners and (verdict.reason != "memory_taken" or now >= min(deadline, began + SETTLE_SECONDS)):
            asks_runners = False
            unloaded, note = ask_runners(verdict, start, env, roots)
            if unloaded:
                deadline = max(deadline, time.monotonic() + SETTLE_SECONDS)
                continue
        if verdict.reason != "memory_taken" or now >= deadline:
            return noted(verdict, note)
        if not waiting:
            missing = explain.gib(missing_bytes(explain.deciding(verdict)))
            text = f"{name} waits up to {seconds:g} s for {missing} more memory to come back"
            streams.say(f"sparkguard: {text}\n")
            _tell_systemd(env, text)
            waiting = True
        time.sleep(min(POLL_SECONDS, max(0.01, deadline - time.monotonic())))


def ask_runners(
    verdict: Verdict, start: command.Command, env: Mapping[str, str], roots: Roots, port_is_freed: bool = False
) -> tuple[bool, str]:
    """Whether models were unloaded for this refused start, so that it is to be judged again; and what is to be said of it."""
    port = verdict.wanted.port
    if port is not None and start.opens_host_port and not port_is_freed and ports.is_taken(roots.proc, port):
        return False, ""  # it would be refused all the same
    from sparkguard import room

    answer = room.ask(verdict, ledger.directory(env))
    if not answer.unloaded:
        return False, answer.complaint if verdict.reason in ("over_budget", "memory_taken") else ""
    text = f"{', '.join(map(explain.printable, answer.unloaded))} unloaded by the runners, to make room for {verdict.wanted.name}"
    streams.say(f"sparkguard: {text}\n")
    _tell_systemd(env, text)
    return True, text


def noted(verdict: Verdict, note: str) -> Verdict:
    """With a note beside what was wanted, where the text of a refusal has it."""
    notes = "; ".join(filter(None, (verdict.wanted.note, note)))
    return verdict.replace(wanted=verdict.wanted.replace(note=notes))


def judge(
    start: command.Command,
    settings: Settings,
    env: Mapping[str, str],
    roots: Roots,
    held: ledger.Ledger,
    gone: Sequence[str] = (),
) -> Verdict:
    """The verdict on a start as things are now; reserves nothing. gone: units and pids to count as ended already."""
    budget = budget_of(settings)
    view = look(settings, env, roots)
    if view.hidden and not budget.allow_unknown:
        raise SparkguardError(
            f"{roots.proc} hides other users' processes (hidepid=), and with them their servers",
            "mount it with gid= of a group of yours; or VLLM_MEM_ALLOW_UNKNOWN=1, and the live check alone sees them",
            OSERR,
        )
    mine, myself = invocation(env, roots), procfs.read_stat(roots.proc, os.getpid())
    starts = tuple(
        start
        for start in held.live()
        if (start.pid, start.start_time) != (os.getpid(), myself.start_time if myself else 0)
        and not (mine and start.invocation == mine[1])
        and procfs.unescape_unit(start.unit or "") not in gone
    )
    holders = count(tuple(entry for entry in view.seen if not _gone(entry, gone)), starts, roots)
    server_env = {**{key: value.text for key, value in settings.passed_on.items()}, **env}
    verdict = admit(budget, _returned(view, gone), holders, command.wanted(start, settings, view.machine, server_env))
    return _refuse_taken_port(verdict, start, view, roots, gone) if verdict.admitted else verdict


def _refuse_taken_port(verdict: Verdict, start: command.Command, view: View, roots: Roots, gone: Sequence[str]) -> Verdict:
    """vLLM itself finds out after 20 s of imports, and its unit would try six times."""
    port = verdict.wanted.port
    if port is None or not start.opens_host_port or not ports.is_taken(roots.proc, port):
        return verdict
    holders = [entry for entry in view.seen if entry.claim.port == port]
    if any(_gone(entry, gone) for entry in holders):
        return verdict
    return verdict.replace(admitted=False, reason="port_taken", culprits=tuple(entry.claim for entry in holders))


def budget_of(settings: Settings) -> Budget:
    return Budget(settings.share("VLLM_MEM_BUDGET"), settings.reserve_bytes(), settings.flag("VLLM_MEM_ALLOW_UNKNOWN"))


def look(settings: Settings, env: Mapping[str, str], roots: Roots, ask_nvml: bool = False) -> View:
    """Sees every server and every pool. NVML is asked only where nothing else can tell, or when ask_nvml says so."""
    choice = settings.choice("SPARK_MEMORY_POOL")
    machine, answer = facts.survey(roots.proc, roots.sys, roots.dev, ledger.directory(env), choice, env)
    meminfo = facts.read_meminfo(roots.proc)
    snapshot = procfs.scan(roots.proc, engines.MARKERS)
    seen = claims.see(roots.proc, snapshot, machine, None)
    nvidia = machine.driver is not None or facts.needs_nvml(machine)
    if (
        answer is None
        and nvidia
        and (ask_nvml or facts.needs_nvml(machine) or claims.undeclared(seen) or _unexplained(machine, meminfo, seen))
    ):
        answer = nvml.ask(env=env)
    if answer is not None:
        if any(gpu.mig for gpu in answer.gpus):  # it may have been cut since the facts were kept
            machine = facts.classify(answer, meminfo["MemTotal"], amdgpu.cards(roots.sys), choice)
        rows: tuple[GpuProcess, ...] | None = facts.processes(machine, answer) if answer.error is None else None
        seen = claims.see(roots.proc, snapshot, machine, rows)
    pools = facts.available(machine, meminfo, answer, roots.sys)
    return View(machine, pools, seen, snapshot.hidden, _complaint(answer) if answer else None)


def _complaint(answer: nvml.Report) -> str | None:
    """What NVML did not tell, so that holders may be missing from the claims."""
    silent = [gpu.device for gpu in answer.gpus if not gpu.listed and not gpu.mig]
    return answer.error or (f"the processes on {', '.join(silent)} could not be listed" if silent else None)


def _unexplained(machine: Machine, meminfo: Mapping[str, int], seen: tuple[claims.Seen, ...]) -> bool:
    """Whether a unified pool's driver holds more than the servers in sight have claimed: somebody holds it undeclared."""
    if machine.pools[0].kind != UNIFIED or not {"MemFree", "AnonPages"} <= meminfo.keys():
        return False
    explained = sum(meminfo.get(key, 0) for key in _EXPLAINED)
    declared = sum(hold.bytes or 0 for entry in seen for hold in entry.claim.holds)
    return meminfo["MemTotal"] - explained > declared + claims.OTHER_BYTES


def _gone(entry: claims.Seen, gone: Sequence[str]) -> bool:
    return (_is_ours(entry.claim) and entry.claim.unit in gone) or any(str(pid) in gone for pid in entry.pids)


def _is_ours(claim: Claim) -> bool:
    """Whether its unit is this user's: another user's may have the same name."""
    return claim.manager == "user"


def _returned(view: View, gone: Sequence[str]) -> tuple[MemoryPool, ...]:
    """The pools as they will be once the gone ones have given back what they have taken."""
    back: dict[str, int] = {}
    for entry in view.seen:
        if gone and _gone(entry, gone):
            for hold in entry.claim.holds:
                back[hold.pool] = back.get(hold.pool, 0) + hold.taken_bytes
    return tuple(
        pool.replace(
            available_bytes=min(pool.available_bytes + back[pool.id], pool.total_bytes or pool.available_bytes + back[pool.id])
        )
        if pool.id in back and pool.available_bytes is not None
        else pool
        for pool in view.pools
    )


def count(seen: tuple[claims.Seen, ...], starts: tuple[ledger.Reservation, ...], roots: Roots) -> tuple[Claim, ...]:
    """Every server and every start under way, each once.

    A start that has become a server is counted by that server's own command line. The runners of `sparkguard serve` say on
    theirs nothing of how much they hold: their supervisor's reservation does, for all of them together.
    """
    spoken_for: list[claims.Seen] = []
    holders = []
    for start in starts:
        below = _below(start, seen, roots)
        unit = procfs.unescape_unit(start.unit) if start.unit else None
        in_unit = (entry for entry in seen if unit and _is_ours(entry.claim) and entry.claim.unit == unit and entry not in below)
        if any(map(_declares, below)) or any(in_unit):
            continue
        holders.append(_with_taken(as_claim(start), below, roots))
        spoken_for += below
    return (*(entry.claim for entry in seen if entry not in spoken_for), *holders)


def _below(start: ledger.Reservation, seen: tuple[claims.Seen, ...], roots: Roots) -> list[claims.Seen]:
    process = procfs.read_stat(roots.proc, start.pid)
    if process is None or process.start_time != start.start_time:
        return []  # a unit's guard has ended, and its pid may be anybody's
    return [entry for entry in seen if any(start.pid in (pid, *procfs.ancestors(roots.proc, pid)) for pid in entry.pids)]


def _declares(entry: claims.Seen) -> bool:
    return entry.claim.source not in ("unknown", "measured")


def _with_taken(claim: Claim, servers: list[claims.Seen], roots: Roots) -> Claim:
    """The claim with what its servers have taken of it already: their private pages, and what NVML measured."""
    taken: dict[str, int] = {}
    for entry in servers:
        processes = {below for pid in entry.pids for below in procfs.descendants(roots.proc, pid)}
        taken["ram"] = taken.get("ram", 0) + procfs.private_bytes(roots.proc, sorted(processes))
        for hold in entry.claim.holds:
            taken[hold.pool] = taken.get(hold.pool, 0) + hold.taken_bytes
    holds = (hold.replace(taken_bytes=min(hold.bytes or 0, taken.get(hold.pool, 0))) for hold in claim.holds)
    return claim.replace(holds=tuple(holds))


def as_claim(reservation: ledger.Reservation) -> Claim:
    unit = procfs.unescape_unit(reservation.unit) if reservation.unit else None
    starting = reservation.engine == "vllm"
    return Claim(
        reservation.pid,
        reservation.engine,
        reservation.holds,
        "reservation",
        unit,
        reservation.port,
        note=f"start of {reservation.name} under way" if starting else "all models of sparkguard serve",
        service=reservation.unit,
    )


def invocation(env: Mapping[str, str], roots: Roots) -> tuple[str, str] | None:
    """(unit, INVOCATION_ID) when systemd itself started this process as part of a unit.

    A terminal or a notebook server is a unit too, and hands its INVOCATION_ID down to everything started in it; only
    SYSTEMD_EXEC_PID tells the unit's own process.
    """
    identity = env.get("INVOCATION_ID")
    if not identity or env.get("SYSTEMD_EXEC_PID") != str(os.getpid()) or not identity.isalnum():
        return None
    unit = procfs.unit_of(procfs.cgroup(roots.proc, "self"))
    return (unit, identity) if unit else None


def _reservation(wanted: Wanted, asked: str, env: Mapping[str, str], roots: Roots) -> ledger.Reservation:
    unit, identity = invocation(env, roots) or (None, None)
    stat = procfs.read_stat(roots.proc, os.getpid())
    start_time = stat.start_time if stat else 0
    holds = tuple(Hold(hold.pool, hold.share, hold.bytes) for hold in wanted.holds)
    return ledger.Reservation(
        wanted.name, os.getpid(), start_time, procfs.boot_id(roots.proc), holds, unit, identity, wanted.port, asked
    )


def _tell_systemd(env: Mapping[str, str], text: str) -> None:
    """STATUS= of the unit, so that `systemctl --user status` shows it. Costs nothing outside a unit."""
    address = env.get("NOTIFY_SOCKET")
    if not address:
        return
    import _socket  # socket costs 8 ms for its enums

    link = _socket.socket(_socket.AF_UNIX, _socket.SOCK_DGRAM)
    try:
        link.setblocking(False)  # a manager that is stopped reads nothing, and its socket is soon full
        link.connect("\0" + address[1:] if address.startswith("@") else address)
        link.send(b"STATUS=" + " ".join(text.split()).encode("utf-8", "replace"))
    except OSError:
        pass  # The status line is a courtesy; the verdict stands on stderr and in the exit status.
    finally:
        link.close()
