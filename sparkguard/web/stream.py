"""Passing a stream on: unbuffered, whole events, and never held up by a reader who does not read."""

from __future__ import annotations

import re
import socket
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiohttp import web

# What a client may leave unread before the engine has to wait for it: an answer of some 20,000 tokens as events. Until
# then the engine finishes at its own pace and serves the next request.
UNREAD_BYTES = 8 << 20
# A client that then takes nothing for so long is gone for us.
STALL_SECONDS = 60.0
# An event may come in pieces, and its first piece waits for the rest, so that an error event never follows half an event.
# Longer ones are no events of these APIs: they are passed on as they come.
EVENT_BYTES = 1 << 20


class Events:
    """Cuts a stream of server-sent events after whole events."""

    def __init__(self) -> None:
        self._rest = b""
        self.broken = False  # a part of an event has been passed on

    def feed(self, chunk: bytes) -> bytes:
        """What can be passed on now."""
        data = self._rest + chunk if self._rest else chunk
        if data.endswith(b"\n\n"):
            self._rest, self.broken = b"", False
            return data
        cut = max((at + len(end) for end in (b"\n\n", b"\r\n\r\n") if (at := data.rfind(end)) >= 0), default=0)
        if len(data) - cut > EVENT_BYTES:
            self._rest, self.broken = b"", True
            return data
        self.broken = self.broken and not cut
        self._rest = data[cut:]
        return data[:cut]

    def rest(self) -> bytes:
        """What the stream's own end leaves."""
        rest, self._rest = self._rest, b""
        return rest


def let_read_slowly(request: web.Request) -> None:
    """From now on a write waits only for a client that has left UNREAD_BYTES unread, and the kernel ends its connection when
    it has then taken nothing for STALL_SECONDS; that reaches the handler as a client that is gone.
    """
    transport = request.transport
    if transport is None:
        return
    transport.set_write_buffer_limits(high=UNREAD_BYTES)
    sock = transport.get_extra_info("socket")
    if sock is not None and sock.family != socket.AF_UNIX and sys.platform == "linux":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STALL_SECONDS * 1000))


_PROMPT = re.compile(rb'(?<!\\)"(?:prompt_tokens|input_tokens|tokens_evaluated)"\s*:\s*(\d+)')
_CACHED = re.compile(rb'(?<!\\)"cache_read_input_tokens"\s*:\s*(\d+)')
_GENERATED = re.compile(rb'(?<!\\)"(?:completion_tokens|output_tokens|tokens_predicted)"\s*:\s*(\d+)')
_TIMINGS = re.compile(rb'(?<!\\)"cache_n"\s*:\s*(\d+),\s*"prompt_n"\s*:\s*(\d+)')
_PREDICTED = re.compile(rb'(?<!\\)"predicted_n"\s*:\s*(\d+)')
# The usage stands at an answer's beginning or end, and a text between can be long.
WINDOW = 4096


def count_tokens(head: bytes, tail: bytes) -> tuple[int, int]:
    """(prompt, generated) as the engine reports them at an answer's beginning and end; 0 where it does not.

    A quote within a generated text is escaped in JSON, so that a text that looks like a report is none.
    """
    prompt = generated = 0
    for text in (head, tail):
        if found := _last(_PROMPT, text):
            prompt = int(found[1]) + (int(cached[1]) if (cached := _last(_CACHED, text)) else 0)
        if found := _last(_GENERATED, text):
            generated = int(found[1])
    if not prompt and (found := _last(_TIMINGS, tail)):
        prompt = int(found[1]) + int(found[2])
    if not generated and (found := _last(_PREDICTED, tail)):
        generated = int(found[1])
    return prompt, generated


def _last(pattern: re.Pattern[bytes], text: bytes) -> re.Match[bytes] | None:
    found = list(pattern.finditer(text))
    return found[-1] if found else None
