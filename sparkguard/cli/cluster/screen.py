"""The picture of `watch` for people: plain lines, and a live screen of them where there is a terminal."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, Any

import click

from sparkguard.cli.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

_COLOURS = {"ready": "green", "fresh": "green", "not_ready": "red", "unreachable": "red", "stale": "yellow", "unknown": "yellow"}
_BAR = 10
# To the screen of full-screen programs and back, the cursor hidden meanwhile; home; to the line's end, to the screen's end.
_OPEN, _CLOSE, _HOME, _LINE_END, _SCREEN_END = "\033[?1049h\033[?25l", "\033[?25h\033[?1049l", "\033[H", "\033[K", "\033[J"


class Screen:
    """`with Screen() as screen: screen.show(lines)`. The terminal is as it was afterwards, however this ends."""

    def __enter__(self) -> Screen:
        sys.stdout.write(_OPEN)
        return self

    def __exit__(self, *_: object) -> None:
        sys.stdout.write(_CLOSE)
        sys.stdout.flush()

    def show(self, text: str) -> None:
        size = shutil.get_terminal_size()
        lines = [_cut(line, size.columns) for line in text.split("\n")]
        if len(lines) > size.lines:
            lines = [*lines[: size.lines - 1], "... the terminal is too low for the rest"]
        sys.stdout.write(_HOME + "\n".join(line + _LINE_END for line in lines) + _SCREEN_END)
        sys.stdout.flush()


def _cut(line: str, width: int) -> str:
    """Counts what is seen: an escape sequence takes no room."""
    if len(click.unstyle(line)) <= width:
        return line
    shown, i, seen = [], 0, 0
    while i < len(line) and seen < width - 1:
        if line[i] == "\033":
            end = line.index("m", i) + 1
            shown.append(line[i:end])
            i = end
        else:
            shown.append(line[i])
            seen += 1
            i += 1
    return "".join(shown) + "…\033[0m"


def lines(tick: dict[str, Any]) -> str:
    """One picture. A dash is what is unknown; what is old says how old."""
    parts = [click.style(f"spark-serve watch  {tick['at'][11:19]} UTC  every {tick['interval_s']:g} s", bold=True)]
    transition = tick["transition"]
    if transition and transition["phase"] not in ("ready", "stopped"):
        error = f": {printable(transition['error'])}" if transition["error"] else ""
        parts.append(f"{printable(transition['verb'])} {printable(transition['model'])}: {transition['phase']}{error}")
    if tick["record_error"]:
        parts.append(click.style(printable(tick["record_error"]), fg="yellow"))
    for node in tick["nodes"]:
        parts += ["", *_node(node)]
    for allocation in tick["allocations"]:
        parts += ["", *_allocation(allocation)]
    if not tick["allocations"]:
        parts += ["", "no model is placed on these nodes"]
    return "\n".join(parts)


def _state(word: str, age: float | None, fresh: str) -> str:
    old = f" {_seconds(age)} old" if word != fresh and age is not None else ""
    return click.style(word.replace("_", " ") + old, fg=_COLOURS.get(word))


def _node(node: dict[str, Any]) -> list[str]:
    head = f"{click.style(printable(node['node']), bold=True)}  {_state(node['state'], node['age_s'], 'fresh')}"
    if node["error"]:
        retry = f" (again in {_seconds(node['retry_in_s'])})" if node["retry_in_s"] is not None else ""
        return [f"{head}  {printable(node['error'])}{retry}"]
    if node["age_s"] is None:
        return [head]
    memory = node["memory"]
    cpu, pressure = node["cpu"], node["pressure"].get("memory") or {}
    load = " ".join(f"{value:.1f}" for value in cpu["load"] or ()) or "-"
    out = [
        head,
        f"  cpu  {_bar(cpu['use'])}  load {load}  mem {_bar(_ratio(memory['used_bytes'], memory['total_bytes']))}"
        f" {_bytes(memory['used_bytes'])} of {_bytes(memory['total_bytes'])}  swap {_bytes(memory['swap_used_bytes'])}"
        f"  stalled {_number(pressure.get('full_avg10'), 1)}%",
    ]
    for gpu in node["gpus"] or ():
        limits = [reason for reason in gpu["reasons"] or () if reason != "idle"]
        use = None if gpu["utilization_percent"] is None else gpu["utilization_percent"] / 100
        out.append(
            f"  gpu  {_bar(use)}  {_number(gpu['celsius'])} C  {_number(gpu['watts'], 1)} W  {_number(gpu['sm_mhz'])} MHz"
            + (f"  held back by {', '.join(limits)}" if limits else "")
        )
    if node["gpus"] is None:
        out.append(f"  gpu  -  {printable(node['gpu_error'] or '')}")
    rates = [
        f"{printable(name)} {_bytes(it['rx_bytes_per_s'])}/s in {_bytes(it['tx_bytes_per_s'])}/s out"
        for kind in ("net", "roce")
        for name, it in node[kind].items()
        if kind == "roce" or it["operstate"] in ("up", "unknown", None)
    ]
    rates += [
        f"{printable(name)} {_bytes(it['read_bytes_per_s'])}/s read {_bytes(it['written_bytes_per_s'])}/s written"
        for name, it in node["disks"].items()
    ]
    out += [f"  {line}" for line in rates]
    return out


def _allocation(found: dict[str, Any]) -> list[str]:
    health, engine = found["health"], found["engine"]
    reason = f"  {printable(health['reason'])}" if health["reason"] else ""
    where = " + ".join(printable(name) for name in found["nodes"])
    head = f"{click.style(printable(found['model']), bold=True)} on {where}  {_state(health['state'], None, 'ready')}{reason}"
    out = [head]
    if found["url"]:
        out.append(f"  {printable(found['url'])}  serves {printable(found['served'])}")
    if engine is None:
        return out
    if engine["error"]:
        return [*out, f"  metrics: {printable(engine['error'])}"]
    mark = click.style("  began anew", fg="yellow") if engine["reset"] else ""
    out.append(
        f"  running {_number(engine['running'])}  waiting {_number(engine['waiting'])}  kv {_bar(engine['kv_used'])}"
        f"  {_number(engine['generation_tokens_per_s'], 1)} tok/s out  {_number(engine['prompt_tokens_per_s'], 1)} tok/s in"
        f"  cached {_percent(engine['cached_share'])}  accepted {_percent(engine['acceptance'])}{mark}"
    )
    shown = (("first token", "ttft"), ("between tokens", "itl"), ("whole request", "e2e"))
    times = [f"{label} {_triple(engine[name])}" for label, name in shown if engine[name]["events"]]
    if times:
        out.append(f"  p50/p95/p99 of {_seconds(engine['window_s'])}: " + "   ".join(times))
    if engine["no_token_for_s"] and engine["no_token_for_s"] > 30:
        out.append(click.style(f"  requests run, and no token has come for {_seconds(engine['no_token_for_s'])}", fg="yellow"))
    return out


def _triple(found: dict[str, float | None]) -> str:
    return "/".join(_seconds(found[name]) for name in ("p50_s", "p95_s", "p99_s"))


def _bar(share: float | None) -> str:
    if share is None:
        return "-".ljust(_BAR + 5)
    full = round(min(1.0, max(0.0, share)) * _BAR)
    return f"{'█' * full}{'░' * (_BAR - full)} {share * 100:3.0f}%"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.0f}%"


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _bytes(value: float | None) -> str:
    if value is None:
        return "-"
    units: Sequence[str] = ("B", "KiB", "MiB", "GiB", "TiB")
    step = 0
    while value >= 1024 and step < len(units) - 1:
        value /= 1024
        step += 1
    return f"{value:.0f} {units[step]}" if step == 0 or value >= 100 else f"{value:.1f} {units[step]}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    if value < 0.0995:
        return f"{value * 1000:.3g} ms"
    return f"{value:.2g} s" if value < 9.95 else f"{value:.0f} s"
