"""run-model.sh: puts a model on its port in place of the one that is there, or changes nothing.

The guard is asked first, with the port's holder counted as gone: systemd's Conflicts= would stop the holder before the guard
could refuse. What fails after the switch is put back.
"""

from __future__ import annotations

import argparse
import http.client
import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from sparkguard import command, guard, ledger, streams, units
from sparkguard.core import explain
from sparkguard.core.record import Record
from sparkguard.core.types import Claim, Verdict
from sparkguard.errors import CONFIG, INTERRUPTED, OK, TEMPFAIL, UNAVAILABLE, SparkguardError, report
from sparkguard.probe.procfs import unescape_unit
from sparkguard.settings import Settings, load

POLL_SECONDS = 1.0
SAY_EVERY_SECONDS = 10.0
LAST_LINES = 20
_RUNNING = ("active", "activating", "reloading")

DESCRIPTION = """\
Switches the model on a port. The guard is asked first, with the server that holds the port counted as gone; refused, nothing
is changed. Else that server's unit is stopped, the wanted one is started, and its progress is shown until
http://127.0.0.1:PORT/v1/models answers. When it fails, its last lines are printed and the former unit is started again.
"""
EPILOG = """\
examples:
  run-model.sh vllm-vision-agent     the unit, with or without .service
  run-model.sh vision-agent          the same, by its spec
  run-model.sh mymodel               vllm-model@mymodel, from ~/.config/spark/models/mymodel.env

exit status: 0 the model answers; 75, 78 refused, as the guard says; 69 it was started and did not come up; 130 interrupted.
RUN_MODEL_TIMEOUT is how many seconds a load may take (1800).
"""


def main(argv: Sequence[str], env: Mapping[str, str] | None = None) -> int:
    streams.mend()
    env = os.environ if env is None else env
    parser = argparse.ArgumentParser(
        "run-model.sh", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", metavar="NAME|UNIT", help="a model's spec, or its unit")
    wanted = parser.parse_args(argv).model
    try:
        return switch(wanted, env)
    except KeyboardInterrupt:
        return INTERRUPTED
    except SparkguardError as error:
        streams.say(report(error))
        return error.status
    except Exception:
        return guard.bug()


def switch(text: str, env: Mapping[str, str]) -> int:
    """Returns the exit status. Raises SparkguardError before anything was changed."""
    seconds = _timeout(env)
    unit, name = units.resolve(text, env)
    state = _state(unit, env)
    known = units.load(unit, env)
    name, args = known.launches() or (name, ())
    # The guard will see the unit's environment, with its drop-ins, and not this shell's.
    here = {key: env[key] for key in ("HOME", "XDG_RUNTIME_DIR") if key in env}
    unit_env = units.session(here) | known.environment
    settings = load(unit_env, name, spec_must_exist=True)
    start = command.build(settings, name, args)
    port = start.declared.port or settings.port()
    if state.active in _RUNNING:
        if _answers(port):
            say(f"{unit} runs already, and answers on port {port}")
            return OK
        say(f"{unit} runs already; waiting for port {port}")
        return OK if _wait(unit, port, None, seconds, env) else UNAVAILABLE

    verdict = _judge(start, settings, unit_env, ())
    running = _running_units(env)
    holders = holders_of(port, verdict.claims, running, lambda unit: _state(unit, env).main_pid)
    holders += [peer for peer in known.conflicts if peer in running and peer not in holders]
    if holders:
        verdict = _judge(start, settings, unit_env, tuple(unescape_unit(holder) for holder in holders))
    elif _is_taken(port):
        hint = f"see who: ss -ltnp 'sport = :{port}'"
        raise SparkguardError(f"port {port} is taken by something that is no inference server", hint, TEMPFAIL)
    if not verdict.admitted and settings.flag("VLLM_MEM_ASK_RUNNERS"):
        # Now and not in the unit's start, which would find the holders stopped already if it was refused then.
        unloaded, note = guard.ask_runners(verdict, start, unit_env, guard.Roots(), port_is_freed=bool(holders))
        if unloaded:
            verdict = _judge(start, settings, unit_env, tuple(unescape_unit(holder) for holder in holders))
        verdict = guard.noted(verdict, note)
    if not verdict.admitted:
        streams.say(explain.describe(verdict) + "\n")
        if holders:
            say(f"that is with {_names(holders)} counted as gone; nothing was changed")
        return explain.status_of(verdict)
    return _replace(holders, unit, port, seconds, env)


def _replace(holders: Sequence[str], unit: str, port: int, seconds: float, env: Mapping[str, str]) -> int:
    """Stops, starts and waits; brings the holders back when that fails."""
    starting: subprocess.Popen[bytes] | None = None
    try:
        for holder in holders:
            say(f"stopping {holder}")
            systemctl(env, "stop", holder)
        # A start by hand counts towards StartLimitBurst=, and switching back and forth is no restart loop. Fails when the
        # unit was never loaded, and then there is no count.
        systemctl(env, "reset-failed", unit, check=False)
        say(f"starting {unit}")
        starting = _spawn(["systemctl", "--user", "start", unit], env)
        if _wait(unit, port, starting, seconds, env):
            return OK
    except KeyboardInterrupt:
        if starting is None:
            say("interrupted")
            _bring_back(holders, env)
        else:
            say(f"no longer waiting; {unit} goes on loading")
            if holders:
                say(f"the former one comes back with: systemctl --user stop {unit} && systemctl --user start {' '.join(holders)}")
        return INTERRUPTED
    except SparkguardError as error:
        streams.say(report(error))
    _last_lines(unit, env)
    systemctl(env, "stop", unit, check=False)
    _bring_back(holders, env)
    return UNAVAILABLE


def _bring_back(holders: Sequence[str], env: Mapping[str, str]) -> None:
    for holder in holders:
        systemctl(env, "reset-failed", holder, check=False)
        if systemctl(env, "start", holder, check=False):
            say(f"{holder} could not be started again: systemctl --user status {holder}")
        else:
            say(f"{holder} was started again")


def _wait(unit: str, port: int, starting: subprocess.Popen[bytes] | None, seconds: float, env: Mapping[str, str]) -> bool:
    """True once the model answers; False, and said, when the unit has failed or the time is over."""
    began = said = time.monotonic()
    last = ""
    state = _state(unit, env)
    restarts = state.restarts
    while True:
        if starting is not None and starting.poll() is not None:
            if starting.returncode:
                say(f"{unit} was not started")
                return False
            starting = None
        seen = _look(unit, env)
        state = seen or state  # a machine that loads a model may be too busy to answer each time
        now = time.monotonic()
        if starting is None and seen is not None:
            if state.active == "active" and _answers(port):
                say(f"{unit} answers on port {port} after {now - began:.0f} s")
                return True
            # A server that died during its load would only load in vain again.
            if state.active not in _RUNNING or state.sub == "auto-restart" or state.restarts != restarts:
                say(f"{unit} failed after {now - began:.0f} s")
                return False
        if now - began > seconds:
            say(f"{unit} does not answer on port {port} after {now - began:.0f} s (RUN_MODEL_TIMEOUT)")
            return False
        text = state.status if starting is not None else f"{unit} is {state.sub} and does not answer yet"
        if text and (text != last or now - said > SAY_EVERY_SECONDS):
            say(f"{now - began:4.0f} s  {text}")
            last, said = text, now
        time.sleep(POLL_SECONDS)


def holders_of(port: int, claims: Sequence[Claim], running: Sequence[str], main_pid: Callable[[str], int]) -> list[str]:
    """The units, as systemctl wants them named, whose servers hold the port.

    Raises SparkguardError for a server that is no unit of this user: it is not ours to stop. That goes for a server which
    merely was started inside a unit, such as a terminal's or a notebook's.
    """
    holders = []
    for claim in claims:
        if claim.port != port:
            continue
        unit = claim.service if claim.manager == "user" and claim.service in running else None
        if unit is None or not (unit.startswith("vllm-") or main_pid(unit) == claim.pid):
            raise SparkguardError(
                f"port {port} is held by {claim.engine}, pid {claim.pid}, which no unit of yours runs",
                f"end it first: kill {claim.pid}" if claim.pid else None,
                TEMPFAIL,
            )
        if unit not in holders:
            holders.append(unit)
    return holders


def _judge(start: command.Command, settings: Settings, env: Mapping[str, str], gone: tuple[str, ...]) -> Verdict:
    roots = guard.Roots()
    with ledger.Ledger(ledger.directory(env), roots.proc) as held:
        return guard.judge(start, settings, env, roots, held, gone)


def _answers(port: int) -> bool:
    """Whether the OpenAI interface is up. With --api-key it answers 401, and that is an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/v1/models")
        return connection.getresponse().status < 500
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _is_taken(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError:
        return False
    return True


def systemctl(env: Mapping[str, str], *words: str, check: bool = True) -> int:
    """The exit status; what systemctl says goes to stderr. Raises SparkguardError (69) for a failure that counts."""
    process = _spawn(["systemctl", "--user", *words], env, quiet=not check)
    process.communicate()
    if check and process.returncode:
        raise SparkguardError(f"systemctl --user {' '.join(words)} failed with status {process.returncode}", None, UNAVAILABLE)
    return process.returncode


class State(Record):
    """What the user manager says of a unit now."""

    active: str
    sub: str
    status: str  # what the guard said last
    restarts: int
    main_pid: int


def _state(unit: str, env: Mapping[str, str]) -> State:
    state = _look(unit, env)
    if state is None:
        raise _no_manager()
    return state


def _look(unit: str, env: Mapping[str, str]) -> State | None:
    """None when the manager does not answer."""
    about = units.properties(unit, "Unit", ("ActiveState", "SubState"), env)
    service = units.properties(unit, "Service", ("StatusText", "NRestarts", "MainPID"), env)
    if about is None or service is None:
        return None
    return State(about["ActiveState"], about["SubState"], service["StatusText"], service["NRestarts"], service["MainPID"])


def _running_units(env: Mapping[str, str]) -> list[str]:
    manager = ("org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager")
    patterns = (str(len(_RUNNING)), *_RUNNING, "1", "*.service")
    answer = units.bus(env, "call", *manager, "ListUnitsByPatterns", "asas", *patterns)
    if answer is None:
        raise _no_manager()
    return [row[0] for row in answer[0][0]]


def _no_manager() -> SparkguardError:
    hint = "start a model by hand: vllm-serve.sh NAME; to see the manager: systemctl --user status"
    return SparkguardError("no systemd user manager answers, and this switches its units", hint, UNAVAILABLE)


def _last_lines(unit: str, env: Mapping[str, str]) -> None:
    status = _state(unit, env).status
    if status:
        say(f"its status: {status}")
    say(f"its last lines (journalctl --user -u {unit}):")
    journal = _spawn(["journalctl", "--user", "-u", unit, "-n", str(LAST_LINES), "--no-pager", "-o", "cat", "-q"], env, stdout=2)
    journal.communicate()


def _spawn(argv: list[str], env: Mapping[str, str], quiet: bool = False, stdout: int | None = None) -> subprocess.Popen[bytes]:
    """A child in a session of its own, so that Ctrl-C is for us alone to answer."""
    stderr = subprocess.DEVNULL if quiet else None
    return subprocess.Popen(
        argv, env=units.session(env), stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True
    )


def _timeout(env: Mapping[str, str]) -> float:
    text = env.get("RUN_MODEL_TIMEOUT", "1800")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e9:
        raise SparkguardError(f"RUN_MODEL_TIMEOUT={text!r} is no number of seconds", "leave it out for 1800", CONFIG)
    return seconds


def _names(holders: Sequence[str]) -> str:
    return " and ".join(unescape_unit(holder) for holder in holders)


def say(text: str) -> None:
    streams.say(text + "\n")
