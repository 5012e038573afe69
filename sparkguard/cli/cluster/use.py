"""spark-serve use: point the clients at a model that is served, and change nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from sparkguard.cli.cluster.options import json_option, node_option, open_catalog, run_async, state_dir
from sparkguard.cli.terminal import HELP, epilog, say, show, show_json
from sparkguard.cluster.events import Events
from sparkguard.errors import CONFIG, OK, TEMPFAIL, UNAVAILABLE, USAGE, SparkguardError

if TYPE_CHECKING:
    from pathlib import Path

    from sparkguard.cluster.catalog.read import Catalog
    from sparkguard.core.cluster import Allocation

_EXAMPLES = """
spark-serve use                                what runs now
spark-serve use --node worker                  what runs on the second Spark
spark-serve use ds4 --hermes-target spark      Hermes on the head
"""


@click.command(
    "use",
    context_settings=HELP,
    epilog=epilog(_EXAMPLES, OK, USAGE, UNAVAILABLE, TEMPFAIL, CONFIG),
    short_help="point Hermes, or the catalog's clients, at a model",
)
@click.argument("model", required=False)
@node_option()
@click.option(
    "--hermes-target",
    type=click.Choice(["mac", "local", "spark"]),
    default="local",
    show_default=True,
    help="Whose Hermes: this machine's (mac means the same), or the head's.",
)
@json_option
@click.pass_context
def command(ctx: click.Context, model: str | None, node: str | None, hermes_target: str, as_json: bool) -> None:
    """Points clients at MODEL, or at what runs now.

    Starts and stops nothing. On this machine these are the catalog's [clients], without any Hermes's ~/.hermes/config.yaml: its
    default model and provider are set, everything else in it and its mode are kept. A file that is missing or cannot be
    understood is left as it is.
    """
    catalog = open_catalog(ctx)
    folder = state_dir()
    emit = Events(lambda event: show_json(event, one_line=True) if as_json else show(event["text"]))
    try:
        allocation = _wanted(catalog, folder, model, node)
        words = run_async(_use(catalog, folder, allocation, hermes_target))
    except SparkguardError as error:
        if as_json:
            emit("hermes", text=error.message, ok=False)
        raise
    emit("hermes", text=words, ok=True)


async def _use(catalog: Catalog, folder: Path, allocation: Allocation, target: str) -> str:
    from sparkguard.cluster import clients
    from sparkguard.cluster.ssh import Fleet
    from sparkguard.cluster.transition import ready

    clients.target_of(allocation)
    found = await ready.probe(allocation, canary=False)
    if not found.ready:
        say(f"{allocation.model} is not ready: {found.reason}")
    async with Fleet(catalog.nodes, catalog.ssh_opts, str(folder), notice=say) as fleet:
        return await clients.use(catalog, allocation, target, fleet)


def _wanted(catalog: Catalog, folder: Path, model: str | None, node: str | None) -> Allocation:
    """The named one, or the one that the controller's record places."""
    from sparkguard.cluster.transition.wanted import allocation_of
    from sparkguard.cluster.watch.picture import placed

    running = [watched.allocation for watched in placed(catalog, folder).watched if watched.allocation.url]
    if model is not None:
        entry = catalog.model(model)
        named = [it for it in running if it.model == entry.name]
        return named[0] if len(named) == 1 and node is None else allocation_of(catalog, model, node)
    if node is not None:
        names = {it.name for it in catalog.select(node, None)}
        running = [it for it in running if names & set(it.nodes)]
    if len(running) == 1:
        return running[0]
    if not running:
        raise SparkguardError("no model is placed on these nodes", "name one: spark-serve use MODEL", USAGE)
    told = ", ".join(f"{it.model} on {'+'.join(it.nodes)}" for it in running)
    raise SparkguardError(f"several models run: {told}", "name one, or say which --node", USAGE)
