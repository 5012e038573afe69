"""sparkguard load: loads a model now, with a progress bar."""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import TYPE_CHECKING

import click

from sparkguard.cli.front import Front, segment
from sparkguard.cli.terminal import HELP, epilog, printable, say, show_json
from sparkguard.errors import CONFIG, OK, TEMPFAIL, UNAVAILABLE, SparkguardError

if TYPE_CHECKING:
    from collections.abc import Mapping

_EXAMPLES = """
sparkguard load SmolLM2-135M-Instruct
sparkguard load folder/model --json
"""
_WIDTH = 36


@click.command(
    "load", context_settings=HELP, epilog=epilog(_EXAMPLES, OK, TEMPFAIL, UNAVAILABLE, CONFIG), short_help="load a model now"
)
@click.argument("model")
@click.option("--json", "as_json", is_flag=True, help="The model as one JSON object on stdout.")
def command(model: str, as_json: bool) -> int:
    """Loads MODEL, making room as a request for it would, and waits until it is ready. A refusal says the arithmetic."""
    front = Front(os.environ)
    if sys.stderr.isatty():
        watch = threading.Thread(target=_show_progress, args=(Front(os.environ), model), daemon=True)
        watch.start()
    try:
        loaded = front.post(f"/api/models/{segment(model)}/load")
    finally:
        if sys.stderr.isatty():
            click.echo("\r\x1b[K", err=True, nl=False)
    if as_json:
        show_json(loaded)
    else:
        say(f"{loaded['id']} is {loaded['state']} on {loaded.get('device') or 'no device'}")
    return OK


def _show_progress(front: Front, model: str) -> None:
    """Draws until the process ends: the verb ends with the load."""
    try:
        id = str(front.get(f"/api/models/{segment(model)}")["id"])
        for line in front.lines("/api/events"):
            if line.startswith("data: "):
                share = progress_of(json.loads(line.removeprefix("data: ")), id)
                if share is not None:
                    click.echo(f"\r\x1b[K{bar(id, share)}", err=True, nl=False)
    except SparkguardError:
        return  # the load itself tells


def progress_of(event: Mapping[str, object], model: str) -> float | None:
    """The share that is loaded, 0 to 1, where the event tells it of this model."""
    if event.get("type") != "runner":
        return None
    runner = event["runner"] if isinstance(event.get("runner"), dict) else event
    assert isinstance(runner, dict)
    share = runner.get("progress")
    return float(share) if runner.get("model") == model and isinstance(share, (int, float)) else None


def bar(model: str, share: float) -> str:
    share = max(0.0, min(1.0, share))
    done = round(share * _WIDTH)
    return f"{printable(model)} [{'#' * done}{'.' * (_WIDTH - done)}] {share:4.0%}"
