"""The sparkguard command: one verb a file, loaded when it is used, and the one place where errors become statuses."""

from __future__ import annotations

import errno
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

import click

from sparkguard import __version__, streams
from sparkguard.cli.terminal import HELP, error_text, exit_statuses
from sparkguard.errors import INTERRUPTED, OK, OSERR, SOFTWARE, STATUSES, SparkguardError

if TYPE_CHECKING:
    from collections.abc import Sequence

_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
# Verb -> the module of its click command, which is named `command` there.
VERBS = {
    "status": "sparkguard.cli.status",
    "check": "sparkguard.cli.check",
    "plan": "sparkguard.cli.plan",
    "config": "sparkguard.cli.config",
    "cap": "sparkguard.cli.cap",
    "why": "sparkguard.cli.why",
    "doctor": "sparkguard.cli.doctor",
    "needs": "sparkguard.cli.needs",
    "serve": "sparkguard.cli.serve",
    "models": "sparkguard.cli.models",
    "load": "sparkguard.cli.load",
    "unload": "sparkguard.cli.unload",
    "runners": "sparkguard.cli.runners",
    "logs": "sparkguard.cli.logs",
    "completion": "sparkguard.cli.completion",
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
  sparkguard status --watch           who holds how much, redrawn every 2 seconds
  sparkguard check longcontext        would it be admitted now?
  sparkguard plan                     which units can never run together
  sparkguard why vllm-longcontext     why it is not running

\b
files:
  ~/.config/spark/spark.conf          settings of this machine
  ~/.config/spark/models/NAME.env     a model's spec
  $XDG_RUNTIME_DIR/sparkguard         reservations of starts under way

\b
environment:
  every setting of spark.conf and of the specs, which it beats: see sparkguard config
  NO_COLOR  any value: no colours

{exit_statuses(*STATUSES)}

SPARKGUARD COMMAND --help tells more about each command.
"""


@click.group(cls=Verbs, context_settings=HELP, epilog=EPILOG, subcommand_metavar="COMMAND [ARGUMENTS]...")
@click.version_option(__version__, message="sparkguard %(version)s")
def program() -> None:
    """Adds up what inference servers reserve, before the kernel's OOM killer does.

    Every vLLM start goes past the guard, which refuses what does not fit into the memory budget. These commands show what
    it sees, ask it without starting anything, and explain what it did. None but `cap` changes anything.
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status; the only handler of errors of the command line."""
    streams.mend()
    colour = False if os.environ.get("NO_COLOR") else None
    try:
        status = program.main(argv, "sparkguard", standalone_mode=False, color=colour)
    except SparkguardError as error:
        click.echo(error_text(error), err=True, nl=False, color=colour)
        return error.status
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except OSError as error:
        # click prints help and version itself. What the kernel says of a file has the file's name.
        if error.filename is not None or error.errno not in _UNWRITABLE:
            return _bug()
        streams.discard(1)
        streams.say(f"sparkguard: stdout cannot be written: {error.strerror}\n")
        return OSERR
    except Exception:
        return _bug()
    return status if isinstance(status, int) else OK


def _bug() -> int:
    import traceback

    traceback.print_exc()
    sys.stderr.write(f"sparkguard {__version__}: this is a bug in sparkguard; the lines above say where\n")
    return SOFTWARE
