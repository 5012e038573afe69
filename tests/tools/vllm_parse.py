"""vllm_parse.py CORPUS: what vLLM's own parser makes of each command line of the corpus, as JSON lines on stdout.

Run by the Python of an environment with vLLM in it. Each line is the options read, "exit" for what vLLM refuses, or "help".
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import vllm.entrypoints.cli.serve
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

# What the reader is compared by, and vLLM's own defaults, which count as not given.
FIELDS = {
    "share": "gpu_memory_utilization",
    "kv": "kv_cache_memory_bytes",
    "port": "port",
    "model": "model",
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "pcp": "prefill_context_parallel_size",
    "dp": "data_parallel_size",
    "dp_local": "data_parallel_size_local",
    "dp_rank": "data_parallel_rank",
    "nodes": "nnodes",
    "devices": "device_ids",
    "headless": "headless",
    "uds": "uds",
}


def the_cli() -> FlexibleArgumentParser:
    """`vllm serve` as vllm/entrypoints/cli/main.py puts it together."""
    parser = FlexibleArgumentParser(description="vLLM CLI")
    commands = parser.add_subparsers(required=False, dest="subparser")
    for command in vllm.entrypoints.cli.serve.cmd_init():
        command.subparser_init(commands)
    return parser


def ask(parser: FlexibleArgumentParser, words: list[str]) -> Any:
    try:
        args = parser.parse_args(words)
    except SystemExit as end:
        return "help" if end.code == 0 else "exit"
    except Exception as error:
        print(f"{words}: {error!r}", file=sys.stderr)
        return "exit"
    if words[:1] == ["serve"] and args.model_tag is not None:  # ServeSubcommand.cmd
        args.model = args.model_tag
    return {name: getattr(args, dest) for name, dest in FIELDS.items()}


def main() -> None:
    corpus = json.loads(Path(sys.argv[1]).read_text())
    serve, module = the_cli(), make_arg_parser(FlexibleArgumentParser())
    options = sorted(name for action in module._actions for name in action.option_strings)
    print(json.dumps({"options": options, "defaults": ask(module, [])}))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for row in corpus:
            for name, text in row.get("files", {}).items():
                Path(name).write_text(text)
            words = row["args"] if row.get("form") == "module" else ["serve", *row["args"]]
            with contextlib.redirect_stdout(io.StringIO()):
                answer = ask(module if row.get("form") == "module" else serve, words)
            print(json.dumps(answer))


if __name__ == "__main__":
    main()
