"""The journal's two readers; both against a real journal in tests/system/test_cli.py."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from sparkguard.cli import journal
from sparkguard.cli.journal import Entry

ROW = {"__REALTIME_TIMESTAMP": "1795993488888537", "SYSLOG_IDENTIFIER": "vllm-serve.sh", "_TRANSPORT": "stdout"}


@pytest.fixture
def journalctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder first on PATH, with a journalctl that prints the file `rows` and notes its arguments."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    program = tmp_path / "journalctl"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >{tmp_path}/words\ncat {tmp_path}/rows\n')
    program.chmod(0o755)
    return tmp_path


def read(folder: Path, *rows: object) -> list[Entry] | None:
    (folder / "rows").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return journal._from_journalctl([{"_UID": "1", "USER_UNIT": "a.service"}, {"X": "y"}], 5, 1_795_993_488_000_000, os.environ)


@pytest.mark.parametrize(
    ("message", "text"),
    [("plain", "plain"), ([72, 105, 255], "Hi\ufffd"), (None, ""), (["a", "b"], "a\nb")],
    ids=["text", "bytes that are no UTF-8", "too long to be told", "a field that stands twice"],
)
def test_a_message(journalctl: Path, message: object, text: str) -> None:
    """Every form in which journalctl prints one becomes text."""
    assert read(journalctl, {**ROW, "MESSAGE": message}) == [Entry(1795993488888537, text, "vllm-serve.sh", "", "", False)]


def test_the_question(journalctl: Path) -> None:
    """Fields of one alternative must all match, alternatives are joined by +, and the time is in seconds."""
    read(journalctl)
    words = (journalctl / "words").read_text().split()
    assert words[-4:] == ["_UID=1", "USER_UNIT=a.service", "+", "X=y"]
    assert "--since=@1795993488" in words
    assert words[words.index("-n") + 1] == "5"


def test_ids_are_plain_hex(journalctl: Path) -> None:
    """systemd-python prints them with dashes; the unit's start is known by either of two fields."""
    row = {
        **ROW,
        "MESSAGE": "m",
        "MESSAGE_ID": "de5b426a-63be-47a7-b6ac-3eaac82e2f6f",
        "USER_INVOCATION_ID": "ab",
        "_TRANSPORT": "kernel",
    }
    (entry,) = read(journalctl, row) or ()
    assert (entry.message_id, entry.invocation, entry.kernel) == ("de5b426a63be47a7b6ac3eaac82e2f6f", "ab", True)


def test_a_line_that_was_cut_off_is_passed_over(journalctl: Path) -> None:
    """The rest still counts."""
    (journalctl / "rows").write_text(json.dumps({**ROW, "MESSAGE": "whole"}) + '\n{"MESSAGE": "cu')
    assert [entry.message for entry in journal._from_journalctl([], 5, None, os.environ) or ()] == ["whole"]


def test_no_journal_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither library nor program is None, which is not an empty journal."""
    monkeypatch.setattr(journal, "_from_library", lambda *_: None)
    monkeypatch.setenv("PATH", "/nowhere")
    assert journal.last([], 5, None, os.environ) is None
