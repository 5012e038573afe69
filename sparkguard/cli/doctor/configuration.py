"""Are the settings, the specs and the programs that they name in order?"""

from __future__ import annotations

import json
import os
import shlex
import sys
from typing import TYPE_CHECKING

from sparkguard import command, guard, units
from sparkguard.cli.doctor.check import Check, spoken
from sparkguard.cli.names import model_of, settings_of
from sparkguard.core.share import WHOLE, format_share, parse_share
from sparkguard.errors import SparkguardError
from sparkguard.probe import files, vllm_version
from sparkguard.settings import Settings, config_home, home_folder, load

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_MOST_BYTES = 1 << 20  # of a file that others wrote
_LAUNCHERS = ("vllm_mem_budget.sh", "vllm-serve.sh")


def examine(env: Mapping[str, str], roots: guard.Roots) -> Iterator[Check]:
    yield _interpreter(env)
    try:
        settings = load(env)
        guard.budget_of(settings)
    except SparkguardError as error:
        yield _to_edit("settings", error, units.conf(env))
        return
    yield Check("settings", True, f"{settings.config_dir}/spark.conf: budget {settings.text('VLLM_MEM_BUDGET')}")
    specs = [_spec(name, env) for name in units.specs(env)]
    yield from (check for check, _ in specs)
    images = [found for _, found in specs if found is not None and found.text("VLLM_IMAGE")]
    yield _vllm(settings, env, bool(images) and len(images) == len(specs))
    if images:
        yield _docker(images[0], env)
    yield from _vims(settings, env)


def _to_edit(id: str, error: SparkguardError, path: str) -> Check:
    return Check(id, False, spoken(error), f"${{EDITOR:-vi}} {shlex.quote(path)}")


def _interpreter(env: Mapping[str, str]) -> Check:
    """The units' programs must start a Python by its own path: a shim costs 90 ms at each start, and wants a shell's PATH."""
    home = home_folder(env)
    python = ""
    for name in _LAUNCHERS:
        path = os.path.join(home, ".local", "bin", name)
        try:
            lines = files.read_file(path, _MOST_BYTES).decode("utf-8", "replace").splitlines()
            line = next((line for line in lines if line.startswith("python=")), "")
        except OSError:
            return Check("interpreter", False, f"{path} is not there, and the units start it", "./install.sh")
        python = "".join(shlex.split(line.partition("=")[2]))
        if not os.path.isabs(python) or "/shims/" in python or not os.access(python, os.X_OK):
            return Check(
                "interpreter", False, f"{path} starts {python!r}, which is no interpreter by its own path", "./install.sh"
            )
    return Check("interpreter", True, f"the units' programs start {python}; this is {sys.executable}")


def _spec(name: str, env: Mapping[str, str]) -> tuple[Check, Settings | None]:
    """Its settings too, unless they cannot be read."""
    id = f"spec:{name}"
    settings = None
    try:
        model = model_of(units.unit_of_spec(name, env), env)
        settings = settings_of(model.replace(name=name))
        if not settings.text("VLLM_MODEL"):
            return Check(id, None, "no model is set yet", f"${{EDITOR:-vi}} {shlex.quote(units.spec(name, env))}"), settings
        start = command.build(settings, name, model.args)
    except SparkguardError as error:
        return _to_edit(id, error, units.spec(name, env)), settings
    share = format_share(start.declared.share) if start.declared.share is not None else "vLLM's own default"
    return Check(id, True, f"{start.model} at {share} on port {start.declared.port}"), settings


def _vllm(settings: Settings, env: Mapping[str, str], containers_only: bool) -> Check:
    # A unit's PATH is the manager's, not this shell's.
    manager = units.manager_environment(env)
    program = command.find_program(settings.text("VLLM_BIN"), manager or env)
    if program is None:
        if containers_only:
            return Check("vllm", None, "not found, and not needed: every spec runs a container")
        where = f"VLLM_BIN={settings.text('VLLM_BIN')} in {settings.origin('VLLM_BIN')}"
        remedy = f"echo 'VLLM_BIN=\"/path/to/venv/bin/vllm\"' >>{shlex.quote(units.conf(env))}"
        return Check("vllm", False, f"{where} is no program that a unit would find", remedy)
    python = _shebang(program)
    if python and not os.access(python, os.X_OK):
        return Check(
            "vllm", False, f"{program} starts {python}, which is not there: its venv was moved or removed", f"ls -l {python}"
        )
    version = vllm_version.version_beside(program)
    if version is None:
        return Check(
            "vllm", None, f"{program}; its version cannot be told from the files beside it", f"{shlex.quote(program)} --version"
        )
    return Check("vllm", True, f"{program}, version {'.'.join(map(str, version))}")


def _shebang(program: str) -> str | None:
    try:
        with open(program, "rb") as file:
            line = file.readline(4096)
    except OSError:
        return None
    words = line[2:].split() if line.startswith(b"#!") else []
    return os.fsdecode(words[0]) if words else None


def _docker(settings: Settings, env: Mapping[str, str]) -> Check:
    text = settings.text("VLLM_DOCKER_BIN")
    program = command.find_program(text, env)
    if program is None:
        return Check(
            "docker", False, f"{text} was not found, and a spec has VLLM_IMAGE", f"sudo apt-get install {os.path.basename(text)}"
        )
    if os.path.basename(program) != "docker":
        return Check("docker", True, program)
    host = env.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    socket = host.removeprefix("unix://")
    if not host.startswith("unix://"):
        return Check("docker", None, f"{program} talks to {host}; containers elsewhere are not this machine's memory")
    if not os.path.exists(socket):
        return Check("docker", False, f"there is no {socket}: the daemon does not run", "sudo systemctl enable --now docker")
    if not os.access(socket, os.R_OK | os.W_OK):
        return Check("docker", False, f"you may not use {socket}", 'sudo usermod -aG docker "$USER"   # then log in anew')
    return Check("docker", True, f"{program}, and you may use {socket}")


def _vims(settings: Settings, env: Mapping[str, str]) -> Iterator[Check]:
    """VIMS enforces a budget of its own on what it launches; two that differ refuse and admit in turns."""
    home = home_folder(env)
    places = [os.path.join(config_home(env), "vims", "serving.json"), os.path.join(home, ".vims", "serving.json")]
    named = env.get("VIMS_CONFIG")
    if named:
        places.insert(0, os.path.join(named, "serving.json") if os.path.isdir(named) else named)
    for path in places:
        if not os.path.isfile(path):
            continue
        try:
            text = files.read_file(path, _MOST_BYTES)
            budget = json.loads(text, parse_float=str, parse_int=str).get("memory_budget")
            share = None if budget is None else parse_share(str(budget))
            if share is not None and abs(share) > 1000 * WHOLE:
                raise ValueError("memory_budget is no share")
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            yield Check("vims-budget", None, f"{path} cannot be read: {error}")
            continue
        ours = settings.share("VLLM_MEM_BUDGET")
        if share is None:
            yield Check("vims-budget", None, f"{path} sets no memory_budget")
        elif share == ours:
            yield Check("vims-budget", True, f"{path} has the same budget, {format_share(ours)}")
        else:
            origin = settings.origin("VLLM_MEM_BUDGET")
            message = f"{path} has memory_budget {format_share(share)}, and VLLM_MEM_BUDGET is {format_share(ours)} ({origin})"
            remedy = f"echo 'VLLM_MEM_BUDGET=\"{format_share(share)}\"' >>{shlex.quote(units.conf(env))}"
            yield Check("vims-budget", False, message, remedy)
