"""A small HTTP client for probes: one request a connection, with a bound on time and on the answer's size.

aiohttp takes longer to import than `status` may take in all (150 ms), and the servers asked are on the same LAN. Proxies of
the environment are not used: the question is whether this laptop reaches the endpoint.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from sparkguard.cluster import json_text
from sparkguard.cluster.deadline import within
from sparkguard.core.record import Record
from sparkguard.errors import UNAVAILABLE, SparkguardError

if TYPE_CHECKING:
    from collections.abc import Mapping

LIMIT_BYTES = 2 << 20
_HEAD_LIMIT_BYTES = 64 << 10


class Unanswered(SparkguardError):
    """cause: refused, timeout, unreachable, protocol, too_large."""

    def __init__(self, url: str, cause: str, detail: str) -> None:
        super().__init__(f"{url}: {detail}", None, UNAVAILABLE)
        self.cause = cause


class Answer(Record):
    status: int
    headers: tuple[tuple[str, str], ...]  # names in lower case
    body: bytes

    def json(self) -> Any:
        """None when it is no JSON."""
        try:
            return json_text.loads(self.body)
        except ValueError:
            return None


async def ask(
    url: str, body: object = None, *, seconds: float, headers: Mapping[str, str] | None = None, limit_bytes: int = LIMIT_BYTES
) -> Answer:
    """GET, or POST when there is a body, which is sent as JSON. Raises Unanswered; any status is an answer."""
    try:
        return await within(seconds, _ask(url, body, headers or {}, limit_bytes))
    except (asyncio.TimeoutError, TimeoutError):
        raise Unanswered(url, "timeout", f"no answer within {seconds:g} s") from None
    except ConnectionRefusedError:
        raise Unanswered(url, "refused", "nothing listens there") from None
    except (EOFError, ConnectionError):
        raise Unanswered(url, "protocol", "the connection ended before the answer did") from None
    except OSError as error:
        raise Unanswered(url, "unreachable", error.strerror or str(error)) from None
    except (ValueError, asyncio.LimitOverrunError):
        raise Unanswered(url, "protocol", "what answers does not speak HTTP") from None


async def _ask(url: str, body: object, headers: Mapping[str, str], limit_bytes: int) -> Answer:
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    host, port = parts.hostname or "", parts.port or (443 if secure else 80)
    context = ssl.create_default_context() if secure else None
    reader, writer = await asyncio.open_connection(host, port, ssl=context, limit=_HEAD_LIMIT_BYTES)
    try:
        payload = b"" if body is None else json.dumps(body).encode()
        lines = {"Host": parts.netloc.rpartition("@")[2], "Connection": "close", "Accept": "*/*", **headers}
        if body is not None:
            lines |= {"Content-Type": "application/json", "Content-Length": str(len(payload))}
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        head = f"{'GET' if body is None else 'POST'} {target} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in lines.items())
        writer.write(head.encode() + b"\r\n" + payload)
        await writer.drain()
        status, found = await _head(reader)
        return Answer(status, tuple(found.items()), await _body(reader, found, status, limit_bytes, url))
    finally:
        writer.close()


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    while True:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        version, _, rest = head[0].partition(" ")
        if not version.startswith("HTTP/1."):
            raise ValueError(version)
        status = int(rest[:3])
        if status >= 200:  # 1xx comes before the answer
            break
    pairs = (line.partition(":") for line in head[1:] if line)
    return status, {name.strip().lower(): value.strip() for name, _, value in pairs}


async def _body(reader: asyncio.StreamReader, headers: dict[str, str], status: int, limit_bytes: int, url: str) -> bytes:
    if status in (204, 304):
        return b""
    parts: list[bytes] = []
    size = 0

    def take(part: bytes) -> None:
        nonlocal size
        size += len(part)
        if size > limit_bytes:
            raise Unanswered(url, "too_large", f"the answer is larger than {limit_bytes >> 10} KiB")
        parts.append(part)

    if "chunked" in headers.get("transfer-encoding", "").lower():
        while length := int((await reader.readline()).split(b";")[0], 16):
            if length > limit_bytes:
                take(bytes(limit_bytes + 1))
            take(await reader.readexactly(length))
            await reader.readexactly(2)
    elif "content-length" in headers:
        length = int(headers["content-length"])
        if length > limit_bytes:
            take(bytes(limit_bytes + 1))
        take(await reader.readexactly(length))
    else:
        while part := await reader.read(64 << 10):
            take(part)
    return b"".join(parts)
