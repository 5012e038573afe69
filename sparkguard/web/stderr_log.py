"""Our log on stderr: `level: category: message` a line; where stderr is the journal's, to the journal, with fields.

A thread writes it: a terminal that is held by Ctrl-S, or a pipe that nobody reads, must not hold up the loop.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from sparkguard.core.record import Record
from sparkguard.web import journal

_MOST_LINES = 10_000
_LAST_SECONDS = 1.0  # for what is left at the end, where nobody may read any more
_PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}


class Line(Record):
    """What one call of a logger says; model and runner where it is about one."""

    priority: int  # syslog's
    text: str
    category: str
    model: str = ""
    runner: str = ""


@contextmanager
def writing(level: int, env: Mapping[str, str], address: str = journal.ADDRESS) -> Iterator[None]:
    """All logging goes there within the block."""
    write: Callable[[Line], None] = to_stderr
    if _is_journal(env):
        write = ToJournal(address) if journal.is_there(address) else to_stderr_of_the_journal
    handler = Handler(write)
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for library in ("aiohttp", "asyncio"):
        logging.getLogger(library).setLevel(max(level, logging.WARNING))
    try:
        yield
    finally:
        handler.finish()


class Handler(logging.Handler):
    """Drops lines rather than wait, and says how many."""

    def __init__(self, write: Callable[[Line], None]) -> None:
        super().__init__()
        self._lines: queue.Queue[Line | None] = queue.Queue(_MOST_LINES)
        self._lost = 0
        self._writer = threading.Thread(target=self._write, args=(write,), daemon=True)
        self._writer.start()

    def emit(self, record: logging.LogRecord) -> None:
        category = getattr(record, "category", None) or record.name.rpartition(".")[2]
        text = f"{record.levelname.lower()}: {category}: {record.getMessage()}"
        if record.exc_info:
            text += "\n" + logging.Formatter().formatException(record.exc_info)
        model, runner = getattr(record, "model", ""), getattr(record, "runner", "")
        try:
            if self._lost:
                lost = f"warning: log: {self._lost} lines were lost"
                self._lines.put_nowait(Line(_PRIORITIES[logging.WARNING], lost, "log"))
                self._lost = 0
            self._lines.put_nowait(Line(_PRIORITIES.get(record.levelno, 6), text, category, model, runner))
        except queue.Full:
            self._lost += 1

    def _write(self, write: Callable[[Line], None]) -> None:
        while (line := self._lines.get()) is not None:
            write(line)

    def finish(self) -> None:
        """Writes what is left, if somebody reads it."""
        try:
            self._lines.put_nowait(None)
        except queue.Full:
            return
        self._writer.join(_LAST_SECONDS)


class ToJournal:
    """One entry a call, a traceback in one piece. What the journal does not take goes to stderr, which is its too."""

    def __init__(self, address: str = journal.ADDRESS) -> None:
        self._address = address

    def __call__(self, line: Line) -> None:
        fields = {
            "MESSAGE": line.text,
            "PRIORITY": str(line.priority),
            "SYSLOG_IDENTIFIER": "sparkguard",
            "SPARK_CATEGORY": line.category,
            "SPARK_MODEL": line.model,
            "SPARK_RUNNER": line.runner,
        }
        try:
            journal.send({key: value for key, value in fields.items() if value}, self._address)
        except OSError:
            to_stderr_of_the_journal(line)


def to_stderr(line: Line, mark: str = "") -> None:
    raw = "".join(f"{mark}{one}\n" for one in line.text.split("\n")).encode("utf-8", "replace")
    try:
        while raw:  # not by sys.stderr: its lock, held by a thread that waits, makes the interpreter's end a crash
            raw = raw[os.write(2, raw) :]
    except OSError:
        pass  # closed: there is nobody to tell


def to_stderr_of_the_journal(line: Line) -> None:
    """With the mark before each line that the journal takes for its priority (sd-daemon(3))."""
    to_stderr(line, f"<{line.priority}>")


def _is_journal(env: Mapping[str, str]) -> bool:
    """$JOURNAL_STREAM is the device and inode of the journal's stream: stderr may be redirected since."""
    try:
        stat = os.fstat(2)
    except OSError:
        return False
    return env.get("JOURNAL_STREAM", "") == f"{stat.st_dev}:{stat.st_ino}"
