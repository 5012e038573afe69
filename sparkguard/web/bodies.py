"""The bodies of requests: how large one may be, how many bytes of all of them are held at once, and how much work one may make.

Anybody who reaches the port may send them, and what they take is memory that no estimate has counted.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from aiohttp import web

from sparkguard.web.errors import ApiError

if TYPE_CHECKING:
    from types import TracebackType

MOST_HELD_BYTES = 512 << 20
# JSON of two bytes becomes an object of 64. So many take some 0.5 s and 150 MB, and a prompt of so many commas or numbers
# is longer than any model's context.
MOST_VALUES = 2 << 20
_RETRY_SECONDS = 5
_SMALL_BYTES = 64 << 10  # always taken: few large ones must not shut out the others


class Bodies:
    """Of one front."""

    def __init__(self, most_bytes: int, most_held_bytes: int = MOST_HELD_BYTES) -> None:
        self.most_bytes = most_bytes
        self.most_held_bytes = most_held_bytes
        self.held_bytes = 0

    def one(self) -> Body:
        return Body(self)


class Body:
    """Counts from read() to the end of its block."""

    def __init__(self, all: Bodies) -> None:
        self._all = all
        self._bytes = 0

    def __enter__(self) -> Body:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._hold(0)

    async def read(self, request: web.BaseRequest) -> bytes:
        """Raises ApiError."""
        if (request.content_length or 0) > self._all.most_bytes:
            raise _too_large(self._all.most_bytes)
        parts = []
        size = 0
        async for part in request.content.iter_any():
            size += len(part)
            if size > self._all.most_bytes:
                raise _too_large(self._all.most_bytes)
            self._hold(size)
            parts.append(part)
        return b"".join(parts)

    def _hold(self, amount: int) -> None:
        held = self._all.held_bytes - self._bytes + amount
        if amount > _SMALL_BYTES and held > self._all.most_held_bytes:
            raise ApiError(503, "too many large requests are here at once; ask again later", "busy", retry_after=_RETRY_SECONDS)
        self._all.held_bytes, self._bytes = held, amount


def parse(body: bytes) -> dict[str, Any]:
    """Raises ApiError."""
    if sum(map(body.count, (b",", b":", b"[", b"{"))) > MOST_VALUES:
        raise ApiError(400, f"the body has more than {MOST_VALUES} commas, colons and brackets", "invalid_body")
    try:
        asked = json.loads(body)
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", "invalid_json") from None
    except ValueError as error:
        raise ApiError(400, f"the body is no JSON: {_what(error)}", "invalid_json") from None
    if not isinstance(asked, dict):
        raise ApiError(400, "the body is no JSON object", "invalid_json")
    return asked


def _what(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos}"
    return "not UTF-8" if isinstance(error, UnicodeDecodeError) else "it has a number of thousands of digits"


def _too_large(limit_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit_bytes >> 20} MB", "body_too_large")
