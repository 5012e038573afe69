"""sparkguard models: the models that the supervisor serves, their state, and what they need."""

from __future__ import annotations

from typing import Any

import click

from sparkguard.cli.listing import Listing
from sparkguard.cli.terminal import HELP, epilog
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
    return MODELS.run(as_json)


def _row(model: dict[str, Any]) -> tuple[str, ...]:
    needs = (model.get("needs") or {}).get("text") or "unknown"
    return model["id"], model["state"], model.get("device") or "-", str(model.get("queue", 0)), needs


def _remarks(model: dict[str, Any]) -> tuple[str | None, ...]:
    return model.get("error"), model.get("warning"), model.get("reason") if model.get("fits") is False else None


MODELS = Listing(
    "models",
    ("MODEL", "STATE", "DEVICE", "QUEUE", "NEEDS"),
    ("QUEUE",),
    _row,
    _remarks,
    "There is no model. GGUF files under MODELS_DIR are served; sparkguard config says where that is.",
)
