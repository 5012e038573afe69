"""sparkguard plan: which of the installed units and specs can run together, before anyone starts them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from sparkguard import command as command_line
from sparkguard import guard, ledger, units
from sparkguard.cli.names import complete_units
from sparkguard.cli.terminal import HELP, bold, epilog, printable, show, show_json, table
from sparkguard.core import explain
from sparkguard.core.admission import admit
from sparkguard.core.plan import MOST_UNITS, Member, plan
from sparkguard.core.record import Record
from sparkguard.core.share import WHOLE, format_share, parse_share
from sparkguard.core.types import Hold, Wanted
from sparkguard.errors import CONFIG, OK, OSERR, USAGE, SparkguardError
from sparkguard.probe import devices, engines, facts, vllm_version
from sparkguard.probe.procfs import unescape_unit
from sparkguard.settings import MODEL, SETTINGS, load

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sparkguard.core.types import Budget, Machine
    from sparkguard.settings import Settings

_EXAMPLES = """
sparkguard plan                                       every installed unit and spec
sparkguard plan vllm-embeddings vllm-longcontext      these alone
VLLM_MEM_BUDGET=0.65 sparkguard plan                  under another budget
sparkguard plan --json | jq -c '.never_together[]'    one set a line
"""
_TABLE = """\
\b
A configuration that was in use, under the default budget of 0.80:
  embeddings    0.10
  gemma4        0.65
  vision-agent  0.75
  longcontext   0.95
can run together: embeddings + gemma4; vision-agent alone
never: longcontext; embeddings + vision-agent (0.85); gemma4 + vision-agent (1.40)

"""
_MOST_SHOWN = 40  # sets of a kind; twenty small units make a hundred thousand
NO_MODEL = "no model is set yet"  # of an installed spec that nobody has edited; doctor says the same


class Planned(Record):
    """One unit: what its start would ask for, or why that cannot be told."""

    unit: str
    name: str
    holds: tuple[Hold, ...]
    port: int | None
    conflicts: tuple[str, ...]
    budget: Budget | None
    error: str | None


@click.command(
    "plan",
    context_settings=HELP,
    epilog=_TABLE + epilog(_EXAMPLES, OK, CONFIG, OSERR, USAGE),
    short_help="which units can never run together",
)
@click.argument("only", nargs=-1, metavar="[UNIT]...", shell_complete=complete_units)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(only: tuple[str, ...], as_json: bool) -> int:
    """Shows which units can run together and which never can, whatever is running now.

    Every vllm-*.service of yours counts, and every spec without a unit of its own, as vllm-model@NAME: at the share that its
    start would ask for, drop-ins included. Units that Conflicts= keeps apart are never in one set. Discrete GPUs are added
    up each for itself. A unit whose configuration is broken is named, and still counts where its share can be told.
    """
    answer = collect(only, os.environ, guard.Roots())
    if as_json:
        show_json(answer)
    else:
        show(describe(answer))
    return OK


def collect(only: Sequence[str], env: Mapping[str, str], roots: guard.Roots) -> dict[str, Any]:
    """The JSON. Raises SparkguardError when the site's configuration or the machine cannot be read, or for too many units."""
    env = {key: value for key, value in env.items() if key not in SETTINGS or SETTINGS[key].scope != MODEL}
    settings = load(env)
    budget = guard.budget_of(settings)
    choice = settings.choice("SPARK_MEMORY_POOL")
    machine = facts.detect(roots.proc, roots.sys, roots.dev, ledger.directory(env), choice, env)
    found = [look(unit, machine, env) for unit in _chosen(only, env)]
    counted = [unit for unit in found if unit.holds]
    if len(counted) > MOST_UNITS:
        raise SparkguardError(
            f"{len(counted)} units are too many to try every set of them; {MOST_UNITS} are not",
            "name those that matter: sparkguard plan UNIT...",
            USAGE,
        )
    names = {unit.unit for unit in found}
    conflicts = sorted(
        {_pair(unit.unit, peer) for unit in found for peer in unit.conflicts if peer in names and peer != unit.unit}
    )
    members = [
        Member(unit.unit, {hold.pool: hold.share or 0 for hold in unit.holds}, (unit.budget or budget).share) for unit in counted
    ]
    sets = plan(members, caps(machine, budget), conflicts)
    return {
        "schema_version": explain.SCHEMA_VERSION,
        "budget": {"share": format_share(budget.share), "reserve_bytes": budget.reserve_bytes},
        "pools": [{"id": pool.id, "kind": pool.kind, "total_bytes": pool.total_bytes} for pool in machine.pools],
        "units": [_unit_json(unit, budget, names) for unit in found],
        "conflicts": [list(pair) for pair in conflicts],
        "maximal_sets": [list(units) for units in sets.maximal_sets],
        "never_together": [list(units) for units in sets.never_together],
        "port_clashes": [
            {"units": [one.unit, other.unit], "port": one.port}
            for at, one in enumerate(found)
            for other in found[at + 1 :]
            if one.port is not None and one.port == other.port and _pair(one.unit, other.unit) not in conflicts
        ],
    }


def caps(machine: Machine, budget: Budget) -> dict[str, int]:
    """What each pool can give at most, as the live check has it: all but the reserve."""
    found = {}
    for pool in machine.pools:
        if pool.total_bytes:
            nothing = admit(budget, (pool,), (), Wanted("", (Hold(pool.id, None, None),)))
            found[pool.id] = max(0, pool.total_bytes - nothing.sums[0].reserve_bytes) * WHOLE // pool.total_bytes
    return found


def _chosen(only: Sequence[str], env: Mapping[str, str]) -> list[str]:
    if only:
        return sorted({units.resolve(text, env)[0] for text in only})
    own = units.installed(env)
    started = {launched[0] for unit in own if (launched := units.load(unit, env).launches())}
    return own + [units.unit_of_spec(name, env) for name in units.specs(env) if name not in started]


def look(unit: str, machine: Machine, env: Mapping[str, str]) -> Planned:
    """What a start of the unit would ask for. Never raises for what is wrong with the unit: that is its error."""
    found = units.load(unit, env)
    launched = found.launches()
    shown, conflicts = unescape_unit(unit), tuple(unescape_unit(peer) for peer in found.conflicts)
    if launched is None and found.argv and not unit.startswith(units.TEMPLATE):
        return _foreign(found, shown, conflicts, machine)
    name, args = launched or (shown, ())
    start_env = {**env, **found.environment}
    error = None
    try:
        if not launched:
            name = units.resolve(unit, env)[1]  # a file among the specs may have a name that no model can have
        settings = load(start_env, name)
        budget = guard.budget_of(settings)
        if not launched and not os.path.exists(settings.spec or ""):
            error = f"there is no unit {shown}, and no spec {settings.spec}"
    except SparkguardError as wrong:
        return Planned(shown, name, (), None, conflicts, None, wrong.message)
    # With a model of no meaning in its place, a start whose model is missing still says what it would take.
    for changes in ({}, {"VLLM_MODEL": "none"}):
        try:
            settings = load({**start_env, **changes}, name)
            start = command_line.build(settings, name, args)
            wanted = command_line.wanted(start, settings, machine, _server_env(settings, start_env))
        except SparkguardError as wrong:
            error = error or (NO_MODEL if _has_no_model(settings) else wrong.message)
            continue
        holds = tuple(hold for hold in wanted.holds if hold.share is not None)
        return Planned(shown, name, holds, wanted.port, conflicts, budget, error)
    return Planned(shown, name, (), None, conflicts, budget, error)


def _has_no_model(settings: Settings) -> bool:
    """As a spec that was installed and not edited yet: nothing is wrong with it."""
    return not settings.text("VLLM_MODEL") and os.path.exists(settings.spec or "")


def _server_env(settings: Settings, env: Mapping[str, str]) -> dict[str, str]:
    return {**{key: value.text for key, value in settings.passed_on.items()}, **env}


def _foreign(found: units.Unit, shown: str, conflicts: tuple[str, ...], machine: Machine) -> Planned:
    """A unit that starts its server without our launcher: its command line says what it takes, as it will once it runs."""
    name = shown.removesuffix(".service").removeprefix("vllm-")
    server = engines.recognise(found.argv, lambda path: None)
    started = engines.recognise_client(found.argv, lambda path: None)
    server = started[1] if started else server
    if server is None or server.declared is None:
        return Planned(shown, name, (), None, conflicts, None, f"nobody knows the share of what it starts: {found.argv[0]}")
    declared = server.declared
    pools, _ = devices.pools_of(machine, found.environment, declared.device_ids, declared.gpus)
    default = vllm_version.default_share(vllm_version.version_beside(found.argv[0]))
    holds = [devices.hold(declared, pool, default, found.environment.get("VLLM_CPU_KVCACHE_SPACE")) for pool in pools]
    return Planned(shown, name, tuple(hold for hold in holds if hold.share is not None), server.port, conflicts, None, None)


def _pair(one: str, other: str) -> tuple[str, str]:
    return (one, other) if one < other else (other, one)


def _unit_json(unit: Planned, budget: Budget, names: set[str]) -> dict[str, Any]:
    shares = [hold.share for hold in unit.holds if hold.share is not None]
    own = unit.budget is not None and unit.budget.share != budget.share
    return {
        "unit": unit.unit,
        "name": unit.name,
        "share": format_share(max(shares)) if shares else None,
        "devices": [hold.pool for hold in unit.holds],
        "port": unit.port,
        "conflicts": [peer for peer in unit.conflicts if peer in names],
        "budget": format_share(unit.budget.share) if own and unit.budget else None,
        "error": unit.error,
    }


def describe(answer: dict[str, Any]) -> str:
    """For people."""
    if not answer["units"]:
        return "No vllm-*.service and no spec is installed."
    rows = [
        (
            _short(unit["unit"]),
            unit["share"] or "unknown",
            str(unit["port"] or "-"),
            ",".join(unit["devices"]) or "-",
            ", ".join(_short(peer) for peer in unit["conflicts"]) or "-",
            (f"own budget {unit['budget']}" if unit["budget"] else "") or _remark(unit["error"]),
        )
        for unit in answer["units"]
    ]
    share = {unit["unit"]: unit for unit in answer["units"]}
    lines = [table(("UNIT", "SHARE", "PORT", "POOL", "CONFLICTS WITH", "REMARK"), rows, ("SHARE", "PORT")), ""]
    lines.append(bold(f"Can run together under the budget of {answer['budget']['share']}:"))
    lines += _sets(answer["maximal_sets"], share) or ["  none"]
    lines += ["", bold("Can never run together:")]
    lines += [f"  {_sum(units, share)}" for units in answer["never_together"]] or [
        "  none that Conflicts= does not keep apart anyway"
    ]
    if answer["port_clashes"]:
        lines += ["", bold("Want the same port without a Conflicts=; the second one would fail after its load:")]
        lines += [
            f"  {' and '.join(_short(unit) for unit in clash['units'])}: {clash['port']}" for clash in answer["port_clashes"]
        ]
    if broken := [unit for unit in answer["units"] if unit["error"] not in (None, NO_MODEL)]:
        lines += ["", bold("Broken:")]
        lines += [f"  {_short(unit['unit'])}: {printable(unit['error'])}" for unit in broken]
    return "\n".join(lines)


def _remark(error: str | None) -> str:
    return NO_MODEL if error == NO_MODEL else "broken: see the end" if error else ""


def _short(unit: str) -> str:
    return printable(unit.removesuffix(".service"))


def _sets(sets: Sequence[Sequence[str]], share: Mapping[str, dict[str, Any]]) -> list[str]:
    lines = [f"  {_sum(names, share)}" for names in sets[:_MOST_SHOWN]]
    return [*lines, f"  and {len(sets) - _MOST_SHOWN} more: see --json"] if len(sets) > _MOST_SHOWN else lines


def _sum(names: Sequence[str], share: Mapping[str, dict[str, Any]]) -> str:
    """'vllm-embeddings + vllm-longcontext: 0.10 + 0.70 = 0.80'; without the sum where their devices differ."""
    shares = [share[name]["share"] for name in names]
    text = f"{' + '.join(_short(name) for name in names)}: {' + '.join(shares)}"
    if len(names) == 1 or len({tuple(share[name]["devices"]) for name in names}) > 1:
        return text
    return f"{text} = {format_share(sum(parse_share(one) for one in shares))}"
