"""What the engine says, as lines 'level: category: message': mapped, cut, kept for a while, and without anybody's prompt.

A runner is read as fast as it writes, whoever listens and however slowly, because an engine whose pipe is full stands still.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping

KEPT_LINES = 2000
KEPT_BYTES = 512 << 10  # of one model's runners; some 4000 usual lines
LINE_BYTES = 2000  # the longest line kept; the engine's own metadata dump stays below
FILE_BYTES = 1 << 20  # of a log file, before it becomes the one old file beside it
_LINES_A_SECOND = 2000  # a load prints some 250, a request some 15; the rest of a flood is counted, not kept
_WAITING_LINES = 1000  # of one slow reader
# An engine writes each line by itself, some 15 for a request, and every one would wake us while the answer is under way. A
# pipe holds 64 KB meanwhile, so an engine would have to write 3 MB a second to be held up.
_PAUSE_SECONDS = 0.02
# '0.00.012.006 I srv  update_slots: all slots are idle': time, level, and mostly a function's name before the colon.
_LINE = re.compile(r"^(?:[\d.]+ )?(?P<level>[EWID]) (?P<rest>.*)$", re.DOTALL)
_CATEGORY = re.compile(r"^(?P<category>[A-Za-z_][\w ()~:<>]{0,60}?)\s*: +(?P<message>.*)$", re.DOTALL)
_LETTERS = {"E": "error", "W": "warning", "I": "info", "D": "debug"}
# Of what the engine tells in detail, so that the measured memory can be read, this is for people.
_TOLD = re.compile(r"model loaded|offloaded \d+/\d+ layers|buffer size =|listening on")
# About a server that the network can reach; ours is on a private socket.
_NOT_OURS = re.compile(r"^-+$|CORS|security risk|llama.cpp/pull/25655")
LOADED = "model loaded"
# From when requests run, text without a level may be a request's own (a grammar is printed back in full). What ggml, the C++
# runtime and CUDA say on the way down is no request's; 'what():' may quote one.
_DEATH = re.compile(
    r"^(\S+\.(c|cc|cpp|cu|cuh|h|m|mm):\d+: |GGML_|ggml_|CUDA error|terminate called|Aborted|  ?\S+\.so[\w.]*[(+])"
)
_EXCEPTION = re.compile(r"got exception: (?:\{\"error\":\{\"code\":(?P<code>\d+))?.*", re.DOTALL)
_TYPE = re.compile(r"\"type\":\"(?P<type>\w+)\"\}+\s*$")
_QUOTES_REQUESTS = re.compile(r"(last read|invalid string|literal|while parsing|prompt|grammar|Jinja|content)\b.*", re.IGNORECASE)


def read_line(line: str, serving: bool) -> tuple[str, str, str] | None:
    """(level, category, message) of a line of llama-server; None for one that may be a request's own text."""
    found = _LINE.match(line)
    if found is None:
        if serving:
            return ("error", "engine", line) if _DEATH.match(line) else None
        return "debug", "engine", line
    level, rest = _LETTERS[found["level"]], found["rest"]
    split = _CATEGORY.match(rest)
    category, message = ("engine", rest) if split is None else (" ".join(split["category"].split()), split["message"])
    if serving and level == "debug":
        return None  # --verbosity 5, by an argument of the user's, prints prompts in many places
    if "got exception:" in message:
        kind = _TYPE.search(message)
        said = _EXCEPTION.search(message)
        code = said["code"] if said and said["code"] else "?"
        message = f"a request failed: {code} {kind['type'] if kind else ''}".rstrip()
    elif serving and level in ("error", "warning"):
        message = _QUOTES_REQUESTS.sub(lambda match: f"{match[1]} (left out)", message)
    if (level == "info" and not _TOLD.search(message)) or (level == "warning" and _NOT_OURS.search(message)):
        level = "debug"
    return level, category, message


class Ring:
    """The last lines of one model's runners. A reader that does not keep up loses lines and is told how many."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque()
        self._bytes = 0
        self._readers: set[_Reader] = set()

    def add(self, line: str) -> None:
        self._lines.append(line)
        self._bytes += len(line)
        while len(self._lines) > KEPT_LINES or self._bytes > KEPT_BYTES:
            self._bytes -= len(self._lines.popleft())
        for reader in self._readers:
            reader.offer(line)

    def lines(self) -> list[str]:
        return list(self._lines)

    def follow(self) -> AsyncIterator[str]:
        reader = _Reader()
        self._readers.add(reader)
        return reader.lines(lambda: self._readers.discard(reader))


class _Reader:
    def __init__(self) -> None:
        self._waiting: deque[str] = deque()
        self._lost = 0
        self._news = asyncio.Event()

    def offer(self, line: str) -> None:
        if len(self._waiting) >= _WAITING_LINES:
            self._waiting.popleft()
            self._lost += 1
        self._waiting.append(line)
        self._news.set()

    async def lines(self, done: Callable[[], None]) -> AsyncIterator[str]:
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                while self._waiting:
                    if self._lost:
                        lost, self._lost = self._lost, 0
                        yield f"warning: log: {lost} lines were lost, this reader is too slow"
                    yield self._waiting.popleft()
        finally:
            done()


class LogFile:
    """One file and one old one, each of at most FILE_BYTES. A disk that takes no more costs the log, never the runner."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.lost = 0  # lines that could not be written
        self.error = ""
        self._file: int | None = None
        self._bytes = 0

    def write(self, text: str, lines: int) -> None:
        raw = text.encode("utf-8", "replace")
        try:
            if self._file is None or self._bytes + len(raw) > FILE_BYTES:
                self._turn()
            assert self._file is not None
            written = os.write(self._file, raw)
            self._bytes += written
            if written < len(raw):
                raise OSError(28, "No space left on device")
        except OSError as error:
            self.lost += lines
            self.error = error.strerror or str(error)

    def _turn(self) -> None:
        self.close()
        os.makedirs(os.path.dirname(self.path), mode=0o700, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(self.path, flags, 0o600)
        self._bytes = os.fstat(self._file).st_size
        if self._bytes > FILE_BYTES // 2:
            os.replace(self.path, f"{self.path}.old")
            os.close(self._file)
            self._file = os.open(self.path, flags, 0o600)
            self._bytes = 0

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class Capture(asyncio.Protocol):
    """The reading end of one runner's pipe. on_line hears each line of the engine itself, as long as it is loading."""

    def __init__(
        self,
        ring: Ring,
        file: LogFile | None,
        logger: logging.Logger,
        on_line: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        about: Mapping[str, str] | None = None,  # whose lines they are, for the log that they are passed on to
    ) -> None:
        self.serving = False
        self._about = about or {}
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # What an exit is judged by. An assertion goes to stderr at once, and a whole load's lines may come from the engine's
        # own queue after it.
        self.last: deque[str] = deque(maxlen=400)
        self.size = 0  # bytes read: a loading runner that says something is alive
        self._ring, self._file, self._logger, self._on_line, self._clock = ring, file, logger, on_line, clock
        self._transport: asyncio.ReadTransport | None = None
        self._pause: asyncio.TimerHandle | None = None
        self._hurry = False
        self._rest = b""
        self._cut = 0  # bytes of an overlong line that were thrown away
        self._second, self._in_second, self._left_out = 0.0, 0, 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.ReadTransport)
        self._transport = transport

    def stop(self) -> None:
        """Reads no more: a process that outlived its runner may hold the other end."""
        if self._transport is not None:
            self._transport.close()

    def hurry(self) -> None:
        """Reads without pauses from now on: the runner has ended, and its last words are waited for."""
        self._hurry = True
        if self._pause is not None:
            self._pause.cancel()
            self._read_on()

    def _read_on(self) -> None:
        self._pause = None
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        self.size += len(data)
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        kept: list[str] = []
        for raw in lines:
            self._take(raw, kept)
        if len(self._rest) > LINE_BYTES:
            self._cut += len(self._rest) - LINE_BYTES
            self._rest = self._rest[:LINE_BYTES]
        self._keep(kept)
        if self.serving and not self._hurry and self._transport is not None:
            self._transport.pause_reading()
            self._pause = asyncio.get_running_loop().call_later(_PAUSE_SECONDS, self._read_on)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._pause is not None:
            self._pause.cancel()
        kept: list[str] = []
        if self._rest:
            self._take(self._rest, kept)
            self._rest = b""
        self._tell_left_out(kept)
        self._keep(kept)
        if self._file is not None:
            self._file.close()
            if self._file.lost:
                self._warn("%s lacks %d lines of this runner", self._file.path, self._file.lost)
        if not self.closed.done():
            self.closed.set_result(None)

    def _take(self, raw: bytes, kept: list[str]) -> None:
        cut, self._cut = self._cut, 0
        now = self._clock()
        if now - self._second >= 1:
            self._tell_left_out(kept)
            self._second, self._in_second = now, 0
        self._in_second += 1
        if self._in_second > _LINES_A_SECOND:
            self._left_out += 1
            return
        if len(raw) > LINE_BYTES:
            cut += len(raw) - LINE_BYTES
            raw = raw[:LINE_BYTES]
        text = raw.decode("utf-8", "replace").rstrip("\r")
        if not text.isprintable():
            text = "".join(c if c.isprintable() or c == "\t" else "?" for c in text)
        if not text.strip():
            return
        if not self.serving:
            self._on_line(text)
        read = read_line(text, self.serving)
        if LOADED in text:
            self.serving = True
        if read is None:
            return
        level, category, message = read
        if cut:
            message += f" ... ({cut} more bytes were cut)"
        if level != "debug" or not self.serving:
            self.last.append(message if category == "engine" else f"{category}: {message}")
        self._say(level, category, message, kept)

    def _tell_left_out(self, kept: list[str]) -> None:
        if self._left_out:
            left_out, self._left_out = self._left_out, 0
            self._say("warning", "log", f"{left_out} lines were left out, they came too fast", kept)

    def _say(self, level: str, category: str, message: str, kept: list[str]) -> None:
        kept.append(f"{level}: {category}: {message}")
        number = logging.getLevelName(level.upper())
        if self._logger.isEnabledFor(number):
            self._logger.log(number, "%s", message, extra={"category": category, **self._about})

    def _keep(self, kept: list[str]) -> None:
        if not kept:
            return
        for line in kept:
            self._ring.add(line)
        if self._file is not None:
            was_well = not self._file.error
            self._file.write("\n".join(kept) + "\n", len(kept))
            if was_well and self._file.error:
                self._warn("%s cannot be written: %s; the last lines are kept in memory", self._file.path, self._file.error)

    def _warn(self, text: str, *words: object) -> None:
        self._logger.warning(text, *words, extra={"category": "log", **self._about})
