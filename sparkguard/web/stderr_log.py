"""Our log on stderr: `level: category: message` a line, and where stderr is the journal's, with its priority.

A thread writes it: a terminal that is held by Ctrl-S, or a pipe that nobody reads, must not hold up the loop.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_MOST_LINES = 10_000
_LAST_SECONDS = 1.0  # for what is left at the end, where nobody may read any more
_PRIORITIES = {logging.DEBUG: "<7>", logging.INFO: "<6>", logging.WARNING: "<4>", logging.ERROR: "<3>", logging.CRITICAL: "<2>"}


@contextmanager
def writing(level: int, env: Mapping[str, str]) -> Iterator[None]:
    """All logging goes there within the block."""
    handler = Handler(_is_journal(env))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for library in ("aiohttp", "asyncio"):
        logging.getLogger(library).setLevel(max(level, logging.WARNING))
    try:
        yield
    finally:
        handler.finish()


class Handler(logging.Handler):
    """Drops lines rather than wait, and says how many."""

    def __init__(self, with_priority: bool) -> None:
        super().__init__()
        self._with_priority = with_priority
        self._lines: queue.Queue[str | None] = queue.Queue(_MOST_LINES)
        self._lost = 0
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()

    def emit(self, record: logging.LogRecord) -> None:
        category = getattr(record, "category", None) or record.name.rpartition(".")[2]
        text = f"{record.levelname.lower()}: {category}: {record.getMessage()}"
        if record.exc_info:
            text += "\n" + logging.Formatter().formatException(record.exc_info)
        try:
            if self._lost:
                self._lines.put_nowait(self._marked(logging.WARNING, f"warning: log: {self._lost} lines were lost"))
                self._lost = 0
            self._lines.put_nowait(self._marked(record.levelno, text))
        except queue.Full:
            self._lost += 1

    def _marked(self, level: int, text: str) -> str:
        mark = _PRIORITIES.get(level, "<6>") if self._with_priority else ""
        return "".join(f"{mark}{line}\n" for line in text.split("\n"))

    def _write(self) -> None:
        while (text := self._lines.get()) is not None:
            raw = text.encode("utf-8", "replace")
            try:
                while raw:  # not by sys.stderr: its lock, held by a thread that waits, makes the interpreter's end a crash
                    raw = raw[os.write(2, raw) :]
            except OSError:
                pass  # closed: there is nobody to tell

    def finish(self) -> None:
        """Writes what is left, if somebody reads it."""
        try:
            self._lines.put_nowait(None)
        except queue.Full:
            return
        self._writer.join(_LAST_SECONDS)


def _is_journal(env: Mapping[str, str]) -> bool:
    """$JOURNAL_STREAM is the device and inode of the journal's stream: stderr may be redirected since."""
    try:
        stat = os.fstat(2)
    except OSError:
        return False
    return env.get("JOURNAL_STREAM", "") == f"{stat.st_dev}:{stat.st_ino}"
