"""spark-serve list: the models of the catalog. It asks no node."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sparkguard.cli.cluster.options import json_option
from sparkguard.cli.terminal import epilog, show, show_json, table
from sparkguard.core.cluster import DISTRIBUTED, SINGLE, YUE
from sparkguard.errors import CONFIG, OK, USAGE

if TYPE_CHECKING:
    from sparkguard.cluster.catalog.entries import Catalog, Model

_EPILOG = epilog("spark-serve list\nspark-serve list --json", OK, USAGE, CONFIG)


@click.command(epilog=_EPILOG)
@json_option
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """The models of the catalog: on how many Sparks, with how much context, by which recipe.

    Whether one is prepared on its nodes is the nodes' to say: `spark-serve pull MODEL` tells and prepares it.
    """
    from sparkguard.cluster.catalog import read as catalogs

    # The untouched example is fine here, so that one can look before one edits.
    catalog = catalogs.load(catalogs.find(ctx.find_root().obj, os.environ, Path.cwd()), example=True)
    models = [*catalog.models, catalog.model("yue")]
    if as_json:
        show_json(
            {
                "schema_version": 1,
                "catalog": catalog.path,
                "nodes": [{"node": node.name, "host": node.ssh, "lan_url": node.lan_url} for node in catalog.nodes],
                "models": [_as_json(catalog, model) for model in models],
            },
            one_line=True,
        )
        return
    header = ("MODEL", "LABEL", "SPARKS", "CONTEXT", "ENGINE", "RECIPE", "ALIASES")
    rows = [
        (
            model.name,
            model.label,
            str(model.nodes_needed),
            context_words(model.context),
            model.wrapper,
            _runbook(model),
            " ".join(model.aliases),
        )
        for model in models
    ]
    show(table(header, rows, right=("SPARKS", "CONTEXT")))


def context_words(context: int | None) -> str:
    """Tokens as people say them: 1M, 262K."""
    if context is None:
        return "-"
    if context % (1 << 20) == 0:
        return f"{context >> 20}M"
    return f"{context // 1000}K" if context >= 1000 else str(context)


def _runbook(model: Model) -> str:
    return f"docs/cluster/{model.recipe}.md" if model.recipe else "-"


def _as_json(catalog: Catalog, model: Model) -> dict[str, Any]:
    return {
        "id": model.name,
        "label": model.label,
        "aliases": list(model.aliases),
        "sparks": model.nodes_needed,
        "mode": YUE if model.wrapper == "yue" else DISTRIBUTED if model.nodes_needed > 1 else SINGLE,
        "context": model.context,
        "wrapper": model.wrapper,
        "image": model.image or None,
        "served": model.served,
        "recipe": model.recipe or None,
        "container": model.container or None,
        "vision": model.vision,
        "client": model.provider or None,
        "notes": model.notes,
        "port": catalog.port if model.wrapper != "yue" else catalog.yue.port,
    }
