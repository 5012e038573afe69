"""spark-serve list, without any node."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from sparkguard.cli.cluster import VERBS, main

REPOSITORY = Path(__file__).parents[4]
SCHEMAS = REPOSITORY / "docs" / "schemas"
# What a verb prints with --json, where its schema is not named after it.
_TOLD_BY = {**dict.fromkeys(("up", "stop", "wait", "use", "reboot", "shutdown"), "events")}
_NO_JSON = ("logs", "ui")


def test_the_example_as_the_schema_says(capsys: pytest.CaptureFixture[str]) -> None:
    """Every entry of the example stands there, with all that its schema has and nothing else."""
    assert main(["--config", str(REPOSITORY / "models.example.toml"), "list", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    jsonschema.validate(told, json.loads((SCHEMAS / "list.json").read_text()))
    assert {"ds4", "ds41-exl3", "qwen38-dual", "glm53", "glm53-exl3", "glm53-tensorfold", "mimo26", "yue"} <= {
        model["id"] for model in told["models"]
    }


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in _NO_JSON])
def test_every_stream_has_a_schema(verb: str) -> None:
    """Each verb with --json has one, which is a schema and says whose it is."""
    schema = json.loads((SCHEMAS / f"{_TOLD_BY.get(verb, verb)}.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    assert "spark-serve" in schema["title"] and verb in schema["title"]
