"""Arguments that name a unit or a model: completed by the shell, and turned into the environment of their start."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from sparkguard import units
from sparkguard.conf_file import Value
from sparkguard.core.record import Record
from sparkguard.probe.procfs import unescape_unit
from sparkguard.settings import SETTINGS, Settings, load

if TYPE_CHECKING:
    from collections.abc import Mapping


class Model(Record):
    """What somebody named: its unit and spec, and the settings that a start of it would have.

    env is this shell's environment with the unit's over it, so that VLLM_MEM_BUDGET=0.9 before a command asks "what if".
    unit_env is the unit's own part: the manager's environment and the drop-ins.
    """

    unit: str
    name: str
    args: tuple[str, ...]  # what the unit hands to vLLM beside the spec
    conflicts: tuple[str, ...]
    env: dict[str, str]
    unit_env: dict[str, str]


def model_of(text: str, env: Mapping[str, str]) -> Model:
    """Raises SparkguardError (78) for what can name neither unit nor spec."""
    unit, name = units.resolve(text, env)
    found = units.load(unit, env)
    launched = found.launches()
    if launched is not None:
        name = launched[0]
    args = launched[1] if launched else ()
    return Model(unit, name, args, found.conflicts, {**env, **found.environment}, found.environment)


def settings_of(model: Model) -> Settings:
    """The settings of a model's start; what comes from the unit says so, instead of 'the environment'."""
    settings = load(model.env, model.name)
    origin = f"the environment of {unescape_unit(model.unit)}"
    own = {key: Value(settings.text(key), origin) for key in SETTINGS if key in model.unit_env}
    return settings.replace(values={**settings.values, **own})


def complete_units(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    names = [unit.removesuffix(".service") for unit in units.installed(os.environ)]
    return [name for name in names if name.startswith(incomplete)]


def complete_models(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    return [name for name in units.specs(os.environ) if name.startswith(incomplete)] + complete_units(ctx, param, incomplete)
