"""What `watch` saw, kept in history.sqlite: a day as it was seen, a week by the minute, a quarter by the half hour.

A row is what one node or model had at one moment: its values as 32-bit floats in the order of its layout, NaN for unknown.
What was not fresh is not written, so that a gap stays one. Its size is bounded: rows are at least two seconds apart, and old
ones go. Only one `watch` writes; others see that by the lock and only read.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import sqlite3
from array import array
from typing import TYPE_CHECKING, Any

from sparkguard.cluster.watch.node_samples import OK, STALE
from sparkguard.core.cluster import READY, UNKNOWN
from sparkguard.core.record import Record
from sparkguard.errors import CONFIG, OSERR, SparkguardError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

VERSION = 1
FILE, LOCK = "history.sqlite", "history.lock"
LEAST_MS = 1900  # between two rows: 2 s, and what a busy laptop is early by
GAP_MS = 6000
HOUR, DAY = 3_600_000, 86_400_000


class Tier(Record):
    step_ms: int  # 0: as seen
    keep_ms: int
    serves_ms: int  # the longest span that is answered from it


TIERS = (Tier(0, DAY, 2 * HOUR), Tier(60_000, 7 * DAY, 7 * DAY), Tier(1_800_000, 90 * DAY, 90 * DAY))

_SCHEMA = """
CREATE TABLE layout (id INTEGER PRIMARY KEY, subject TEXT NOT NULL, names TEXT NOT NULL, UNIQUE (subject, names));
CREATE TABLE row (
  tier INTEGER NOT NULL, subject TEXT NOT NULL, at INTEGER NOT NULL, layout INTEGER NOT NULL, data BLOB NOT NULL,
  PRIMARY KEY (tier, subject, at)
) WITHOUT ROWID;
"""


class Series(Record):
    """One subject's values over time. means and maxima: by name, None where there is a gap or the value was unknown."""

    subject: str
    step_ms: int
    at: tuple[int, ...]  # Unix milliseconds of this laptop
    means: Mapping[str, tuple[float | None, ...]]
    maxima: Mapping[str, tuple[float | None, ...]]


class History:
    """Open one with writer() or reader(). Methods raise SparkguardError when the file cannot be used."""

    def __init__(self, database: sqlite3.Connection, lock: int | None) -> None:
        self._database = database
        self._lock = lock
        if lock is not None:
            database.execute("DELETE FROM layout WHERE id NOT IN (SELECT layout FROM row)")
            database.commit()
        self._layouts: dict[tuple[str, str], int] = {}
        self._last: dict[str, int] = {}
        self._minute: int | None = None

    def close(self) -> None:
        self._database.close()
        if self._lock is not None:
            os.close(self._lock)

    # ---- writing

    def add(self, at_ms: int, values: Mapping[str, Mapping[str, float | None]]) -> None:
        """What was fresh at that moment, by subject and name."""
        try:
            for subject, its in values.items():
                if 0 <= at_ms - self._last.get(subject, -LEAST_MS) < LEAST_MS:
                    continue
                self._last[subject] = at_ms
                self._put(0, subject, at_ms, its.keys(), its.values())
            minute = at_ms // TIERS[1].step_ms
            if minute != self._minute:
                self._minute = minute
                for tier in range(1, len(TIERS)):
                    self._roll_up(tier, at_ms)
                self._forget(at_ms)
            self._database.commit()
        except sqlite3.Error as error:
            raise _unusable(error) from None

    def _put(self, tier: int, subject: str, at_ms: int, names: Any, values: Any) -> None:
        text = json.dumps(list(names), separators=(",", ":"))
        data = array("f", (math.nan if value is None else value for value in values))
        layout = self._layouts.get((subject, text))
        if layout is None:
            self._database.execute("INSERT OR IGNORE INTO layout (subject, names) VALUES (?, ?)", (subject, text))
            row = self._database.execute("SELECT id FROM layout WHERE subject = ? AND names = ?", (subject, text)).fetchone()
            layout = self._layouts[subject, text] = int(row[0])
        self._database.execute(
            "INSERT OR REPLACE INTO row VALUES (?, ?, ?, ?, ?)", (tier, subject, at_ms, layout, data.tobytes())
        )

    def _roll_up(self, tier: int, now_ms: int) -> None:
        """Means and maxima of each step that is over, from the tier below: a step's values lie at its beginning."""
        step = TIERS[tier].step_ms
        over = now_ms // step * step
        for subject in self.subjects():
            query = "SELECT max(at) FROM row WHERE tier = ? AND subject = ?"
            last = self._database.execute(query, (tier, subject)).fetchone()[0]
            begin = 0 if last is None else last + step
            steps: dict[int, list[dict[str, tuple[float, float]]]] = {}
            for at, pairs in self._pairs(tier - 1, subject, begin, over):
                steps.setdefault(at // step * step, []).append(pairs)
            for at, rows in steps.items():
                names = {name: None for row in rows for name in row}
                means = [_mean([row[name][0] for row in rows if name in row]) for name in names]
                maxima = [_most([row[name][1] for row in rows if name in row]) for name in names]
                self._put(tier, subject, at, names, [*means, *maxima])

    def _forget(self, now_ms: int) -> None:
        query = "DELETE FROM row WHERE tier = ? AND subject = ? AND at < ?"  # by subject, which the key can find
        for tier, it in enumerate(TIERS):
            for subject in self.subjects():
                self._database.execute(query, (tier, subject, now_ms - it.keep_ms))
        self._database.commit()
        self._database.execute("PRAGMA incremental_vacuum").fetchall()

    # ---- reading

    def subjects(self) -> list[str]:
        try:
            return [row[0] for row in self._database.execute("SELECT DISTINCT subject FROM layout ORDER BY subject")]
        except sqlite3.Error as error:
            raise _unusable(error) from None

    def read(self, subject: str, begin_ms: int, end_ms: int, points: int = 600) -> Series:
        """From the finest tier that serves such a span, in at most so many points, gaps included as points without values."""
        span = end_ms - begin_ms
        tier = next((i for i, it in enumerate(TIERS) if span <= it.serves_ms), len(TIERS) - 1)
        step = max(TIERS[tier].step_ms, -(-span // max(1, points)))
        try:
            rows = list(self._pairs(tier, subject, begin_ms, end_ms))
        except sqlite3.Error as error:
            raise _unusable(error) from None
        bins: dict[int, list[dict[str, tuple[float, float]]]] = {}
        for at, pairs in rows:
            bins.setdefault(at if not step else begin_ms + (at - begin_ms) // step * step, []).append(pairs)
        ats: list[int] = []
        for at in bins:
            if ats and at - ats[-1] > max(GAP_MS, 3 * step):
                ats.append(ats[-1] + max(step, 1))
            ats.append(at)
        names = {name: None for row in bins.values() for pairs in row for name in pairs}
        means = {name: tuple(_mean([it[name][0] for it in bins.get(at, ()) if name in it]) for at in ats) for name in names}
        maxima = {name: tuple(_most([it[name][1] for it in bins.get(at, ()) if name in it]) for at in ats) for name in names}
        return Series(subject, step, tuple(ats), means, maxima)

    def _pairs(self, tier: int, subject: str, begin_ms: int, end_ms: int) -> Iterator[tuple[int, dict[str, tuple[float, float]]]]:
        """(mean, maximum) by name; what was unknown is left out."""
        layouts = {
            row[0]: json.loads(row[1])
            for row in self._database.execute("SELECT id, names FROM layout WHERE subject = ?", (subject,))
        }
        query = "SELECT at, layout, data FROM row WHERE tier = ? AND subject = ? AND at >= ? AND at < ? ORDER BY at"
        for at, layout, blob in self._database.execute(query, (tier, subject, begin_ms, end_ms)):
            names = layouts[layout]
            data = array("f")
            data.frombytes(blob)
            maxima = data[len(names) :] if tier else data
            yield at, {name: (mean, most) for name, mean, most in zip(names, data, maxima) if not math.isnan(mean)}


def writer(state_dir: Path) -> History | None:
    """None: another `watch` writes already."""
    lock = os.open(state_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    try:
        return History(_open(state_dir / FILE), lock)
    except BaseException:
        os.close(lock)
        raise


def reader(state_dir: Path) -> History | None:
    """None: nothing was kept yet."""
    path = state_dir / FILE
    return History(_open(path), None) if path.exists() else None


def _open(path: Path) -> sqlite3.Connection:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        database = sqlite3.connect(path, timeout=5)
    except (OSError, sqlite3.Error) as error:
        raise SparkguardError(f"{path} cannot be opened: {error}", None, OSERR) from None
    try:
        version = database.execute("PRAGMA user_version").fetchone()[0]
        if version > VERSION:
            raise SparkguardError(
                f"{path} is of version {version}, and this spark-serve knows {VERSION}", "it was left as it is", CONFIG
            )
        if version == 0:
            database.execute("PRAGMA auto_vacuum = INCREMENTAL")
        database.execute("PRAGMA journal_mode = WAL").fetchall()
        database.execute("PRAGMA synchronous = NORMAL")
        if version == 0:
            database.executescript(f"BEGIN IMMEDIATE;{_SCHEMA}PRAGMA user_version = {VERSION};COMMIT;")
        return database
    except sqlite3.Error as error:
        database.close()
        raise _unusable(error, path) from None
    except BaseException:
        database.close()
        raise


def _unusable(error: sqlite3.Error, path: Path | None = None) -> SparkguardError:
    return SparkguardError(
        f"{path or FILE} cannot be used: {error}", f"it was left as it is; move it away, and a new {FILE} is begun", OSERR
    )


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _most(values: list[float]) -> float | None:
    return max(values) if values else None


def values_of(tick: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    """What is kept of a picture of watch.py: the fresh parts, by subject."""
    found: dict[str, dict[str, float | None]] = {}
    for node in tick["nodes"]:
        if node["state"] == OK:
            found[f"node/{node['node']}"] = _of_node(node)
    for allocation in tick["allocations"]:
        engine = allocation["engine"]
        if engine is not None and engine["state"] == OK:
            found[f"model/{allocation['model']}/{'+'.join(allocation['nodes'])}"] = _of_engine(allocation, engine)
    return found


def _of_node(node: Mapping[str, Any]) -> dict[str, float | None]:
    kept: dict[str, float | None] = {
        "cpu_percent": node["cpu_percent"],
        "load1": node["load1"],
        "memory_used_bytes": node["memory"]["used_bytes"],
        "swap_used_bytes": node["memory"]["swap_used_bytes"],
        **node["psi"],
        "hottest_c": max((zone["celsius"] for zone in node["thermal"] or ()), default=None),
        "read_bytes_s": node["disk"]["read_bytes_s"],
        "write_bytes_s": node["disk"]["write_bytes_s"],
        "sampler_cpu_percent": node["sampler_cpu_percent"],
    }
    for index, gpu in enumerate(node["gpus"] or ()):
        kept |= {f"gpu{index}_{name}": gpu[name] for name in ("utilization_percent", "temperature_c", "power_w", "clock_mhz")}
    for it in node["network"]:
        kept |= {f"network/{it['name']}/{way}": it[way] for way in ("rx_bytes_s", "tx_bytes_s")}
    for it in node["roce"]:
        kept |= {f"roce/{it['device']}/{it['port']}/{way}": it[way] for way in ("rx_bytes_s", "tx_bytes_s", "errors_s")}
    return kept


_RATES = ("prompt_tokens_s", "generation_tokens_s", "requests_s")
_ENGINE = ("running", "waiting", "kv_usage", *_RATES, "cached_ratio", "accepted_ratio")


def _of_engine(allocation: Mapping[str, Any], engine: Mapping[str, Any]) -> dict[str, float | None]:
    kept: dict[str, float | None] = {name: engine[name] for name in _ENGINE}
    for latency in ("ttft", "itl", "e2e"):
        kept |= {f"{latency}_{which}_s": engine[f"{latency}_s"][which] for which in ("mean", "p50", "p95", "p99")}
    kept["ready"] = {READY: 1.0, UNKNOWN: None, STALE: None}.get(allocation["state"], 0.0)
    return kept
