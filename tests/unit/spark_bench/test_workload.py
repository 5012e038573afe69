"""The workload file, and what every level renders from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spark_bench import workload
from spark_bench.fault import Fault

ITEM = {"id": "short", "genre": "folk", "lyrics": "[verse]\nOne line\n"}
GOOD: dict[str, Any] = {"version": 1, "workloads": [ITEM, {**ITEM, "id": "long", "run_n_segments": 3}]}


def load(folder: Path, content: Any, synthetic: bool = True) -> dict[str, Any]:
    path = folder / "workload.json"
    path.write_text(json.dumps(content))
    return workload.load(str(path), synthetic)


FAULTS = {
    "version is 2": {**GOOD, "version": 2},
    "unknown key speed": {**GOOD, "speed": 1},
    "workloads names none": {**GOOD, "workloads": []},
    "workload short is there twice": {**GOOD, "workloads": [ITEM, ITEM]},
    "the id 'a b'": {**GOOD, "workloads": [{**ITEM, "id": "a b"}]},
    "lyrics is empty": {**GOOD, "workloads": [{**ITEM, "lyrics": " "}]},
    "short: unknown key tempo": {**GOOD, "workloads": [{**ITEM, "tempo": 1}]},
    "does not hold the lyrics' 1 sections": {**GOOD, "workloads": [{**ITEM, "run_n_segments": 0}]},
    "min_seconds and max_seconds": {**GOOD, "workloads": [{**ITEM, "min_seconds": 9, "max_seconds": 8}]},
}


@pytest.mark.parametrize("says", FAULTS)
def test_a_fault_is_named(says: str, tmp_path: Path) -> None:
    """Before anything is rendered, with the key."""
    with pytest.raises(Fault, match=says):
        load(tmp_path, FAULTS[says])


def test_every_fault_is_named(tmp_path: Path) -> None:
    """All at once, since each attempt costs a look at the machine."""
    with pytest.raises(Fault, match=r"version is 2.*workloads names none"):
        load(tmp_path, {"version": 2, "workloads": []})


def test_rendering_takes_rights_references_and_a_runner(tmp_path: Path) -> None:
    """What a synthetic run does without: the basis of rights, three local files, and the commands that render and end a job."""
    with pytest.raises(Fault, match=r"rights_basis.*attestation.*vocal.*instrumental.*runner.*stop"):
        load(tmp_path, GOOD, synthetic=False)
    for name in workload.REFERENCES:
        (tmp_path / name).write_text("x")
    real = {**GOOD, "rights_basis": "own_voice", "runner": ["render"], "stop": ["true"]}
    found = load(tmp_path, {**real, **{name: name for name in workload.REFERENCES}}, synthetic=False)
    assert found["vocal"] == str(tmp_path / "vocal")


def test_every_level_renders_the_same() -> None:
    """The corpus depends on seed and count; the order on the iteration as well; neither on the level."""
    first, second = workload.corpus(GOOD, 8, 7, 0), workload.corpus(GOOD, 8, 7, 1)
    assert first == workload.corpus(GOOD, 8, 7, 0)
    assert first != second
    assert sorted(job["key"] for job in first) == sorted(job["key"] for job in second)
    assert {job["seed"] for job in first} == {job["seed"] for job in second}
    assert [job["workload"] for job in sorted(first, key=lambda job: str(job["key"])[-3:])] == ["short", "long"] * 4


def test_seeds_are_the_same_everywhere() -> None:
    """From a hash, so that another machine or Python renders the same songs."""
    assert [workload.job_seed(42, number) for number in range(3)] == [47619944, 3796952088, 3932739055]


def test_levels_are_rotated() -> None:
    """Each level comes once an iteration, and over the iterations none is always the first or the last."""
    planned = workload.schedule([1, 2, 3, 4], 8)
    rounds = [[one["concurrency"] for one in planned if one["iteration"] == number] for number in range(8)]
    assert all(sorted(one) == [1, 2, 3, 4] for one in rounds)
    assert rounds[:3] == [[1, 2, 3, 4], [4, 3, 2, 1], [2, 3, 4, 1]]
    assert {one[0] for one in rounds} == {one[-1] for one in rounds} == {1, 2, 3, 4}
