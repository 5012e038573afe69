"""A run as CSV (a request a row) or Markdown (for people); JSON is the record itself. Pure."""

from __future__ import annotations

import csv
import io
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

FORMATS = ("json", "csv", "markdown")
# Milliseconds for people; a record has seconds.
_SCALE = {"ttft_s": ("first token, ms", 1000), "ttfo_s": ("first visible, ms", 1000), "gap_s": ("between chunks, ms", 1000)}
_RATES = {
    "decode_tokens_per_s": ("decode, tokens/s", 1),
    "prefill_tokens_per_s": ("prefill, tokens/s", 1),
    "prefill_client_tokens_per_s": ("prefill by our clock, tokens/s", 1),
    "seconds": ("whole request, s", 1),
}
LABELS: dict[str, tuple[str, int]] = _SCALE | _RATES


def export(run: dict[str, Any], form: str) -> str:
    return {"json": _json, "csv": _csv, "markdown": _markdown}[form](run)


def _json(run: dict[str, Any]) -> str:
    return json.dumps(run, indent=2) + "\n"


def _csv(run: dict[str, Any]) -> str:
    rows = []
    for phase, level in [("warmup", None), *(("measured", level) for level in run["levels"])]:
        for request in run["warmup"] if level is None else level["requests"]:
            flat = {key: value for key, value in request.items() if key != "unmeasured"}
            at = {key: level[key] for key in ("prompt_tokens_wanted", "concurrency")} if level else {}
            rows.append({"run": run["id"], "model": run["target"]["model"], "phase": phase, **at, **flat})
    names = list(dict.fromkeys(name for row in sorted(rows, key=len, reverse=True) for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows([{key: "" if value is None else _harmless(value) for key, value in row.items()} for row in rows])
    return text.getvalue()


def _harmless(value: Any) -> Any:
    """A spreadsheet runs a cell that begins like a formula, a terminal obeys control characters, and a server chose the text."""
    if not isinstance(value, str):
        return value
    text = _plain(value)
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text


def _plain(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)


def _markdown(run: dict[str, Any]) -> str:
    target, settings, checks = run["target"], run["settings"], run["checks"]
    where = ", ".join(target["nodes"]) or target["url"]
    why = f": {_cell(run['reason'])}" if run["reason"] else ""
    lines = [
        f"# {run['kind']} of {_cell(target['model'])}",
        "",
        f"{run['id']}, {run['status']}{why}; on {_cell(where)}; {settings['requests']} requests a level and repeat, "
        f"{settings['repeats']} repeats, output {settings['max_tokens']} tokens ({run['method']['output_length']}), "
        f"reasoning {settings['reasoning']}, seed {settings['seed']}.",
        f"Exclusive: {_yes(checks.get('exclusive'))}. Prefix cache missed: {_yes(checks.get('cache_missed'))}. "
        f"Output length fixed: {_yes(checks.get('output_length_fixed'))}.",
        "",
    ]
    for level in run["levels"]:
        lines += [
            f"## Prompts of {level['prompt_tokens_wanted']} tokens, {level['concurrency']} at once",
            "",
            f"{level['ok']} of {level['n']} whole, {level['incomplete']} incomplete, {level['failed']} failed, "
            f"{level['cancelled']} cancelled. {_throughput(level)}",
            "",
            *rows_of(level),
            "",
        ]
    return "\n".join([*lines, *(f"- {_cell(note)}" for note in run["notes"])]).rstrip() + "\n"


def rows_of(level: dict[str, Any]) -> list[str]:
    rows = ["| | n | min | median | p95 | p99 | max |", "|---|---|---|---|---|---|---|"]
    for name, (label, scale) in LABELS.items():
        found = level["statistics"][name]
        if found:
            cells = [number(found[key], scale) for key in ("min", "median", "p95", "p99", "max")]
            rows.append(f"| {label} | {found['n']} | {' | '.join(cells)} |")
    return rows


def _throughput(level: dict[str, Any]) -> str:
    found = level["over_repeats"]["generated_tokens_per_s"]
    if not found:
        return ""
    half = f" ± {found['half_95']:.2f} (95 %, {found['n']} repeats)" if found["half_95"] is not None else ""
    return f"Together {found['mean']:.2f}{half} tokens/s."


def number(value: float | None, scale: int = 1) -> str:
    return "" if value is None else f"{value * scale:.2f}"


def _yes(value: bool | None) -> str:
    return "not known" if value is None else "yes" if value else "no"


def _cell(text: Any) -> str:
    return _plain(str(text)).replace("|", "\\|").replace("<", "&lt;")


def comparison_rows(found: dict[str, Any]) -> Sequence[Sequence[str]]:
    """For a table: level, number, first, second, ratio."""
    rows = []
    for level in found["levels"]:
        where = f"{level['prompt_tokens_wanted']} x {level['concurrency']}"
        for name, one in level["medians"].items():
            label, scale = LABELS.get(name, ("together, tokens/s", 1))
            if one["first"] is not None or one["second"] is not None:
                ratio = f"{one['ratio']:.3f}" if one["ratio"] is not None else ""
                rows.append((where, label, number(one["first"], scale), number(one["second"], scale), ratio))
    return rows
