"""What reboot and shutdown share: sudo is asked on every node first, then the drain, then the machines."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from sparkguard.cli.cluster.options import run_async, state_dir
from sparkguard.cli.cluster.transitions import carry_out, events, telling
from sparkguard.errors import CONFIG, SparkguardError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from sparkguard.cluster.catalog.read import Catalog
    from sparkguard.cluster.transition.power import Power
    from sparkguard.core.cluster import Blocked, NodeView, Plan
    from sparkguard.core.ownership import Rules

MOST_PASSWORD_BYTES = 1024

password_option = click.option(
    "--sudo-password-stdin", is_flag=True, help="Read sudo's password from the first line of stdin; it is kept nowhere."
)


def no_wait_option(help: str) -> Callable[[Any], Any]:
    return click.option("--no-wait", is_flag=True, help=help)


def carry_out_power(
    verb: str,
    order: str,
    catalog: Catalog,
    nodes: tuple[str, ...],
    *,
    cancel_jobs: bool,
    wait: bool,
    password_stdin: bool,
    as_json: bool,
    dry_run: bool,
) -> int:
    """verb: spark-serve's; order: systemctl's."""
    from sparkguard.cluster.transition.run import Asked
    from sparkguard.core.transition import plan_power

    def planner(views: Mapping[str, NodeView], rules: Rules) -> Plan | Blocked:
        return plan_power(views, rules, nodes, order, cancel_jobs=cancel_jobs, wait=wait)

    password = _first_line() if password_stdin else None
    folder = state_dir()
    power = None
    if not dry_run:
        with telling(events(as_json), as_json):
            power = _permission(catalog, nodes, order, password, as_json)
    return carry_out(Asked(verb, nodes, planner, power=power), catalog, folder, as_json=as_json, dry_run=dry_run)


def _permission(catalog: Catalog, nodes: tuple[str, ...], order: str, password: bytes | None, as_json: bool) -> Power:
    from sparkguard.cluster.transition import power, run

    async def ask(secret: bytes | None) -> Power | tuple[str, ...]:
        async with run.fleet_of(catalog, state_dir(), _quiet) as fleet:
            return await power.plan(fleet, nodes, order, secret)

    found = run_async(ask(password))
    if isinstance(found, tuple) and password is None and not as_json and sys.stdin.isatty():
        asked = click.prompt(f"sudo password on {', '.join(found)}", hide_input=True, err=True)
        found = run_async(ask(str(asked).encode()))
    if isinstance(found, tuple):
        raise power.needs_password(found)
    return found


def _quiet(event: str, **fields: Any) -> None:
    """What the connection has to say is said by the transition that follows."""


def _first_line() -> bytes:
    line = sys.stdin.buffer.readline(MOST_PASSWORD_BYTES).rstrip(b"\r\n")
    if not line:
        raise SparkguardError("--sudo-password-stdin: the first line of stdin is empty", None, CONFIG)
    return line
