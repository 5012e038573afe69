"""sparkguard check: the guard's own verdict on a start, without starting or reserving anything."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from sparkguard import command as command_line
from sparkguard import guard, ledger, room, units
from sparkguard.cli import names
from sparkguard.cli.terminal import HELP, epilog, say, show_json
from sparkguard.core import explain
from sparkguard.errors import CONFIG, OK, OSERR, TEMPFAIL, USAGE, SparkguardError
from sparkguard.probe import vllm_argv
from sparkguard.probe.procfs import unescape_unit
from sparkguard.settings import load

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sparkguard.core.types import Verdict

_EXAMPLES = """
sparkguard check vllm-longcontext                       the unit, with its drop-ins
sparkguard check mymodel --gpu-memory-utilization 0.5   the spec, with another share
sparkguard check --gpu-memory-utilization 0.4           any vLLM that you would start by hand
sparkguard check longcontext --gone 4242                as if process 4242 had ended
VLLM_MEM_BUDGET=0.9 sparkguard check mymodel            under another budget
"""
UNNAMED = "unnamed"


@click.command(
    "check",
    context_settings={**HELP, "ignore_unknown_options": True},
    epilog=epilog(_EXAMPLES, OK, TEMPFAIL, CONFIG, OSERR, USAGE),
    short_help="would it be admitted now?",
    options_metavar="[--json] [--gone UNIT|PID]...",
)
@click.argument(
    "words", nargs=-1, type=click.UNPROCESSED, metavar="[NAME] [VLLM ARGUMENTS]...", shell_complete=names.complete_models
)
@click.option("--json", "as_json", is_flag=True, help="The guard's JSON object on stdout.")
@click.option("--gone", multiple=True, metavar="UNIT|PID", help="Count this holder as ended already. May be repeated.")
def command(words: tuple[str, ...], as_json: bool, gone: tuple[str, ...]) -> int:
    """Asks the guard about a start, as things are now: nothing is started, reserved or waited for.

    NAME is a spec (mymodel) or a unit (vllm-longcontext, vllm-model@mymodel). What its start would end by itself counts as
    gone: the unit's own former run, and the peers that its Conflicts= names. Without NAME, the arguments alone are judged.

    The verdict goes to stderr, and with --json, as one object, to stdout. The status is the guard's.
    """
    if not words:
        raise click.UsageError("a NAME, or arguments of vllm serve, are needed")
    try:
        verdict = judge(words, gone, os.environ, guard.Roots())
    except SparkguardError as error:
        if as_json:
            show_json(explain.error_json(UNNAMED if words[0].startswith("-") else words[0], error))
        raise
    say(explain.describe(verdict))
    if as_json:
        show_json(explain.as_json(verdict))
    return explain.status_of(verdict)


def judge(words: Sequence[str], gone: Sequence[str], env: Mapping[str, str], roots: guard.Roots) -> Verdict:
    """Raises SparkguardError when the start could never be judged."""
    ended = [*gone]
    for text in gone:
        if not text.isdigit():
            ended += [f"{text}.service", unescape_unit(units.resolve(text, env)[0])]
    if words[0].startswith("-"):
        name, args = UNNAMED, tuple(words)
        settings = load(env)
    else:
        model = names.model_of(words[0], env)
        settings, env = names.settings_of(model), model.env
        name, args = model.name, (*model.args, *words[1:])
        ended += [unescape_unit(unit) for unit in (model.unit, *model.conflicts)]
        for unit in (model.unit, *model.conflicts):
            if ledger.current_invocation(ledger.directory(env), unit):
                say(f"sparkguard: {unescape_unit(unit)} runs, and is counted as ended: this start would stop it first")
    required = settings.spec is not None and (not args or os.path.exists(settings.spec))
    start = command_line.build(settings, name, args, model_required=required)
    with ledger.Ledger(ledger.directory(env), roots.proc) as held:
        verdict = guard.judge(start, settings, env, roots, held, ended)
    named = settings.is_set("VLLM_PORT") or "port" in vllm_argv.flags_set([*settings.words("VLLM_EXTRA_ARGS"), *args])
    if verdict.wanted.port is not None and not named:
        say(f"sparkguard: no port is named, so it is judged for port {verdict.wanted.port}")
    if settings.flag("VLLM_MEM_ASK_RUNNERS") and room.lacking(verdict):
        say("sparkguard: a start would have the runners unload idle models, if those hold enough (VLLM_MEM_ASK_RUNNERS=1)")
    return verdict
