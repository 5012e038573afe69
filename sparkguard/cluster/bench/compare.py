"""Two runs side by side: first what differs in what was measured, then the numbers. Pure."""

from __future__ import annotations

from typing import Any

# Where two runs differ in one of these, their numbers are of different things, and that is said before them.
TARGET = ("model", "name", "image", "digest", "nodes", "engine", "url")
SETTINGS = ("kind", "max_tokens", "requests", "reasoning", "repeats", "seed", "fixed_length")
METHOD = ("output_length",)
CHECKS = ("exclusive", "cache_missed", "output_length_fixed")
NUMBERS = ("ttft_s", "ttfo_s", "decode_tokens_per_s", "prefill_tokens_per_s", "prefill_client_tokens_per_s", "gap_s", "seconds")
# What makes the numbers incomparable, as opposed to what is merely worth knowing (another url, another seed).
DECISIVE = frozenset(
    (
        "model",
        "image",
        "digest",
        "nodes",
        "engine",
        "kind",
        "max_tokens",
        "reasoning",
        "output_length",
        "cache_missed",
        "exclusive",
    )
)


def compare(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """ratio is second by first. A level that only one has is named, and compared with nothing."""
    differences = []
    for part, keys in (("target", TARGET), ("settings", SETTINGS), ("method", METHOD), ("checks", CHECKS)):
        for key in keys:
            one, other = first[part].get(key), second[part].get(key)
            if one != other:
                differences.append({"what": f"{part}.{key}", "first": one, "second": other, "decisive": key in DECISIVE})
    ours, theirs = _levels(first), _levels(second)
    shared = [key for key in ours if key in theirs]
    return {
        "schema_version": 1,
        "type": "comparison",
        "first": _who(first),
        "second": _who(second),
        "comparable": not any(one["decisive"] for one in differences) and _whole(first) and _whole(second) and bool(shared),
        "differences": differences,
        "levels": [_level(key, ours[key], theirs[key]) for key in shared],
        "only_first": [_key(key) for key in ours if key not in theirs],
        "only_second": [_key(key) for key in theirs if key not in ours],
    }


def _levels(run: dict[str, Any]) -> dict[tuple[int, int], dict[str, Any]]:
    return {(level["prompt_tokens_wanted"], level["concurrency"]): level for level in run["levels"]}


def _who(run: dict[str, Any]) -> dict[str, Any]:
    return {key: run[key] for key in ("id", "at", "status", "kind")} | {"model": run["target"]["model"]}


def _whole(run: dict[str, Any]) -> bool:
    return bool(run["status"] == "completed")


def _key(key: tuple[int, int]) -> dict[str, int]:
    return {"prompt_tokens_wanted": key[0], "concurrency": key[1]}


def _level(key: tuple[int, int], first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    numbers = {}
    for name in NUMBERS:
        one, other = _median(first, name), _median(second, name)
        numbers[name] = {"first": one, "second": other, "ratio": _ratio(one, other)}
    one, other = _throughput(first), _throughput(second)
    numbers["generated_tokens_per_s"] = {"first": one, "second": other, "ratio": _ratio(one, other)}
    return {**_key(key), "ok": [first["ok"], second["ok"]], "n": [first["n"], second["n"]], "medians": numbers}


def _median(level: dict[str, Any], name: str) -> float | None:
    found = level["statistics"].get(name)
    return found["median"] if found else None


def _throughput(level: dict[str, Any]) -> float | None:
    found = level["over_repeats"]["generated_tokens_per_s"]
    return found["mean"] if found else None


def _ratio(first: float | None, second: float | None) -> float | None:
    return round(second / first, 4) if first and second is not None else None
