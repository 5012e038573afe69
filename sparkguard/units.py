"""The user's systemd units: their names, the spec that each one starts, and what the user manager knows about them.

The manager is asked through busctl, whose JSON keeps every value as it is; `systemctl show` quotes them in a way of its own.
Where no manager answers, the unit files are read instead, as far as Environment=, ExecStart= and Conflicts= go.
"""

from __future__ import annotations

import json
import os
import shlex
from typing import TYPE_CHECKING, Any

from sparkguard.core.record import Record
from sparkguard.probe import bounded, files
from sparkguard.probe.procfs import unescape_unit
from sparkguard.settings import check_name, config_home, home_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# A manager answers in milliseconds; one that is stopped or far behind must not hold a command up.
SECONDS = 5.0
_MOST_UNIT_BYTES = 1 << 20
TEMPLATE = "vllm-model@"
_BUS = "org.freedesktop.systemd1"
_LAUNCHER = "vllm-serve.sh"
_SPECIFIERS = "%ihnNpt"


class Unit(Record):
    """id is as systemd escapes it; environment is what ExecStart= sees of the manager's and the unit's own."""

    id: str
    environment: dict[str, str]
    conflicts: tuple[str, ...]
    argv: tuple[str, ...]  # ExecStart=; empty when there is no such unit

    def launches(self) -> tuple[str, tuple[str, ...]] | None:
        """(spec's name, further arguments) when it is our launcher that the unit runs."""
        if len(self.argv) < 2 or self.argv[0].rpartition("/")[2] != _LAUNCHER:
            return None
        return unescape_unit(self.argv[1]), self.argv[2:]


def folder(env: Mapping[str, str]) -> str:
    """Where the user's own units and drop-ins stand."""
    return os.path.join(config_home(env), "systemd", "user")


def conf(env: Mapping[str, str]) -> str:
    """The site's settings."""
    return os.path.join(config_home(env), "spark", "spark.conf")


def spec(name: str, env: Mapping[str, str]) -> str:
    """The path of a model's spec, whether it is there or not."""
    return os.path.join(config_home(env), "spark", "models", f"{name}.env")


def installed(env: Mapping[str, str]) -> list[str]:
    """Every vllm-*.service of the user's own, templates left out."""
    try:
        names = os.listdir(folder(env))
    except OSError:
        return []
    return sorted(name for name in names if name.startswith("vllm-") and name.endswith(".service") and "@." not in name)


def specs(env: Mapping[str, str]) -> list[str]:
    """The names of every spec in ~/.config/spark/models."""
    try:
        names = os.listdir(os.path.join(config_home(env), "spark", "models"))
    except OSError:
        return []
    return sorted(name.removesuffix(".env") for name in names if name.endswith(".env"))


def resolve(text: str, env: Mapping[str, str]) -> tuple[str, str]:
    """(unit, name of its spec) for a unit or a name that somebody typed. Raises SparkguardError for what can be neither."""
    base = text.removesuffix(".service")
    if base.startswith(TEMPLATE):
        name = check_name(base.removeprefix(TEMPLATE))
        return f"{TEMPLATE}{escape(name)}.service", name
    own = base if base.startswith("vllm-") else f"vllm-{base}"
    name = check_name(own.removeprefix("vllm-"))
    if find(f"{own}.service", env):
        return f"{own}.service", name
    name = check_name(base)
    return f"{TEMPLATE}{escape(name)}.service", name


def unit_of_spec(name: str, env: Mapping[str, str]) -> str:
    own = f"vllm-{name}.service"
    return own if find(own, env) else f"{TEMPLATE}{escape(name)}.service"


def escape(name: str) -> str:
    """A name in a unit's name, as systemd-escape has it, but '-' stays: %i hands it on, and it is what people type."""
    return "".join(
        c if c.isascii() and (c.isalnum() or c in ":_.-") else "".join(f"\\x{byte:02x}" for byte in os.fsencode(c)) for c in name
    )


def find(unit: str, env: Mapping[str, str]) -> str | None:
    """The file of a unit, or of its template; None when it is nowhere."""
    stem, dot, kind = unit.rpartition(".")
    template = f"{stem.partition('@')[0]}@{dot}{kind}" if "@" in stem else unit
    places = (os.path.join(place, name) for name in (unit, template) for place in _search_path(env))
    return next((path for path in places if os.path.isfile(path)), None)


def load(unit: str, env: Mapping[str, str]) -> Unit:
    """From the manager; without one, from the files."""
    manager = manager_environment(env)
    if manager is None:
        return read(unit, env)
    service = properties(unit, "Service", ("Environment", "EnvironmentFiles", "ExecStart"), env)
    conflicts = properties(unit, "Unit", ("Conflicts",), env)
    if service is None or conflicts is None:
        return read(unit, env)
    environment = {**manager, **_pairs(service["Environment"])}
    for path, _ in service["EnvironmentFiles"]:
        environment.update(_environment_file(path))
    starts = service["ExecStart"]
    return Unit(unit, environment, tuple(conflicts["Conflicts"]), tuple(starts[0][1]) if starts else ())


def manager_environment(env: Mapping[str, str]) -> dict[str, str] | None:
    """What every unit's environment starts from; None when no user manager answers."""
    found = bus(env, "get-property", _BUS, "/org/freedesktop/systemd1", f"{_BUS}.Manager", "Environment")
    return None if found is None else _pairs(found[0])


def properties(unit: str, interface: str, names: Sequence[str], env: Mapping[str, str]) -> dict[str, Any] | None:
    """Properties of one interface (Unit, Service, Slice, Manager), as D-Bus has them; None when nobody answers."""
    path = "/org/freedesktop/systemd1" + (f"/unit/{_bus_label(unit)}" if unit else "")
    found = bus(env, "get-property", _BUS, path, f"{_BUS}.{interface}", *names)
    return None if found is None else dict(zip(names, found))


def bus(env: Mapping[str, str], *words: str) -> list[Any] | None:
    try:
        status, output = bounded.run(["busctl", "--user", "--json=short", *words], SECONDS, session(env))
    except OSError:
        return None
    return [json.loads(line)["data"] for line in output.splitlines()] if status == 0 else None


def systemctl(env: Mapping[str, str], *words: str) -> bool:
    """Whether it answered and succeeded."""
    try:
        return bounded.run(["systemctl", "--user", *words], SECONDS, session(env))[0] == 0
    except OSError:
        return False


def session(env: Mapping[str, str]) -> dict[str, str]:
    """The environment with which the manager is found: cron and `sudo -u` leave XDG_RUNTIME_DIR out."""
    return {"XDG_RUNTIME_DIR": f"/run/user/{os.getuid()}", **env}


def read(unit: str, env: Mapping[str, str]) -> Unit:
    """From the unit's files and drop-ins, without a manager."""
    path = find(unit, env)
    environment: dict[str, str] = {}
    conflicts: list[str] = []
    argv: list[str] = []
    for file in [path, *_drop_ins(unit, env)] if path else []:
        for key, value in _assignments(file):
            words = _words(value, unit, env)
            if key == "Environment":
                environment = {**environment, **_pairs(words)} if words else {}
            elif key == "EnvironmentFile":
                environment.update(_environment_file(words[0].removeprefix("-")) if words else {})
            elif key == "Conflicts":
                conflicts = conflicts + words if words else []
            elif key == "ExecStart":
                argv = [words[0].lstrip("-@:+!"), *words[1:]] if words else []
    return Unit(unit, environment, tuple(conflicts), tuple(argv))


def _search_path(env: Mapping[str, str]) -> tuple[str, ...]:
    data = env.get("XDG_DATA_HOME") or os.path.join(home_folder(env), ".local", "share")
    others = ("/etc", "/run", "/usr/local/lib", "/usr/lib")
    return (folder(env), os.path.join(data, "systemd", "user"), *(f"{place}/systemd/user" for place in others))


def _drop_ins(unit: str, env: Mapping[str, str]) -> list[str]:
    """In the order of their file names; of two with one name, the one of the more specific folder counts."""
    stem, _, kind = unit.rpartition(".")
    parts = stem.partition("@")[0].split("-")
    folders = [f"{kind}.d", *(f"{'-'.join(parts[:n])}-.{kind}.d" for n in range(1, len(parts)))]
    folders += [f"{stem.partition('@')[0]}@.{kind}.d"] if "@" in stem else []
    found: dict[str, str] = {}
    for name in (*folders, f"{unit}.d"):
        for place in reversed(_search_path(env)):
            try:
                files = os.listdir(os.path.join(place, name))
            except OSError:
                continue
            found.update({file: os.path.join(place, name, file) for file in files if file.endswith(".conf")})
    return [found[name] for name in sorted(found)]


def _assignments(path: str) -> Iterator[tuple[str, str]]:
    """KEY and VALUE of each line; a line that ends in a backslash goes on in the next."""
    try:
        lines = files.read_file(path, _MOST_UNIT_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return
    begun = ""
    for line in lines:
        if line.lstrip().startswith(("#", ";")):
            continue
        if line.endswith("\\"):
            begun += line[:-1] + " "
            continue
        key, equals, value = (begun + line).partition("=")
        begun = ""
        if equals:
            yield key.strip(), value.strip()


def _words(value: str, unit: str, env: Mapping[str, str]) -> list[str]:
    try:
        words = shlex.split(value)
    except ValueError:
        return []
    stem = unit.rpartition(".")[0]
    prefix, _, instance = stem.partition("@")
    home = home_folder(env)
    values = dict(zip(_SPECIFIERS, ("%", instance, home, unit, stem, prefix, session(env)["XDG_RUNTIME_DIR"])))
    return [_specified(word, {**values, "I": unescape_unit(instance), "E": config_home(env)}) for word in words]


def _specified(word: str, values: Mapping[str, str]) -> str:
    head, *rest = word.split("%")
    out = head
    while rest:
        part = rest.pop(0)
        if not part and rest:  # %%
            out += "%" + rest.pop(0)
        else:
            out += values.get(part[:1], "%" + part[:1]) + part[1:]
    return out


def _environment_file(path: str) -> dict[str, str]:
    found = {}
    for key, value in _assignments(path):
        quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
        found[key] = value[1:-1] if quoted else value
    return found


def _pairs(lines: Sequence[str]) -> dict[str, str]:
    return {key: value for key, equals, value in (line.partition("=") for line in lines) if equals}


def _bus_label(unit: str) -> str:
    """sd_bus_path_encode(): what is no letter or digit as _xx, a leading digit too."""
    raw = os.fsencode(unit)
    return "".join(
        chr(byte) if chr(byte).isascii() and chr(byte).isalnum() and not (at == 0 and chr(byte).isdigit()) else f"_{byte:02x}"
        for at, byte in enumerate(raw)
    )
