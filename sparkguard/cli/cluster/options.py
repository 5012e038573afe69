"""What the verbs of spark-serve share: the catalog, the state folder, their options, and one way to run and to be interrupted."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from sparkguard.cli.terminal import say
from sparkguard.cluster.transition import state

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from sparkguard.cluster.catalog.read import Catalog

T = TypeVar("T")
Command = TypeVar("Command", bound="Callable[..., Any] | click.Command")

json_option = click.option("--json", "as_json", is_flag=True, help="JSON on stdout, an object a line; docs/schemas describes it.")
cancel_jobs_option = click.option("--cancel-jobs", is_flag=True, help="Cancel the songs that YuE renders instead of refusing.")
dry_run_option = click.option("--dry-run", is_flag=True, help="Only print the steps.")


def node_option(help: str = "head, worker, a name, several with commas, both or all.") -> Callable[[Command], Command]:
    return click.option("--node", metavar="NODE", help=help)


def open_catalog(ctx: click.Context) -> Catalog:
    """The catalog of --config, of the environment, or of its usual places. Raises SparkguardError (78) with every fault in it."""
    from sparkguard.cluster.catalog import read as catalog

    return catalog.load(catalog.find(ctx.find_root().obj, os.environ, Path.cwd()))


def state_dir(env: Mapping[str, str] = os.environ) -> Path:
    """The laptop's state folder, made 0700 when it is not there."""
    return state.folder(env)


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Runs a verb; Ctrl-C, SIGTERM and a closed terminal cancel it once, and it may clean up.

    A second signal changes nothing: what is under way is the clean-up. The third ends the process where it stands, and the
    next command explains and reconciles. Raises KeyboardInterrupt when it was cancelled so, which main() makes status 130.
    """
    signals = 0

    async def main() -> T:
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(work)

        def interrupted() -> None:
            nonlocal signals
            signals += 1
            if signals == 1:
                task.cancel()
            elif signals == 2:
                say("cleaning up; once more leaves everything as it is now, and the next command reconciles")
            else:
                os._exit(130)

        caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for number in caught:
            loop.add_signal_handler(number, interrupted)
        try:
            return await task
        except asyncio.CancelledError:
            if signals:
                raise KeyboardInterrupt from None
            raise
        finally:
            for number in caught:
                loop.remove_signal_handler(number)

    return asyncio.run(main())
