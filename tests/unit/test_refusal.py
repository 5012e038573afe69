"""After a refusal: what it cost, and a record of it that does not rest on the journal."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from sparkguard import ledger, refusal
from sparkguard.core.admission import admit
from sparkguard.core.types import RAM, Budget, Hold, MemoryPool, Wanted

POOL = MemoryPool("ram", RAM, 100 << 30, 90 << 30)
VERDICT = admit(Budget(800_000_000), (POOL,), (), Wanted("m", (Hold("ram", 900_000_000, 90 << 30),)))


@pytest.fixture
def env(home: Path) -> dict[str, str]:
    return {"XDG_RUNTIME_DIR": str(home / "run"), "HOME": str(home), "INVOCATION_ID": "aaaa"}


def test_records_and_reads_back(env: dict[str, str]) -> None:
    """The last refusal of a name is the object, the text and when; the next one takes its place."""
    assert refusal.last("m", env) is None
    refusal.record(VERDICT, env, "first\n")
    refusal.record(VERDICT, env, "FATAL: m wants\n")
    entry = refusal.last("m", env)
    assert entry is not None
    assert (entry["verdict"], entry["name"], entry["unit"], entry["invocation"]) == ("refused", "m", "m", "aaaa")
    assert entry["text"] == "FATAL: m wants"
    assert isinstance(entry["time"], float)


def test_a_record_that_cannot_be_written(env: dict[str, str], home: Path) -> None:
    """A refusal does not fail because its record does."""
    (home / "run" / "sparkguard").write_text("in the way")
    refusal.record(VERDICT, env, "text")
    assert refusal.last("m", env) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_a_record_that_is_none(env: dict[str, str], text: str) -> None:
    """What is torn or something else is no refusal."""
    refusal.record(VERDICT, env, "text")
    (Path(ledger.directory(env)) / "refused" / "m").write_text(text)
    assert refusal.last("m", env) is None


def test_a_name_cannot_leave_the_folder(env: dict[str, str], home: Path) -> None:
    """Who asks `why` may ask anything."""
    (home / "run" / "secret").write_text('{"reason": "stolen"}')
    assert refusal.last("../../secret", env) is None
    assert refusal.last(r"..\x2f..\x2fsecret", env) is None


PEERS = {
    "stopped for this start": (1_000_000, 1_200_000, True),
    "stopped a minute before": (1_000_000, 61_000_000, False),
    "never ran": (0, 1_000, False),
}


@pytest.mark.parametrize(("ended", "began", "named"), PEERS.values(), ids=PEERS)
def test_names_the_peer_that_was_stopped(
    env: dict[str, str], monkeypatch: pytest.MonkeyPatch, ended: int, began: int, named: bool
) -> None:
    """A peer that Conflicts= stopped in the same transaction is named, with the command that brings it back, and no other."""

    def properties(unit: str, *_: str) -> Mapping[str, str]:
        if unit == "vllm-m.service":
            conflicts = r"shutdown.target vllm-model@a\x2db.service"
            return {"Conflicts": conflicts, "InactiveExitTimestampMonotonic": str(began)}
        assert unit == r"vllm-model@a\x2db.service"
        return {"InactiveEnterTimestampMonotonic": str(ended)}

    monkeypatch.setattr(refusal, "_own_unit", lambda _: "vllm-m.service")
    monkeypatch.setattr(refusal, "_properties", properties)
    text = refusal.after_conflict(env)
    assert bool(text) == named
    if named:
        assert text == (
            "vllm-model@a-b.service was stopped for this start (Conflicts=). "
            r"Bring it back with: systemctl --user start 'vllm-model@a\x2db.service'" + "\n"
        )


def test_outside_a_unit_nothing_was_stopped(env: dict[str, str]) -> None:
    """A terminal's environment is not a unit's process, and nobody is asked."""
    assert refusal.after_conflict({**env, "SYSTEMD_EXEC_PID": str(os.getpid() + 1), "PATH": "/nowhere"}) == ""


def test_a_fifo_in_its_place(env: dict[str, str], home: Path) -> None:
    """Neither the refusal nor the question why waits for somebody at the other end."""
    folder = home / "run" / "sparkguard" / "refused"
    folder.mkdir(parents=True)
    for name in ("m", "m.new"):
        os.mkfifo(folder / name)
    assert refusal.last("m", env) is None
    refusal.record(VERDICT, env, "text")
    assert refusal.last("m", env) is None
