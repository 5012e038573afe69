"""Will the user's units start at boot, be capped, and be left alone by other watchers of memory?"""

from __future__ import annotations

import os
import pwd
import shlex
from typing import TYPE_CHECKING

from sparkguard import ledger, units
from sparkguard.cli.doctor.check import Check, spoken
from sparkguard.core.share import WHOLE, parse_share
from sparkguard.errors import SparkguardError
from sparkguard.probe import bounded, facts, procfs
from sparkguard.settings import load

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sparkguard.guard import Roots

_NEEDED = ("memory", "cpu")
_DELEGATE = (
    "sudo mkdir -p /etc/systemd/system/user@.service.d && printf '[Service]\\nDelegate=cpu cpuset io memory pids\\n' | "
    "sudo tee /etc/systemd/system/user@.service.d/delegate.conf && sudo systemctl daemon-reload   # then log in anew"
)
_OOMD_SECONDS = 2.0


def examine(env: Mapping[str, str], roots: Roots) -> Iterator[Check]:
    yield _runtime_folder(env, roots)
    if os.path.isdir("/run/systemd/system"):
        manager = units.properties("", "Manager", ("ControlGroup",), env)
        yield _manager(env, manager is not None)
        yield _linger()
        yield _controllers(roots, manager["ControlGroup"] if manager else None)
        yield _oomd(env, roots)
    yield _earlyoom(env, roots)
    yield _swap(roots)


def _runtime_folder(env: Mapping[str, str], roots: Roots) -> Check:
    folder = ledger.directory(env)
    try:
        with ledger.Ledger(folder, roots.proc) as held:
            held.live()
    except SparkguardError as error:
        return Check(
            "reservations", False, spoken(error), f"ls -la {shlex.quote(folder)}; df {shlex.quote(os.path.dirname(folder))}"
        )
    if not folder.startswith(env.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"):
        return Check("reservations", None, f"kept in {folder}, because there is no runtime folder of a login session")
    return Check("reservations", True, f"kept in {folder}")


def _manager(env: Mapping[str, str], answers: bool) -> Check:
    if answers:
        return Check("user-manager", True, "answers")
    if not os.path.exists(os.path.join(units.session(env)["XDG_RUNTIME_DIR"], "bus")):
        return Check(
            "user-manager",
            False,
            "it has no bus to be asked on",
            'sudo apt-get install dbus-user-session && sudo loginctl enable-linger "$USER"',
        )
    return Check("user-manager", False, "does not answer on its bus", "systemctl --user status")


def _linger() -> Check:
    user = pwd.getpwuid(os.getuid()).pw_name
    if os.path.exists(f"/var/lib/systemd/linger/{user}"):
        return Check("linger", True, f"the units of {user} start at boot and outlive the logout")
    return Check(
        "linger", False, f"the units of {user} end at the logout, and none starts at boot", f"sudo loginctl enable-linger {user}"
    )


def _controllers(roots: Roots, group: str | None) -> Check:
    group = group or f"/user.slice/user-{os.getuid()}.slice/user@{os.getuid()}.service"
    path = f"{roots.sys}/fs/cgroup{group}/cgroup.controllers"
    try:
        with open(path, encoding="ascii") as file:
            found = file.read().split()
    except OSError:
        return Check("controllers", None, f"{path} cannot be read: no cgroup v2, or no user manager; caps have no effect")
    missing = [name for name in _NEEDED if name not in found]
    if missing:
        return Check(
            "controllers", False, f"{' and '.join(missing)} are not delegated to your units: caps have no effect", _DELEGATE
        )
    return Check("controllers", True, f"delegated: {' '.join(found)}")


def _earlyoom(env: Mapping[str, str], roots: Roots) -> Check:
    """earlyoom kills below its threshold, which must lie below what the budget leaves free."""
    running = next(
        (
            process
            for process in procfs.scan(roots.proc, (b"earlyoom",)).processes
            if process.argv[0].rpartition("/")[2] == "earlyoom"
        ),
        None,
    )
    if running is None:
        return Check("earlyoom", True, "does not run")
    args = running.argv[1:]
    options = " ".join(args) or "its defaults"
    percent = _option(args, "-m") or "10"
    try:
        threshold = parse_share(percent.partition(",")[0]) // 100
        left = WHOLE - load(env).share("VLLM_MEM_BUDGET")
    except (ValueError, SparkguardError):
        return Check("earlyoom", None, f"runs with {options}")
    if _option(args, "-M"):
        return Check(
            "earlyoom", None, f"runs with {options}: -M is an absolute floor; it must lie below what the budget leaves free"
        )
    if threshold >= left:
        return Check(
            "earlyoom",
            False,
            f"runs with {options}: it kills below {percent.partition(',')[0]} % available, and the budget leaves less",
            "echo 'EARLYOOM_ARGS=\"-m 4 -s 10\"' | sudo tee /etc/default/earlyoom && sudo systemctl restart earlyoom",
        )
    return Check("earlyoom", True, f"runs with {options}")


def _option(args: tuple[str, ...], name: str) -> str | None:
    """The value of a short option of earlyoom, joined or apart; the last one wins."""
    found = None
    for at, word in enumerate(args):
        if word == name:
            found = args[at + 1] if at + 1 < len(args) else None
        elif word.startswith(name) and not word.startswith("--"):
            found = word[len(name) :]
    return found


def _oomd(env: Mapping[str, str], roots: Roots) -> Check:
    runs = procfs.scan(roots.proc, (b"systemd-oomd",)).processes
    if not any(process.argv[0].endswith("systemd-oomd") for process in runs):
        return Check("oomd", True, "systemd-oomd does not run")
    names = ("ManagedOOMSwap", "ManagedOOMMemoryPressure", "ManagedOOMMemoryPressureLimit")
    argv = ["systemctl", "show", f"user@{os.getuid()}.service", *(f"--property={name}" for name in names)]
    try:
        _, output = bounded.run(argv, _OOMD_SECONDS, env)
    except OSError:
        output = b""
    found = " ".join(output.decode("utf-8", "replace").split())
    if "=kill" in found:
        message = f"systemd-oomd may kill any of your units, the desktop's too, when memory is short ({found})"
        return Check("oomd", None, message, "oomctl")
    return Check("oomd", True, f"systemd-oomd runs, and is not set on your units ({found})")


def _swap(roots: Roots) -> Check:
    memory = facts.read_meminfo(roots.proc)
    total, free = memory.get("SwapTotal", 0), memory.get("SwapFree", 0)
    if not total:
        return Check("swap", None, "there is none: when memory runs out, the OOM killer comes at once")
    gib = 1 << 30
    if free * 10 < total:
        return Check(
            "swap",
            False,
            f"{free / gib:.1f} of {total / gib:.1f} GiB is free: something has outgrown the memory",
            "sparkguard status",
        )
    return Check("swap", True, f"{free / gib:.1f} of {total / gib:.1f} GiB is free")
