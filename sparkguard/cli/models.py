"""sparkguard models: the models that the supervisor serves, their state, and what they need."""

from __future__ import annotations

import os

import click

from sparkguard.cli.front import Front
from sparkguard.cli.terminal import HELP, epilog, printable, show, show_json, table
from sparkguard.errors import CONFIG, OK, UNAVAILABLE

_EXAMPLES = """
sparkguard models
sparkguard models --json | jq -r '.models[] | select(.fits) | .id'
"""


@click.command(
    "models", context_settings=HELP, epilog=epilog(_EXAMPLES, OK, UNAVAILABLE, CONFIG), short_help="what the runners can serve"
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(as_json: bool) -> int:
    """Lists the models under MODELS_DIR: state, device, what each needs, and why one cannot run."""
    answer = Front(os.environ).get("/api/models")
    if as_json:
        show_json(answer)
        return OK
    rows = [
        (
            model["id"],
            model["state"],
            model.get("device") or "-",
            str(model.get("queue", 0)),
            (model.get("needs") or {}).get("text") or "unknown",
        )
        for model in answer["models"]
    ]
    if not rows:
        show("There is no model. GGUF files under MODELS_DIR are served; sparkguard config says where that is.")
        return OK
    remarks = [answer["warning"]] if answer.get("warning") else []
    remarks += [
        f"{model['id']}: {text}"
        for model in answer["models"]
        for text in (model.get("error"), model.get("warning"), None if model.get("fits", True) else model.get("reason"))
        if text
    ]
    show(table(("MODEL", "STATE", "DEVICE", "QUEUE", "NEEDS"), rows, ("QUEUE",)))
    if remarks:
        show("\n" + "\n".join(printable(remark) for remark in remarks))
    return OK
