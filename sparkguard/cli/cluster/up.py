"""spark-serve up: drain what runs, check, start a model, and wait until a token comes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from sparkguard.cli.cluster.options import cancel_jobs_option, dry_run_option, json_option, node_option, open_catalog, state_dir
from sparkguard.cli.cluster.transitions import carry_out, command_lines, events, telling
from sparkguard.cli.terminal import HELP, epilog, show
from sparkguard.errors import CONFIG, FAILED, INTERRUPTED, OK, TEMPFAIL, UNAVAILABLE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sparkguard.core.cluster import Blocked, NodeView, Plan
    from sparkguard.core.ownership import Rules

_EXAMPLES = """
spark-serve up ds4                        on the nodes that it needs
spark-serve up qwen38 --node worker       a model of one node, on the second Spark
spark-serve up ds4 --dry-run              only print the steps
spark-serve up yue --cancel-jobs          song workers, whatever renders now
"""


@click.command(
    "up",
    context_settings=HELP,
    epilog=epilog(_EXAMPLES, OK, FAILED, UNAVAILABLE, TEMPFAIL, CONFIG, INTERRUPTED),
    short_help="start a model, in place of what runs",
)
@click.argument("model")
@node_option()
@cancel_jobs_option
@click.option("--no-hermes", is_flag=True, help="Leave the client as it is.")
@click.option(
    "--hermes-target",
    type=click.Choice(["local", "mac", "spark"]),
    default="local",
    show_default=True,
    help="Whose Hermes to point at it.",
)
@click.option("--no-wait", is_flag=True, help="End when the containers have started; `spark-serve wait` waits for them.")
@dry_run_option
@json_option
@click.option("--print-cmd", is_flag=True, hidden=True)
@click.pass_context
def command(
    ctx: click.Context,
    model: str,
    node: str | None,
    cancel_jobs: bool,
    no_hermes: bool,
    hermes_target: str,
    no_wait: bool,
    dry_run: bool,
    as_json: bool,
    print_cmd: bool,
) -> int:
    """Starts MODEL in place of what runs on its nodes.

    Everything that can refuse is checked before anything is stopped: the nodes, images (the same on each), paths, the fabric,
    ports, memory, and whether something foreign is in the way. Then what runs is drained, stopped by its own id, and MODEL is
    started. It is ready when all its ranks live and one token has come back to this machine. A model that runs as the catalog
    has it is left alone. What fails is kept in diagnostics/ of the state folder, and cleaned up.
    """
    from sparkguard.cluster.transition.run import Asked
    from sparkguard.cluster.transition.wanted import allocation_of
    from sparkguard.core.transition import plan_up

    with telling(events(as_json), as_json):
        catalog = open_catalog(ctx)
        wanted = allocation_of(catalog, model, node)
    if print_cmd:
        show(command_lines(wanted.ranks))
        return OK

    def planner(views: Mapping[str, NodeView], rules: Rules) -> Plan | Blocked:
        return plan_up(views, rules, wanted, cancel_jobs=cancel_jobs, client=not no_hermes, wait=not no_wait)

    asked = Asked(f"up {wanted.model}", wanted.nodes, planner, wanted, hermes_target)
    return carry_out(asked, catalog, state_dir(), as_json=as_json, dry_run=dry_run)
