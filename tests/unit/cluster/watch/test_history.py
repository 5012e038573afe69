"""What is kept of what was seen: gaps stay gaps, old rows are rolled up and go, and the file stays small."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparkguard.cluster.watch import history
from sparkguard.cluster.watch.history import DAY, HOUR, TIERS, History
from sparkguard.errors import SparkguardError

BEGIN = 1_800_000_000_000 // TIERS[2].step_ms * TIERS[2].step_ms
S = 1000


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[History]:
    made = history.writer(tmp_path)
    assert made is not None
    yield made
    made.close()


def test_what_was_added_is_read(kept: History) -> None:
    """By subject, with unknown values left out and the others as they were."""
    kept.add(BEGIN, {"node/head": {"cpu": 0.5, "watts": None}, "model/m/head": {"running": 2}})
    kept.add(BEGIN + 2 * S, {"node/head": {"cpu": 0.25, "watts": 40.0}})
    assert kept.subjects() == ["model/m/head", "node/head"]
    found = kept.read("node/head", BEGIN, BEGIN + 60 * S)
    assert (found.at, found.means) == ((BEGIN, BEGIN + 2 * S), {"cpu": (0.5, 0.25), "watts": (None, 40.0)})


def test_a_gap_is_read_as_one(kept: History) -> None:
    """Between two rows that are further apart than news may be late stands a point without values."""
    for at in (0, 2, 4, 604, 606):
        kept.add(BEGIN + at * S, {"n": {"cpu": 1.0}})
    found = kept.read("n", BEGIN, BEGIN + HOUR, points=3600)
    assert [at - BEGIN for at in found.at] == [0, 2 * S, 4 * S, 5 * S, 604 * S, 606 * S]
    assert found.means["cpu"] == (1.0, 1.0, 1.0, None, 1.0, 1.0)


def test_rows_are_two_seconds_apart(kept: History) -> None:
    """A watch at four ticks a second keeps no more than one at two seconds."""
    for tick in range(41):
        kept.add(BEGIN + tick * 250, {"n": {"cpu": float(tick)}})
    assert [at - BEGIN for at in kept.read("n", BEGIN, BEGIN + 60 * S, 6000).at] == [0, 2000, 4000, 6000, 8000, 10000]


def test_other_values_than_before_are_another_layout(kept: History) -> None:
    """An interface that was plugged in has no past, and loses none of the others'."""
    kept.add(BEGIN, {"n": {"a": 1.0}})
    kept.add(BEGIN + 2 * S, {"n": {"a": 2.0, "b": 3.0}})
    assert kept.read("n", BEGIN, BEGIN + 60 * S).means == {"a": (1.0, 2.0), "b": (None, 3.0)}


def test_minutes_and_half_hours(kept: History) -> None:
    """Means and maxima of each step, taken when it is over; the half hours' from the minutes'."""
    for second in range(0, 3602, 2):
        kept.add(BEGIN + second * S, {"n": {"x": float(second // 60)}})
    minutes = kept.read("n", BEGIN, BEGIN + 3 * HOUR, points=10_000)
    assert minutes.step_ms == 60_000
    assert minutes.means["x"][:60] == tuple(float(minute) for minute in range(60))
    halves = kept.read("n", BEGIN, BEGIN + 8 * DAY, points=10_000)
    assert halves.at == (BEGIN, BEGIN + TIERS[2].step_ms)
    assert (halves.means["x"], halves.maxima["x"]) == ((14.5, 44.5), (29.0, 59.0))


def test_what_is_old_goes(kept: History) -> None:
    """Seconds after a day, minutes after a week; the half hours are still there."""
    for second in range(0, 120, 2):
        kept.add(BEGIN + second * S, {"n": {"x": 7.0}})
    kept.add(BEGIN + HOUR, {"n": {"x": 1.0}})
    kept.add(BEGIN + DAY + 10 * HOUR, {"n": {"x": 1.0}})
    assert BEGIN not in kept.read("n", BEGIN, BEGIN + HOUR).at
    assert BEGIN in kept.read("n", BEGIN, BEGIN + DAY).at
    kept.add(BEGIN + 8 * DAY, {"n": {"x": 1.0}})
    assert BEGIN not in kept.read("n", BEGIN, BEGIN + DAY).at
    assert BEGIN in kept.read("n", BEGIN, BEGIN + 10 * DAY).at


@settings(max_examples=30)  # each makes a file
@given(st.lists(st.integers(min_value=0, max_value=7199), min_size=1, max_size=40), st.integers(min_value=1, max_value=50))
def test_any_span_is_read_in_so_many_points(tmp_path_factory: pytest.TempPathFactory, seconds: list[int], points: int) -> None:
    """However irregular it was: values stay within what was seen, and between two values stands at most one gap."""
    made = history.writer(tmp_path_factory.mktemp("h"))
    assert made is not None
    for second in sorted(seconds):
        made.add(BEGIN + second * S, {"n": {"x": float(second)}})
    found = made.read("n", BEGIN, BEGIN + 2 * HOUR, points)
    made.close()
    assert list(found.at) == sorted(set(found.at))
    values = [value for value in found.means["x"] if value is not None]
    assert min(seconds) <= min(values)
    assert max(values) <= max(seconds)
    assert len(values) <= points + 1
    assert len(found.at) <= 2 * len(values)


def test_a_day_takes_less_than_fifty_megabytes(kept: History, tmp_path: Path) -> None:
    """Two Sparks and two models, an hour of them: a day is 24 times that at most."""
    chance = random.Random(1)
    sizes = {"node/head": 32, "node/worker": 32, "model/a/head": 21, "model/b/worker": 21}
    for second in range(0, 3600, 2):
        values = {who: {f"value{i}": chance.random() for i in range(count)} for who, count in sizes.items()}
        kept.add(BEGIN + second * S, values)
    log = (tmp_path / f"{history.FILE}-wal").stat().st_size  # used again and again
    assert 24 * (tmp_path / history.FILE).stat().st_size + log < 50e6


def test_only_one_writes(kept: History, tmp_path: Path) -> None:
    """A second watch sees that by the lock, and may read meanwhile."""
    assert history.writer(tmp_path) is None
    kept.add(BEGIN, {"n": {"x": 1.0}})
    second = history.reader(tmp_path)
    assert second is not None
    assert second.read("n", BEGIN, BEGIN + S).means == {"x": (1.0,)}
    second.close()


def test_the_file_is_its_owners_alone(kept: History, tmp_path: Path) -> None:
    """Mode 0600."""
    assert (tmp_path / history.FILE).stat().st_mode & 0o777 == 0o600


def test_a_file_of_a_newer_version_is_left_as_it_is(tmp_path: Path) -> None:
    """And so is one that is no database."""
    path = tmp_path / history.FILE
    database = sqlite3.connect(path)
    database.execute("PRAGMA user_version = 99")
    database.close()
    before = path.read_bytes()
    with pytest.raises(SparkguardError, match="version 99"):
        history.writer(tmp_path)
    assert path.read_bytes() == before
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(SparkguardError, match="cannot be used"):
        history.reader(tmp_path)
    assert path.read_bytes() == b"no database" * 1000


def test_nothing_was_kept_yet(tmp_path: Path) -> None:
    """There is nothing to read, and no file is made for it."""
    assert history.reader(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
