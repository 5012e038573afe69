"""sparkguard logs: what a model's runner has logged."""

from __future__ import annotations

import os

import click

from sparkguard.cli.front import Front, segment
from sparkguard.cli.terminal import HELP, epilog, printable, show, show_json
from sparkguard.errors import CONFIG, OK, UNAVAILABLE

_EXAMPLES = """
sparkguard logs SmolLM2-135M-Instruct
sparkguard logs folder/model --follow
sparkguard logs folder/model --json | jq -r 'select(.level == "error") | .message'
"""


@click.command(
    "logs", context_settings=HELP, epilog=epilog(_EXAMPLES, OK, UNAVAILABLE, CONFIG), short_help="what a runner has logged"
)
@click.argument("model")
@click.option("-f", "--follow", is_flag=True, help="Go on with what it logs from now on, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line: level, category, message.")
def command(model: str, follow: bool, as_json: bool) -> int:
    """Shows the last lines of MODEL's runners, `level: category: message` each. No prompt and no answer is among them."""
    for line in Front(os.environ).lines(f"/api/runners/{segment(model)}/log{'?follow=1' if follow else ''}"):
        if as_json:
            level, category, message = (*line.split(": ", 2), "", "")[:3]
            show_json({"level": level, "category": category, "message": message}, one_line=True)
        else:
            show(printable(line))
    return OK
