"""spark-serve wait: until what starts on a node is ready."""

from __future__ import annotations

import click

from sparkguard.cli.cluster.options import json_option, node_option, open_catalog, run_async, state_dir
from sparkguard.cli.cluster.transitions import events, telling
from sparkguard.cli.terminal import HELP, epilog
from sparkguard.errors import CONFIG, FAILED, INTERRUPTED, OK, UNAVAILABLE

_EXAMPLES = """
spark-serve up ds4 --no-wait && spark-serve wait
spark-serve wait --node worker --timeout 600
"""


@click.command(
    "wait",
    context_settings=HELP,
    epilog=epilog(_EXAMPLES, OK, FAILED, UNAVAILABLE, CONFIG, INTERRUPTED),
    short_help="until what starts is ready",
)
@node_option("The node that serves it.  [default: head]")
@click.option("--timeout", type=click.FloatRange(1, 86400), metavar="SECONDS", help="[default: the model's ready_timeout]")
@json_option
@click.pass_context
def command(ctx: click.Context, node: str | None, timeout: float | None, as_json: bool) -> int:
    """Watches the containers that were started, and ends when a token has come (0), a rank has ended, or the time is over (1).

    It stops nothing.
    """
    from sparkguard.cluster.transition.waiting import wait

    emit = events(as_json)
    with telling(emit, as_json):
        catalog = open_catalog(ctx)
        chosen = catalog.select(node or "head", None)[0].name
        return run_async(wait(catalog, state_dir(), chosen, emit, timeout))
