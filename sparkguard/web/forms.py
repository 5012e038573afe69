"""A form with a file in it (multipart/form-data, RFC 7578), of which only two short fields are read."""

from __future__ import annotations

import re

_BOUNDARY = re.compile(r'boundary=(?:"([^"]{1,70})"|([^\s;,"]{1,70}))', re.IGNORECASE)
_NAME = re.compile(rb'(?:^|[;\s])name="?([^";\r\n]*)"?', re.IGNORECASE)
_MOST_HEAD_BYTES, _MOST_FIELD_BYTES = 4096, 4096
_FIELDS = ("model", "stream")


def fields(content_type: str, body: bytes) -> dict[str, str] | None:
    """Those of `model` and `stream` that are there; None: no form that can be read."""
    found = _BOUNDARY.search(content_type)
    if found is None:
        return None
    mark = b"--" + (found[1] or found[2]).encode("latin-1", "replace")
    read: dict[str, str] = {}
    at = body.find(mark)
    if at < 0:
        return None
    while True:
        at += len(mark)
        end = body.find(b"\r\n" + mark, at)
        if end < 0:
            return read if body.startswith(b"--", at) else None
        head_end = body.find(b"\r\n\r\n", at, min(end, at + _MOST_HEAD_BYTES))
        if head_end >= 0 and end - head_end - 4 <= _MOST_FIELD_BYTES:
            name = _NAME.search(body[at:head_end])
            if name and name[1].decode("latin-1") in _FIELDS:
                read[name[1].decode("latin-1")] = body[head_end + 4 : end].decode("utf-8", "replace")
        at = end + 2
