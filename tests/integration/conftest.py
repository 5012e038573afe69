"""A world of its own for each test that starts servers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_rig.fixture import rig  # noqa: F401
from pid_namespace import PidNamespace
from world import World


@pytest.fixture
def world(home: Path) -> Iterator[World]:
    with PidNamespace() as inside:
        yield World(home, inside)
