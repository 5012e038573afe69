"""The rig as a fixture: two nodes that are up, for one test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster_rig.rig import Rig, why_not


@pytest.fixture
def rig(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    if reason := why_not():
        pytest.skip(f"NOT RUN: {reason}")
    monkeypatch.setenv("SPARK_SERVE_STATE_DIR", str(home / "state"))
    with Rig(tmp_path / "rig") as rig:
        yield rig
