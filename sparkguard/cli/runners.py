"""sparkguard runners: the processes that hold loaded models."""

from __future__ import annotations

import os

import click

from sparkguard.cli.front import Front
from sparkguard.cli.terminal import HELP, epilog, printable, show, show_json, table
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
    answer = Front(os.environ).get("/api/runners")
    if as_json:
        show_json(answer)
        return OK
    rows = [
        (
            runner["model"],
            runner["state"],
            runner.get("device") or "-",
            str(runner.get("pid") or "-"),
            gib(runner["memory_bytes"]) if runner.get("memory_bytes") is not None else "-",
            str(runner.get("requests", 0)),
            str(runner.get("tokens", 0)),
            str(runner.get("queue", 0)),
        )
        for runner in answer["runners"]
    ]
    if not rows:
        show("No model is loaded. The first request for one loads it, and so does `sparkguard load MODEL`.")
        return OK
    header = ("MODEL", "STATE", "DEVICE", "PID", "MEMORY", "REQUESTS", "TOKENS", "QUEUE")
    show(table(header, rows, header[3:]))
    errors = [f"{runner['model']}: {runner['last_error']}" for runner in answer["runners"] if runner.get("last_error")]
    if errors:
        show("\n" + "\n".join(printable(error) for error in errors))
    return OK
