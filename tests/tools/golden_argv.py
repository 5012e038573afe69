"""golden_argv.py: writes tests/unit/cluster/golden anew: the arguments of `docker create`, one a line, for each rank.

For who changes the example catalog or a recipe on purpose: read the difference before it is committed.
"""

from __future__ import annotations

from pathlib import Path

from sparkguard.cluster.catalog import read as catalog
from sparkguard.cluster.catalog import recipes

REPOSITORY = Path(__file__).parents[2]
GOLDEN = REPOSITORY / "tests" / "unit" / "cluster" / "golden"


def example() -> dict[str, str]:
    """Name of the file -> its text, for all ranks of the example catalog."""
    found = catalog.load(REPOSITORY / "models.example.toml", example=True)
    files = {}
    for model in found.models:
        for rank in recipes.allocation(found, model, found.select(None, model)).ranks:
            files[f"{model.name}.{rank.rank}.txt"] = "\n".join(rank.create) + "\n"
    return files


if __name__ == "__main__":
    for old in GOLDEN.glob("*.txt"):
        old.unlink()
    for name, text in example().items():
        (GOLDEN / name).write_text(text)
