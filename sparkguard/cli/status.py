"""sparkguard status: the memory pools, who holds how much of them, and what would still fit."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import click

from sparkguard import guard, ledger
from sparkguard.cli.terminal import HELP, bold, epilog, printable, show, show_json, table
from sparkguard.core import explain
from sparkguard.core.admission import admit
from sparkguard.core.record import Record
from sparkguard.core.share import brief_share, floor_share, format_share
from sparkguard.core.types import Budget, Claim, Hold, Verdict, Wanted
from sparkguard.errors import CONFIG, INTERRUPTED, OK, OSERR, SparkguardError
from sparkguard.probe import cores
from sparkguard.settings import load

if TYPE_CHECKING:
    from collections.abc import Mapping

_EXAMPLES = """
sparkguard status                             once
sparkguard status --watch                     redrawn every 2 seconds until Ctrl-C
sparkguard status --watch 10 --json           one object a line, every 10 seconds
sparkguard status --json | jq -r '.pools[] | "\\(.id) \\(.claimed_share) \\(.room_share)"'
"""
_WATCH_SECONDS = 2.0
# Home and clear to the end: unlike a full clear it does not flicker, and leaves the scrollback alone.
_REDRAW, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


class _Seconds(click.FloatRange):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = super().convert(value, param, ctx)
        if seconds != seconds:  # nan, which is outside of no range
            self.fail(f"{value} is no number of seconds", param, ctx)
        return seconds


@click.command(
    "status",
    context_settings=HELP,
    epilog=epilog(_EXAMPLES, OK, OSERR, CONFIG, INTERRUPTED),
    short_help="who holds how much memory",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.option(
    "--watch",
    is_flag=False,
    flag_value=_WATCH_SECONDS,
    type=_Seconds(0.1, 86400),
    metavar="[SECONDS]",
    help="Look again every SECONDS (2) until Ctrl-C.",
)
def command(as_json: bool, watch: float | None) -> int:
    """Shows the memory pools of this machine, every claim on them, their sums, and what would still fit.

    A claim is an inference server of any user, a start under way, or another process that holds 256 MiB or more of GPU
    memory. A share is of the pool's total; unknown is said, never counted as 0. Pressure is the kernel's (PSI): the part of
    the last ten seconds in which some, or all, processes waited for memory.
    """
    while True:
        seen = see(os.environ, guard.Roots())
        if as_json:
            show_json(as_json_object(seen), one_line=watch is not None)
        elif watch is not None and os.isatty(1):
            text = f"{time.strftime('%H:%M:%S')}, every {watch:g} s; Ctrl-C ends\n\n{describe(seen)}\n"
            show(_REDRAW + text.replace("\n", _CLEAR_LINE + "\n") + _CLEAR_BELOW)
        else:
            show(describe(seen))
        if watch is None:
            return OK
        time.sleep(watch)


class Status(Record):
    """One look. idle: for each pool the verdict on a start that asks for nothing of it, whose sum is the pool's own."""

    budget: Budget
    claims: tuple[Claim, ...]
    idle: tuple[Verdict, ...]
    hidden: bool
    nvml_error: str | None
    ledger_error: str | None
    note: str | None
    pressure: dict[str, float] | None
    cpus: int
    cpu_share: int


def see(env: Mapping[str, str], roots: guard.Roots) -> Status:
    """Raises SparkguardError when the machine or the configuration cannot be read."""
    settings = load(env)
    budget = guard.budget_of(settings)
    view = guard.look(settings, env, roots, ask_nvml=True)
    starts: tuple[ledger.Reservation, ...] = ()
    ledger_error = None
    try:
        with ledger.Ledger(ledger.directory(env), roots.proc) as held:
            starts = held.live()
    except SparkguardError as error:
        ledger_error = error.message
    claims = guard.count(view.seen, starts, roots)
    nothing = [Wanted("", (Hold(pool.id, None, None),)) for pool in view.pools]
    return Status(
        budget,
        claims,
        tuple(admit(budget, view.pools, claims, wanted) for wanted in nothing),
        view.hidden,
        view.nvml_error,
        ledger_error,
        view.machine.note,
        read_pressure(roots.proc),
        len(cores.usable(roots.sys)),
        settings.share("VLLM_CPU_SHARE"),
    )


def read_pressure(proc_root: str) -> dict[str, float] | None:
    """avg10 of memory pressure in percent; None: a kernel without PSI."""
    try:
        with open(f"{proc_root}/pressure/memory", encoding="ascii") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    found = {}
    for line in lines:
        kind, *fields = line.split()
        for field in fields:
            key, _, value = field.partition("=")
            if key == "avg10":
                found[f"{kind}_avg10"] = float(value)
    return found or None


def blocked_by(verdict: Verdict) -> str | None:
    """Why nothing would be admitted to the pool, whatever its share; None when its sum decides."""
    return verdict.reason if verdict.reason in ("orphan", "unknown_holder", "unknown_pool") else None


def as_json_object(seen: Status) -> dict[str, Any]:
    pools = [
        {
            **explain.pool_json(total.pool, total.claimed_share),
            "reserve_bytes": total.reserve_bytes,
            "outstanding_bytes": total.outstanding_bytes,
            "room_share": format_share(_room(idle)),
            "blocked_by": blocked_by(idle),
        }
        for idle in seen.idle
        for total in idle.sums
    ]
    return {
        "schema_version": explain.SCHEMA_VERSION,
        "budget": _budget_json(seen.budget),
        "pools": pools,
        "claims": [explain.claim_json(claim) for claim in seen.claims],
        "pressure": seen.pressure,
        "cpus": {"usable": seen.cpus, "share": format_share(seen.cpu_share)},
        "hidden_processes": seen.hidden,
        "nvml_error": seen.nvml_error,
        "ledger_error": seen.ledger_error,
        "note": seen.note,
    }


def _budget_json(budget: Budget) -> dict[str, Any]:
    return {
        "share": format_share(budget.share),
        "reserve_bytes": budget.reserve_bytes,
        "allow_unknown": budget.allow_unknown,
    }


def _room(verdict: Verdict) -> int:
    return 0 if blocked_by(verdict) else max(0, floor_share(verdict.sums[0].room_share))


def describe(seen: Status) -> str:
    """For people."""
    rows = [
        (
            total.pool.id,
            total.pool.kind,
            total.pool.name or "-",
            _size(total.pool.total_bytes),
            _size(total.pool.available_bytes),
            f"{explain.show(total.claimed_share)} of {explain.show(seen.budget.share)}",
            explain.show(_room(idle)) if _room(idle) else "nothing",
        )
        for idle in seen.idle
        for total in idle.sums
    ]
    numbers = ("TOTAL", "AVAILABLE", "CLAIMED", "STILL FITS")
    parts = [table(("POOL", "KIND", "NAME", "TOTAL", "AVAILABLE", "CLAIMED", "STILL FITS"), rows, numbers)]
    if seen.claims:
        parts.append(_claims_table(seen.claims))
    else:
        parts.append("Nobody holds any of it, and no start is under way.")
    remarks = _remarks(seen)
    return "\n\n".join(parts) + "\n" + "".join(f"\n{remark}" for remark in remarks)


def _claims_table(claims: tuple[Claim, ...]) -> str:
    rows = []
    for claim in sorted(claims, key=lambda claim: (claim.unit or "~", claim.pid or 0)):
        share = max((hold.share for hold in claim.holds if hold.share is not None), default=None)
        known = [hold.bytes for hold in claim.holds if hold.bytes is not None]
        remark = "; ".join(text for text in ("its server is gone" if claim.orphan else "", _source(claim), claim.note) if text)
        rows.append(
            (
                str(claim.pid or "-"),
                claim.unit or "-",
                claim.engine,
                str(claim.port or "-"),
                "unknown" if share is None else brief_share(share) if claim.source == "measured" else explain.show(share),
                _size(sum(known) if len(known) == len(claim.holds) and known else None),
                ",".join(hold.pool for hold in claim.holds) or "-",
                remark,
            )
        )
    return table(("PID", "UNIT", "ENGINE", "PORT", "SHARE", "SIZE", "POOL", "REMARK"), rows, ("PID", "PORT", "SHARE", "SIZE"))


def _source(claim: Claim) -> str:
    return {"default": "vLLM's own default", "measured": "measured", "config": "from its --config"}.get(claim.source, "")


def _remarks(seen: Status) -> list[str]:
    lines = []
    if seen.pressure is not None:
        some, full = seen.pressure.get("some_avg10", 0.0), seen.pressure.get("full_avg10", 0.0)
        lines.append(f"memory pressure: some {some:.2f} %, full {full:.2f} % of the last 10 s")
    for idle in seen.idle:
        pool, reason = idle.sums[0].pool.id, blocked_by(idle)
        if reason == "unknown_pool":
            lines.append(bold(f"Every start on {pool} is refused: its memory cannot be read."))
        elif reason:
            pids = ", ".join(f"pid {claim.pid}" for claim in idle.culprits)
            lines.append(bold(f"Every start on {pool} is refused: nobody knows how much {pids} holds, or will."))
    if seen.hidden:
        lines.append("Some processes are hidden from you (hidepid=): their claims are missing above, and the guard refuses.")
    for text in (seen.note, seen.nvml_error and f"NVML: {seen.nvml_error}", seen.ledger_error):
        if text:
            lines.append(printable(text))
    return lines


def _size(amount_bytes: int | None) -> str:
    return "unknown" if amount_bytes is None else explain.gib(amount_bytes)
