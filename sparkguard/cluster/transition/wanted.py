"""From the catalog to what a plan is made of: the rules, the allocation that is wanted, and what to ask the nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sparkguard.cluster.catalog import recipes
from sparkguard.cluster.observe import Questions
from sparkguard.core.ownership import Known, Rules
from sparkguard.core.types import Budget
from sparkguard.errors import SparkguardError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sparkguard.cluster.catalog.read import Catalog
    from sparkguard.core.cluster import Allocation


def rules_of(catalog: Catalog) -> Rules:
    known = tuple(
        Known(
            model.name,
            tuple(node.name for node in catalog.nodes[: model.nodes_needed]) if model.nodes_needed > 1 else (),
            (catalog.port,),
            model.drain_seconds,
        )
        for model in catalog.models
    )
    return Rules(
        nodes=tuple(node.name for node in catalog.nodes),
        models=known,
        keep=catalog.keep_containers,
        stop_names=catalog.stop_names,
        master_port=catalog.master_port,
        budget=Budget(catalog.budget_share, catalog.reserve_bytes),
        yue_ready_seconds=catalog.yue.ready_seconds,
    )


def allocation_of(catalog: Catalog, model: str, node: str | None = None) -> Allocation:
    """What `up MODEL --node NODE` wants. Raises SparkguardError for a model or a node that there is not."""
    entry = catalog.model(model)
    return recipes.allocation(catalog, entry, catalog.select(node, entry))


def running_of(catalog: Catalog, model: str, node: str) -> Allocation | None:
    """The allocation of a model that runs on a node; None: it is no longer in the catalog, or no longer fits there."""
    try:
        entry = catalog.model(model)
        return recipes.allocation(catalog, entry, catalog.select(node if entry.nodes_needed == 1 else None, entry))
    except SparkguardError:
        return None


def questions(
    catalog: Catalog, nodes: tuple[str, ...], wanted: Allocation | None = None, yue: bool = True
) -> dict[str, Questions]:
    """What a look at each node must tell, so that nothing is found out only after something was stopped."""
    ports = (catalog.port, catalog.master_port, catalog.yue.port)
    settings = yue_settings(catalog) if yue else None
    asked = {name: Questions(ports=ports, yue=settings) for name in nodes}
    for rank in wanted.ranks if wanted is not None else ():
        before = asked.get(rank.node)
        if before is None:
            continue
        asked[rank.node] = before.replace(
            images=(*before.images, rank.image),
            paths=(*before.paths, *rank.paths),
            interfaces=(*before.interfaces, *rank.interfaces),
            hcas=(*before.hcas, *rank.hcas),
            ports=tuple(dict.fromkeys((*ports, *([rank.port] if rank.port is not None else ())))),
        )
    return asked


def yue_settings(catalog: Catalog) -> Mapping[str, Any]:
    return {"service": catalog.yue.service, "factory_root": catalog.yue.factory_root}
