"""What may be believed of a run."""

from __future__ import annotations

import pytest

from sparkguard.cluster.bench.checks import _exclusive


@pytest.mark.parametrize(
    ("told", "counted", "requests", "whole", "expected"),
    [
        (1000, 1000.0, 10, True, True),
        (1000, 1010.0, 10, True, True),
        (1000, 990.0, 10, True, True),
        (1000, 1011.0, 10, True, False),
        (1000, 980.0, 10, True, None),
        (1000, None, 10, True, None),
        (1000, 1000.0, 10, False, None),
    ],
    ids=["equal", "a token a request more", "a token a request fewer", "others'", "too few", "not known", "a count is missing"],
)
def test_exclusive(told: int, counted: float | None, requests: int, whole: bool, expected: bool | None) -> None:
    """Yes within a token a request; no where there are more; and where it cannot be known, None."""
    assert _exclusive(told, counted, requests, whole) is expected
