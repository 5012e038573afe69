"""What a transition tells, also when nobody listens any more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema

from sparkguard.cluster.events import Events, words

SCHEMA = json.loads((Path(__file__).parents[3] / "docs" / "schemas" / "events.json").read_text())


def test_an_event_has_its_time_and_its_words() -> None:
    """Every line carries the schema's version, the time in UTC, and the seconds since the command began."""
    told: list[dict[str, Any]] = []
    Events(told.append)("fence", node="head", text="let no command of an older transition act any more")
    jsonschema.validate(told[0], SCHEMA)
    assert (told[0]["schema_version"], told[0]["node"]) == (1, "head")


def test_a_reader_that_is_gone_ends_no_transition() -> None:
    """The dashboard that started `up` may be closed: what is under way goes on in silence."""
    calls = []

    def broken(event: dict[str, Any]) -> None:
        calls.append(event)
        raise BrokenPipeError

    events = Events(broken)
    events("start", text="up ds4")
    events("ready", text="ds4 is ready")
    assert len(calls) == 1


def test_words_for_people() -> None:
    """The clock, the node, and every further line indented."""
    assert (
        words({"event": "stop", "elapsed_s": 65.2, "node": "head", "text": "stop it\nSIGTERM"})
        == "  1:05  head: stop it\n        SIGTERM"
    )
    assert words({"event": "stopped", "elapsed_s": 0.0}) == "  0:00  stopped"
