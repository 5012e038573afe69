"""python3 -m spark_bench concurrency | analyze: docs/cluster/benchmarks.md has the method."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from spark_bench.fault import Fault


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    try:
        return int(options.verb(options))
    except Fault as fault:
        sys.stderr.write(f"spark_bench: {fault.message}\n")
        return fault.status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python3 -m spark_bench", description=__doc__)
    verbs = parser.add_subparsers(dest="name", required=True, metavar="VERB")
    run = verbs.add_parser("concurrency", help="render the same songs with 1, 2, 3 ... at once, and keep all that is seen")
    run.set_defaults(verb=_concurrency)
    run.add_argument("--workload", required=True, metavar="FILE", help="what is rendered: docs/cluster/benchmarks.md")
    run.add_argument("--output", required=True, metavar="DIR", help="a new folder for the raw results")
    run.add_argument("--concurrency", default="1,2,3,4", metavar="N,...", help="how many at once; 1 must be among them")
    run.add_argument("--jobs-per-level", type=int, default=8, metavar="N")
    run.add_argument("--iterations", type=int, default=2, metavar="N", help="how often each level comes; 2 at least for a result")
    run.add_argument("--seed", type=int, default=0, metavar="S")
    run.add_argument("--warmup", type=int, default=1, metavar="N", help="jobs before the first that is measured")
    run.add_argument("--cooldown", type=float, metavar="SECONDS", help="between trials; 60, or 0 for --synthetic")
    run.add_argument("--timeout", type=float, default=14400.0, metavar="SECONDS", help="for one job")
    run.add_argument("--telemetry-interval", type=float, default=2.0, metavar="SECONDS")
    run.add_argument("--synthetic", action="store_true", help="render nothing: shows that the experiment works, anywhere")
    run.add_argument("--guards", action="store_true", help="also with --synthetic, which has none otherwise")
    run.add_argument("--min-free-gib", type=float, default=12.0, metavar="GIB", help="free memory, below which it stops")
    run.add_argument("--max-celsius", type=float, default=85.0, metavar="C", help="of the GPU, from which it pauses")
    run.add_argument("--max-swap-growth-gib", type=float, default=1.0, metavar="GIB", help="beyond which it stops")
    run.add_argument("--max-pause", type=float, default=900.0, metavar="SECONDS", help="for cooling, after which it stops")
    run.add_argument("--json", action="store_true", help="progress as a line of JSON each")
    run.add_argument("--ssh-host", metavar="HOST", help="run on this Spark of the catalog: drain it, hold it, and give it back")
    run.add_argument("--config", metavar="FILE", help="the catalog, with --ssh-host")
    run.add_argument("--wait-idle", type=float, default=14400.0, metavar="SECONDS", help="for songs that render, with --ssh-host")
    run.add_argument("--proc", default="/proc", help=argparse.SUPPRESS)
    run.add_argument("--node", help=argparse.SUPPRESS)
    again = verbs.add_parser("analyze", help="make summary.json, comparison.csv and report.md from the raw results")
    again.set_defaults(verb=_analyze)
    again.add_argument("output", metavar="DIR")
    again.add_argument("--json", action="store_true", help="the summary instead of the report")
    return parser


def _concurrency(options: argparse.Namespace) -> int:
    if options.ssh_host:
        from spark_bench.remote import run_there

        return run_there(options, _say(options.json))
    from spark_bench.analysis import analyze
    from spark_bench.experiment import COMPLETE, run

    record = run(experiment_options(options), _say(options.json))
    summary = analyze(options.output)
    _put(summary, options.json)
    return 0 if record["status"] == COMPLETE else 1


def experiment_options(options: argparse.Namespace) -> Any:
    from spark_bench.experiment import Options
    from spark_bench.guards import Limits

    try:
        levels = [int(word) for word in options.concurrency.split(",")]
    except ValueError:
        raise Fault(f"--concurrency {options.concurrency} is no list of numbers") from None
    guarded = options.guards or not options.synthetic
    gib = float(1 << 30)
    limits = Limits(
        int(options.min_free_gib * gib), options.max_celsius, int(options.max_swap_growth_gib * gib), options.max_pause
    )
    return Options(
        workload=options.workload,
        output=options.output,
        levels=levels,
        jobs=options.jobs_per_level,
        iterations=options.iterations,
        seed=options.seed,
        warmup=options.warmup,
        cooldown=options.cooldown if options.cooldown is not None else 0.0 if options.synthetic else 60.0,
        interval=options.telemetry_interval,
        timeout=options.timeout,
        synthetic=options.synthetic,
        limits=limits if guarded else None,
        proc=options.proc,
        node=options.node,
    )


def _analyze(options: argparse.Namespace) -> int:
    from spark_bench.analysis import analyze

    _put(analyze(options.output), options.json)
    return 0


def _put(summary: dict[str, Any], as_json: bool) -> None:
    from spark_bench.analysis import report

    if as_json:
        print(json.dumps(dict(summary, event="summary"), sort_keys=True), flush=True)
    else:
        print(report(summary), end="", flush=True)


def _say(as_json: bool) -> Any:
    def say(event: dict[str, Any]) -> None:
        if as_json:
            print(json.dumps(event, sort_keys=True), flush=True)
        else:
            sys.stderr.write(event["text"] + "\n")

    return say


if __name__ == "__main__":
    sys.exit(main())
