"""The truth about vLLM's arguments, from vLLM's own parser: tests/data/argv/corpus.json, and the spelling of its options.

The reader itself is held to the corpus in tests/unit/probe/test_vllm_argv.py.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from guest import REPOSITORY

from sparkguard.core.share import parse_share
from sparkguard.probe import vllm_argv

CORPUS = REPOSITORY / "tests" / "data" / "argv" / "corpus.json"
ROWS = json.loads(CORPUS.read_text())


class Answers(NamedTuple):
    options: list[str]
    defaults: dict[str, Any]
    rows: list[Any]


@pytest.fixture(scope="module")
def answers(vllm: Path) -> Answers:
    """All rows in one process: importing vLLM takes 10 s."""
    command = [str(vllm / "bin" / "python"), str(REPOSITORY / "tests" / "tools" / "vllm_parse.py"), str(CORPUS)]
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    # Some of vLLM's imports talk on stdout.
    first, *rest = (json.loads(line) for line in done.stdout.splitlines() if line.startswith(("{", '"')))
    return Answers(first["options"], first["defaults"], rest)


def test_the_corpus_is_what_vllm_says(answers: Answers) -> None:
    """Each row of the corpus holds what vLLM's parser makes of it."""
    assert len(answers.rows) == len(ROWS) > 250
    wrong = [(row, answer) for row, answer in zip(ROWS, answers.rows) if not agrees(row, answer, answers.defaults)]
    assert wrong == []


def agrees(row: dict[str, Any], answer: Any, defaults: dict[str, Any]) -> bool:
    if "expect" in row:
        return isinstance(answer, dict) if row["expect"] == "dies" else bool(answer == row["expect"])
    if isinstance(answer, str):
        return False
    told = {name: value for name, value in answer.items() if value != defaults[name]}
    if told.pop("uds", None) is not None or told.pop("headless", False):
        told["port"] = None
    if "share" in told:
        told["share"] = round(told["share"] * 10**9)
    if "devices" in told:
        told["devices"] = ",".join(map(str, told["devices"]))
    wanted = {name: value for name, value in row.items() if name in defaults}
    if "share" in wanted:
        wanted["share"] = parse_share(wanted["share"])
    if "devices" in wanted:
        wanted["devices"] = wanted["devices"].replace(" ", "")
    return bool(told == wanted)


def test_every_prefix_means_what_it_means_to_vllm(answers: Answers) -> None:
    """Every prefix of every option of vLLM is either the same option to the reader, or none to both."""
    known = {option: name for option in answers.options if (name := resolved(option))}
    assert len(known) > 20
    checked = 0
    for option in answers.options:
        for end in range(2 if option[1] != "-" else 3, len(option) + 1):
            prefix = option[:end]
            fitting = [other for other in answers.options if other.startswith(prefix)]
            meant = prefix if prefix in fitting else fitting[0] if len(fitting) == 1 else ""
            assert resolved(prefix) == known.get(meant), prefix
            checked += 1
    assert checked > 5000


def resolved(option: str) -> str | None:
    found = vllm_argv.options([option, "1"])
    return found[0][0] if found else None
