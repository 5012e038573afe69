"""spark-serve bench: measures what serves, and keeps, shows, compares and exports what was measured."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from sparkguard.cli.cluster.options import json_option, node_option, open_catalog, run_async, state_dir
from sparkguard.cli.terminal import HELP, epilog, printable, printable_lines, say, show, show_json, table
from sparkguard.errors import CONFIG, FAILED, INTERRUPTED, OK, TEMPFAIL, UNAVAILABLE, USAGE, SparkguardError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparkguard.cluster.bench.history import History
    from sparkguard.cluster.bench.request import Settings

KEY = "SPARK_SERVE_API_KEY"


def _numbers(_: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """One or several, with commas: 1,4,16."""
    try:
        return tuple(dict.fromkeys(int(word) for word in value.split(","))) if value is not None else None
    except ValueError:
        raise click.BadParameter(f"{value!r} is no list of numbers such as 1,4,16", param=param) from None


EXAMPLES = """
spark-serve bench run --node head --kind decode --requests 3
spark-serve bench run --node head --concurrency 1,4,16 --requests 32 --repeats 3
spark-serve bench run --node head --kind prefill --prompt-tokens 1024,8192,32768
spark-serve bench run --url http://127.0.0.1:8080 --model gemma       any OpenAI endpoint
spark-serve bench compare 2 1                                         the last but one with the last
spark-serve bench export last --format markdown
"""


@click.group(context_settings=HELP, epilog=epilog(EXAMPLES, OK, FAILED, USAGE, UNAVAILABLE, TEMPFAIL, CONFIG, INTERRUPTED))
def command() -> None:
    """Measures decode and prefill of what serves; docs/cluster/benchmarks.md defines each number."""


@command.command()
@node_option("Measure what serves on this node: head, worker, or a name of the catalog.")
@click.option("--url", metavar="URL", help="Measure this OpenAI endpoint instead; no catalog is read.")
@click.option("--model", metavar="ID", help="The served id, with --url.  [default: the only one that it serves]")
@click.option("--kind", type=click.Choice(["decode", "prefill"]), default="decode", show_default=True)
@click.option("--requests", type=int, default=3, show_default=True, help="Of each level and repeat; never fewer than streams.")
@click.option(
    "--concurrency",
    metavar="N,...",
    callback=_numbers,
    default="1",
    show_default=True,
    help="Streams at once, 1 to 64; several are levels.",
)
@click.option("--max-tokens", type=int, help="Output of a request.  [default: 128; 16 for prefill]")
@click.option(
    "--prompt-tokens",
    metavar="N,...",
    callback=_numbers,
    help="Of a prompt; several are levels.  [default: 256; 1024,4096 for prefill]",
)
@click.option("--reasoning", type=click.Choice(["on", "off", "default"]), default="default", show_default=True)
@click.option("--thinking", "reasoning", flag_value="on", hidden=True)
@click.option("--no-thinking", "reasoning", flag_value="off", hidden=True)
@click.option("--repeats", type=int, default=1, show_default=True, help="Of each level; two or more give an interval.")
@click.option("--warmup", type=int, default=1, show_default=True, help="Requests of each size before it is measured.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the prompts' text.")
@click.option("--stop-at-end", is_flag=True, help="Let a model end its answer, instead of holding it to --max-tokens.")
@click.option("--timeout", type=float, default=600.0, show_default=True, help="Seconds for one request.")
@click.option("--deadline", type=float, default=3600.0, show_default=True, help="Seconds for the run.")
@click.option("--shared", is_flag=True, help="Measure although others use the engine.")
@click.option("--keep", type=click.IntRange(1, 100_000), default=100, show_default=True, help="Saved runs; the oldest go.")
@json_option
@click.pass_context
def run(
    ctx: click.Context,
    /,
    node: str | None,
    url: str | None,
    model: str | None,
    shared: bool,
    keep: int,
    as_json: bool,
    **options: Any,
) -> int:
    """Runs a benchmark, saves it, and prints its record. Ctrl-C ends it, and what was measured by then is kept."""
    from sparkguard.cluster.bench import start

    if (url is None) == (node is None):
        raise SparkguardError("what is to be measured: --node NODE of the catalog, or --url URL", None, USAGE)
    settings = _settings(options)
    catalog = None if url else open_catalog(ctx)
    asked = start.Asked(settings, url=url, model=model, node=node, shared=shared, keep=keep, key=os.environ.get(KEY))

    def put(event: dict[str, Any]) -> None:
        if as_json:
            show_json(event, one_line=True)
        else:
            say(printable(str(event.get("text") or event["event"])))

    record = run_async(start.start(asked, state_dir(), catalog, put))
    _put(record, as_json, one_line=True)
    return OK if record["status"] == "completed" else TEMPFAIL if record["status"] == "revoked" else FAILED


@command.command("list")
@json_option
def list_runs(as_json: bool) -> None:
    """The saved runs, newest first."""
    from sparkguard.cluster.bench.history import brief

    rows = [brief(record) for record in _history().runs()]
    if as_json:
        show_json({"schema_version": 1, "type": "runs", "runs": rows}, one_line=True)
        return
    show(table(("RUN", "MODEL", "WHERE", "STATUS", "DECODE", "PREFILL", "TTFT"), [_row(one) for one in rows]))


@command.command("show")
@click.argument("run")
@json_option
def show_run(run: str, as_json: bool) -> None:
    """One run: by id, the beginning of one, `last`, or 1 for the newest, 2 for the one before."""
    record = _history().get(run)
    if as_json:
        show_json({"schema_version": 1, "type": "shown", "run": record}, one_line=True)
    else:
        _put(record, as_json)


@command.command()
@click.argument("first")
@click.argument("second")
@json_option
def compare(first: str, second: str, as_json: bool) -> None:
    """Two runs: what differs in what was measured, then their numbers, and SECOND by FIRST."""
    from sparkguard.cluster.bench.compare import compare as compared
    from sparkguard.cluster.bench.export import comparison_rows

    runs = _history()
    found = compared(runs.get(first), runs.get(second))
    if as_json:
        show_json(found, one_line=True)
        return
    for one in found["differences"]:
        mark = "!" if one["decisive"] else " "
        show(printable(f"{mark} {one['what']}: {one['first']} / {one['second']}"))
    if not found["comparable"]:
        show("These two did not measure the same thing; read the numbers with that in mind.")
    header = ("PROMPT x STREAMS", "", found["first"]["id"], found["second"]["id"], "RATIO")
    show(table(header, comparison_rows(found), header[2:]))


@command.command()
@click.argument("run", required=False)
@node_option("Those that measure this node.")
@json_option
@click.pass_context
def cancel(ctx: click.Context, run: str | None, node: str | None, as_json: bool) -> int:
    """Ends benchmarks that run on this laptop, and waits until their requests are closed; what they measured is kept."""
    from sparkguard.cluster.bench import leases

    nodes = {one.name for one in open_catalog(ctx).select(node, None)} if node else set()
    asked = leases.revoke_all(
        state_dir(),
        reason="cancelled",
        which=lambda lease: (run is None or lease.id.startswith(run)) and (not nodes or leases.concerning(nodes)(lease)),
    )
    if as_json:
        show_json({"schema_version": 1, "type": "cancelled", "runs": [lease.id for lease in asked]}, one_line=True)
    else:
        show("\n".join(f"{lease.id} has ended" for lease in asked) or "no benchmark runs")
    return OK


@command.command()
@click.argument("run")
@click.option("--format", "form", type=click.Choice(["json", "csv", "markdown"]), default="json", show_default=True)
@click.option("--output", type=click.Path(dir_okay=False), help="A file instead of stdout.")
def export(run: str, form: str, output: str | None) -> None:
    """One run as JSON, as CSV with a row a request, or as Markdown."""
    from sparkguard.cluster.bench.export import export as exported

    text = exported(_history().get(run), form)
    if output is None:
        show(text.rstrip("\n"))
        return
    try:
        with open(output, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise SparkguardError(f"{output} cannot be written: {error.strerror}", None, FAILED) from None


def _settings(options: dict[str, Any]) -> Settings:
    from sparkguard.cluster.bench.request import PREFILL, Settings, checked

    prefill = options["kind"] == PREFILL
    return checked(
        Settings(
            kind=options["kind"],
            requests=options["requests"],
            concurrency=options["concurrency"],
            max_tokens=options["max_tokens"] if options["max_tokens"] is not None else 16 if prefill else 128,
            prompt_tokens=options["prompt_tokens"] or ((1024, 4096) if prefill else (256,)),
            reasoning=options["reasoning"],
            repeats=options["repeats"],
            warmup=options["warmup"],
            seed=options["seed"],
            fixed_length=not options["stop_at_end"],
            request_seconds=options["timeout"],
            run_seconds=options["deadline"],
        )
    )


def _history() -> History:
    from sparkguard.cluster.bench.history import History

    return History(state_dir())


def _put(record: dict[str, Any], as_json: bool, one_line: bool = False) -> None:
    from sparkguard.cluster.bench.export import export as exported

    if as_json:
        show_json(record, one_line)
    else:
        show(printable_lines(exported(record, "markdown").rstrip("\n")))


def _row(one: dict[str, Any]) -> Sequence[str]:
    numbers = one["summary"]

    def rate(name: str, unit: str, scale: int = 1) -> str:
        value = numbers.get(name)
        return "" if value is None else f"{value * scale:.1f} {unit}"

    return (
        one["id"],
        one["model"],
        ",".join(one["nodes"]) or one["url"],
        one["status"],
        rate("decode_tokens_per_s", "t/s"),
        rate("prefill_tokens_per_s", "t/s"),
        rate("ttft_s", "ms", 1000),
    )
