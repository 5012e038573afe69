"""The samples that the page is tested with are such as `spark-serve watch --json` says them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
from browser import dashboard as world


def lenient(schema: Any) -> Any:
    """Without what is required: the script leaves out what the page does not read."""
    if isinstance(schema, dict):
        return {key: lenient(value) for key, value in schema.items() if key != "required"}
    return [lenient(value) for value in schema] if isinstance(schema, list) else schema


def test_samples_are_scripted_as_the_schema_says() -> None:
    """No key that watch does not say, and none of another kind."""
    schema = json.loads((Path(__file__).parents[2] / "docs" / "schemas" / "watch.json").read_text())
    jsonschema.validate(world.sample(), lenient(schema))
