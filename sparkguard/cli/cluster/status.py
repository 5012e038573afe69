"""spark-serve status: what runs where, and whether it can be used."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from sparkguard.cli.cluster.options import json_option, open_catalog, run_async, state_dir
from sparkguard.cli.terminal import HELP, epilog, printable, say, show, show_json, table
from sparkguard.errors import CONFIG, OK, UNAVAILABLE

if TYPE_CHECKING:
    from pathlib import Path

    from sparkguard.cluster.catalog.read import Catalog
    from sparkguard.cluster.transition.status import NodeStatus, SongStatus, Status

_EXAMPLES = """
spark-serve status
spark-serve status --json | jq -r '.nodes[] | "\\(.node) \\(.state) \\(.model) \\(.can_use)"'
"""


@click.command(
    "status",
    context_settings=HELP,
    epilog=epilog(_EXAMPLES, OK, UNAVAILABLE, CONFIG),
    short_help="what runs where, and is it ready",
)
@json_option
@click.option("--no-token", is_flag=True, help="Ask the endpoints which model they serve, but not for a token.")
@click.pass_context
def command(ctx: click.Context, as_json: bool, no_token: bool) -> int:
    """Asks every node once: its containers, its YuE worker, the model at its endpoint, and one token of an engine that is idle.

    A node that cannot be asked is unknown, never stopped; the status is 69 then.
    """
    catalog, folder = open_catalog(ctx), state_dir()
    status = run_async(_see(catalog, folder, not no_token))
    from sparkguard.cluster.transition import status as seeing

    if as_json:
        show_json(seeing.as_json(status))
    else:
        show(_describe(catalog, status))
    return OK if seeing.reachable(status) else UNAVAILABLE


async def _see(catalog: Catalog, folder: Path, canary: bool) -> Status:
    from sparkguard.cluster.ssh import Fleet
    from sparkguard.cluster.transition.status import see

    async with Fleet(catalog.nodes, catalog.ssh_opts, str(folder), notice=say) as fleet:
        return await see(catalog, fleet, folder, canary=canary)


def _describe(catalog: Catalog, status: Status) -> str:
    rows = [[node.node, node.host, _what(node), _use(node), node.url or "-"] for node in status.nodes]
    lines = [table(("NODE", "HOST", "RUNS", "USABLE", "AT"), rows)]
    lines += [f"{node.node}: {printable(node.error.removeprefix(f'{node.node}: '))}" for node in status.nodes if node.error]
    lines += [f"YuE on {song.node}: {printable(_sings(song))}" for song in status.yue_workers]
    if status.at_work is not None:
        from sparkguard.cluster.transition.lock import describe

        lines.append(f"at work: {printable(describe(status.at_work, time.time()).rstrip(','))}")
    if status.transition_error:
        lines.append(f"the last transition: {printable(status.transition_error)}")
    return "\n".join(lines)


def _what(node: NodeStatus) -> str:
    if node.state == "unknown":
        return f"unknown (was {node.phase}{' ' + node.model if node.model else ''})"
    if node.state == "gone":
        return (
            "nothing"
            if node.phase in ("stopped", "unmanaged")
            else f"nothing ({node.phase}{' ' + node.model if node.model else ''})"
        )
    together = ", with the other nodes" if node.mode == "distributed" else ""
    slow = " over sockets, which is slow" if node.slow_fabric else ""
    return f"{node.model} ({node.phase}{together}{slow})"


def _sings(song: SongStatus) -> str:
    ready = f"ready, {song.worker.id}" if song.worker is not None else song.reason
    return f"{ready}; renders {', '.join(song.jobs)}" if song.jobs else ready


def _use(node: NodeStatus) -> str:
    return {True: "yes", False: "no", None: "unknown"}[node.can_use]
