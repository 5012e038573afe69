"""sparkguard load: what it draws while a model loads."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from sparkguard.cli.load import _show_progress, bar, progress_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

ID = "folder/small"


class Supervisor:
    """What cli/front.py would say of one."""

    def get(self, path: str) -> dict[str, object]:
        assert path == "/api/models/alias"
        return {"id": ID, "state": "stopped"}

    def lines(self, path: str) -> Iterator[str]:
        yield f"data: {json.dumps({'type': 'snapshot', 'models': [], 'runners': [], 'devices': []})}"
        yield ":"
        for model, share in ((ID, 0.25), ("other", 0.5), (ID, 0.75)):
            yield f"data: {json.dumps({'type': 'runner', 'runner': {'id': model, 'model': model, 'progress': share}})}"


def test_progress_is_of_the_model_that_loads() -> None:
    """The share is taken from its runner's events, and drawn within bounds."""
    event = {"type": "runner", "runner": {"id": ID, "model": ID, "progress": 0.5}}
    assert progress_of(event, ID) == 0.5
    assert progress_of(event, "other") is None
    assert progress_of({"type": "queue", "model": ID, "queue": 1}, ID) is None
    assert bar("m", 0.5) == f"m [{'#' * 18}{'.' * 18}]  50%"
    assert bar("m", 1.5).endswith("100%")


def test_progress_is_drawn_for_an_alias_too(capsys: pytest.CaptureFixture[str]) -> None:
    """Events name models by their ids."""
    _show_progress(Supervisor(), "alias")  # type: ignore[arg-type]
    drawn = capsys.readouterr().err.split("\r")
    assert [text.rpartition(" ")[2] for text in drawn if text] == ["25%", "75%"]
