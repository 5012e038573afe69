"""sparkguard doctor: what on this machine would make a start fail, or a server die, and the command that mends it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from sparkguard.cli.doctor.check import Check, spoken
from sparkguard.cli.terminal import HELP, epilog, printable, show, show_json
from sparkguard.core.explain import SCHEMA_VERSION
from sparkguard.errors import CONFIG, OK, SparkguardError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sparkguard.guard import Roots

_EXAMPLES = """
sparkguard doctor
sparkguard doctor --json | jq -r '.checks[] | select(.ok == false) | .remedy'
"""
_MARKS = {True: ("ok", "green"), False: ("BAD", "red"), None: ("?", "yellow")}


@click.command(
    "doctor", context_settings=HELP, epilog=epilog(_EXAMPLES, OK, CONFIG), short_help="look for what would make starts fail"
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(as_json: bool) -> int:
    """Looks at this machine and its configuration, and changes nothing.

    Each check is ok, BAD, or ? where it cannot be told or is a matter of choice; below a BAD one stands the command that
    mends it. The status is 0 when nothing is BAD, else 78.
    """
    from sparkguard.guard import Roots

    checks = examine(os.environ, Roots())
    if as_json:
        show_json(as_json_object(checks))
    else:
        show(describe(checks))
    return CONFIG if any(check.ok is False for check in checks) else OK


def examine(env: Mapping[str, str], roots: Roots) -> list[Check]:
    """Every check that can be made; what makes the rest of a room impossible is a check of its own."""
    from sparkguard.cli.doctor import configuration, machine, runners, session

    checks: list[Check] = []
    for room in (configuration, session, machine, runners):
        try:
            for check in room.examine(env, roots):
                checks.append(check)
        except SparkguardError as error:
            name = room.__name__.rpartition(".")[2]
            checks.append(Check(name, False, spoken(error), f"ls -ld {roots.proc} {roots.proc}/self {roots.proc}/meminfo"))
    return checks


def as_json_object(checks: Sequence[Check]) -> dict[str, Any]:
    rows = [{"id": check.id, "ok": check.ok, "message": check.message, "remedy": check.remedy} for check in checks]
    return {"schema_version": SCHEMA_VERSION, "checks": rows}


def describe(checks: Sequence[Check]) -> str:
    width = max(len(check.id) for check in checks)
    lines = []
    for check in checks:
        word, colour = _MARKS[check.ok]
        lines.append(f"{click.style(word.ljust(3), fg=colour)}  {printable(check.id).ljust(width)}  {printable(check.message)}")
        if check.remedy:
            lines.append(f"{'':{width + 5}}  {printable(check.remedy)}")
    return "\n".join(lines)
