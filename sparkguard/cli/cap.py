"""sparkguard cap: shows, sets or removes a unit's memory cap, a drop-in of one name."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from sparkguard import units
from sparkguard.cli.names import complete_units
from sparkguard.cli.terminal import HELP, epilog, say, show, show_json
from sparkguard.core.explain import SCHEMA_VERSION, gib
from sparkguard.core.record import Record
from sparkguard.core.share import WHOLE, bytes_of, parse_share
from sparkguard.errors import CONFIG, OK, OSERR, UNAVAILABLE, USAGE, SparkguardError
from sparkguard.probe import facts, files
from sparkguard.probe.procfs import unescape_unit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sparkguard.guard import Roots

FILE = "50-sparkguard-cap.conf"
_MARK = "# Written by `sparkguard cap`"
_BODY = """\
{mark}; `sparkguard cap {unit} --revert` removes it.
# Above MemoryHigh the kernel takes cache back and slows the unit down; at MemoryMax it kills inside the unit.
# On unified memory (GB10) CUDA memory is charged to no cgroup: this bounds the host's side only.
[{section}]
{lines}
"""
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}
# The files of the unit's cgroup, beside the property that each one follows.
_CGROUP = {"MemoryHigh": "memory.high", "MemoryMax": "memory.max", "MemorySwapMax": "memory.swap.max"}
# What D-Bus says for infinity.
_INFINITY = 2**64 - 1
_MOST_DROP_IN_BYTES = 1 << 20

_EXAMPLES = """
sparkguard cap vims-server                                  what is in force
sparkguard cap vims-server --high 25% --max 30%             of the installed RAM
sparkguard cap inference.slice --max 100G --dry-run         shows the drop-in, and changes nothing
sparkguard cap vims-server --revert                         removes it
"""


@click.command(
    "cap",
    context_settings=HELP,
    epilog=epilog(_EXAMPLES, OK, USAGE, CONFIG, UNAVAILABLE, OSERR),
    short_help="show, set or remove a unit's memory cap",
)
@click.argument("unit", shell_complete=complete_units)
@click.option("--high", metavar="V", help="MemoryHigh=: above it the unit is slowed down.")
@click.option("--max", "most", metavar="V", help="MemoryMax=: at it the kernel kills inside the unit.")
@click.option("--swap-max", metavar="V", help="MemorySwapMax= (0: no way out into swap).")
@click.option(
    "--oom-policy",
    type=click.Choice(["kill", "stop", "continue"]),
    default="kill",
    show_default=True,
    help="What a kill ends: all of the unit, the unit in an orderly way, or the one process.",
)
@click.option("--revert", is_flag=True, help="Remove the drop-in.")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout: what is in force afterwards.")
def command(
    unit: str,
    high: str | None,
    most: str | None,
    swap_max: str | None,
    oom_policy: str,
    revert: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Caps the memory of one of your user units, so that the kernel kills the culprit inside it and not your desktop.

    Without options it shows what is in force. Values are a percentage of the installed RAM (25%), bytes with K, M, G or T
    (powers of 1024), or infinity. The drop-in is ~/.config/systemd/user/UNIT.d/50-sparkguard-cap.conf; a unit that runs
    gets the cap at once.

    What no cap can do: on unified memory (GB10) CUDA memory is not charged to the cgroup. A cap bounds the host's side of a
    server; the sum of the GPU shares is the guard's business.
    """
    from sparkguard.guard import Roots

    env, roots = os.environ, Roots()
    sets = high is not None or most is not None
    if revert and sets:
        raise click.UsageError("--revert and --high or --max exclude each other")
    if swap_max is not None and not sets:
        raise click.UsageError("--swap-max needs --high or --max")
    unit = full_name(unit)
    _must_exist(unit, env)
    if revert:
        remove(unit, env, roots, dry_run)
    elif sets:
        total_bytes = facts.read_meminfo(roots.proc)["MemTotal"]
        text = drop_in(unit, Cap(high, most, swap_max or "0", oom_policy), total_bytes)
        write(unit, text, env, roots, dry_run)
    if not dry_run:
        answer = in_force(unit, env, roots)
        if as_json:
            show_json(answer)
        else:
            show(describe(answer))
    return OK


class Cap(Record):
    """As typed; None: no such line."""

    high: str | None
    most: str | None
    swap_max: str
    oom_policy: str


def full_name(text: str) -> str:
    """With .service where no type is given. Raises SparkguardError (2) for what has no memory of its own to cap."""
    if "/" in text or "\0" in text or text.startswith(("-", ".")):
        raise SparkguardError(f"{text!r} is no unit's name", None, USAGE)
    kind = text.rpartition(".")[2]
    if kind in ("service", "slice"):
        return text
    if kind in ("socket", "timer", "target", "path", "mount", "device", "scope") and "." in text:
        raise SparkguardError(f"a {kind} cannot be capped by a drop-in", "name a service or a slice", USAGE)
    return f"{text}.service"


def _must_exist(unit: str, env: Mapping[str, str]) -> None:
    if units.find(unit, env) is not None:
        return
    state = units.properties(unit, "Unit", ("LoadState",), env)
    if state is not None and state["LoadState"] != "not-found":
        return  # made by a generator, or transient
    if state is None and os.path.exists(path_of(unit, env)):
        return
    system = any(os.path.isfile(f"{place}/systemd/system/{unit}") for place in ("/etc", "/run", "/usr/lib", "/lib"))
    if system:
        raise SparkguardError(
            f"{unit} is a unit of the system, and this caps user units only",
            f"as root: systemctl set-property {unit} MemoryHigh=25% MemoryMax=30%",
        )
    if state is None:
        raise SparkguardError(
            f"there is no file of a user unit {unit}, and no user manager answers", "see: systemctl --user status"
        )
    raise SparkguardError(f"there is no user unit {unit}", "see them all: systemctl --user list-unit-files")


def parse_amount(text: str, total_bytes: int) -> int | None:
    """Bytes of a value of MemoryMax=; None is infinity. Raises SparkguardError (2)."""
    if text == "infinity":
        return None
    try:
        if text.endswith("%"):
            share = parse_share(text[:-1]) // 100
            if not 0 <= share <= WHOLE or "e" in text.lower():
                raise ValueError
            return bytes_of(share, total_bytes)
        unit = text[-1:].upper() if not text[-1:].isdigit() else ""
        number = parse_share(text[: len(text) - len(unit)])
        if number < 0 or "e" in text[:-1].lower():
            raise ValueError
        return (number << 10 * _POWERS[unit]) // WHOLE
    except (ValueError, KeyError):
        raise SparkguardError(
            f"{text!r} is no amount of memory", "write a percentage (25%), bytes with K, M, G or T (30G), or infinity", USAGE
        ) from None


def drop_in(unit: str, cap: Cap, total_bytes: int) -> str:
    """The file's text. Raises SparkguardError (2) for values that make no sense, alone or together."""
    high = parse_amount(cap.high, total_bytes) if cap.high is not None else None
    most = parse_amount(cap.most, total_bytes) if cap.most is not None else None
    parse_amount(cap.swap_max, total_bytes)
    if most is not None and (cap.high == "infinity" or (high is not None and high > most)):
        raise SparkguardError(
            f"--high {cap.high} is above --max {cap.most}", "the unit would be killed before it is slowed down", USAGE
        )
    if 0 in (high, most):
        raise SparkguardError("a cap of 0 bytes lets nothing run", "leave the option out, or write infinity", USAGE)
    lines = [f"MemoryHigh={cap.high}"] if cap.high is not None else []
    lines += [f"MemoryMax={cap.most}"] if cap.most is not None else []
    lines += [f"MemorySwapMax={cap.swap_max}"]
    is_slice = unit.endswith(".slice")
    lines += [] if is_slice else [f"OOMPolicy={cap.oom_policy}"]
    section = "Slice" if is_slice else "Service"
    return _BODY.format(mark=_MARK, unit=unescape_unit(unit), section=section, lines="\n".join(lines))


def path_of(unit: str, env: Mapping[str, str]) -> str:
    return os.path.join(units.folder(env), f"{unit}.d", FILE)


def write(unit: str, text: str, env: Mapping[str, str], roots: Roots, dry_run: bool) -> None:
    """The drop-in, whole or not at all; then into force."""
    path = path_of(unit, env)
    _must_be_ours(path)
    if dry_run:
        say(f"would write {path}:")
        show(text.rstrip("\n"))
        return
    draft = f"{path}.{os.getpid()}"  # not *.conf: systemd does not read it
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(draft, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(draft, path)
    except OSError as error:
        raise SparkguardError(f"{path} cannot be written: {error.strerror}", None, OSERR) from None
    say(f"wrote {path}")
    put_into_force(unit, env, roots)


def remove(unit: str, env: Mapping[str, str], roots: Roots, dry_run: bool) -> None:
    path = path_of(unit, env)
    if not os.path.lexists(path):
        say(f"there is no {path}: nothing to revert")
        return
    _must_be_ours(path)
    if dry_run:
        say(f"would remove {path}")
        return
    try:
        os.unlink(path)
        if not os.listdir(os.path.dirname(path)):
            os.rmdir(os.path.dirname(path))
    except OSError as error:
        raise SparkguardError(f"{path} cannot be removed: {error.strerror}", None, OSERR) from None
    say(f"removed {path}")
    put_into_force(unit, env, roots)


def _must_be_ours(path: str) -> None:
    try:
        first = files.read_file(path, _MOST_DROP_IN_BYTES).decode("utf-8", "replace")
    except FileNotFoundError:
        return
    except OSError as error:
        raise SparkguardError(f"{path} cannot be read: {error.strerror}", None, OSERR) from None
    if not first.startswith(_MARK):
        raise SparkguardError(f"{path} was not written by sparkguard cap", "move it away, or edit it by hand", CONFIG)


def put_into_force(unit: str, env: Mapping[str, str], roots: Roots) -> None:
    """daemon-reload; and where that leaves a running unit as it was (systemd 257 and newer), set-property as well."""
    if units.manager_environment(env) is None:
        say("no user manager answers: it is in force once one does")
        return
    if not units.systemctl(env, "daemon-reload"):
        raise SparkguardError("systemctl --user daemon-reload failed", "run it yourself", UNAVAILABLE)
    wanted = configured(unit, env)
    present = in_cgroup(unit, env, roots)
    if wanted is None or present is None or _equal(wanted, present):
        return
    # set-property leaves files behind that would beat every later drop-in until the next boot; those made here go again.
    place = os.path.join(units.session(env)["XDG_RUNTIME_DIR"], "systemd", "user.control", f"{unit}.d")
    before = _files(place)
    values = (f"{key}={'infinity' if amount is None else amount}" for key, amount in wanted.items())
    done = units.systemctl(env, "set-property", "--runtime", unit, *values)
    for name in _files(place) - before:
        os.unlink(os.path.join(place, name))
    units.systemctl(env, "daemon-reload")
    if not done:
        raise SparkguardError(
            f"the running {unit} keeps its old cap", f"restart it: systemctl --user restart {unit}", UNAVAILABLE
        )


def _files(place: str) -> set[str]:
    try:
        return set(os.listdir(place))
    except OSError:
        return set()


def _equal(wanted: Mapping[str, int | None], present: Mapping[str, int | None]) -> bool:
    """The kernel counts whole pages."""
    page = os.sysconf("SC_PAGE_SIZE")

    def pages(amount: int | None) -> int | None:
        return None if amount is None else amount // page

    return all(key not in present or pages(wanted[key]) == pages(present[key]) for key in wanted)


def configured(unit: str, env: Mapping[str, str]) -> dict[str, int | None] | None:
    """What the manager has for the unit, in bytes, None for infinity; None when no manager answers."""
    interface = "Slice" if unit.endswith(".slice") else "Service"
    found = units.properties(unit, interface, tuple(_CGROUP), env)
    return None if found is None else {key: None if value >= _INFINITY else value for key, value in found.items()}


def in_cgroup(unit: str, env: Mapping[str, str], roots: Roots) -> dict[str, int | None] | None:
    """What the kernel has for the running unit; None: it does not run, or there is no memory controller."""
    interface = "Slice" if unit.endswith(".slice") else "Service"
    group = units.properties(unit, interface, ("ControlGroup",), env)
    if group is None or not group["ControlGroup"]:
        return None
    found: dict[str, int | None] = {}
    for key, name in _CGROUP.items():
        try:
            with open(f"{roots.sys}/fs/cgroup{group['ControlGroup']}/{name}", encoding="ascii") as file:
                text = file.read().strip()
        except OSError:
            continue
        found[key] = None if text == "max" else int(text)
    return found or None


def in_force(unit: str, env: Mapping[str, str], roots: Roots) -> dict[str, Any]:
    """The JSON; amounts in bytes, or 'infinity'."""
    path = path_of(unit, env)

    def shown(amounts: dict[str, int | None] | None) -> dict[str, int | str] | None:
        return None if amounts is None else {key: "infinity" if value is None else value for key, value in amounts.items()}

    return {
        "schema_version": SCHEMA_VERSION,
        "unit": unescape_unit(unit),
        "drop_in": path if os.path.exists(path) else None,
        "configured": shown(configured(unit, env)),
        "cgroup": shown(in_cgroup(unit, env, roots)),
    }


def describe(answer: dict[str, Any]) -> str:
    lines = [f"{answer['unit']}: {answer['drop_in'] or 'no cap of ours'}"]
    if answer["configured"] is None:
        lines.append("  no user manager answers: what is in force cannot be told")
    for title, amounts in (("configured", answer["configured"]), ("in the kernel", answer["cgroup"])):
        if amounts:
            text = ", ".join(f"{key} {value if isinstance(value, str) else gib(value)}" for key, value in amounts.items())
            lines.append(f"  {title}: {text}")
    if answer["configured"] is not None and answer["cgroup"] is None:
        lines.append("  in the kernel: nothing; it does not run, or its cgroup has no memory controller (see sparkguard doctor)")
    if any(value != "infinity" for value in (answer["configured"] or {}).values()):
        lines.append("  On unified memory (GB10) CUDA memory is charged to no cgroup: a cap bounds the host's side only.")
    return "\n".join(lines)
