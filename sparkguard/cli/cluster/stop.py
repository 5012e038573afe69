"""spark-serve stop: drain and release nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from sparkguard.cli.cluster.options import cancel_jobs_option, dry_run_option, json_option, node_option, open_catalog, state_dir
from sparkguard.cli.cluster.transitions import carry_out, events, telling
from sparkguard.cli.terminal import HELP, epilog
from sparkguard.errors import CONFIG, FAILED, INTERRUPTED, OK, TEMPFAIL, UNAVAILABLE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sparkguard.core.cluster import Blocked, NodeView, Plan
    from sparkguard.core.ownership import Rules

_EXAMPLES = """
spark-serve stop                     everything of the catalog, on all nodes
spark-serve stop --node worker       what runs on the second Spark alone
spark-serve stop --cancel-jobs       songs that render are cancelled
"""


@click.command(
    "stop",
    context_settings=HELP,
    epilog=epilog(_EXAMPLES, OK, FAILED, UNAVAILABLE, TEMPFAIL, CONFIG, INTERRUPTED),
    short_help="drain and stop what runs",
)
@node_option("Only this node: head, worker, or a name of the catalog.  [default: all]")
@cancel_jobs_option
@dry_run_option
@json_option
@click.pass_context
def command(ctx: click.Context, node: str | None, cancel_jobs: bool, dry_run: bool, as_json: bool) -> int:
    """Announces nothing any more, waits for requests and songs, stops the catalog's containers by their ids, and looks again.

    Containers that are not its own, and those of keep_containers, stay. A node that cannot be reached is reported (69) after
    the others were released.
    """
    from sparkguard.cluster.transition.run import Asked
    from sparkguard.core.transition import plan_stop

    with telling(events(as_json), as_json):
        catalog = open_catalog(ctx)
        nodes = tuple(each.name for each in catalog.select(node, None))

    def planner(views: Mapping[str, NodeView], rules: Rules) -> Plan | Blocked:
        return plan_stop(views, rules, nodes, cancel_jobs=cancel_jobs)

    return carry_out(Asked("stop", nodes, planner), catalog, state_dir(), as_json=as_json, dry_run=dry_run)
