"""What the page sends is an object of plain words, or is refused."""

from __future__ import annotations

import pytest

from sparkguard.cluster.ui import body

BAD = {
    "no JSON": b"{",
    "no object": b"[1]",
    "nested without end": b"[" * 60_000,
    "no UTF-8": b'{"verb": "\xff"}',
    "half a character": b'{"verb": "up", "model": "\\ud800"}',
    "a NUL": b'{"verb": "up", "model": "small\\u0000x"}',
    "a NUL in a key": b'{"a\\u0000": 1}',
    "two lines, deep inside": b'{"a": [{"b": ["x\\ny"]}]}',
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD)
def test_what_is_no_request(data: bytes) -> None:
    """It is a ValueError, whatever is wrong with it: a task that dies of it would tell the page nothing."""
    with pytest.raises(ValueError):
        body.read(data)


def test_what_is_a_request() -> None:
    """A password may hold any letters."""
    assert body.read('{"verb": "reboot", "password": "pä ß€=-"}'.encode()) == {"verb": "reboot", "password": "pä ß€=-"}
