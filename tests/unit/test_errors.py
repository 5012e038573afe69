"""The one exception, and the one table of exit statuses."""

from __future__ import annotations

import pytest

from sparkguard import errors

MEANINGS = {
    "OK": 0, "FAILED": 1, "USAGE": 2, "UNAVAILABLE": 69, "SOFTWARE": 70, "OSERR": 71, "TEMPFAIL": 75, "CONFIG": 78,
    "NOT_FOUND": 127, "INTERRUPTED": 130,
}  # fmt: skip


def test_every_status_is_in_the_table() -> None:
    """The constants and the table are the same statuses, each with systemd's name and a meaning."""
    assert {name: getattr(errors, name) for name in MEANINGS} == MEANINGS
    assert list(errors.STATUSES) == list(MEANINGS.values())
    assert all(name and meaning for name, meaning in errors.STATUSES.values())


REPORTS = {
    "with a hint": (errors.SparkguardError("no model", "set one"), "sparkguard: no model\n  set one\n"),
    "without": (errors.SparkguardError("no model"), "sparkguard: no model\n"),
}


@pytest.mark.parametrize(("error", "text"), REPORTS.values(), ids=REPORTS)
def test_report(error: errors.SparkguardError, text: str) -> None:
    """What is wrong on one line, what to do about it on the next."""
    assert errors.report(error) == text


def test_bad_configuration_is_the_default_status() -> None:
    """An error that says nothing else is 78: it will not pass by itself."""
    assert errors.SparkguardError("x").status == errors.CONFIG
    assert errors.SparkguardError("x", status=errors.OSERR).status == errors.OSERR
