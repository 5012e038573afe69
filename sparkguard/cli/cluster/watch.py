"""spark-serve watch: nodes, models and their health, as they are now and on."""

from __future__ import annotations

import sys
import time
from contextlib import AsyncExitStack, aclosing
from typing import TYPE_CHECKING, Any

import click

from sparkguard.cli.cluster.options import json_option, open_catalog, run_async, state_dir
from sparkguard.cli.terminal import epilog, say, show, show_json, table
from sparkguard.errors import CONFIG, INTERRUPTED, OK, OSERR, USAGE, SparkguardError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sparkguard.cluster.catalog.read import Catalog
    from sparkguard.cluster.watch.history import History

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
EXAMPLES = """
    spark-serve watch                               a live screen; Ctrl-C ends it
    spark-serve watch --json --interval 1           an object a line
    spark-serve watch --prometheus 127.0.0.1:9410   for Prometheus, as long as it runs
    spark-serve watch --history 2h                  what was kept
"""


@click.command("watch", epilog=epilog(EXAMPLES, OK, USAGE, OSERR, CONFIG, INTERRUPTED))
@json_option
@click.option("--interval", type=click.FloatRange(0.25, 3600), default=2.0, show_default=True, help="Seconds between two ticks.")
@click.option(
    "--prometheus", metavar="[HOST:]PORT", help="Answer Prometheus there too, as this machine alone where no host is given."
)
@click.option("--history", metavar="DURATION", help="Show what was kept of the last 90s, 15m, 2h or 7d instead, and end.")
@click.option("--no-history", is_flag=True, help="Keep nothing.")
@click.pass_context
def command(
    ctx: click.Context, as_json: bool, interval: float, prometheus: str | None, history: str | None, no_history: bool
) -> None:
    """Shows what nodes and models do, tick by tick.

    Nodes are read over one SSH channel each, models over their endpoints; nothing stays on the nodes when this ends. A node
    that cannot be reached is tried again, every 30 s at last, and holds up nothing. What is unknown is a dash, or null.
    An idle model is asked for one token every 30 s, but never while a benchmark runs.
    """
    if interval != interval:  # a range does not refuse it
        raise SparkguardError("nan is no interval", None, USAGE)
    if history is not None:
        _show_history(_duration(history), as_json)
        return
    catalog = open_catalog(ctx)
    try:
        run_async(_watch(catalog, state_dir(), interval, as_json, prometheus, keep=not no_history))
    except BrokenPipeError:
        sys.stderr.close()  # the reader has had enough, and Python would complain about the rest at its end


async def _watch(catalog: Catalog, folder: Path, interval: float, as_json: bool, prometheus: str | None, keep: bool) -> None:
    from sparkguard.cluster.ssh import Fleet
    from sparkguard.cluster.watch.picture import Watch, placed

    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(Fleet(catalog.nodes, catalog.ssh_opts, str(folder), notice=say))
        caches = {node.name: [catalog.cache(node.name)] for node in catalog.nodes}
        links = {node.name: fleet[node.name] for node in catalog.nodes}
        watch = Watch(links, lambda: placed(catalog, folder), folder, interval, nodes=catalog.nodes, paths=caches)
        if prometheus is not None:
            say(f"for Prometheus: {await _export(stack, prometheus, watch.picture)}")
        kept = _open_history(folder) if keep else None
        if kept is not None:
            stack.callback(kept.close)
        put = _json if as_json else _printer(stack)
        async with aclosing(watch.ticks()) as ticks:
            async for tick in ticks:
                put(tick)
                if kept is not None and not _keep(kept, tick):
                    kept = None


async def _export(stack: AsyncExitStack, text: str, picture: Callable[[], dict[str, Any]]) -> str:
    try:
        from sparkguard.cluster.watch.exporter import Exporter, address
    except ImportError as error:
        raise SparkguardError(f"--prometheus needs {error.name}", "pip install 'sparkguard[cluster]'", CONFIG) from None
    host, port = address(text)
    exporter = await stack.enter_async_context(Exporter(host, port, picture))
    return exporter.url


def _json(tick: dict[str, Any]) -> None:
    show_json(tick, one_line=True)
    sys.stdout.flush()


def _printer(stack: AsyncExitStack) -> Callable[[dict[str, Any]], None]:
    from sparkguard.cli.cluster.screen import Screen, lines

    if not sys.stdout.isatty():
        return lambda tick: show(lines(tick) + "\n")
    screen = stack.enter_context(Screen())
    return lambda tick: screen.show(lines(tick))


# ---- what is kept


def _open_history(folder: Path) -> History | None:
    """A history that cannot be kept is no reason not to look."""
    from sparkguard.cluster.watch import history

    try:
        return history.writer(folder)
    except (SparkguardError, OSError) as error:
        say(f"nothing is kept: {error}")
        return None


def _keep(kept: History, tick: dict[str, Any]) -> bool:
    from sparkguard.cluster.watch.history import values_of

    try:
        kept.add(time.time_ns() // 1_000_000, values_of(tick))
    except SparkguardError as error:
        say(f"nothing more is kept: {error.message}")
        return False
    return True


def _duration(text: str) -> int:
    """In seconds."""
    number, unit = text[:-1], text[-1:]
    if unit not in _UNITS or not number.isascii() or not number.isdigit() or not int(number):
        raise SparkguardError(f"{text!r} is no duration", "for example 90s, 15m, 2h or 7d", USAGE)
    return int(number) * _UNITS[unit]


def _show_history(seconds: int, as_json: bool) -> None:
    from sparkguard.cluster.watch import history

    kept = history.reader(state_dir())
    if kept is None:
        raise SparkguardError("nothing was kept yet", "`spark-serve watch` keeps what it sees while it runs", OSERR)
    try:
        now = time.time_ns() // 1_000_000
        found = [kept.read(subject, now - seconds * 1000, now + 1) for subject in kept.subjects()]
    finally:
        kept.close()
    found = [series for series in found if series.at]
    if as_json:
        for series in found:
            values = {name: {"mean": list(series.means[name]), "max": list(series.maxima[name])} for name in series.means}
            line = {"schema_version": 1, "subject": series.subject, "step_ms": series.step_ms, "at_ms": list(series.at)}
            show_json({**line, "series": values}, one_line=True)
        return
    rows = []
    for series in found:
        for name, means in series.means.items():
            known = [value for value in means if value is not None]
            most = [value for value in series.maxima[name] if value is not None]
            if known and any(most):
                rows.append([series.subject, name, f"{sum(known) / len(known):.6g}", f"{max(most):.6g}"])
    show(
        table(["subject", "value", "mean", "highest"], rows, right=["mean", "highest"])
        if rows
        else "nothing was kept of that time"
    )
