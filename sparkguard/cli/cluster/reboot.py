"""spark-serve reboot: drain, and restart the machines."""

from __future__ import annotations

import click

from sparkguard.cli.cluster.options import cancel_jobs_option, dry_run_option, json_option, node_option, open_catalog
from sparkguard.cli.cluster.power import carry_out_power, no_wait_option, password_option
from sparkguard.cli.terminal import HELP, epilog
from sparkguard.errors import CONFIG, FAILED, INTERRUPTED, OK, TEMPFAIL, UNAVAILABLE

_EXAMPLES = """
spark-serve reboot                        both Sparks; sudo's password is asked for where it is needed
spark-serve reboot --node worker          one
pass spark | spark-serve reboot --sudo-password-stdin
"""


@click.command(
    "reboot",
    context_settings=HELP,
    epilog=epilog(_EXAMPLES, OK, FAILED, UNAVAILABLE, TEMPFAIL, CONFIG, INTERRUPTED),
    short_help="drain and restart the Sparks",
)
@node_option("Only this node: head, worker, or a name of the catalog.  [default: all]")
@cancel_jobs_option
@no_wait_option("End when the machines have taken the command.")
@password_option
@dry_run_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    node: str | None,
    cancel_jobs: bool,
    no_wait: bool,
    sudo_password_stdin: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Drains as stop does, restarts the machines (systemctl reboot), the head last, and waits until each is a new boot.

    sudo is asked on every node before anything is drained. Its rules are never changed: where it asks for a password,
    the password goes to its stdin there, once, and is kept nowhere. Nothing is started afterwards.
    """
    catalog = open_catalog(ctx)
    nodes = tuple(each.name for each in catalog.select(node, None))
    return carry_out_power(
        "reboot", "reboot", catalog, nodes, cancel_jobs=cancel_jobs, wait=not no_wait,
        password_stdin=sudo_password_stdin, as_json=as_json, dry_run=dry_run,
    )  # fmt: skip
