"""A file is replaced whole, with its mode, and only if nobody changed it in between: here, and by the node's program."""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from sparkguard.cluster.clients.places import Here
from sparkguard.cluster.node import edit
from sparkguard.cluster.node.base import Fault
from sparkguard.errors import SparkguardError

Write = Callable[[Path, "str | None", str], None]


def here(path: Path, old: str | None, new: str) -> None:
    asyncio.run(Here(str(path)).write(old, new))


def on_node(path: Path, old: str | None, new: str) -> None:
    digest = None if old is None else hashlib.sha256(old.encode()).hexdigest()
    edit._write(str(path), str(path), digest, new.encode())


both = pytest.mark.parametrize("write", [here, on_node])


@both
def test_the_mode_is_kept(write: Write, tmp_path: Path) -> None:
    """And nothing else is left in the folder; another name for the same file keeps the old text."""
    path = tmp_path / "config.yaml"
    path.write_text("old")
    path.chmod(0o640)
    os.link(path, tmp_path / "other")
    write(path, "old", "new")
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("new", 0o640)
    assert sorted(it.name for it in tmp_path.iterdir()) == ["config.yaml", "other"]
    assert (tmp_path / "other").read_text() == "old"


@both
def test_a_new_file_is_its_owners_alone(write: Write, tmp_path: Path) -> None:
    """It may hold a key one day."""
    write(tmp_path / "new", None, "text")
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o600


@both
@pytest.mark.parametrize(("there", "expected"), [("changed", "old"), (None, "old"), ("made meanwhile", None)])
def test_a_change_by_another_program_is_not_undone(write: Write, tmp_path: Path, there: str | None, expected: str | None) -> None:
    """Status 75: try again."""
    path = tmp_path / "config.yaml"
    if there is not None:
        path.write_text(there)
    with pytest.raises((SparkguardError, Fault)) as caught:
        write(path, expected, "new")
    assert caught.value.status == 75  # type: ignore[attr-defined]
    assert (path.read_text() if path.exists() else None) == there


@both
def test_a_folder_that_cannot_be_written_is_said(write: Write, tmp_path: Path) -> None:
    """Without a traceback, and without what was to be written."""
    path = tmp_path / "gone" / "config.yaml"
    with pytest.raises((SparkguardError, Fault)) as caught:
        write(path, None, "sk-secret")
    assert "cannot be written" in str(caught.value)
    assert "sk-secret" not in str(caught.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    """A folder, a device, or something of many megabytes is nobody's settings."""
    big = tmp_path / "big"
    with big.open("wb") as file:
        file.truncate(5 << 20)
    for path in (tmp_path, Path("/dev/zero"), big):
        with pytest.raises(SparkguardError, match="no file of settings"):
            asyncio.run(Here(str(path)).read())
        with pytest.raises(Fault, match="no file of settings"):
            edit._read(str(path), str(path))
