"""run-model.sh: puts a model on its port in place of the one that is there, or changes nothing.

The guard is asked first, with the port's holder counted as gone: systemd's Conflicts= would stop the holder before the guard
could refuse. What fails after the switch is put back.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from sparkguard import command, guard, ledger
from sparkguard.core import explain
from sparkguard.core.types import Claim, Verdict
from sparkguard.errors import CONFIG, INTERRUPTED, OK, TEMPFAIL, UNAVAILABLE, SparkguardError, report
from sparkguard.probe.procfs import unescape_unit
from sparkguard.settings import Settings, check_name, load

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
        sys.stderr.write(report(error))
        return error.status


def switch(text: str, env: Mapping[str, str]) -> int:
    """Returns the exit status. Raises SparkguardError before anything was changed."""
    seconds = _timeout(env)
    unit, name = resolve(text, _is_installed)
    unit_env = unit_environment(unit, env)
    settings = load(unit_env, name, spec_must_exist=unit.startswith("vllm-model@"))
    start = command.build(settings, name, ())
    port = start.declared.port or settings.port()
    if properties(unit, "ActiveState")["ActiveState"] in _RUNNING:
        if _answers(port):
            say(f"{unit} runs already, and answers on port {port}")
            return OK
        say(f"{unit} runs already; waiting for port {port}")
        return OK if _wait(unit, port, None, time.monotonic() + seconds) else UNAVAILABLE

    verdict = _judge(start, settings, unit_env, ())
    running = _running_units()
    holders = holders_of(port, verdict.claims, running, _main_pid)
    holders += [peer for peer in properties(unit, "Conflicts")["Conflicts"].split() if peer in running and peer not in holders]
    if holders:
        verdict = _judge(start, settings, unit_env, tuple(unescape_unit(holder) for holder in holders))
    elif _is_taken(port):
        raise SparkguardError(
            f"port {port} is taken by something that is no inference server", f"see who: ss -ltnp 'sport = :{port}'", TEMPFAIL
        )
    if not verdict.admitted:
        sys.stderr.write(explain.describe(verdict) + "\n")
        if holders:
            say(f"that is with {_names(holders)} counted as gone; nothing was changed")
        return explain.status_of(verdict)
    return _replace(holders, unit, port, seconds)


def _replace(holders: Sequence[str], unit: str, port: int, seconds: float) -> int:
    """Stops, starts and waits; brings the holders back when that fails."""
    starting: subprocess.Popen[bytes] | None = None
    try:
        for holder in holders:
            say(f"stopping {holder}")
            systemctl("stop", holder)
        # A start by hand counts towards StartLimitBurst=, and switching back and forth is no restart loop. Fails when the
        # unit was never loaded, and then there is no count.
        systemctl("reset-failed", unit, check=False)
        say(f"starting {unit}")
        starting = _spawn(["systemctl", "--user", "start", unit])
        if _wait(unit, port, starting, time.monotonic() + seconds):
            return OK
    except KeyboardInterrupt:
        if starting is None:
            say("interrupted")
            _bring_back(holders)
        else:
            back = (
                f"; back to the former one with: systemctl --user stop {unit} && systemctl --user start {' '.join(holders)}"
                if holders
                else ""
            )
            say(f"no longer waiting; {unit} goes on loading{back}")
        return INTERRUPTED
    except SparkguardError as error:
        sys.stderr.write(report(error))
    _last_lines(unit)
    systemctl("stop", unit, check=False)
    _bring_back(holders)
    return UNAVAILABLE


def _bring_back(holders: Sequence[str]) -> None:
    for holder in holders:
        systemctl("reset-failed", holder, check=False)
        if systemctl("start", holder, check=False):
            say(f"{holder} could not be started again: systemctl --user status {holder}")
        else:
            say(f"{holder} was started again")


def _wait(unit: str, port: int, starting: subprocess.Popen[bytes] | None, deadline: float) -> bool:
    """True once the model answers; False, and said, when the unit has failed or the time is over."""
    began = said = time.monotonic()
    last = ""
    restarts = properties(unit, "NRestarts")["NRestarts"]
    while True:
        if starting is not None and starting.poll() is not None:
            if starting.returncode:
                say(f"{unit} was not started")
                return False
            starting = None
        state = properties(unit, "ActiveState", "SubState", "StatusText", "NRestarts")
        now = time.monotonic()
        if starting is None:
            if state["ActiveState"] == "active" and _answers(port):
                say(f"{unit} answers on port {port} after {now - began:.0f} s")
                return True
            # A server that died during its first load would only load in vain again.
            if state["ActiveState"] not in _RUNNING or state["SubState"] == "auto-restart" or state["NRestarts"] != restarts:
                say(f"{unit} failed after {now - began:.0f} s")
                return False
        if now > deadline:
            say(f"{unit} does not answer on port {port} after {now - began:.0f} s (RUN_MODEL_TIMEOUT)")
            return False
        text = state["StatusText"] if starting is not None else f"{state['SubState']}, does not answer yet"
        if text and (text != last or now - said > SAY_EVERY_SECONDS):
            say(f"{now - began:4.0f} s  {text}")
            last, said = text, now
        time.sleep(POLL_SECONDS)


def resolve(text: str, is_installed: Callable[[str], bool]) -> tuple[str, str]:
    """(unit, name of its spec) for what somebody typed. is_installed tells of a unit that has a file of its own."""
    base = text.removesuffix(".service")
    if base.startswith("vllm-model@"):
        return base + ".service", check_name(base.removeprefix("vllm-model@"))
    own = base if base.startswith("vllm-") else f"vllm-{base}"
    name = check_name(own.removeprefix("vllm-"))
    if is_installed(own + ".service"):
        return own + ".service", name
    name = check_name(base)
    return f"vllm-model@{_escape(name)}.service", name


def _escape(name: str) -> str:
    """For a unit's name. '-' stays: %i hands it on as it is, and it is what people type."""
    return "".join(
        c if c.isascii() and (c.isalnum() or c in ":_.-") else "".join(f"\\x{byte:02x}" for byte in c.encode()) for c in name
    )


def holders_of(port: int, claims: Sequence[Claim], running: Sequence[str], main_pid: Callable[[str], int]) -> list[str]:
    """The units, as systemctl wants them named, whose servers hold the port.

    Raises SparkguardError for a server that is no unit of this user: it is not ours to stop. That goes for a server which
    merely was started inside a unit, such as a terminal's or a notebook's.
    """
    units = {unescape_unit(unit): unit for unit in running}
    holders = []
    for claim in claims:
        if claim.port != port:
            continue
        unit = units.get(claim.unit or "")
        if unit is None or not (unit.startswith("vllm-") or main_pid(unit) == claim.pid):
            raise SparkguardError(
                f"port {port} is held by {claim.engine}, pid {claim.pid}, which no unit of yours runs",
                f"end it first: kill {claim.pid}" if claim.pid else None,
                TEMPFAIL,
            )
        if unit not in holders:
            holders.append(unit)
    return holders


def unit_environment(unit: str, env: Mapping[str, str]) -> dict[str, str]:
    """What the guard will see in that unit: the user manager's environment and the drop-ins', not this shell's."""
    manager = "/org/freedesktop/systemd1"
    path = _bus("call", "org.freedesktop.systemd1", manager, "org.freedesktop.systemd1.Manager", "LoadUnit", "s", unit)[0]
    lines = [
        *_bus("get-property", "org.freedesktop.systemd1", manager, "org.freedesktop.systemd1.Manager", "Environment"),
        *_bus("get-property", "org.freedesktop.systemd1", path, "org.freedesktop.systemd1.Service", "Environment"),
    ]
    here = {key: env[key] for key in ("HOME", "PATH", "XDG_RUNTIME_DIR") if key in env}
    return here | dict(line.partition("=")[::2] for line in lines)


def _bus(*words: str) -> list[str]:
    """busctl rather than `systemctl show`: it quotes values so that they can be read back."""
    data = json.loads(_run(["busctl", "--user", "--json=short", *words]))["data"]
    return [str(item) for item in data] if isinstance(data, list) else [str(data)]


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


def systemctl(*words: str, check: bool = True) -> int:
    """The exit status; what systemctl says goes to stderr. Raises SparkguardError (69) for a failure that counts."""
    process = _spawn(["systemctl", "--user", *words], quiet=not check)
    process.communicate()
    if check and process.returncode:
        raise SparkguardError(f"systemctl --user {' '.join(words)} failed with status {process.returncode}", None, UNAVAILABLE)
    return process.returncode


def properties(unit: str, *names: str) -> dict[str, str]:
    """Raises SparkguardError (69) when there is no user manager to ask."""
    output = _run(["systemctl", "--user", "show", unit, *(f"--property={name}" for name in names)])
    found = dict(line.partition("=")[::2] for line in output.splitlines())
    return {name: found.get(name, "") for name in names}


def _is_installed(unit: str) -> bool:
    return properties(unit, "LoadState")["LoadState"] == "loaded"


def _main_pid(unit: str) -> int:
    return int(properties(unit, "MainPID")["MainPID"] or 0)


def _running_units() -> list[str]:
    states = ",".join(_RUNNING)
    listing = _run(
        ["systemctl", "--user", "list-units", "--type=service", f"--state={states}", "--plain", "--no-legend", "--full"]
    )
    return [line.split()[0] for line in listing.splitlines() if line]


def _last_lines(unit: str) -> None:
    status = properties(unit, "StatusText")["StatusText"]
    if status:
        say(f"its status: {status}")
    say(f"its last lines (journalctl --user -u {unit}):")
    try:
        sys.stderr.write(_run(["journalctl", "--user", "-u", unit, "-n", str(LAST_LINES), "--no-pager", "-o", "cat", "-q"]))
        sys.stderr.flush()
    except SparkguardError as error:
        sys.stderr.write(report(error))


def _run(argv: list[str]) -> str:
    process = _spawn(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    output, errors = process.communicate()
    if process.returncode:
        said = errors.decode("utf-8", "replace").strip() or f"status {process.returncode}"
        raise SparkguardError(f"{argv[0]} failed: {said}", "is there a user manager? systemctl --user status", UNAVAILABLE)
    return output.decode("utf-8", "replace")


def _spawn(argv: list[str], quiet: bool = False, stdout: int | None = None, stderr: int | None = None) -> subprocess.Popen[bytes]:
    """A child in a session of its own, so that Ctrl-C is for us alone to answer."""
    try:
        return subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.DEVNULL if quiet else stderr, start_new_session=True
        )
    except FileNotFoundError:
        raise SparkguardError(
            f"there is no {argv[0]} here, and this switches systemd units",
            "start a model by hand: vllm-serve.sh NAME",
            UNAVAILABLE,
        ) from None


def _timeout(env: Mapping[str, str]) -> float:
    text = env.get("RUN_MODEL_TIMEOUT", "1800")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e9:
        raise SparkguardError(f"RUN_MODEL_TIMEOUT={text!r} is no number of seconds", "leave it out for 1800", CONFIG)
    return seconds


def _names(units: Sequence[str]) -> str:
    return " and ".join(unescape_unit(unit) for unit in units)


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
