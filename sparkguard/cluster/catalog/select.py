"""Which model and which nodes a command line means."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkguard.cluster.catalog.entries import SONGS, songs
from sparkguard.cluster.catalog.tables import nearest
from sparkguard.errors import USAGE, SparkguardError

if TYPE_CHECKING:
    from sparkguard.cluster.catalog.entries import Catalog, Model
    from sparkguard.core.cluster import Node

ALL = ("both", "all")


def find_model(catalog: Catalog, name: str) -> Model:
    wanted = name.lower()
    if wanted == SONGS:
        return songs(catalog.nodes)
    known = {alias.lower(): model for model in catalog.models for alias in (model.name, *model.aliases)}
    if wanted in known:
        return known[wanted]
    raise SparkguardError(
        f"{catalog.path} has no model {name!r}{nearest(wanted, [*known, SONGS])}", "`spark-serve list` prints them", USAGE
    )


def find_nodes(catalog: Catalog, node: str | None, model: Model | None) -> tuple[Node, ...]:
    """node: a role, a name, several of them with commas, both, all, or None for those that the model takes by itself."""
    chosen = catalog.nodes if node is None or node in ALL else _named(catalog, node)
    if model is None or model.wrapper == SONGS:
        return chosen
    if model.nodes_needed > len(catalog.nodes):
        raise SparkguardError(f"{model.name} needs {model.nodes_needed} nodes, and {catalog.path} has {len(catalog.nodes)}")
    own = catalog.nodes[: model.nodes_needed]
    if node is None:
        return own
    if model.nodes_needed == 1:
        if len(chosen) > 1:
            raise SparkguardError(f"{model.name} runs on one node", "give --node head, --node worker or a node's name", USAGE)
        return chosen
    if not set(own) <= set(chosen):
        hint = f"leave --node out, or give --node both: it takes {', '.join(each.name for each in own)}"
        raise SparkguardError(f"{model.name} runs on {model.nodes_needed} nodes together", hint, USAGE)
    return own


def _named(catalog: Catalog, node: str) -> tuple[Node, ...]:
    # head and worker are roles, whatever [[cluster.nodes]] calls the machines.
    roles = {"head": catalog.nodes[0], **({"worker": catalog.nodes[1]} if len(catalog.nodes) > 1 else {})}
    names = {**roles, **{each.name: each for each in catalog.nodes}}
    wanted = node.split(",")
    for each in wanted:
        if each not in names:
            raise SparkguardError(
                f"no node {each!r} in {catalog.path}{nearest(each, names)}", f"it has {', '.join((*names, *ALL))}", USAGE
            )
    chosen = {names[each].name for each in wanted}
    return tuple(each for each in catalog.nodes if each.name in chosen)
