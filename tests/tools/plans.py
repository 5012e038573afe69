#!/usr/bin/env python3
"""Records what a real llama-server plans for every shape of the tests, or prints how far off the estimate is.

tests/tools/plans.py record SERVER BUILD     writes tests/data/gguf/plans-BUILD.json
tests/tools/plans.py table                   prints the tables of docs/needs.md from the records
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

import gguf_shapes  # noqa: E402
import llama_server  # noqa: E402

DATA = TESTS / "data" / "gguf"


def record(server: Path, build: int) -> None:
    plans: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in gguf_shapes.SHAPES:
            model = llama_server.shape_file(Path(folder), name)
            plans[name] = {}
            for setting in llama_server.SETTINGS:
                try:
                    plans[name][setting] = llama_server.ask(server, model, setting)
                except RuntimeError as error:
                    plans[name][setting] = None
                    print(name, setting, str(error).strip().splitlines()[-1][:150], file=sys.stderr)
    lines = [f"  {json.dumps(name)}: {json.dumps(settings)}" for name, settings in plans.items()]
    (DATA / f"plans-{build}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def table() -> None:
    for path in sorted(DATA.glob("plans-*.json"), reverse=True):
        build = int(path.stem.removeprefix("plans-"))
        print(f"### Build {build}\n")
        print("| shape | weights and cache | work buffers | largest error | at |")
        print("|---|---|---|---|---|")
        with tempfile.TemporaryDirectory() as folder:
            for name, settings in json.loads(path.read_text()).items():
                print(row(Path(folder), name, settings, build))
        print()


def row(folder: Path, name: str, settings: dict[str, dict[str, list[int]] | None], build: int) -> str:
    model = llama_server.shape_file(folder, name)
    exact = asked = 0
    worst, where, theirs_there = 0, "", 0
    low, high = 0, 0
    for setting, plan in settings.items():
        if plan is None:
            continue
        for part in llama_server.estimated(model, setting, build).devices:
            ours, theirs = llama_server.numbers_of(part), plan[part.device]
            asked += 1
            exact += list(ours[:2]) == list(theirs[:2])
            off = ours[2] - theirs[2]
            low, high = min(low, off), max(high, off)
            if abs(off) > abs(worst):
                worst, where, theirs_there = off, f"{setting}, {part.device}", theirs[2]
    if not asked:
        return f"| {name} | this build cannot load it | | | |"
    spread = f"{low:+d} to {high:+d} MB" if low or high else "exact"
    largest = f"{100 * worst / theirs_there:+.1f} %" if worst else "0"
    return f"| {name} | {exact} of {asked} exact | {spread} | {largest} | {where or 'none'} |"


def main() -> None:
    if sys.argv[1:2] == ["record"]:
        record(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        table()


if __name__ == "__main__":
    main()
