"""spark-serve logs: what the rank on a node says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from sparkguard.cli.cluster.options import open_catalog, run_async, state_dir
from sparkguard.cli.terminal import HELP, epilog, printable, say, show
from sparkguard.errors import CONFIG, FAILED, INTERRUPTED, OK, UNAVAILABLE, SparkguardError

if TYPE_CHECKING:
    from pathlib import Path

    from sparkguard.cluster.catalog.read import Catalog
    from sparkguard.core.cluster import Container, NodeView

_EXAMPLES = """
spark-serve logs                 the head's last 100 lines
spark-serve logs -f worker       the worker's, and what it says from now on
"""
# docker says nothing for as long as the engine does; the node's heartbeat ends a stream whose link is gone.
_QUIET_SECONDS = 86400.0


@click.command(
    "logs",
    context_settings=HELP,
    epilog=epilog(_EXAMPLES, OK, FAILED, UNAVAILABLE, CONFIG, INTERRUPTED),
    short_help="what the rank on a node says",
)
@click.argument("node", default="head")
@click.option("-f", "--follow", is_flag=True, help="Go on until Ctrl-C, or until the container ends.")
@click.option(
    "-n",
    "--tail",
    type=click.IntRange(0, 1_000_000),
    default=100,
    show_default=True,
    metavar="LINES",
    help="How many lines back.",
)
@click.pass_context
def command(ctx: click.Context, node: str, follow: bool, tail: int) -> int:
    """Prints the log of the container that this catalog owns on NODE (head, worker, or a name of the catalog).

    Of several, the one that runs. What could steer the terminal is printed as an escape.
    """
    catalog = open_catalog(ctx)
    chosen = catalog.select(node, None)
    if len(chosen) != 1:
        raise click.UsageError("logs takes one node")
    return run_async(_print(catalog, state_dir(), chosen[0].name, follow, tail))


async def _print(catalog: Catalog, folder: Path, node: str, follow: bool, tail: int) -> int:
    from sparkguard.cluster.observe import look
    from sparkguard.cluster.ssh import Fleet
    from sparkguard.cluster.transition.wanted import questions

    async with Fleet(catalog.nodes, catalog.ssh_opts, str(folder), notice=say) as fleet:
        view = (await look(fleet, questions(catalog, (node,), yue=False)))[node]
        container = _chosen(catalog, view)
        request = {"id": container.id, "tail": tail, "follow": follow}
        async for reply in fleet[node].stream("logs", request, quiet_seconds=_QUIET_SECONDS):
            if "line" in reply:
                show("".join(char if char == "\t" else printable(char) for char in str(reply["line"])))
    return OK


def _chosen(catalog: Catalog, view: NodeView) -> Container:
    from sparkguard.cluster.transition.wanted import rules_of
    from sparkguard.core.ownership import ours

    if view.error is not None or view.containers is None:
        raise SparkguardError(f"{view.node}: {view.error or view.daemon_error}", None, UNAVAILABLE)
    found = sorted(ours(view, rules_of(catalog)), key=lambda one: (one.state == "running", one.started_at))
    if not found:
        hint = "`spark-serve status` tells what is there; evidence of failed starts is in diagnostics/ of the state folder"
        raise SparkguardError(f"{view.node} has no container of {catalog.path}", hint, FAILED)
    return found[-1]
