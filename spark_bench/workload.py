"""The workload file, checked whole; and from it and a seed the corpus that every level renders."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
from typing import Any

from spark_bench.fault import Fault

VERSION = 1
KEYS = ("version", "rights_basis", "attestation", "vocal", "instrumental", "workloads", "runner", "stop")
ITEM_KEYS = ("id", "genre", "lyrics", "run_n_segments", "max_new_tokens", "min_seconds", "max_seconds")
RIGHTS = ("operator_owned", "written_license", "own_voice")
REFERENCES = ("attestation", "vocal", "instrumental")
MAX_BYTES = 4 << 20
MIN_SECONDS, MAX_SECONDS = 5.0, 900.0  # of a song, where the workload does not say
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,47}")
_SECTION = re.compile(r"\[\w+\]")


def load(path: str, synthetic: bool) -> dict[str, Any]:
    """The file's content with absolute paths of the references. Raises Fault naming every fault.

    A synthetic run renders nothing, so it needs no references, no rights and no runner.
    """
    try:
        with open(path, encoding="utf-8") as file:
            found = json.loads(file.read(MAX_BYTES + 1))
    except (OSError, ValueError) as error:
        raise Fault(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise Fault(f"{path} is no JSON object")
    faults = [f"unknown key {key}" for key in found if key not in KEYS]
    if found.get("version") != VERSION:
        faults.append(f"version is {found.get('version')!r}, and {VERSION} is known")
    items = found.get("workloads")
    if not isinstance(items, list) or not items:
        faults.append("workloads names none")
    else:
        for item in items:
            faults += _item_faults(item)
        names = [item.get("id") for item in items if isinstance(item, dict)]
        faults += [f"workload {name} is there twice" for name in sorted({str(n) for n in names if names.count(n) > 1})]
    if not synthetic:
        faults += _real_faults(found, os.path.dirname(os.path.abspath(path)))
    if faults:
        raise Fault("{}: {}".format(path, "; ".join(faults)))
    return found


def _item_faults(item: Any) -> list[str]:
    if not isinstance(item, dict):
        return ["a workload is no object"]
    name = item.get("id")
    if not isinstance(name, str) or not _ID.fullmatch(name):
        return [f"the id {name!r} of a workload is none of up to 48 letters, digits, - and _"]
    faults = [f"{name}: unknown key {key}" for key in item if key not in ITEM_KEYS]
    for key in ("genre", "lyrics"):
        if not isinstance(item.get(key), str) or not item[key].strip() or "\0" in item[key]:
            faults.append(f"{name}: {key} is empty")
    sections = len(_SECTION.findall(item["lyrics"])) if isinstance(item.get("lyrics"), str) else 0
    segments = item.get("run_n_segments", max(2, sections))
    if not _is_int(segments, 1, 64) or segments < sections:
        faults.append(f"{name}: run_n_segments {segments!r} does not hold the lyrics' {sections} sections")
    if not _is_int(item.get("max_new_tokens", 3000), 1, 100_000):
        faults.append(f"{name}: max_new_tokens is no number of tokens")
    least, most = item.get("min_seconds", MIN_SECONDS), item.get("max_seconds", MAX_SECONDS)
    if not _is_number(least) or not _is_number(most) or not 0 <= least <= most:
        faults.append(f"{name}: min_seconds and max_seconds are no range")
    return faults


def _real_faults(found: dict[str, Any], folder: str) -> list[str]:
    faults = []
    if found.get("rights_basis") not in RIGHTS:
        faults.append("rights_basis is none of {}".format(", ".join(RIGHTS)))
    for key in REFERENCES:
        value = found.get(key)
        path = os.path.join(folder, os.path.expanduser(value)) if isinstance(value, str) and value else ""
        if not os.path.isfile(path):
            faults.append(f"{key} names no file here")
        else:
            found[key] = path
    for key in ("runner", "stop"):
        words = found.get(key)
        if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
            deed = "renders" if key == "runner" else "ends"
            faults.append(f"{key} is no list of words (the command that {deed} a job)")
    return faults


def _is_int(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value and abs(value) != float("inf")


def corpus(workload: dict[str, Any], jobs: int, seed: int, iteration: int) -> list[dict[str, Any]]:
    """The same jobs for every level and iteration; an iteration has its own order, and all of its levels have that one."""
    items = workload["workloads"]
    made = []
    for number in range(jobs):
        item = items[number % len(items)]
        made.append({"key": f"{item['id']}-{number:03}", "workload": item["id"], "seed": job_seed(seed, number)})
    random.Random(f"{seed} order {iteration}").shuffle(made)
    return made


def job_seed(seed: int, number: int) -> int:
    """32 bits, the same on every machine and Python."""
    return int.from_bytes(hashlib.sha256(b"%d job %d" % (seed, number)).digest()[:4], "big")


def schedule(levels: list[int], iterations: int) -> list[dict[str, int]]:
    """Each level once an iteration. Every other one runs backwards, and each pair begins one further on, so that no level is
    always the first on a cold machine or always the last on a hot one."""
    made = []
    for iteration in range(iterations):
        start = (iteration // 2) % len(levels)
        order = levels[start:] + levels[:start]
        made += [{"iteration": iteration, "concurrency": level} for level in (order if iteration % 2 == 0 else order[::-1])]
    return made


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=True).encode()).hexdigest()
