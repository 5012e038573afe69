"""spark-serve pull: prepare a model on the nodes that it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from sparkguard.cli.cluster.options import json_option, node_option, open_catalog, run_async, state_dir
from sparkguard.cli.terminal import HELP, epilog, printable_lines, say, show_json
from sparkguard.errors import CONFIG, FAILED, INTERRUPTED, OK, TEMPFAIL, UNAVAILABLE, USAGE, SparkguardError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from sparkguard.cluster.catalog.entries import Catalog, Model
    from sparkguard.cluster.events import Emit
    from sparkguard.core.cluster import Node

_EXAMPLES = """
spark-serve pull ds4                     image and weights, on all nodes that it needs
spark-serve pull ds4 --detach            only begin; another `pull ds4` joins
spark-serve pull ds4 --cancel            end it; what came so far stays
spark-serve pull small --node worker     a model of one node
"""


@click.command(
    context_settings=HELP,
    epilog=epilog(_EXAMPLES, OK, FAILED, USAGE, UNAVAILABLE, TEMPFAIL, CONFIG, INTERRUPTED),
    short_help="prepare a model on its nodes",
)
@click.argument("model")
@node_option()
@click.option("--detach", is_flag=True, help="Begin, and do not wait.")
@click.option("--cancel", is_flag=True, help="End the preparation that runs.")
@click.option("--verify", is_flag=True, help="Read files again that were verified before.")
@json_option
@click.pass_context
def command(ctx: click.Context, model: str, node: str | None, detach: bool, cancel: bool, verify: bool, as_json: bool) -> int:
    """Prepares MODEL on the nodes that it needs: its image by digest, and each file of its weights with the publisher's hash.

    The work is done on the nodes, in the background, at the lowest priority; Ctrl-C or a lost connection leaves it running,
    and the same command joins it again. What was fetched before goes on where it broke off. It ends before a disk runs full,
    and stops or starts no model. HF_TOKEN and NGC_API_KEY are passed on from here when they are set; HF_ENDPOINT names a mirror.
    """
    catalog = open_catalog(ctx)
    chosen = catalog.model(model)
    emit = _events(as_json)
    try:
        return run_async(_work(catalog, chosen, _nodes(catalog, chosen, node), state_dir(), emit, detach, cancel, verify))
    except KeyboardInterrupt:
        say(f"the preparation goes on; `spark-serve pull {chosen.name}` joins it, --cancel ends it")
        return INTERRUPTED


def _nodes(catalog: Catalog, model: Model, node: str | None) -> tuple[Node, ...]:
    """One node of a distributed model may be prepared by itself."""
    if node is None:
        return catalog.select(None, model)
    chosen = catalog.select(node, None)
    needed = catalog.nodes[: model.nodes_needed]
    return chosen if model.nodes_needed == 1 else tuple(each for each in chosen if each in needed)


async def _work(
    catalog: Catalog, model: Model, nodes: Sequence[Node], folder: Path, emit: Emit, detach: bool, cancel: bool, verify: bool
) -> int:
    from sparkguard.cluster import pull
    from sparkguard.cluster.ssh import Fleet

    async with Fleet(catalog.nodes, catalog.ssh_opts, str(folder), notice=say) as fleet:
        if cancel:
            await pull.cancel(fleet, nodes, emit)
            return OK
        outcomes = await pull.pull(fleet, catalog, model, nodes, emit, verify=verify, detach=detach)
    if detach:
        return OK
    bad = [outcome for outcome in outcomes if outcome.event != "pull_done"]
    if bad:
        what = "; ".join(f"{outcome.node}: {outcome.message or outcome.event.replace('_', ' ')}" for outcome in bad)
        raise SparkguardError(f"{model.name} is not prepared: {what}", "the same command goes on where it ended", bad[0].status)
    if different := pull.different_images(outcomes):
        raise SparkguardError(different, "`docker image inspect` on each tells their origin", FAILED)
    emit("pull_ready", model=model.name, text=f"{model.name} is prepared: `spark-serve up {model.name}`")
    return OK


def _events(as_json: bool) -> Emit:
    from sparkguard.cluster.events import Events, words

    def put(event: dict[str, Any]) -> None:
        if as_json:
            show_json(event, one_line=True)
        elif event["event"] != "pull_file":
            say(printable_lines(words(event)))

    return Events(put)
