"""docs/reference.md has the keys of every JSON object, and no other."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sparkguard.cli import cap, check, config, doctor, plan, status, why
from sparkguard.core import explain
from sparkguard.errors import SparkguardError

if TYPE_CHECKING:
    from conftest import Place

REFERENCE = Path(__file__).parents[3] / "docs" / "reference.md"


def documented(heading: str) -> set[str]:
    """The words in backticks in the first column of the table under a heading."""
    text = REFERENCE.read_text(encoding="utf-8").partition(f"{heading}\n")[2]
    assert text, f"reference.md has no heading {heading!r}"
    rows = [line for line in re.split(r"^#", text, flags=re.MULTILINE)[0].splitlines() if line.startswith("|")]
    return {word for row in rows for word in re.findall(r"`([^`]+)`", row.split("|")[1])}


OBJECTS: dict[str, Callable[[Place], dict[str, Any]]] = {
    "## The verdict (`vllm_mem_budget.sh --json`, `sparkguard check --json`)": lambda place: explain.as_json(
        check.judge(["--gpu-memory-utilization", "0.1"], (), place.env, place.roots)
    ),
    "### `sparkguard status --json`": lambda place: status.as_json_object(status.see(place.env, place.roots)),
    "### `sparkguard plan --json`": lambda place: plan.collect((), place.env, place.roots),
    "### `sparkguard config --json`": lambda place: config.collect(None, place.env)[0],
    "### `sparkguard cap UNIT --json`": lambda place: cap.in_force("x.service", place.env, place.roots),
    "### `sparkguard why UNIT --json`": lambda place: dict.fromkeys(("unit", "cause", "message", "evidence")),
}


@pytest.mark.parametrize(("heading", "answer"), OBJECTS.items(), ids=lambda value: value if isinstance(value, str) else "")
def test_the_keys_are_documented(place: Place, heading: str, answer: Callable[[Place], dict[str, Any]]) -> None:
    """Each key of the object has its row; schema_version may stand in the sentence above all of them."""
    assert documented(heading) - {"schema_version"} == answer(place).keys() - {"schema_version"}


def test_every_cause_and_check_key_is_documented() -> None:
    """The causes of `why`, and the keys of a check of `doctor`."""
    text = REFERENCE.read_text(encoding="utf-8")
    (check_json,) = doctor.as_json_object([doctor.Check("x", True, "y")])["checks"]
    assert [word for word in (*why.CAUSES, *check_json) if f"`{word}`" not in text] == []


def test_an_error_is_documented() -> None:
    """The reason of an object without a verdict stands among the reasons."""
    row = next(line for line in REFERENCE.read_text(encoding="utf-8").splitlines() if line.startswith("| `reason` |"))
    assert f"`{explain.error_json('m', SparkguardError('x'))['reason']}`" in row
