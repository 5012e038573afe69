"""How many clients there may be beside the runners."""

from __future__ import annotations

import resource

import pytest

from sparkguard.web import connections


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "most", "most_waiting"),
    [
        (1024, 524288, 65536, 32640, 128),
        (1024, 1024, 1024, 384, 128),
        (128, 128, 128, 16, 16),
        (1024, resource.RLIM_INFINITY, 65536, 32640, 128),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, resource.RLIM_INFINITY, 32640, 128),
    ],
)
def test_a_limit_of_open_files(
    soft: int, hard: int, raised: int, most: int, most_waiting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is raised as far as it may be, and what runners need is kept of it."""
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda what: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda what, both: limits.append(both))
    connections.raise_limit()
    assert limits[-1] == (raised, hard)
    assert (connections.most(), connections.most_waiting()) == (most, most_waiting)
