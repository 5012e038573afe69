"""How up, stop and their like tell what they do: events as JSON lines on stdout, or words on stderr and the end on stdout."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from sparkguard.cli.cluster.options import run_async
from sparkguard.cli.terminal import printable, printable_lines, say, show, show_json
from sparkguard.cluster.events import Events, words
from sparkguard.cluster.transition.turn import Refused
from sparkguard.core.cluster import Blocked
from sparkguard.errors import SparkguardError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sparkguard.cluster.catalog.read import Catalog
    from sparkguard.cluster.events import Emit
    from sparkguard.cluster.transition.run import Asked

# The last word of a transition is its product; all before it is talk.
_PRODUCT = ("ready", "launched", "stopped", "host_up", "host_down", "rebooted")


def events(as_json: bool) -> Events:
    return Events(_put_json if as_json else _put_words)


def carry_out(asked: Asked, catalog: Catalog, state_dir: Path, *, as_json: bool, dry_run: bool) -> int:
    """The exit status of a transition."""
    from sparkguard.cluster.transition import run

    emit = events(as_json)
    with telling(emit, as_json):
        if dry_run:
            return _show_plan(asked, run_async(run.plan_of(asked, catalog, state_dir, emit)), as_json)
        return run_async(run.transition(asked, catalog, state_dir, emit))


@contextlib.contextmanager
def telling(emit: Emit, as_json: bool) -> Iterator[None]:
    """With --json a refusal or a failure is an event too, before main() says it on stderr."""
    try:
        yield
    except SparkguardError as error:
        if as_json:
            told: dict[str, Any] = {"status": error.status, "code": getattr(error, "code", "failed"), "hint": error.hint}
            holder = getattr(error, "holder", None)
            if holder is not None:
                told["holder"] = dict(holder.__dict__)
            jobs = getattr(error, "jobs", None)
            if jobs:
                told["jobs"] = {node: list(found) for node, found in jobs.items()}
            emit("refused" if isinstance(error, Refused) else "failed", text=error.message, **told)
        raise


def _show_plan(asked: Asked, plan: Any, as_json: bool) -> int:
    from sparkguard.cluster.transition import run

    if isinstance(plan, Blocked):
        raise Refused(asked.verb, plan)
    if as_json:
        show_json(run.plan_json(plan, asked), one_line=True)
        return 0
    lines = [f"{asked.verb} would do this, and nothing was done yet:"]
    lines += [f"  {note}" for note in plan.notes]
    for number, step in enumerate(plan.steps, 1):
        where = f"{step.node}: " if step.node else ""
        lines.append(f"{number:>3}. {where}{step.text}")
    show(printable_lines("\n".join(lines)))
    return 0


def _put_json(event: dict[str, Any]) -> None:
    show_json(event, one_line=True)


def _put_words(event: dict[str, Any]) -> None:
    if event["event"] in _PRODUCT:
        show(printable_lines(words(event)))
    elif event["event"] != "error":  # main() tells it, with what to do
        say(words(event))


def command_lines(ranks: Any) -> str:
    """For --print-cmd: what would be run on each node, as a shell would take it."""
    import shlex

    return "\n".join(f"{rank.node}: docker create {printable(shlex.join(rank.create))}" for rank in ranks)
