"""--ssh-host: drains one Spark of the catalog, holds it while the experiment runs there, and gives it back as it was.

Runs on the laptop. Both locks are held throughout: the laptop's, and the node's own, which other laptops meet. Where it is not
sure that everything of the experiment has ended, the node stays drained, and that is said.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spark_bench import workload
from spark_bench.analysis import analyze, report
from spark_bench.experiment import COMPLETE
from spark_bench.fault import Fault
from sparkguard.cli.cluster.options import run_async
from sparkguard.cluster import commands
from sparkguard.cluster.bench import leases
from sparkguard.cluster.catalog import read as catalogs
from sparkguard.cluster.commands import Turn
from sparkguard.cluster.ssh import Fleet
from sparkguard.cluster.transition import discovery, lock, state, yue
from sparkguard.cluster.transition.turn import Work
from sparkguard.cluster.transition.wanted import yue_settings
from sparkguard.core import ownership
from sparkguard.errors import INTERRUPTED, UNAVAILABLE, SparkguardError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from sparkguard.core.cluster import Node, NodeView, YueView

    Say = Callable[[dict[str, Any]], None]

POLL_SECONDS = 1.0
QUIET_SECONDS = 30.0
END_SECONDS = 120.0
VERB = "spark_bench concurrency"
PACKAGE = (
    "__init__",
    "__main__",
    "analysis",
    "audio",
    "dispatch",
    "experiment",
    "fault",
    "guards",
    "synthetic",
    "telemetry",
    "workload",
)


def run_there(options: argparse.Namespace, say: Say) -> int:
    output = Path(options.output)
    if output.exists():
        raise Fault(f"{output} is there already: results are never written over")
    try:
        return run_async(_there(options, output, say))
    except SparkguardError as error:
        raise Fault(f"{error.message}\n  {error.hint}" if error.hint else error.message, error.status) from None
    except KeyboardInterrupt:
        return INTERRUPTED


async def _there(options: argparse.Namespace, output: Path, say: Say) -> int:
    files = _files(options)
    catalog = catalogs.load(catalogs.find(options.config, os.environ, Path.cwd()))
    node = _node(catalog.nodes, options.ssh_host)
    state_dir = state.folder(os.environ)

    def emit(event: str, **fields: Any) -> None:
        say({"event": event, "text": event, **fields})

    with lock.held(state_dir, lock.myself(VERB)):
        await asyncio.to_thread(leases.revoke_all, state_dir, reason=f"`{VERB}` came", which=leases.concerning({node.name}))
        async with Fleet(catalog.nodes, catalog.ssh_opts, str(state_dir)) as fleet:
            holder = lock.myself(VERB)
            work = Work(catalog, state_dir, fleet, emit, holder, (node.name,))
            view = (await work.look())[node.name]
            factory = _admitted(view)
            assert view.generation and factory.generation
            # The generation stays as it is: what may not happen meanwhile is kept out by the lock that is held on the node.
            work.turn = Turn(view.generation, holder.replace(generation=view.generation))
            async with commands.hold(fleet[node.name], work.turn):
                return await _drained(options, files, output, work, node, factory, say)


async def _drained(
    options: argparse.Namespace, files: dict[str, str], output: Path, work: Work, node: Node, before: YueView, say: Say
) -> int:
    settings = yue_settings(work.catalog)
    link = work.fleet[node.name]
    begun = False
    try:
        discovery.revoke(work.state_dir, (node.name,))
        say({"event": "drain", "text": f"{node.name} takes no more songs"})
        await commands.yue(link, work.turn, settings, "drain")
        await _idle(work, node, options.wait_idle, say)
        begun = True
        status = await _experiment(options, files, output, work, node, say)
    finally:
        # An interruption arrives once; what follows here is not interrupted by it.
        await _give_back(work, node, before, begun, say)
    return status


async def _experiment(options: argparse.Namespace, files: dict[str, str], output: Path, work: Work, node: Node, say: Say) -> int:
    """Its results in `output`, those that are small, and its status."""
    id = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(3)}"
    output.mkdir(parents=True)
    receipt: dict[str, Any] = {"version": 1, "host": node.name, "experiment": id, "status": "running", "path": None}
    state.write(output / "remote-run.json", json.dumps(receipt, indent=1) + "\n")
    request = {"id": id, "files": files, "arguments": _arguments(options, node)}
    status = None
    replies = work.fleet[node.name].stream("experiment", request, quiet_seconds=QUIET_SECONDS)
    async with contextlib.aclosing(replies):
        async for reply in replies:
            if "event" in reply:
                say({"text": str(reply["event"].get("event")), **reply["event"]})
            elif "file" in reply:
                _keep(output, str(reply["file"]), base64.b64decode(reply["data"]))
            elif "status" in reply:
                status, receipt["path"] = int(reply["status"]), reply["path"]
    receipt["status"] = "collected"
    state.write(output / "remote-run.json", json.dumps(receipt, indent=1) + "\n")
    if status is None or not (output / "run.json").is_file():
        raise Fault(f"the experiment did not begin: see {receipt['path']}/driver.log on {node.name}", 1)
    summary = analyze(str(output))
    say({"event": "summary", "text": report(summary), **(summary if options.json else {})})
    say({"event": "kept", "text": f"audio and logs are in {receipt['path']} on {node.name}", "path": receipt["path"]})
    return 0 if summary["status"] == COMPLETE else 1


async def _give_back(work: Work, node: Node, before: YueView, begun: bool, say: Say) -> None:
    """Admits the worker again under its own generation, once nothing of the experiment is left; else leaves it drained."""
    assert before.generation
    left = f"{node.name} stays drained; `spark-serve up yue` looks at everything and admits it"
    try:
        await work.fleet[node.name].call("experiment", {"wait": True}, seconds=END_SECONDS)
        # What was there before the experiment is no reason: the worker took songs beside it.
        occupied = _occupied(work, (await work.look())[node.name]) if begun else None
        if occupied is not None:
            say({"event": "left_drained", "text": f"{left}: {occupied}"})
            return
        settings = yue_settings(work.catalog)
        await commands.yue(work.fleet[node.name], work.turn, settings, "admit", admit_generation=before.generation)
        worker, reason = await yue.agreed(node, await yue.look_at(work, node.name), before.generation)
        if worker is None:
            say({"event": "left_drained", "text": f"{node.name} was admitted again, and is not ready: {reason}"})
            return
        discovery.publish_workers(work.state_dir, (worker,))
        say({"event": "given_back", "text": f"{node.name} takes songs again"})
    except SparkguardError as error:
        say({"event": "left_drained", "text": f"{left}: {error.message}"})


async def _idle(work: Work, node: Node, seconds: float, say: Say) -> None:
    """Waits for songs that render; cancels none. Then nobody else may compute there."""
    last = time.monotonic() + seconds
    said: tuple[str, ...] | None = None
    while True:
        seen = await yue.look_at(work, node.name)
        if seen.error is not None:
            raise SparkguardError(f"{node.name}: YuE does not answer: {seen.error}", None, UNAVAILABLE)
        if seen.busy is False and not seen.jobs and not seen.containers:
            break
        if time.monotonic() > last:
            raise Fault(
                f"{node.name} still renders {', '.join(seen.jobs) or 'a song'} after {seconds:g} s; it was not cancelled", 75
            )
        if seen.jobs != said:
            said = seen.jobs
            say({"event": "waiting", "text": f"waits for {', '.join(seen.jobs) or 'a song'}", "jobs": list(seen.jobs)})
        await asyncio.sleep(POLL_SECONDS)
    occupied = _occupied(work, (await work.look())[node.name])
    if occupied is not None:
        raise Fault(occupied, 75)


def _occupied(work: Work, view: NodeView) -> str | None:
    if view.error is not None or view.containers is None:
        return f"{view.node} cannot be looked at: {view.error or view.daemon_error}"
    blocked = ownership.foreign({view.node: view}, work.rules, (view.node,), None, stopped=True)
    if blocked is not None:
        return "; ".join(blocked.reasons)
    running = [one.name for one in ownership.ours(view, work.rules) if one.state in ownership.ALIVE]
    return f"{', '.join(running)} runs on {view.node}" if running else None


def _admitted(view: NodeView) -> YueView:
    if view.error is not None:
        raise SparkguardError(f"{view.node}: {view.error}", None, UNAVAILABLE)
    factory = view.yue
    if factory is None or factory.error is not None:
        raise Fault(f"{view.node} has no YuE worker that answers: {factory.error if factory else 'none is there'}", 1)
    if not factory.accepting or not factory.generation or not view.generation:
        raise Fault(f"YuE on {view.node} takes no songs: `spark-serve up yue` first, so that it can be given back as it was", 1)
    return factory


def _node(nodes: tuple[Node, ...], host: str) -> Node:
    for node in nodes:
        if host in (node.name, node.ssh, node.ssh.rpartition("@")[2]):
            return node
    raise Fault(f"--ssh-host {host} is no node of the catalog; it has {', '.join(node.name for node in nodes)}")


def _files(options: argparse.Namespace) -> dict[str, str]:
    """All that the node needs, by its path there."""
    found = workload.load(options.workload, options.synthetic)
    here = Path(__file__).parent
    files = {f"src/spark_bench/{name}.py": (here / f"{name}.py").read_bytes() for name in PACKAGE}
    for key in () if options.synthetic else workload.REFERENCES:
        path = Path(found[key])
        found[key] = key + path.suffix
        files[f"input/{found[key]}"] = path.read_bytes()
    files["input/workload.json"] = json.dumps(found).encode()
    return {name: base64.b64encode(data).decode() for name, data in files.items()}


def _arguments(options: argparse.Namespace, node: Node) -> list[str]:
    values = {
        "--workload": "{root}/input/workload.json",
        "--output": "{root}/results",
        "--concurrency": options.concurrency,
        "--jobs-per-level": options.jobs_per_level,
        "--iterations": options.iterations,
        "--seed": options.seed,
        "--warmup": options.warmup,
        "--cooldown": options.cooldown,
        "--timeout": options.timeout,
        "--telemetry-interval": options.telemetry_interval,
        "--min-free-gib": options.min_free_gib,
        "--max-celsius": options.max_celsius,
        "--max-swap-growth-gib": options.max_swap_growth_gib,
        "--max-pause": options.max_pause,
        "--node": node.name,
    }
    flags = [flag for flag, given in (("--synthetic", options.synthetic), ("--guards", options.guards)) if given]
    return ["concurrency", "--json", *flags, *(f"{name}={value}" for name, value in values.items() if value is not None)]


def _keep(output: Path, name: str, data: bytes) -> None:
    """Pieces of a file come in order. The node chose the name: it stays within the folder."""
    path = Path(os.path.normpath(output / name))
    if output not in path.parents:
        raise Fault(f"the node hands over a file that it calls {name!r}", 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(data)
