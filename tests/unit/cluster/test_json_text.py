"""JSON of others: a value, or ValueError, and nothing that could not be told on."""

from __future__ import annotations

import json

import pytest

from sparkguard.cluster import json_text

HOSTILE = {
    "nested too deep": "[" * 200_000,
    "objects too deep": '{"a":' * 200_000,
    "NaN": "[NaN]",
    "Infinity": "[-Infinity]",
    "beyond a float": "[1e999]",
    "a number without end": "[" + "9" * 5000 + "]",
    "cut off": '{"a": [1',
    "no UTF-8": b"[\xff\xfe\xff]",
    "nothing": "",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_what_is_no_json_is_a_value_error(text: str | bytes) -> None:
    """No other exception comes of it, so that no caller forgets one."""
    with pytest.raises(ValueError):
        json_text.loads(text)


def test_what_is_json_is_read() -> None:
    """And can be written again."""
    value = {"a": [1, -2.5, 1e300, None, True, "x"], "b": {"c": 12345678901234567890}}
    assert json_text.loads(json.dumps(value)) == value
