"""Programs that talk to a model, pointed at the endpoint that serves it now: on this machine, or Hermes on the head.

A client says how its file looks with another target; reading and writing the file is done here, the same for all. A file is
the old one or the new one, keeps its mode, and is left alone when it cannot be understood.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from sparkguard.cluster.clients.env_file import EnvFile
from sparkguard.cluster.clients.hermes import DEFAULT_PATH, Hermes
from sparkguard.cluster.clients.places import Here, OnNode
from sparkguard.cluster.clients.target import Target
from sparkguard.errors import CONFIG, SparkguardError

if TYPE_CHECKING:
    from sparkguard.cluster.catalog.read import Catalog
    from sparkguard.cluster.clients.places import Place
    from sparkguard.cluster.ssh import Fleet
    from sparkguard.core.cluster import Allocation

__all__ = ["LOCAL", "SPARK", "TARGETS", "Client", "EnvFile", "Hermes", "Target", "target_of", "use"]

LOCAL, SPARK = "local", "spark"
TARGETS = {"mac": LOCAL, LOCAL: LOCAL, SPARK: SPARK}  # the word of --hermes-target -> where


class Client(Protocol):
    """One kind of file."""

    name: str
    makes_file: bool  # whether one that is not there is begun

    def retarget(self, text: str, target: Target) -> str:
        """The file's text with another target, and nothing else changed. Raises SparkguardError, which shows none of the text."""
        ...


_KINDS: dict[str, type[Client]] = {"hermes": Hermes, "env": EnvFile}


def target_of(allocation: Allocation) -> Target:
    """Raises SparkguardError where clients have no use for it."""
    if allocation.url is None or not allocation.served:
        raise SparkguardError(f"{allocation.model} has no endpoint that clients could use", None, CONFIG)
    if allocation.client is None:
        hint = f'set hermes_provider = "spark" in [models.{allocation.model}] of the catalog'
        raise SparkguardError(f"{allocation.model} has no name for clients", hint, CONFIG)
    base_url = allocation.url.rstrip("/").removesuffix("/v1") + "/v1"
    return Target(allocation.client, base_url, allocation.served, allocation.context, allocation.vision)


async def use(catalog: Catalog, allocation: Allocation, target: str, fleet: Fleet | None) -> str:
    """Points the clients there, and says so. target: LOCAL, the catalog's clients on this machine, or SPARK, Hermes on the head.

    Raises SparkguardError when one of them was left as it is.
    """
    wanted = target_of(allocation)
    works: list[tuple[Client, Place]] = []
    if TARGETS[target] == SPARK:
        assert fleet is not None
        works.append((Hermes(), OnNode(fleet[catalog.head.name], DEFAULT_PATH)))
    elif catalog.clients:
        works += [(_KINDS[client.kind](), Here(client.path)) for client in catalog.clients]
    else:
        works.append((Hermes(), Here(DEFAULT_PATH)))
    results = await asyncio.gather(*(_apply(client, place, wanted) for client, place in works), return_exceptions=True)
    done = [result for result in results if isinstance(result, str)]
    failed = [result for result in results if isinstance(result, BaseException)]
    for error in failed:
        if not isinstance(error, SparkguardError):
            raise error
    if failed:
        first = failed[0]
        assert isinstance(first, SparkguardError)
        words = "; ".join([*(str(error) for error in failed), *done])
        raise SparkguardError(words, first.hint, first.status)
    return "; ".join(done)


async def _apply(client: Client, place: Place, target: Target) -> str:
    found = await place.read()
    if found is None and not client.makes_file:
        hint = f"set {client.name} up once, so that its file is there; nothing was made in its place"
        raise SparkguardError(f"{client.name} was left as it is: {place} is not there", hint, CONFIG)
    old = found or ""
    try:
        new = client.retarget(old, target)
    except SparkguardError as error:
        raise SparkguardError(f"{client.name} was left as it is: {place}: {error.message}", error.hint, error.status) from None
    if new == old:
        return f"{client.name} already uses {target.served} at {target.base_url} ({place})"
    await place.write(old if found is not None else None, new)
    return f"{client.name} uses {target.served} at {target.base_url} now ({place})"
