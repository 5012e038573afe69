"""sparkguard runners: the processes that hold loaded models."""

from __future__ import annotations

from typing import Any

import click

from sparkguard.cli.listing import Listing
from sparkguard.cli.terminal import HELP, epilog
from sparkguard.core.explain import gib
from sparkguard.errors import CONFIG, OK, UNAVAILABLE

_EXAMPLES = """
sparkguard runners
sparkguard runners --json | jq -r '.runners[] | "\\(.pid) \\(.model)"'
"""


@click.command(
    "runners", context_settings=HELP, epilog=epilog(_EXAMPLES, OK, UNAVAILABLE, CONFIG), short_help="which models are loaded"
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(as_json: bool) -> int:
    """Lists the runners: state, device, memory, requests served, tokens generated, and the last error of each."""
    return RUNNERS.run(as_json)


def _row(runner: dict[str, Any]) -> tuple[str, ...]:
    memory = gib(runner["memory_bytes"]) if runner.get("memory_bytes") is not None else "-"
    counts = (str(runner.get(key, 0)) for key in ("requests", "tokens", "queue"))
    return runner["model"], runner["state"], runner.get("device") or "-", str(runner.get("pid") or "-"), memory, *counts


def _remarks(runner: dict[str, Any]) -> tuple[str | None, ...]:
    return (runner.get("last_error"),)


RUNNERS = Listing(
    "runners",
    ("MODEL", "STATE", "DEVICE", "PID", "MEMORY", "REQUESTS", "TOKENS", "QUEUE"),
    ("PID", "MEMORY", "REQUESTS", "TOKENS", "QUEUE"),
    _row,
    _remarks,
    "No model is loaded. The first request for one loads it, and so does `sparkguard load MODEL`.",
)
