"""Our log: what a line says of itself to the journal, and what becomes of it where there is none."""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkguard.web import stderr_log
from sparkguard.web.stderr_log import Handler, Line, ToJournal


@pytest.fixture
def listener(home: Path) -> Iterator[socket.socket]:
    """What stands for journald's socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(home / "journal"))
        listener.settimeout(20)
        yield listener


def logged(home: Path, message: str, level: int = logging.INFO, name: str = "sparkguard.supervisor", **about: str) -> None:
    handler = Handler(ToJournal(str(home / "journal")))
    handler.emit(logging.getLogger(name).makeRecord(name, level, "", 0, message, (), None, extra=about or None))
    handler.finish()


def fields(raw: bytes) -> dict[str, str]:
    """As journald reads them: KEY=value, or KEY, the length in eight bytes, and the value."""
    found = {}
    while raw:
        head, _, raw = raw.partition(b"\n")
        key, equals, value = head.partition(b"=")
        if not equals:
            (length,) = struct.unpack("<Q", raw[:8])
            value, raw = raw[8 : 8 + length], raw[8 + length + 1 :]
        found[key.decode()] = value.decode()
    return found


def test_a_line_with_its_fields(listener: socket.socket, home: Path) -> None:
    """The model and the runner that it is about, its category, and syslog's priority."""
    logged(home, "a: ended (crash)", logging.WARNING, model="folder/a", runner="folder/a@3")
    assert fields(listener.recv(4096)) == {
        "MESSAGE": "warning: supervisor: a: ended (crash)",
        "PRIORITY": "4",
        "SYSLOG_IDENTIFIER": "sparkguard",
        "SPARK_CATEGORY": "supervisor",
        "SPARK_MODEL": "folder/a",
        "SPARK_RUNNER": "folder/a@3",
    }


def test_a_line_about_no_model(listener: socket.socket, home: Path) -> None:
    """It has no such field, rather than an empty one; an engine's category is its own."""
    logged(home, "model loaded", category="srv")
    told = fields(listener.recv(4096))
    assert told["SPARK_CATEGORY"] == "srv"
    assert not told.keys() & {"SPARK_MODEL", "SPARK_RUNNER"}


@pytest.mark.parametrize("message", ["one\ntwo\nPRIORITY=0\n", "\n", "=\n=", "MESSAGE_ID\n" + "x" * 8])
def test_no_message_makes_fields_of_its_own(listener: socket.socket, home: Path, message: str) -> None:
    """A line break within a message is part of it."""
    logged(home, message, model="a\nPRIORITY=1")
    told = fields(listener.recv(4096))
    assert (told["MESSAGE"], told["PRIORITY"]) == (f"info: supervisor: {message}", "6")
    assert told["SPARK_MODEL"] == "a\nPRIORITY=1"


def test_without_a_journal_it_goes_to_stderr(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With the mark that systemd reads a priority from, before each of its lines; nothing is lost."""
    logged(home, "one\ntwo", logging.ERROR)
    assert capfd.readouterr().err == "<3>error: supervisor: one\n<3>two\n"


def test_a_line_that_is_too_long_for_the_journal(listener: socket.socket, home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A datagram has its limit; stderr has none."""
    logged(home, "x" * (4 << 20))
    assert capfd.readouterr().err == f"<6>info: supervisor: {'x' * (4 << 20)}\n"


@pytest.mark.parametrize("is_journal", [False, True])
def test_where_stderr_goes_decides(
    is_journal: bool, listener: socket.socket, home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """To the journal only if stderr is the journal's: what was redirected stays there."""
    stat = os.fstat(2)
    env = {"JOURNAL_STREAM": f"{stat.st_dev}:{stat.st_ino if is_journal else 0}"}
    before, level = logging.getLogger().handlers[:], logging.getLogger().level
    try:
        with stderr_log.writing(logging.INFO, env, str(home / "journal")):
            logging.getLogger("sparkguard.serve").info("here")
    finally:
        logging.getLogger().handlers[:] = before
        logging.getLogger().setLevel(level)
    listener.setblocking(False)
    if is_journal:
        assert b"MESSAGE=info: serve: here\n" in listener.recv(4096)
    assert capfd.readouterr().err == ("" if is_journal else "info: serve: here\n")


def test_a_flood_is_counted() -> None:
    """Whoever logs never waits for the writer, and how many lines were lost is said."""
    told: list[Line] = []
    may_write, has_written = threading.Event(), threading.Event()

    def write(line: Line) -> None:
        may_write.wait(20)
        told.append(line)
        if len(told) == 100:
            has_written.set()

    handler = Handler(write)
    record = logging.makeLogRecord({"name": "sparkguard.serve", "levelno": logging.INFO, "levelname": "INFO", "msg": "x"})
    for _ in range(stderr_log._MOST_LINES + 50):
        handler.emit(record)
    may_write.set()
    assert has_written.wait(20)
    handler.emit(record)
    handler.finish()
    lost = [line.text for line in told if line.category == "log"]
    assert lost in (["warning: log: 50 lines were lost"], ["warning: log: 49 lines were lost"])
