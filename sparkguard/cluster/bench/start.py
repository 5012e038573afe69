"""From what was asked for to a run under a lease: finds the target, admits the run under the controller's lock, then measures."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from sparkguard.cluster.bench import history, leases
from sparkguard.cluster.bench.client import Endpoint
from sparkguard.cluster.bench.run import Run, Target
from sparkguard.cluster.events import Events
from sparkguard.cluster.transition import lock
from sparkguard.core.record import Record
from sparkguard.errors import TEMPFAIL, UNAVAILABLE, USAGE, SparkguardError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sparkguard.cluster.bench.request import Settings
    from sparkguard.cluster.catalog.read import Catalog


class Asked(Record):
    """key: sent to the endpoint in a header; it is kept nowhere."""

    settings: Settings
    url: str | None = None
    model: str | None = None
    node: str | None = None
    shared: bool = False
    keep: int = history.KEEP
    key: str | None = None


async def start(asked: Asked, state_dir: Path, catalog: Catalog | None, put: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The record of the run, saved. Raises SparkguardError: busy 75, unreachable 69, bad arguments 2."""
    saved = history.History(state_dir, asked.keep)
    id = history.new_id(asked.settings.kind)
    with contextlib.ExitStack() as stack:
        # Lifecycle commands hold this lock from before they revoke leases until they are through: none is between the two.
        with lock.held(state_dir, lock.myself("bench run")):
            if catalog is None:
                target, subject = await _at_url(asked), None
            else:
                from sparkguard.cluster.bench.allocation import at_node

                assert asked.node
                subject = await at_node(catalog, asked.node, state_dir)
                target = subject.target
            lease = leases.Lease(id, os.getpid(), socket.gethostname(), time.time(), target.url, target.model, target.nodes)
            _refuse_second(target, leases.living(state_dir))
            held = stack.enter_context(leases.held(state_dir, lease))
        async with Endpoint(target.url, asked.key) as endpoint:
            run = Run(
                endpoint,
                target,
                asked.settings,
                id,
                emit=Events(put),
                save=saved.save,
                held=held,
                identity=subject.identity if subject else None,
                environment=subject.environment if subject else None,
                shared=asked.shared,
            )
            try:
                return await run.run()
            finally:
                saved.prune()


def _refuse_second(target: Target, running: list[leases.Lease]) -> None:
    for lease in running:
        if lease.url == target.url or set(lease.nodes).intersection(target.nodes):
            what = f"{lease.id} measures {lease.model} there, pid {lease.pid} on {lease.host}: both would be slowed"
            raise SparkguardError(what, "wait, or end it: spark-serve bench cancel", TEMPFAIL)


async def _at_url(asked: Asked) -> Target:
    assert asked.url
    url = asked.url
    if not url.startswith(("http://", "https://")):
        raise SparkguardError(f"--url {url} begins with neither http:// nor https://", None, USAGE)
    if urlsplit(url).username is not None:
        hint = "a key belongs into SPARK_SERVE_API_KEY: a url is kept with the run"
        raise SparkguardError("--url has a name or a password in it", hint, USAGE)
    async with Endpoint(url, asked.key) as endpoint:
        ids = await endpoint.models()
    if ids is None:
        raise SparkguardError(f"{url} does not answer /v1/models", None, UNAVAILABLE)
    if asked.model is None and len(ids) != 1:
        raise SparkguardError(f"{url} serves {', '.join(ids) or 'nothing'}: say which with --model", None, USAGE)
    return Target(url, asked.model or ids[0])
