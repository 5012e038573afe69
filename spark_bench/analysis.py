"""From the raw results to a recommendation, the same bytes each time: no clock, no machine, no order of files is in it."""

from __future__ import annotations

import csv
import io
import json
import os
import random
from typing import Any

from spark_bench import telemetry
from spark_bench.dispatch import CANCELLED, FAILED, PASSED, TIMEOUT
from spark_bench.fault import Fault

# A level is recommended over the one before only where it is this much faster, and its slow jobs are at most this much slower.
LEAST_GAIN, MOST_P95 = 1.10, 3.0
SHORTER = 0.8  # of the same job's audio at one at a time: what is cut short is no gain
DRAWS = 2000
LEAST_ITERATIONS, LEAST_WORKLOADS = 2, 2
FEW = 20  # jobs, below which a 95th percentile says little
_DIGITS = 6


def analyze(folder: str) -> dict[str, Any]:
    """Writes summary.json, comparison.csv and report.md beside the raw results, and returns the first."""
    run = _json(os.path.join(folder, "run.json"))
    if run.get("version") != 1:
        raise Fault("{} is of version {!r}, and 1 is known".format(os.path.join(folder, "run.json"), run.get("version")))
    summary = summarize(run, _trials(folder))
    telemetry.write(os.path.join(folder, "summary.json"), summary)
    for name, text in (("comparison.csv", _csv(summary)), ("report.md", report(summary))):
        with open(os.path.join(folder, name), "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
    return summary


def summarize(run: dict[str, Any], trials: list[dict[str, Any]]) -> dict[str, Any]:
    """trials: each trial's record with its "jobs" and "telemetry". Pure."""
    measured = [trial for trial in trials if trial["measured"]]
    levels = {number: _level(number, [t for t in measured if t["concurrency"] == number]) for number in sorted(run["levels"])}
    base = levels[1]
    for number, level in levels.items():
        level.update(_compared(level, base, measured, number, run["corpus"]))
    doubts = _doubts(run, measured, levels)
    chosen, why = _choose(levels)
    return {
        "version": 1,
        "host": run["host"],
        "synthetic": run["synthetic"],
        "corpus": run["corpus"],
        "seed": run["seed"],
        "status": run["status"],
        "reason": run["reason"],
        "criteria": {"least_gain": LEAST_GAIN, "most_p95": MOST_P95, "shorter": SHORTER, "draws": DRAWS},
        "levels": [levels[number] for number in sorted(levels)],
        "recommended": None if run["synthetic"] or base["passed"] == 0 else chosen,
        "candidate": chosen,
        "why": why,
        "provisional": bool(doubts),
        "doubts": doubts,
    }


def _level(number: int, trials: list[dict[str, Any]]) -> dict[str, Any]:
    """All trials of a level, pooled: what passed, by the time of all of it."""
    jobs = [job for trial in trials for job in trial["jobs"]]
    passed = [job for job in jobs if job["outcome"] == PASSED]
    seconds = sum(trial["seconds"] for trial in trials)
    latencies = sorted(job["seconds"] for job in passed)
    heat = [gpu.get("temperature_c") for trial in trials for row in trial["telemetry"] for gpu in row.get("gpus") or []]
    power = [gpu.get("power_w") for trial in trials for row in trial["telemetry"] for gpu in row.get("gpus") or []]
    free = [row.get("available_bytes") for trial in trials for row in trial["telemetry"]]
    return {
        "concurrency": number,
        "trials": len(trials),
        "complete": sum(trial["status"] == "complete" for trial in trials),
        "paused_seconds": _round(sum(trial["paused_seconds"] for trial in trials)),
        "jobs": len(jobs),
        **{outcome: sum(job["outcome"] == outcome for job in jobs) for outcome in (PASSED, FAILED, TIMEOUT, CANCELLED)},
        "seconds": _round(seconds),
        "jobs_per_hour": _round(3600 * len(passed) / seconds) if seconds > 0 else None,
        "audio_seconds_per_hour": _round(3600 * sum(job["audio"]["seconds"] for job in passed) / seconds)
        if seconds > 0
        else None,
        "latency": {
            "n": len(latencies),
            "mean": _round(sum(latencies) / len(latencies)) if latencies else None,
            **{f"p{share}": _round(_quantile(latencies, share / 100)) for share in (50, 90, 95, 99)},
            "min": _round(latencies[0]) if latencies else None,
            "max": _round(latencies[-1]) if latencies else None,
        },
        "overlap_most": max([_overlap(trial["jobs"])[0] for trial in trials] or [0]),
        "overlap_mean": _round(_mean([_overlap(trial["jobs"])[1] for trial in trials])),
        "hottest_c": max([value for value in heat if value is not None] or [None]),
        "power_mean_w": _round(_mean([value for value in power if value is not None])),
        "least_free_bytes": min([value for value in free if value is not None] or [None]),
    }


def _compared(
    level: dict[str, Any], base: dict[str, Any], measured: list[dict[str, Any]], number: int, corpus: str
) -> dict[str, Any]:
    speedup = _ratio(level["jobs_per_hour"], base["jobs_per_hour"])
    ours = [t for t in measured if t["concurrency"] == number]
    theirs = [t for t in measured if t["concurrency"] == 1]
    return {
        "speedup": speedup,
        "speedup_95": _interval(ours, theirs, f"{corpus} {number}") if number != 1 else None,
        "efficiency": _round(speedup / number) if speedup is not None else None,
        "p95_by_one": _ratio(level["latency"]["p95"], base["latency"]["p95"]),
        "shortened": _shortened(ours, theirs),
    }


def _interval(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], seed: str) -> list[float | None] | None:
    """95 % of the speedup, by drawing jobs again.

    A trial with L jobs in flight on the average and W seconds a job ends L/W jobs a second (Little's law). L is the
    dispatcher's doing and W the machine's, so W is what is drawn: jobs with replacement, 2000 times, from a seed that the
    raw results give.
    """
    first, second = ([j["seconds"] for t in trials for j in t["jobs"] if j["outcome"] == PASSED] for trials in (ours, theirs))
    fly, alone = (_mean([_overlap(trial["jobs"])[1] for trial in trials]) for trials in (ours, theirs))
    if len(first) < 2 or len(second) < 2 or not fly or not alone:
        return None
    chooser = random.Random(seed)
    drawn = sorted((fly / _draw(chooser, first)) / (alone / _draw(chooser, second)) for _ in range(DRAWS))
    return [_round(_quantile(drawn, share)) for share in (0.025, 0.975)]


def _draw(chooser: random.Random, numbers: list[float]) -> float:
    return sum(numbers[int(chooser.random() * len(numbers))] for _ in numbers) / len(numbers)


def _choose(levels: dict[int, dict[str, Any]]) -> tuple[int, list[str]]:
    """Upwards from one; each step must earn its place over the last that did."""
    best, why = 1, []
    for number in sorted(levels):
        if number == 1:
            continue
        level, reasons = levels[number], []
        gain = _ratio(level["jobs_per_hour"], levels[best]["jobs_per_hour"])
        lost = level["jobs"] - level["passed"]
        if not level["jobs"] or lost or level["complete"] < level["trials"]:
            reasons.append(f"{lost} of {level['jobs']} jobs did not pass")
        if gain is None or gain < LEAST_GAIN:
            reasons.append(f"{_text(gain)} of {best} at once is not {LEAST_GAIN:.2f}")
        if level["p95_by_one"] is None or level["p95_by_one"] > MOST_P95:
            slower = _text(level["p95_by_one"])
            reasons.append(f"its 95th percentile is {slower} of one at a time, more than {MOST_P95:.1f}")
        if level["speedup_95"] is None or level["speedup_95"][0] is None or level["speedup_95"][0] <= 1.0:
            reasons.append("that it is faster than one at a time is not sure")
        if level["shortened"]:
            reasons.append(f"{len(level['shortened'])} songs came out shorter")
        if reasons:
            why.append(f"not {number}: {'; '.join(reasons)}")
        else:
            why.append(f"{number}: {_text(gain)} of {best} at once")
            best = number
    return best, why


def _doubts(run: dict[str, Any], measured: list[dict[str, Any]], levels: dict[int, dict[str, Any]]) -> list[str]:
    """What keeps the result from being more than provisional."""
    doubts = []
    if run["synthetic"]:
        doubts.append("synthetic: nothing was rendered, and the times say nothing of a machine")
    if run["status"] != "complete":
        doubts.append("the experiment was stopped: {}".format(run["reason"]))
    if run["iterations"] < LEAST_ITERATIONS:
        doubts.append("one iteration: order and luck are not told apart")
    if len(run["workloads"]) < LEAST_WORKLOADS:
        doubts.append("one kind of song")
    for number in sorted(levels):
        level = levels[number]
        if level["trials"] < run["iterations"]:
            doubts.append(f"{number} at once has {level['trials']} of {run['iterations']} trials")
        if level["overlap_most"] < number and level["jobs"] >= number:
            doubts.append(f"{number} at once never were more than {level['overlap_most']}")
        if level["paused_seconds"]:
            doubts.append(f"{number} at once was paused for {level['paused_seconds']:.0f} s")
        if 0 < level["latency"]["n"] < FEW:
            doubts.append(f"{number} at once: a 95th percentile of {level['latency']['n']} jobs")
    if any(not trial["telemetry"] for trial in measured):
        doubts.append("a trial has no telemetry")
    return doubts


def _shortened(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> list[str]:
    """Jobs whose audio is shorter than the same job's at one at a time, by more than chance."""
    alone: dict[str, float] = {}
    for trial in theirs:
        for job in trial["jobs"]:
            if job["outcome"] == PASSED:
                alone[job["key"]] = max(alone.get(job["key"], 0.0), job["audio"]["seconds"])
    return sorted(
        {
            job["key"]
            for trial in ours
            for job in trial["jobs"]
            if job["outcome"] == PASSED and job["audio"]["seconds"] < SHORTER * alone.get(job["key"], 0.0)
        }
    )


def _overlap(jobs: list[dict[str, Any]]) -> tuple[int, float]:
    """(most at once, on the average) between the first start and the last end, of jobs that ran."""
    spans = [(job["began"], job["ended"]) for job in jobs if "began" in job]
    if not spans:
        return 0, 0.0
    now = most = 0
    # An end before a start at the same moment: those two were not at once.
    for _, change in sorted([(began, 1) for began, _ in spans] + [(ended, -1) for _, ended in spans]):
        now += change
        most = max(most, now)
    whole = max(ended for _, ended in spans) - min(began for began, _ in spans)
    return most, sum(ended - began for began, ended in spans) / whole if whole > 0 else 0.0


def _trials(folder: str) -> list[dict[str, Any]]:
    """In the order of their names; one that a crash left without its record has no time, and counts as not done."""
    root = os.path.join(folder, "trials")
    names = sorted(os.listdir(root)) if os.path.isdir(root) else []
    found = []
    for name in names:
        path = os.path.join(root, name, "trial.json")
        if os.path.isfile(path):
            jobs = sorted(_lines(os.path.join(root, name, "jobs.jsonl")), key=lambda job: str(job["key"]))
            found.append(dict(_json(path), jobs=jobs, telemetry=_lines(os.path.join(root, name, "telemetry.jsonl"))))
    return found


def _json(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError) as error:
        raise Fault(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise Fault(f"{path} is no JSON object")
    return found


def _lines(path: str) -> list[dict[str, Any]]:
    """A last line that a crash cut off is left out."""
    found = []
    try:
        with open(path, encoding="utf-8") as file:
            for line in file:
                try:
                    found.append(json.loads(line))
                except ValueError:
                    continue
    except OSError:
        pass
    return found


def _quantile(ordered: list[float], share: float) -> float | None:
    """Linear between the two nearest."""
    if not ordered:
        return None
    place = (len(ordered) - 1) * share
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _mean(numbers: list[float]) -> float | None:
    return sum(numbers) / len(numbers) if numbers else None


def _ratio(one: float | None, other: float | None) -> float | None:
    return _round(one / other) if one is not None and other else None


def _round(number: float | None) -> float | None:
    return None if number is None else round(number, _DIGITS)


def _text(number: float | None, digits: int = 2) -> str:
    return "-" if number is None else f"{number:.{digits}f}"


COLUMNS = (
    "concurrency", "trials", "jobs", PASSED, FAILED, TIMEOUT, CANCELLED, "jobs_per_hour", "audio_seconds_per_hour", "speedup",
    "efficiency", "p95_by_one",
)  # fmt: skip


def _csv(summary: dict[str, Any]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*COLUMNS, "speedup_low", "speedup_high", "p50_s", "p95_s", "overlap_mean"])
    for level in summary["levels"]:
        low, high = level["speedup_95"] or (None, None)
        rest = [low, high, level["latency"]["p50"], level["latency"]["p95"], level["overlap_mean"]]
        writer.writerow(["" if value is None else value for value in [*(level[name] for name in COLUMNS), *rest]])
    return text.getvalue()


def report(summary: dict[str, Any]) -> str:
    """For people."""
    head = "Concurrency on {}".format(summary["host"])
    verdict = (
        "No recommendation: synthetic." if summary["recommended"] is None
        else f"Recommended: **{summary['recommended']} at once**{', provisionally' if summary['provisional'] else ''}."
    )  # fmt: skip
    lines = ["# " + head, "", verdict, ""]
    lines += [
        "| at once | passed | songs/h | by one at a time | 95 % | p50 s | p95 s | p95 by one | in flight |",
        "|" + "---|" * 9,
    ]
    for level in summary["levels"]:
        low, high = level["speedup_95"] or (None, None)
        cells = [
            str(level["concurrency"]),
            f"{level['passed']} of {level['jobs']}",
            _text(level["jobs_per_hour"], 1),
            _text(level["speedup"]),
            f"{_text(low)} to {_text(high)}" if low is not None else "-",
            _text(level["latency"]["p50"]),
            _text(level["latency"]["p95"]),
            _text(level["p95_by_one"]),
            _text(level["overlap_mean"]),
        ]
        lines.append("| {} |".format(" | ".join(cells)))
    lines += ["", *("- " + why for why in summary["why"]), ""]
    if summary["doubts"]:
        lines += ["What keeps this provisional:", "", *("- " + doubt for doubt in summary["doubts"]), ""]
    return "\n".join(lines)
