"""Can everything be seen, and does anybody hold memory or a port that a model needs?"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from sparkguard import guard, units
from sparkguard.cli.doctor.check import Check
from sparkguard.cli.names import model_of, settings_of
from sparkguard.core.explain import gib
from sparkguard.core.types import DISCRETE, RAM, UNKNOWN
from sparkguard.errors import SparkguardError
from sparkguard.probe import procfs
from sparkguard.settings import load

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sparkguard.core.types import Claim, MemoryPool

_RAY_SETTING = "RAY_memory_monitor_refresh_ms"


def examine(env: Mapping[str, str], roots: guard.Roots) -> Iterator[Check]:
    view = guard.look(load(env), env, roots, ask_nvml=True)
    yield _hidden(view, roots)
    yield _pools(view)
    yield _nvml(view)
    yield _orphans(view)
    claims = [entry.claim for entry in view.seen]
    for port, names in sorted(_ports(env).items()):
        yield _port(port, names, claims, roots)
    yield from _ray(roots)


def _hidden(view: guard.View, roots: guard.Roots) -> Check:
    if not view.hidden:
        return Check("hidepid", True, "every user's processes can be seen")
    return Check(
        "hidepid",
        False,
        f"{roots.proc} hides other users' processes, and with them their servers: the guard refuses every start",
        "sudo mount -o remount,hidepid=0 /proc",
    )


def _pools(view: guard.View) -> Check:
    text = "; ".join(_described(pool) for pool in view.pools)
    if any(pool.kind == UNKNOWN for pool in view.pools):
        return Check(
            "pools", False, f"{text}. {view.machine.note or ''}".strip(), "nvidia-smi --query-gpu=name,memory.total --format=csv"
        )
    return Check("pools", True, text + (f". {view.machine.note}" if view.machine.note else ""))


def _described(pool: MemoryPool) -> str:
    what = "the system RAM" if pool.kind == RAM else f"{pool.id} is {pool.kind}"
    size = gib(pool.total_bytes) if pool.total_bytes is not None else "of unknown size"
    return f"{what}, {size}" + (f" ({pool.name})" if pool.name else "")


def _nvml(view: guard.View) -> Check:
    if view.nvml_error:
        return Check("nvml", False, view.nvml_error, "nvidia-smi")
    if view.machine.driver is None and not any(pool.kind == DISCRETE for pool in view.pools):
        return Check("nvml", None, "no NVIDIA driver is loaded, so there is nobody to ask")
    return Check("nvml", True, f"answers; driver {view.machine.driver or 'unknown'}")


def _orphans(view: guard.View) -> Check:
    pids = [str(claim.pid) for claim in (entry.claim for entry in view.seen) if claim.orphan]
    if not pids:
        return Check("orphans", True, "no engine has lost its server")
    return Check(
        "orphans", False, f"engines whose server is gone still hold their memory: pid {', '.join(pids)}", f"kill {' '.join(pids)}"
    )


def _ports(env: Mapping[str, str]) -> dict[int, list[str]]:
    """Each port that a spec wants, and the units that would serve on it."""
    found: dict[int, list[str]] = {}
    for name in units.specs(env):
        try:
            model = model_of(units.unit_of_spec(name, env), env)
            found.setdefault(settings_of(model).port(), []).append(procfs.unescape_unit(model.unit))
        except SparkguardError:
            continue  # the spec's own check says it
    return found


def _port(port: int, wanted_by: list[str], claims: list[Claim], roots: guard.Roots) -> Check:
    id, who = f"port:{port}", ", ".join(wanted_by)
    holder = next((claim for claim in claims if claim.port == port), None)
    if holder is not None and holder.manager == "user" and holder.unit in wanted_by:
        return Check(id, True, f"{holder.unit}, pid {holder.pid}")
    if holder is None and port not in procfs.listening_ports(roots.proc):
        return Check(id, True, f"free; wanted by {who}")
    owner = f"{holder.engine}, pid {holder.pid}" if holder else _owner(port, roots)
    return Check(id, False, f"taken by {owner}; wanted by {who}", f"ss -ltnp 'sport = :{port}'")


def _owner(port: int, roots: guard.Roots) -> str:
    import psutil

    if roots.proc != "/proc":
        return "a process that is not looked for"
    rows = psutil.net_connections(kind="tcp")
    pid = next((row.pid for row in rows if row.status == psutil.CONN_LISTEN and row.laddr and row.laddr.port == port), None)
    if pid is None:
        return "a process of another user"
    argv = procfs.argv_of(roots.proc, pid)
    unit = procfs.unit_of(procfs.cgroup(roots.proc, pid))
    return f"{os.path.basename(argv[0]) if argv else 'a process'}, pid {pid}" + (
        f", of {procfs.unescape_unit(unit)}" if unit else ""
    )


def _ray(roots: guard.Roots) -> Iterator[Check]:
    """Ray kills its workers at 95 % of the memory, which a loading vLLM passes on unified memory."""
    for process in procfs.scan(roots.proc, (b"raylet",)).processes:
        if process.argv[0].rpartition("/")[2] != "raylet":
            continue
        env = procfs.environment(roots.proc, process.pid)
        if env is None:
            yield Check(
                "ray", None, f"raylet, pid {process.pid}, is another user's: whether its memory monitor is off cannot be told"
            )
        elif env.get(_RAY_SETTING) == "0":
            yield Check("ray", True, f"raylet, pid {process.pid}, runs without its memory monitor")
        else:
            message = f"raylet, pid {process.pid}, kills workers when 95 % of the memory is used, as a loading vLLM may"
            yield Check("ray", False, message, f"export {_RAY_SETTING}=0   # then start Ray anew")
        return
