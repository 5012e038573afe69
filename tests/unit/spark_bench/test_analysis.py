"""From raw results to a recommendation: when there is one, and when not."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from spark_bench import analysis, workload

RUN: dict[str, Any] = {
    "version": 1,
    "host": "spark",
    "synthetic": False,
    "levels": [1, 2, 3],
    "iterations": 2,
    "corpus": "c0",
    "seed": 0,
    "status": "complete",
    "reason": None,
    "workloads": ["short", "long"],
}
JOBS = 12


def trial(streams: int, iteration: int, speed: float, **changes: Any) -> dict[str, Any]:
    """Its jobs take 100 s alone, spread by some; `speed` is the throughput over one at a time."""
    chooser = random.Random(iteration)
    each = 100.0 * streams / speed
    free = [0.0] * streams
    jobs = []
    for number in range(JOBS):
        slot = free.index(min(free))
        seconds = each * chooser.uniform(0.95, 1.05)
        job = {"key": f"j{number:02}", "began": free[slot], "ended": free[slot] + seconds, "seconds": seconds}
        free[slot] += seconds
        jobs.append({**job, "workload": "short", "outcome": "passed", "audio": {"seconds": 60.0}})
    return {
        "name": f"r{iteration}-c{streams}",
        "concurrency": streams,
        "iteration": iteration,
        "measured": True,
        "status": "complete",
        "paused_seconds": 0.0,
        "seconds": max(free),
        "jobs": jobs,
        "telemetry": [{"gpus": [{"temperature_c": 70.0, "power_w": 30.0}], "available_bytes": 1 << 35}],
        **changes,
    }


def summary(speeds: dict[int, float], run: dict[str, Any] = RUN, **changes: Any) -> dict[str, Any]:
    trials = [trial(streams, iteration, speed) for iteration in range(2) for streams, speed in speeds.items()]
    for one in trials:
        if one["concurrency"] == 2:
            for key, value in changes.items():
                one[key] = value(one) if callable(value) else value
    return analysis.summarize({**run, "levels": list(speeds)}, trials)


@pytest.mark.parametrize(
    ("speeds", "chosen"),
    [
        ({1: 1.0, 2: 1.05, 3: 1.08}, 1),
        ({1: 1.0, 2: 1.5, 3: 1.6}, 2),
        ({1: 1.0, 2: 1.5, 3: 2.0}, 3),
        ({1: 1.0, 2: 0.9, 3: 1.5}, 3),
        ({1: 1.0, 2: 0.6, 3: 0.5}, 1),
    ],
    ids=["too little", "a third adds little", "each adds", "a dip between", "slower"],
)
def test_a_level_earns_its_place(speeds: dict[int, float], chosen: int) -> None:
    """10 % over the best before it, or it is not recommended."""
    assert summary(speeds)["recommended"] == chosen


def test_slow_songs_are_a_price() -> None:
    """Twice the throughput at eight times is four times the wait: more than three is refused."""
    found = summary({1: 1.0, 8: 2.0})
    assert found["recommended"] == 1
    assert "95th percentile" in found["why"][0]


def lose_one(one: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**job, "outcome": "failed"} if job["key"] == "j03" else job for job in one["jobs"]]


def shorten(one: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**job, "audio": {"seconds": 40.0}} if job["key"] == "j03" else job for job in one["jobs"]]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"jobs": lose_one}, "2 of 24 jobs did not pass"),
        ({"jobs": shorten}, "1 songs came out shorter"),
        ({"status": "stopped"}, "0 of 24"),
    ],
    ids=["failed", "shorter", "stopped"],
)
def test_speed_that_costs_songs_is_none(changes: dict[str, Any], says: str) -> None:
    """A failed job, a song that is a fifth shorter than alone, a trial that was stopped: not recommended."""
    found = summary({1: 1.0, 2: 1.8}, **changes)
    assert found["recommended"] == 1
    assert says in found["why"][0]


def test_the_interval_holds_the_speedup() -> None:
    """Jobs are drawn again 2000 times; the speedup lies within what comes out, and the range is narrow for even jobs."""
    level = summary({1: 1.0, 2: 1.5})["levels"][1]
    low, high = level["speedup_95"]
    assert low < level["speedup"] < high
    assert high - low < 0.15


def test_a_synthetic_run_recommends_nothing() -> None:
    """Its times are of no machine."""
    found = summary({1: 1.0, 2: 1.9}, {**RUN, "synthetic": True})
    assert (found["recommended"], found["candidate"], found["provisional"]) == (None, 2, True)


@pytest.mark.parametrize(
    ("run", "says"),
    [
        ({"iterations": 1}, "one iteration"),
        ({"workloads": ["short"]}, "one kind of song"),
        ({"status": "stopped", "reason": "guard: hot"}, "the experiment was stopped: guard: hot"),
        ({"iterations": 3}, "2 at once has 2 of 3 trials"),
    ],
    ids=["once", "one kind", "stopped", "missing"],
)
def test_what_makes_it_provisional(run: dict[str, Any], says: str) -> None:
    """Too little to tell order and luck apart, or an end before its time."""
    found = summary({1: 1.0, 2: 1.5}, {**RUN, **run})
    assert found["provisional"] is True
    assert any(doubt.startswith(says) for doubt in found["doubts"])


def test_levels_that_never_were_at_once() -> None:
    """Three streams that never overlapped measured one."""
    serial = [{**job, "began": 200.0 * at, "ended": 200.0 * at + 100.0} for at, job in enumerate(trial(2, 0, 1.0)["jobs"])]
    found = summary({1: 1.0, 2: 1.5}, jobs=serial)
    assert "2 at once never were more than 1" in found["doubts"]


def test_the_same_results_give_the_same_bytes() -> None:
    """Whatever the order in which trials and jobs are read."""
    trials = [trial(streams, iteration, 1.0 + streams / 4) for iteration in range(2) for streams in (1, 2, 3)]
    first = json.dumps(analysis.summarize(RUN, trials), sort_keys=True)
    assert first == json.dumps(analysis.summarize(RUN, json.loads(json.dumps(trials))), sort_keys=True)


def test_few_at_the_end_and_none_passed() -> None:
    """Nothing passed: no rate, no recommendation, and no division by it."""
    found = summary({1: 1.0, 2: 1.5})
    empty = analysis.summarize({**RUN, "levels": [1, 2]}, [])
    assert (empty["recommended"], empty["levels"][1]["speedup"]) == (None, None)
    assert found["levels"][0]["speedup"] == 1.0
    assert workload.VERSION == 1
