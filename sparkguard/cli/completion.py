"""sparkguard completion: the script that teaches a shell to complete the command."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from sparkguard.cli.terminal import HELP, epilog, show
from sparkguard.errors import OK, USAGE

_EXAMPLES = """
eval "$(sparkguard completion bash)"                                          in ~/.bashrc
eval "$(sparkguard completion zsh)"                                           in ~/.zshrc, after compinit
sparkguard completion fish >~/.config/fish/completions/sparkguard.fish        once
"""


@click.command("completion", context_settings=HELP, epilog=epilog(_EXAMPLES, OK, USAGE), short_help="print a shell's completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> int:
    """Prints the script that makes SHELL complete commands, options, units and models.

    bash has to be 4.4 or newer.
    """
    made = get_completion_class(shell)
    if made is None:
        raise click.UsageError(f"this click knows no completion for {shell}")
    from sparkguard.cli import program

    show(made(program, {}, "sparkguard", "_SPARKGUARD_COMPLETE").source())
    return OK
