"""The controller's record: whole or not at all, and never overwritten when it cannot be understood."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from sparkguard.cluster.transition import state
from sparkguard.cluster.transition.state import Controller, Placed, Transition
from sparkguard.core.cluster import DISTRIBUTED, READY, STARTING
from sparkguard.errors import CONFIG, SparkguardError

READY_PAIR = Placed(READY, DISTRIBUTED, "ds4", "g1", "d1", ("head", "worker"), 12.5)
SOME = Controller(
    (("head", READY_PAIR), ("worker", READY_PAIR)), Transition("g1", "up ds4", STARTING, ("head", "worker"), "ds4", "mac", 7)
)

HOSTILE = {
    "cut off": (json.dumps({"version": 1, "nodes": {}})[:-5], "is cut off or damaged"),
    "nested without end": ("[" * 100_000, "is cut off or damaged"),
    "empty": ("", "is cut off or damaged"),
    "newer": (json.dumps({"version": 2, "nodes": {}}), "is of version 2, and this spark-serve knows 1"),
    "no version": (json.dumps({"phase": "ready"}), "has no version that this spark-serve knows"),
    "a list": ("[]", "has no version that this spark-serve knows"),
    "legacy": (json.dumps({"version": 1, "mode": "vllm", "phase": "ready"}), "was written by another spark-serve"),
    "nodes of a wrong type": (json.dumps({"version": 1, "nodes": [1], "transition": None}), "is damaged"),
}


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    """Save and load are inverse."""
    state.save(tmp_path, SOME)
    assert state.load(tmp_path) == SOME


def test_no_file_is_an_empty_record(tmp_path: Path) -> None:
    """Before the first transition nothing is managed."""
    assert state.load(tmp_path) == Controller()
    assert state.load(tmp_path).of("head").phase == "unmanaged"


@pytest.mark.parametrize(("text", "message"), HOSTILE.values(), ids=HOSTILE)
def test_what_cannot_be_understood_is_refused_and_kept(tmp_path: Path, text: str, message: str) -> None:
    """A damaged, newer or foreign record is refused with what to do, and not a byte of it changes."""
    path = tmp_path / state.FILE
    path.write_text(text)
    with pytest.raises(SparkguardError, match=message) as caught:
        state.load(tmp_path)
    assert caught.value.status == CONFIG
    assert "left as it is" in f"{caught.value.hint}"
    assert path.read_text() == text


def test_a_failed_write_leaves_the_old_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the disk fails before the rename, the old file stands and no temporary file is left."""
    state.save(tmp_path, SOME)

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(SparkguardError, match="No space left on device"):
        state.save(tmp_path, Controller())
    assert state.load(tmp_path) == SOME
    assert [path.name for path in tmp_path.iterdir()] == [state.FILE]


def test_the_folder_is_its_owners_alone(tmp_path: Path) -> None:
    """The state folder is made 0700, the record 0600."""
    folder = state.folder({"SPARK_SERVE_STATE_DIR": str(tmp_path / "a" / "b")})
    state.save(folder, SOME)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / state.FILE).stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777], ids=["group", "others", "as /tmp"])
def test_a_folder_where_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    """They could announce an endpoint of theirs in it; what to do is said."""
    tmp_path.chmod(mode)
    with pytest.raises(SparkguardError, match="other users may write") as caught:
        state.folder({"SPARK_SERVE_STATE_DIR": str(tmp_path)})
    assert (caught.value.status, caught.value.hint) == (CONFIG, f"chmod 700 {tmp_path}")


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with sudo, after which the owner could not use it any more."""
    monkeypatch.setattr(state.os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(SparkguardError, match="is another user's"):
        state.folder({"SPARK_SERVE_STATE_DIR": str(tmp_path)})


def test_the_folder_lies_in_the_home(tmp_path: Path) -> None:
    """Without SPARK_SERVE_STATE_DIR it is ~/.local/state/spark-serve."""
    assert state.folder({"HOME": str(tmp_path)}) == tmp_path / ".local" / "state" / "spark-serve"
