"""How long a library of many models takes to be listed, with what each needs: `python bench/library.py [--models 500]`.

Headers are those of well-known models of 1 to 700 billion parameters, made as the tests make them, in turn; vocabularies are
left out, and files come from the page cache. Prints milliseconds, the median of the turns; asserts nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests")]

import gguf_shapes  # noqa: E402

from sparkguard.core.types import RAM, Machine, MemoryPool  # noqa: E402
from sparkguard.probe.llama_server import LlamaServer  # noqa: E402
from sparkguard.settings import load  # noqa: E402
from sparkguard.supervisor import devices, runner_settings  # noqa: E402
from sparkguard.supervisor.library import ModelLibrary  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=500)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(f"# {options.models} models of {len(gguf_shapes.SHAPES)} shapes, {options.turns} turns, {os.cpu_count()} CPUs")
        for name, took, known in measure(Path(folder), options.models, options.turns):
            print(f"{name:46} {took:8.1f} ms   {known} with their needs")
    return 0


def measure(root: Path, count: int, turns: int) -> list[tuple[str, float, int]]:
    """(what, milliseconds in the median, the least number of models whose needs were there)."""
    make_models(root / "models", count)
    rows: dict[str, list[tuple[float, int]]] = {}
    for _ in range(turns):
        for name, result in turn(root):
            rows.setdefault(name, []).append(result)
    measured = []
    for name, results in rows.items():
        times, counts = zip(*results, strict=True)
        measured.append((name, statistics.median(times), min(counts)))
    return measured


def turn(root: Path) -> list[tuple[str, tuple[float, int]]]:
    (root / "kept.json").unlink(missing_ok=True)
    library = made(root)
    found = [("first list ever", scan(library))]
    while not (root / "kept.json").exists():  # written once all is exact
        asyncio.run(library.watch())
        scan(library)
    found.append(("listed again", scan(library)))
    found.append(("first after a restart", scan(made(root))))
    return found


def made(root: Path) -> ModelLibrary:
    site = runner_settings.read(load({"HOME": str(root), "MODELS_DIR": str(root / "models")}))
    server = LlamaServer("/engine", "1", None, frozenset(), ())
    found = devices.find(Machine((MemoryPool("ram", RAM, 1 << 40),)), server, site, {})
    return ModelLibrary(lambda: site, str(root / "runners.toml"), server, lambda: found, kept_in=str(root / "kept.json"))


def scan(library: ModelLibrary) -> tuple[float, int]:
    """Milliseconds until all cards are there, and on how many there are needs."""
    began = time.perf_counter()
    models = asyncio.run(library.scan())
    cards = [library.describe(model.id) for model in models]
    took = 1000 * (time.perf_counter() - began)
    return took, sum(card["needs"] is not None for card in cards)


def make_models(folder: Path, count: int) -> None:
    """One file of each shape, copied: a copy is a file of its own, and is read as one."""
    folder.mkdir(parents=True)
    shapes = list(gguf_shapes.SHAPES.values())
    for number, shape in enumerate(shapes[:count]):
        shape().write(folder / f"m{number:04}.gguf")
    for number in range(len(shapes), count):
        source = folder / f"m{number % len(shapes):04}.gguf"
        with source.open("rb") as file:
            header = file.read(4 << 20)
        target = folder / f"m{number:04}.gguf"
        target.write_bytes(header)
        os.truncate(target, source.stat().st_size)


if __name__ == "__main__":
    sys.exit(main())
