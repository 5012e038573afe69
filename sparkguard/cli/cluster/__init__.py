"""The spark-serve command: one verb a file, loaded when it is used."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

import click

from sparkguard import __version__, streams
from sparkguard.cli.terminal import HELP, error_text, exit_statuses
from sparkguard.errors import CONFIG, FAILED, INTERRUPTED, OK, SOFTWARE, TEMPFAIL, UNAVAILABLE, USAGE, SparkguardError

if TYPE_CHECKING:
    from collections.abc import Sequence

# Verb -> the module of its click command, which is named `command` there.
VERBS = {
    "list": "sparkguard.cli.cluster.list",
    "status": "sparkguard.cli.cluster.status",
    "up": "sparkguard.cli.cluster.up",
    "stop": "sparkguard.cli.cluster.stop",
    "wait": "sparkguard.cli.cluster.wait",
    "pull": "sparkguard.cli.cluster.pull",
    "use": "sparkguard.cli.cluster.use",
    "logs": "sparkguard.cli.cluster.logs",
    "reboot": "sparkguard.cli.cluster.reboot",
    "shutdown": "sparkguard.cli.cluster.shutdown",
    "watch": "sparkguard.cli.cluster.watch",
    "bench": "sparkguard.cli.cluster.bench",
    "ui": "sparkguard.cli.cluster.ui",
}


class Verbs(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module = VERBS.get(cmd_name)
        command = import_module(module).command if module else None
        return command if isinstance(command, click.Command) else None


EPILOG = f"""\
\b
examples:
  cp models.example.toml models.toml    then edit [cluster]
  spark-serve status                    what runs where, and whether it is ready
  spark-serve up ds4                    drain what runs, check, start, wait until a token comes
  spark-serve up ds4 --dry-run          only print the steps
  spark-serve logs -f worker

\b
files:
  models.toml, or ~/.config/spark/models.toml   the catalog; --config and SPARK_SERVE_CONFIG name another
  ~/.local/state/spark-serve                    state, evidence of failed starts, benchmarks; SPARK_SERVE_STATE_DIR

{exit_statuses(OK, FAILED, USAGE, UNAVAILABLE, SOFTWARE, TEMPFAIL, CONFIG, INTERRUPTED)}

spark-serve COMMAND --help tells more about each command.
"""


@click.group(cls=Verbs, context_settings=HELP, epilog=EPILOG, subcommand_metavar="COMMAND [ARGUMENTS]...")
@click.option(
    "--config", metavar="FILE", help="The catalog.  [default: $SPARK_SERVE_CONFIG, models.toml, ~/.config/spark/models.toml]"
)
@click.version_option(__version__, message="spark-serve %(version)s")
@click.pass_context
def program(ctx: click.Context, config: str | None) -> None:
    """Controls and watches inference on two or more DGX Sparks over SSH. Nothing is installed on them."""
    ctx.obj = config


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status; the only handler of errors of the command line."""
    streams.mend()
    colour = False if os.environ.get("NO_COLOR") else None
    try:
        status = program.main(argv, "spark-serve", standalone_mode=False, color=colour)
    except SparkguardError as error:
        click.echo(error_text(error, "spark-serve"), err=True, nl=False, color=colour)
        return error.status
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except Exception:
        import traceback

        traceback.print_exc()
        sys.stderr.write(f"spark-serve {__version__}: this is a bug in spark-serve; the lines above say where\n")
        return SOFTWARE
    return status if isinstance(status, int) else OK
