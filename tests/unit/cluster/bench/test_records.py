"""Records of runs: kept, compared, exported."""

from __future__ import annotations

import csv
import io
import json
import resource
from pathlib import Path
from typing import Any

import pytest

from sparkguard.cluster.bench import history, leases, report
from sparkguard.cluster.bench.compare import compare
from sparkguard.cluster.bench.export import export
from sparkguard.cluster.bench.history import History
from sparkguard.core.measure import FAILED, OK, Measured
from sparkguard.errors import SparkguardError

FAST = Measured(OK, ttft=0.1, ttfo=0.1, seconds=1.0, decode_rate=50.0, prompt=100, completion=50, gaps=(0.02, 0.02), chunks=3)


def run(id: str = "20261130T010203004Z-decode-abcdef", *requests: Measured, **changes: Any) -> dict[str, Any]:
    made = [report.Request(at, 1, float(at), 0.0, "", one) for at, one in enumerate(requests or (FAST,))]
    levels = [report.level(256, 1, made)]
    target = {
        "url": "http://h:8000",
        "model": "m",
        "name": None,
        "nodes": ["head"],
        "image": "sha256:1",
        "digest": "d",
        "engine": "vllm",
    }
    settings = {"kind": "decode", "max_tokens": 50, "requests": 1, "reasoning": "default", "repeats": 1, "seed": 0}
    record = {
        "schema_version": 1, "type": "run", "id": id, "at": "2026-11-30T01:02:03.004Z", "kind": "decode", "status": "completed",
        "reason": None, "target": target, "settings": {**settings, "fixed_length": True}, "notes": [],
        "method": {"output_length": "ignore_eos"}, "warmup": [], "levels": levels,
        "summary": report.summary("decode", levels), "checks": {"exclusive": True},
    }  # fmt: skip
    return {**record, **changes}


def test_failed_requests_take_time_and_give_nothing() -> None:
    """50 tokens in the 2 s that one good and one failed request took together."""
    level = run("x", FAST, Measured(FAILED, "timeout", seconds=1.0, completion=9))["levels"][0]
    assert (level["ok"], level["failed"], level["repeats"][0]["generated_tokens_per_s"]) == (1, 1, 25.0)
    assert level["over_repeats"]["generated_tokens_per_s"] is None


def test_runs_of_the_same_compare() -> None:
    """Nothing that decides differs: the ratio is a ratio of speeds."""
    found = compare(run(), run("20261130T010203005Z-decode-abcdef", FAST.replace(decode_rate=55.0)))
    assert (found["comparable"], found["differences"]) == (True, [])
    assert found["levels"][0]["medians"]["decode_tokens_per_s"] == {"first": 50.0, "second": 55.0, "ratio": 1.1}


DIFFERENCES = [
    ({"target": {**run()["target"], "image": "sha256:2"}}, "target.image", True),
    ({"target": {**run()["target"], "nodes": ["worker"]}}, "target.nodes", True),
    ({"settings": {**run()["settings"], "reasoning": "off"}}, "settings.reasoning", True),
    ({"checks": {"exclusive": False}}, "checks.exclusive", True),
    ({"settings": {**run()["settings"], "seed": 1}}, "settings.seed", False),
]


@pytest.mark.parametrize(("changes", "what", "decides"), DIFFERENCES, ids=[what for _, what, _ in DIFFERENCES])
def test_what_differs_is_named(changes: dict[str, Any], what: str, decides: bool) -> None:
    """Before any number; and whether the two may be compared at all."""
    found = compare(run(), run(**changes))
    assert [one["what"] for one in found["differences"]] == [what]
    assert found["comparable"] is not decides


def test_a_run_that_was_not_whole_is_not_compared_silently() -> None:
    """Its numbers are shown, and it is said."""
    assert compare(run(), run(status="cancelled"))["comparable"] is False


def test_levels_that_only_one_has_are_named() -> None:
    """They are compared with nothing."""
    other = run()
    other["levels"][0]["concurrency"] = 4
    found = compare(run(), other)
    assert (found["levels"], found["comparable"]) == ([], False)
    assert (found["only_first"], found["only_second"]) == (
        [{"prompt_tokens_wanted": 256, "concurrency": 1}],
        [{"prompt_tokens_wanted": 256, "concurrency": 4}],
    )


def test_a_cell_is_no_formula() -> None:
    """A server's error text goes into a spreadsheet as text."""
    record = run("x", Measured(FAILED, "http_500"))
    record["levels"][0]["requests"][0]["detail"] = '=HYPERLINK("http://x")'
    row = next(csv.DictReader(io.StringIO(export(record, "csv"))))
    assert row["detail"] == '\'=HYPERLINK("http://x")'
    assert (row["outcome"], row["ttft_s"], row["prompt_tokens_wanted"]) == ("failed", "", "256")


def test_markdown_of_hostile_names() -> None:
    """A model's name breaks no table and is no markup."""
    record = run()
    record["target"]["model"] = "a|b\n<script>"
    assert export(record, "markdown").startswith("# decode of a\\|b &lt;script>\n")


def test_the_newest_are_kept(tmp_path: Path) -> None:
    """Of 5 runs with room for 3, the 2 oldest go; other files stay."""
    kept = History(tmp_path, keep=3)
    (kept.folder / "notes.json").write_text("{}")
    ids = [f"20261130T01020300{number}Z-decode-abcdef" for number in range(5)]
    for id in ids:
        kept.save(run(id))
    kept.prune()
    assert [record["id"] for record in kept.runs()] == ids[:1:-1]
    assert (kept.folder / "notes.json").exists()


def test_one_that_runs_is_not_pruned(tmp_path: Path) -> None:
    """Also when it is the oldest."""
    kept = History(tmp_path, keep=1)
    ids = [f"20261130T01020300{number}Z-decode-abcdef" for number in range(3)]
    with leases.held(tmp_path, leases.Lease(ids[0], 1, "h", 0.0, "u", "m")):
        for id in ids:
            kept.save(run(id, status="running"))
        kept.prune()
        assert [(record["id"], record["status"]) for record in kept.runs()] == [(ids[2], "interrupted"), (ids[0], "running")]
    assert kept.get("last")["status"] == "interrupted"


def test_a_damaged_run_hides_no_other(tmp_path: Path) -> None:
    """It is left out of the list and left where it is."""
    kept = History(tmp_path)
    kept.save(run())
    broken = kept.folder / "20261130T010203999Z-decode-abcdef.json"
    broken.write_text('{"schema_version": 1, "id"')
    assert [record["id"] for record in kept.runs()] == [run()["id"]]
    with pytest.raises(SparkguardError, match="cannot be read"):
        kept.get("1")
    assert broken.exists()


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("1", 1),
        ("last", 1),
        ("2", 0),
        ("20261130T010203001Z", 1),
        ("20261130", None),
        ("3", None),
        ("0", None),
        ("x", None),
        ("", None),
    ],
    ids=["newest", "last", "before", "beginning", "several begin so", "too far", "zero", "none", "nothing"],
)
def test_runs_have_short_names(name: str, found: int | None, tmp_path: Path) -> None:
    """By place, by beginning; what means none or several is refused."""
    kept = History(tmp_path)
    ids = [f"20261130T01020300{number}Z-decode-abcdef" for number in range(2)]
    for id in ids:
        kept.save(run(id))
    if found is None:
        with pytest.raises(SparkguardError):
            kept.get(name)
    else:
        assert kept.get(name)["id"] == ids[found]


def test_ids_sort_by_time() -> None:
    """And are no path."""
    made = [history.new_id("decode") for _ in range(3)]
    assert [id[:18] for id in made] == sorted(id[:18] for id in made)
    assert all("/" not in id for id in made)


def test_a_lease_that_cannot_be_read_is_still_one(tmp_path: Path) -> None:
    """Somebody holds it, so it may concern any node: fail closed."""
    with leases.held(tmp_path, leases.Lease("a", 1, "h", 0.0, "u", "m", ("head",))):
        (tmp_path / leases.FOLDER / "a.json").write_text("{")
        (lease,) = leases.living(tmp_path)
        assert leases.concerning({"worker"})(lease)
        with pytest.raises(SparkguardError) as caught:
            leases.revoke_all(tmp_path, 0.0, which=leases.concerning({"worker"}))
    assert caught.value.status == 75


def test_a_lease_on_a_full_disk_is_one(tmp_path: Path) -> None:
    """It cannot say whose it is, and holds."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # every byte written to a file is one too many
    try:
        with leases.held(tmp_path, leases.Lease("a", 1, "h", 0.0, "u", "m", ("head",))):
            (lease,) = leases.living(tmp_path)
            assert leases.concerning({"worker"})(lease)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert leases.living(tmp_path) == []


def test_a_lease_of_a_dead_process_is_none(tmp_path: Path) -> None:
    """Its file says who it was, and nobody holds its lock."""
    folder = tmp_path / leases.FOLDER
    folder.mkdir(parents=True)
    (folder / "a.json").write_text(json.dumps({**leases.Lease("a", 1, "h", 0.0, "u", "m").__dict__, "nodes": []}))
    assert (leases.living(tmp_path), list(folder.iterdir())) == ([], [])


def test_only_the_nodes_that_are_meant(tmp_path: Path) -> None:
    """A lease on the worker does not concern what happens to the head."""
    with leases.held(tmp_path, leases.Lease("a", 1, "h", 0.0, "u", "m", ("worker",))) as held:
        assert leases.revoke_all(tmp_path, 0.0, which=leases.concerning({"head"})) == []
        assert held.revoked() is None
