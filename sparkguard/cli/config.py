"""sparkguard config: every setting's effective value, and where it came from."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from sparkguard.cli import names
from sparkguard.cli.terminal import HELP, epilog, say, show, show_json, table
from sparkguard.core.explain import SCHEMA_VERSION
from sparkguard.errors import CONFIG, OK, SparkguardError
from sparkguard.settings import MODEL, SETTINGS, Settings, load
from sparkguard.supervisor import runner_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_EXAMPLES = """
sparkguard config                        the site's settings
sparkguard config longcontext            those of a start of vllm-longcontext, drop-ins included
sparkguard config mymodel --json | jq -r '.settings[] | "\\(.key)=\\(.value)  # \\(.origin)"'
"""
_CHECKS: dict[str, Callable[[Settings], object]] = {
    "VLLM_MEM_BUDGET": lambda settings: settings.share("VLLM_MEM_BUDGET"),
    "VLLM_CPU_SHARE": lambda settings: settings.share("VLLM_CPU_SHARE"),
    "VLLM_MEM_WAIT": lambda settings: settings.seconds("VLLM_MEM_WAIT"),
    "VLLM_MEM_ALLOW_UNKNOWN": lambda settings: settings.flag("VLLM_MEM_ALLOW_UNKNOWN"),
    "SPARK_MEMORY_RESERVE_MB": Settings.reserve_bytes,
    "SPARK_MEMORY_POOL": lambda settings: settings.choice("SPARK_MEMORY_POOL"),
    "VLLM_ENV_PROFILE": lambda settings: settings.choice("VLLM_ENV_PROFILE"),
    "VLLM_PORT": Settings.port,
    "VLLM_GPU_MEM_UTIL": lambda settings: settings.is_set("VLLM_GPU_MEM_UTIL") and settings.share("VLLM_GPU_MEM_UTIL"),
    "VLLM_EXTRA_ARGS": lambda settings: settings.words("VLLM_EXTRA_ARGS"),
    "VLLM_DOCKER_ARGS": lambda settings: settings.words("VLLM_DOCKER_ARGS"),
    **runner_settings.READERS,
}


@click.command(
    "config", context_settings=HELP, epilog=epilog(_EXAMPLES, OK, CONFIG), short_help="effective settings and their origins"
)
@click.argument("name", required=False, shell_complete=names.complete_models)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(name: str | None, as_json: bool) -> int:
    """Prints every setting's effective value and where it came from.

    NAME is a spec or a unit: then its spec, its drop-ins and the user manager's environment count, and the model's own
    settings are shown as well. Precedence: the environment (drop-ins), the spec, spark.conf, the default.
    """
    answer, wrong = collect(name, os.environ)
    if as_json:
        show_json(answer)
    else:
        show(_describe(answer))
    for error in wrong:
        say(f"sparkguard: {error.message}" + (f"\n  {error.hint}" if error.hint else ""))
    return CONFIG if wrong else OK


def collect(name: str | None, env: Mapping[str, str]) -> tuple[dict[str, Any], list[SparkguardError]]:
    """The JSON, and what is wrong with single values. Raises SparkguardError for a file that cannot be read at all."""
    model = names.model_of(name, env) if name is not None else None
    settings = names.settings_of(model) if model else load(env)
    wrong: dict[str, SparkguardError] = {}
    for key, check in _CHECKS.items():
        try:
            check(settings)
        except SparkguardError as error:
            wrong[key] = error
    rows = [
        {
            "key": key,
            "value": settings.text(key),
            "origin": settings.origin(key),
            "default": setting.default,
            "valid": setting.valid,
            "meaning": setting.meaning,
            "scope": setting.scope,
            "error": wrong[key].message if key in wrong else None,
        }
        for key, setting in SETTINGS.items()
        if model or setting.scope != MODEL or settings.is_set(key)
    ]
    answer = {
        "schema_version": SCHEMA_VERSION,
        "name": model.name if model else None,
        "spec": settings.spec if settings.spec and os.path.exists(settings.spec) else None,
        "settings": rows,
        "passed_on": [{"key": key, "value": value.text, "origin": value.origin} for key, value in settings.passed_on.items()],
    }
    return answer, [error for key, error in wrong.items() if any(row["key"] == key for row in rows)]


def _describe(answer: dict[str, Any]) -> str:
    rows = [(row["key"], row["value"] or "(empty)", row["origin"]) for row in answer["settings"]]
    text = table(("KEY", "VALUE", "ORIGIN"), rows)
    if answer["passed_on"]:
        rows = [(row["key"], row["value"], row["origin"]) for row in answer["passed_on"]]
        text += "\n\n" + table(("HANDED TO THE SERVER", "VALUE", "ORIGIN"), rows)
    return text
