"""Evidence of failed starts: one folder each, and not without end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparkguard.cluster.transition import diagnostics
from sparkguard.errors import SparkguardError

NODES = {
    "head": {
        "containers": [
            {
                "name": "vllm_ds4",
                "state": "exited",
                "exit_code": 137,
                "oom_killed": True,
                "log": {"stdout": ["loading"], "stderr": ["killed"]},
            }
        ]
    },
    "worker": {"error": "worker: no answer within 10 s"},
}


def test_what_is_kept_is_whole(tmp_path: Path) -> None:
    """The facts of the transition and each node's, with a version."""
    folder = diagnostics.keep(tmp_path, "ds4", {"error": "it died", "phase": "starting"}, NODES)
    kept = json.loads((folder / "failure.json").read_text())
    assert (kept["schema_version"], kept["error"], kept["nodes"]) == (1, "it died", NODES)
    assert folder.name.startswith("startup-") and folder.stat().st_mode & 0o077 == 0


def test_two_failures_in_one_second_are_two(tmp_path: Path) -> None:
    """No evidence overwrites another's."""
    folders = {diagnostics.keep(tmp_path, "ds4", {}, {}) for _ in range(3)}
    assert len(folders) == 3


def test_the_oldest_goes(tmp_path: Path) -> None:
    """The newest 50 are kept."""
    for number in range(diagnostics.KEPT):
        old = tmp_path / "diagnostics" / f"startup-20260101-{number:06}-ds4"
        old.mkdir(parents=True)
        (old / "failure.json").write_text("{}")
    newest = diagnostics.keep(tmp_path, "ds4", {}, {})
    left = sorted(path.name for path in (tmp_path / "diagnostics").iterdir())
    assert len(left) == diagnostics.KEPT
    assert left[0] == "startup-20260101-000001-ds4" and left[-1] == newest.name


def test_the_summary_has_the_end_of_each_log() -> None:
    """What killed it, its last lines, and which node could not be asked."""
    assert diagnostics.summary(NODES).splitlines() == [
        "head: vllm_ds4 exited with 137, killed for memory",
        "  loading",
        "  killed",
        "worker: worker: no answer within 10 s",
    ]


def test_a_folder_that_cannot_be_is_an_error_and_no_bug(tmp_path: Path) -> None:
    """What stands in the way of the evidence is told, as every fault is."""
    (tmp_path / "diagnostics").write_text("")
    with pytest.raises(SparkguardError, match="no evidence can be kept"):
        diagnostics.keep(tmp_path, "ds4", {}, {})


def test_what_goes_is_ours(tmp_path: Path) -> None:
    """A link among the folders is not followed, and one that cannot be emptied file by file keeps nobody from his evidence."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "thesis").write_text("years")
    (tmp_path / "diagnostics").mkdir()
    (tmp_path / "diagnostics" / "startup-0").symlink_to(theirs)
    (tmp_path / "diagnostics" / "startup-1" / "within").mkdir(parents=True)
    for _ in range(diagnostics.KEPT + 1):
        diagnostics.keep(tmp_path, "ds4", {}, {})
    assert (theirs / "thesis").exists()
    assert not (tmp_path / "diagnostics" / "startup-1").exists()


@pytest.mark.parametrize("containers", [[1, None, "x"], [{"log": None}, {"log": "x"}], [{"log": {"stdout": [1, None]}}], "x"])
def test_a_node_may_tell_what_it_likes(containers: object) -> None:
    """A summary of evidence that makes no sense is a summary."""
    assert isinstance(diagnostics.summary({"head": {"containers": containers}}), str)
