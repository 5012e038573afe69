"""sparkguard unload: ends a model's runner once its requests have ended."""

from __future__ import annotations

import os

import click

from sparkguard.cli.front import Front, segment
from sparkguard.cli.terminal import HELP, epilog, say, show_json
from sparkguard.errors import CONFIG, OK, UNAVAILABLE

_EXAMPLES = """
sparkguard unload SmolLM2-135M-Instruct
sparkguard unload folder/model --json
"""


@click.command("unload", context_settings=HELP, epilog=epilog(_EXAMPLES, OK, UNAVAILABLE, CONFIG), short_help="unload a model")
@click.argument("model")
@click.option("--json", "as_json", is_flag=True, help="The model as one JSON object on stdout.")
def command(model: str, as_json: bool) -> int:
    """Unloads MODEL: what it is answering is finished first, what waits is refused, and then its process ends."""
    unloaded = Front(os.environ).post(f"/api/models/{segment(model)}/unload")
    if as_json:
        show_json(unloaded)
    else:
        say(f"{unloaded['id']} is {unloaded['state']}")
    return OK
