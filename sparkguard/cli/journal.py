"""Lines of the systemd journal: through systemd-python where it is installed, else from journalctl."""

from __future__ import annotations

import json
from importlib import import_module
from typing import TYPE_CHECKING, Any

from sparkguard.core.record import Record
from sparkguard.probe import bounded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    # Alternatives, each of fields that must all match: [{"_UID": "1000", "USER_UNIT": "a.service"}, {...}].
    Matches = Sequence[Mapping[str, str]]

SECONDS = 10.0
MISSING = "the journal cannot be read: pip install 'sparkguard[systemd]', or put journalctl on PATH"
_FIELDS = ("MESSAGE", "MESSAGE_ID", "SYSLOG_IDENTIFIER", "_PID", "_TRANSPORT", "USER_INVOCATION_ID", "_SYSTEMD_INVOCATION_ID")


class Entry(Record):
    """microseconds are of the realtime clock; invocation is the unit's start that the line belongs to."""

    microseconds: int
    message: str
    identifier: str
    message_id: str
    invocation: str
    kernel: bool


def last(matches: Matches, count: int, since: int | None, env: Mapping[str, str]) -> list[Entry] | None:
    """The last lines that match, oldest first, not older than since (microseconds); None when there is no way to ask."""
    found = _from_library(matches, count, since)
    return _from_journalctl(matches, count, since, env) if found is None else found


def _from_library(matches: Matches, count: int, since: int | None) -> list[Entry] | None:
    try:
        journal = import_module("systemd.journal")
    except ImportError:
        return None
    try:
        reader = journal.Reader(converters={"MESSAGE": _text})
    except OSError:
        return None
    with reader:
        for number, match in enumerate(matches):
            if number:
                reader.add_disjunction()
            for key, value in match.items():
                reader.add_match(**{key: value})
        reader.seek_tail()
        entries: list[Entry] = []
        while len(entries) < count and (row := reader.get_previous()):
            stamp = row["__REALTIME_TIMESTAMP"]
            at = int(stamp.timestamp() * 1_000_000)
            if since is not None and at < since:
                break
            entries.append(_entry(at, row))
    return entries[::-1]


def _from_journalctl(matches: Matches, count: int, since: int | None, env: Mapping[str, str]) -> list[Entry] | None:
    argv = ["journalctl", "-q", "--no-pager", "-o", "json", f"--output-fields={','.join(_FIELDS)}", "-n", str(count)]
    if since is not None:
        argv.append(f"--since=@{since // 1_000_000}")
    for number, match in enumerate(matches):
        argv += (["+"] if number else []) + [f"{key}={value}" for key, value in match.items()]
    try:
        status, output = bounded.run(argv, SECONDS, env)
    except OSError:
        return None
    if status != 0 and not output:
        return None
    rows = []
    for line in output.splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue  # cut off by the limit on its output or its time
    return [_entry(int(row["__REALTIME_TIMESTAMP"]), row) for row in rows]


def _entry(at: int, row: Mapping[str, Any]) -> Entry:
    return Entry(
        at,
        _text(row.get("MESSAGE")),
        _text(row.get("SYSLOG_IDENTIFIER")),
        _text(row.get("MESSAGE_ID")).replace("-", ""),
        _text(row.get("USER_INVOCATION_ID") or row.get("_SYSTEMD_INVOCATION_ID")).replace("-", ""),
        _text(row.get("_TRANSPORT")) == "kernel",
    )


def _text(value: Any) -> str:
    """journalctl gives what is no UTF-8 as a list of numbers, systemd-python as bytes; a repeated field is a list of texts."""
    if isinstance(value, list):
        if value and isinstance(value[0], int):
            value = bytes(value)
        else:
            value = "\n".join(str(one) for one in value)
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return "" if value is None else str(value)
