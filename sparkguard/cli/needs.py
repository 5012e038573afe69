"""sparkguard needs: what a model file would take under llama.cpp, from its header."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from sparkguard import guard, ledger
from sparkguard.cli.terminal import HELP, epilog, printable, show, show_json, table
from sparkguard.conf_file import split_words
from sparkguard.core import engine_args
from sparkguard.core.estimate import CACHE_TYPES, HOST, KNOWN_BUILDS, NEWEST_BUILD, Ask, DeviceNeeds, Needs, estimate
from sparkguard.core.placement import best_device, in_words, megabytes, place
from sparkguard.core.types import DISCRETE
from sparkguard.errors import CONFIG, OK, OSERR, USAGE, SparkguardError
from sparkguard.probe import facts
from sparkguard.probe.gguf import read_model
from sparkguard.settings import load
from sparkguard.supervisor.runner_settings import READERS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sparkguard.core.placement import Placed
    from sparkguard.core.types import MemoryPool

SCHEMA_VERSION = 1
FIELDS = (*(field for field in DeviceNeeds._fields if field != "device"), "total_bytes")
INSTALLED = "installed"
_EXAMPLES = """
sparkguard needs model.gguf                                  at 4096 tokens of context
sparkguard needs model.gguf --context 32768 --parallel 4     four conversations of 8192 tokens
sparkguard needs model.gguf --context 0 --kv-type q8_0       the whole context, in a smaller cache
sparkguard needs moe-00001-of-00003.gguf --cpu-moe-layers 20 experts of the first 20 layers on the host
sparkguard needs model.gguf --args "-ub 1024 --swa-full"      with arguments of llama-server's own
sparkguard needs model.gguf --json | jq .total_bytes
"""


@click.command(
    "needs",
    context_settings=HELP,
    epilog=epilog(_EXAMPLES, OK, CONFIG, OSERR, USAGE),
    short_help="what a GGUF model would take",
)
@click.argument("file", type=click.Path())
@click.option(
    "--context",
    type=click.IntRange(0),
    default=4096,
    show_default=True,
    help="Tokens, of all sequences together; 0: the model's own.",
)
@click.option("--parallel", type=click.IntRange(1), default=1, show_default=True, help="Sequences at a time.")
@click.option("--kv-type", type=click.Choice(CACHE_TYPES), default="f16", show_default=True, help="Type of the cache.")
@click.option("--ubatch", type=click.IntRange(1), default=512, show_default=True, help="Tokens of a batch that is computed.")
@click.option("--flash-attn", type=click.Choice(["on", "off"]), default="on", show_default=True, help="Flash attention.")
@click.option("--full-window", is_flag=True, help="A full cache for layers with a sliding window (--swa-full).")
@click.option(
    "--cpu-moe-layers",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Layers, from the first, whose experts stay on the host.",
)
@click.option(
    "--engine-build",
    metavar="BUILD",
    default=str(NEWEST_BUILD),
    show_default=True,
    help="Build of llama.cpp; 'installed': that of the llama-server there is.",
)
@click.option("--args", "engine_words", metavar="TEXT", default="", help="Further arguments of llama-server, as in runners.toml.")
@click.option("--projector", type=click.Path(), help="The model's projector (mmproj).")
@click.option("--draft", type=click.Path(), help="A model that drafts for it.")
@click.option("--lora", type=click.Path(), multiple=True, help="An adapter. May be repeated.")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "gpu"]),
    default="auto",
    show_default=True,
    help="Where it would run; auto: the GPU where there is one.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(
    file: str,
    context: int,
    parallel: int,
    kv_type: str,
    ubatch: int,
    flash_attn: str,
    full_window: bool,
    cpu_moe_layers: int,
    engine_build: str,
    engine_words: str,
    projector: str | None,
    draft: str | None,
    lora: tuple[str, ...],
    device: str,
    as_json: bool,
) -> int:
    """Says what FILE would take if llama.cpp's server ran it with these settings, and whether that is free now.

    The file's header is read, and nothing is started. FILE is the first of the files of a model in several.
    MB is 2^20 bytes. Weights, cache and state are llama.cpp's own numbers; its work buffers are rebuilt from its graph.
    What a GPU's driver takes for itself is not in it. The status is 0 whether it fits or not.
    """
    ask = Ask(
        context=context,
        parallel=parallel,
        key_type=kv_type,
        value_type=kv_type,
        ubatch=ubatch,
        batch=max(2048, ubatch),
        flash_attention=flash_attn == "on",
        full_window=full_window,
        cpu_moe_layers=cpu_moe_layers,
        build=_build(engine_build, os.environ),
    )
    ask = engine_args.read(_words(engine_words), ask)
    answer = collect(file, ask, projector, lora, device, os.environ, guard.Roots(), draft)
    if as_json:
        show_json(answer)
    else:
        show(describe(answer))
    return OK


def _build(text: str, env: Mapping[str, str]) -> int | None:
    if text == INSTALLED:
        from sparkguard.probe import llama_server

        return llama_server.build_of(llama_server.find(load(env).text("SPARK_LLAMA_SERVER"), env), env)
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 1 << 31):
        raise SparkguardError(f"--engine-build {text!r} is no build", f"a number such as {NEWEST_BUILD}, or {INSTALLED}", USAGE)
    return int(text)


def _words(text: str) -> tuple[str, ...]:
    try:
        words = split_words(text)
    except ValueError as error:
        raise SparkguardError(f"--args cannot be split: {error}", status=USAGE) from None
    if why := engine_args.unusable(words):
        raise SparkguardError(f"--args: {why}", "leave it out", USAGE)
    return tuple(words)


def collect(
    file: str,
    ask: Ask,
    projector: str | None,
    lora: tuple[str, ...],
    device: str,
    env: Mapping[str, str],
    roots: guard.Roots,
    draft: str | None = None,
) -> dict[str, Any]:
    """The JSON. Raises SparkguardError when a file or the machine cannot be read, or the engine would refuse the settings."""
    model = read_model(file)
    parts = read_model(projector) if projector else None
    adapters = tuple(read_model(path) for path in lora)
    drafting = read_model(draft) if draft else None
    settings = load(env)
    choice = settings.choice("SPARK_MEMORY_POOL")
    machine, report = facts.survey(roots.proc, roots.sys, roots.dev, ledger.directory(env), choice, env)
    if report is None and facts.needs_nvml(machine):
        from sparkguard.probe import nvml

        report = nvml.ask(env=env)
    pools = facts.available(machine, facts.read_meminfo(roots.proc), report, roots.sys)
    gpu = None if device == "cpu" else best_device(pools)
    on_device = (gpu is not None or device == "gpu") and ask.gpu_layers != 0
    needs = estimate(model, ask.replace(on_device=on_device), parts, adapters, drafting)
    if ask.build not in KNOWN_BUILDS:
        which = "the engine's build is not known" if ask.build is None else f"build {ask.build} is not known"
        needs = needs.replace(doubts=(*needs.doubts, f"{which}: estimated as build {needs.build}"))
    placed = place(needs, pools, gpu, settings.reserve_bytes(), READERS["SPARK_VRAM_RESERVE_MB"](settings))
    fits = all(not part.short_bytes for part in placed) and (device != "gpu" or gpu is not None)
    return as_json(file, model.architecture, ask, needs, placed, gpu, fits)


def as_json(
    file: str, architecture: str, ask: Ask, needs: Needs, placed: tuple[Placed, ...], gpu: MemoryPool | None, fits: bool
) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "file": file,
        "architecture": architecture,
        "context": needs.context,
        "engine_build": needs.build if ask.build is None else ask.build,
        **{field: needs.total_bytes if field == "total_bytes" else needs.sum_of(field) for field in FIELDS},
        "devices": [
            {
                "device": "cpu" if part.device == HOST else gpu.id if gpu else "gpu",
                **{field: getattr(part, field) for field in FIELDS},
            }
            for part in needs.devices
        ],
        "fits": fits,
        "pools": [
            {
                "id": part.pool.id,
                "wanted_bytes": part.wanted_bytes,
                "available_bytes": part.pool.available_bytes,
                "reserve_bytes": part.reserve_bytes,
                "reserve_setting": "SPARK_VRAM_RESERVE_MB" if part.pool.kind == DISCRETE else "SPARK_MEMORY_RESERVE_MB",
                "short_bytes": part.short_bytes,
            }
            for part in placed
        ],
        "estimated": bool(needs.doubts),
        "doubts": list(needs.doubts),
        "summary": in_words(needs),
    }


def describe(answer: dict[str, Any]) -> str:
    """For people."""
    lines = [answer["summary"]]
    if len(answer["devices"]) > 1:
        names = {
            "weights_bytes": "WEIGHTS",
            "kv_cache_bytes": "KV CACHE",
            "state_bytes": "STATE",
            "compute_bytes": "WORK",
            "output_bytes": "OUTPUT",
            "projector_bytes": "PROJECTOR",
            "prompt_cache_bytes": "PROMPT CACHE",
            "total_bytes": "TOTAL",
        }
        shown = [field for field in FIELDS if answer[field]]
        rows = [(part["device"], *(megabytes(part[field]) for field in shown)) for part in answer["devices"]]
        lines += ["", table(("DEVICE", *(names[field] for field in shown)), rows, [names[field] for field in shown]), ""]
    for pool in answer["pools"]:
        free = "an unknown amount" if pool["available_bytes"] is None else megabytes(pool["available_bytes"])
        keeps = f"{megabytes(pool['reserve_bytes'])} ({pool['reserve_setting']})"
        sum_of = f"{pool['id']}: wants {megabytes(pool['wanted_bytes'])}, has {free} free and keeps {keeps}"
        lines.append(sum_of + (f": {megabytes(pool['short_bytes'])} too few" if pool["short_bytes"] else ""))
    lines.append("It fits now." if answer["fits"] else "It does not fit now.")
    lines += [_sentence(printable(doubt)) for doubt in answer["doubts"]]
    return "\n".join(lines)


def _sentence(doubt: str) -> str:
    return f"{doubt[0].upper()}{doubt[1:]}." if doubt.startswith(("not counted", "roughly counted")) else f"Estimated: {doubt}."
