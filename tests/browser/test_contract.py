"""What the scripted spark-serve says of benchmarks is what the real one would say."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
from browser import dashboard as world


def test_benchmarks_are_scripted_as_the_schema_says() -> None:
    """A list, a run that is shown, and a comparison: docs/schemas/bench.json describes them all."""
    schema = json.loads((Path(__file__).parents[2] / "docs" / "schemas" / "bench.json").read_text())
    rows = {"schema_version": 1, "type": "runs", "runs": [world.run("r2"), world.run("r1", "prefill", status="cancelled")]}
    for value in (rows, world.whole_run("r2"), world.comparison()):
        jsonschema.validate(value, schema)
