"""The picture of `watch` for people: plain lines, and a live screen of them where there is a terminal."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, Any

import click

from sparkguard.cli.terminal import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

_COLOURS = {"ready": "green", "ok": "green", "dead": "red", "failed": "red", "lost": "red"}  # all else is yellow
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
    for worker in tick["yue"]:
        jobs = f"  {printable(', '.join(worker['jobs']))}" if worker["jobs"] else ""
        parts += ["", f"{click.style('yue', bold=True)} on {printable(worker['node'])}  {_state(worker['state'])}{jobs}"]
    if not tick["allocations"] and not tick["yue"]:
        parts += ["", "no model is placed on these nodes"]
    return "\n".join(parts)


def _state(word: str, age: float | None = None) -> str:
    old = f" {_seconds(age)} old" if word == "stale" and age is not None else ""
    return click.style(word.replace("_", " ") + old, fg=_COLOURS.get(word, "yellow"))


def _node(node: dict[str, Any]) -> list[str]:
    word = node["connection"] if node["state"] == "unknown" else node["state"]
    head = f"{click.style(printable(node['node']), bold=True)}  {_state(word, node['age_s'])}"
    if node["error"]:
        retry = f" (again in {_seconds(node['retry_in_s'])})" if node["retry_in_s"] is not None else ""
        return [f"{head}  {printable(node['error'])}{retry}"]
    if node["age_s"] is None:
        return [head]
    memory = node["memory"]
    out = [
        head,
        f"  cpu  {_bar(node['cpu_percent'])}  load {_number(node['load1'], 1)}"
        f"  mem {_bar(_ratio(memory['used_bytes'], memory['total_bytes']))}"
        f" {_bytes(memory['used_bytes'])} of {_bytes(memory['total_bytes'])}  swap {_bytes(memory['swap_used_bytes'])}"
        f"  stalled {_number(node['psi']['memory_full10'], 1)}%",
    ]
    for gpu in node["gpus"] or ():
        limits = ", ".join(gpu["throttle"] or ())
        out.append(
            f"  gpu  {_bar(gpu['utilization_percent'])}  {_number(gpu['temperature_c'])} C  {_number(gpu['power_w'], 1)} W"
            f"  {_number(gpu['clock_mhz'])} MHz" + (f"  held back by {limits}" if limits else "")
        )
    if node["gpus"] is None:
        out.append(f"  gpu  -  {printable(node['gpu_error'] or '')}")
    up = [it for it in node["network"] if it["state"] in ("up", "unknown", None)]
    rows = [(it["name"], it["rx_bytes_s"], "in", it["tx_bytes_s"], "out") for it in up]
    rows += [(it["device"], it["rx_bytes_s"], "in", it["tx_bytes_s"], "out") for it in node["roce"]]
    rows.append(("disks", node["disk"]["read_bytes_s"], "read", node["disk"]["write_bytes_s"], "written"))
    width = max(len(printable(row[0])) for row in rows)
    for name, first, word, second, other in rows:
        out.append(f"  {printable(name).ljust(width)}  {_bytes(first):>9}/s {word:4}  {_bytes(second):>9}/s {other}")
    return out


def _allocation(found: dict[str, Any]) -> list[str]:
    engine = found["engine"]
    reason = f"  {printable(found['error'])}" if found["error"] else ""
    where = " + ".join(printable(name) for name in found["nodes"])
    out = [f"{click.style(printable(found['model']), bold=True)} on {where}  {_state(found['state'])}{reason}"]
    if found["url"]:
        out.append(f"  {printable(found['url'])}  serves {printable(found['served'])}")
    if found["slow_fabric"]:
        out.append(click.style("  its ranks talk over sockets, not RDMA: see docs/cluster/recovery.md", fg="yellow"))
    if engine is None:
        return out
    if engine["error"]:
        return [*out, f"  metrics: {printable(engine['error'])}"]
    kv = None if engine["kv_usage"] is None else 100 * engine["kv_usage"]
    out.append(
        f"  running {_number(engine['running'])}  waiting {_number(engine['waiting'])}  kv {_bar(kv)}"
        f"  {_number(engine['generation_tokens_s'], 1)} tok/s out  {_number(engine['prompt_tokens_s'], 1)} tok/s in"
        f"  cached {_percent(engine['cached_ratio'])}  accepted {_percent(engine['accepted_ratio'])}"
        + (click.style("  began anew", fg="yellow") if engine["reset"] else "")
    )
    shown = (("first token", "ttft_s"), ("between tokens", "itl_s"), ("whole request", "e2e_s"))
    times = [f"{label} {_triple(engine[name])}" for label, name in shown if engine[name]["n"]]
    if times:
        out.append(f"  p50/p95/p99 of {_seconds(engine['window_s'])}: " + "   ".join(times))
    if engine["no_token_for_s"] and engine["no_token_for_s"] > 30:
        out.append(click.style(f"  requests run, and no token has come for {_seconds(engine['no_token_for_s'])}", fg="yellow"))
    return out


def _triple(found: dict[str, float | None]) -> str:
    return "/".join(_seconds(found[name]) for name in ("p50", "p95", "p99"))


def _bar(percent: float | None) -> str:
    if percent is None:
        return "-".ljust(_BAR + 5)
    full = round(min(100.0, max(0.0, percent)) / 100 * _BAR)
    return f"{'█' * full}{'░' * (_BAR - full)} {percent:3.0f}%"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.0f}%"


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _ratio(part: float | None, whole: float | None) -> float | None:
    """In percent."""
    return None if part is None or not whole else 100 * part / whole


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
