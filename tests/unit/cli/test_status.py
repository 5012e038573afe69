"""sparkguard status: the sums of a machine made of files, as an object and for people."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from sparkguard import ledger
from sparkguard.cli import main
from sparkguard.cli.status import as_json_object, describe, read_pressure, see
from sparkguard.core.types import Hold
from sparkguard.errors import USAGE, SparkguardError
from sparkguard.probe import procfs

if TYPE_CHECKING:
    from conftest import Place

KEYS = [
    "schema_version", "budget", "pools", "claims", "pressure", "cpus", "hidden_processes", "nvml_error", "ledger_error", "note"
]  # fmt: skip
POOL = [
    "id", "kind", "name", "total_bytes", "available_bytes", "claimed_share", "reserve_bytes", "outstanding_bytes", "room_share",
    "blocked_by",
]  # fmt: skip
CLAIM = ["pid", "unit", "engine", "port", "share", "bytes", "devices", "source", "orphan", "note"]


def status(place: Place) -> dict[str, Any]:
    return as_json_object(see(place.env, place.roots))


def text(place: Place) -> str:
    return describe(see(place.env, place.roots))


def test_an_idle_machine(place: Place) -> None:
    """One pool, no claims, and the whole budget still fits."""
    answer = status(place)
    assert list(answer) == KEYS
    assert answer["schema_version"] == 1
    assert answer["budget"] == {"share": "0.80", "reserve_bytes": None, "allow_unknown": False}
    (pool,) = answer["pools"]
    assert list(pool) == POOL
    assert (pool["id"], pool["kind"], pool["claimed_share"], pool["room_share"]) == ("ram", "ram", "0.00", "0.80")
    assert pool["reserve_bytes"] == -(-127600748 * 1024 // 20)
    assert answer["claims"] == []
    assert (answer["pressure"], answer["hidden_processes"], answer["nvml_error"], answer["ledger_error"]) == (
        None,
        False,
        None,
        None,
    )
    assert "Nobody holds any of it" in text(place)


def test_claims_and_their_sum(place: Place) -> None:
    """Each server with its pid, unit, port and share; the pool has their sum, and the rest of the budget still fits."""
    place.vllm(100, "m", "--port", "8001", "--gpu-memory-utilization", "0.1", unit="vllm-embeddings.service")
    place.vllm(200, "m", "--gpu-memory-utilization=0.45")
    answer = status(place)
    assert all(list(claim) == CLAIM for claim in answer["claims"])
    assert [(c["pid"], c["unit"], c["port"], c["share"]) for c in answer["claims"]] == [
        (100, "vllm-embeddings.service", 8001, "0.10"),
        (200, None, 8000, "0.45"),
    ]
    assert (answer["pools"][0]["claimed_share"], answer["pools"][0]["room_share"]) == ("0.55", "0.25")
    lines = [line.split() for line in text(place).splitlines()]
    assert ["100", "vllm-embeddings.service", "vllm", "8001", "0.10", "12.2", "GiB", "ram"] in lines
    assert ["0.55", "of", "0.80", "0.25"] in [line[-4:] for line in lines]


def test_a_start_under_way_is_a_claim(place: Place) -> None:
    """A reservation that no server stands for yet is counted, and said to be one."""
    pid = place.tree.add(300, ["/bin/sh", "start"], starttime=77)
    with ledger.Ledger(ledger.directory(place.env), place.roots.proc) as held:
        boot = procfs.boot_id(place.roots.proc)
        held.hold(ledger.Reservation("mymodel", pid, 77, boot, (Hold("ram", 300_000_000, 1 << 30),), port=8002))
    answer = status(place)
    assert [(c["pid"], c["source"], c["share"], c["note"]) for c in answer["claims"]] == [
        (300, "reservation", "0.30", "start of mymodel under way")
    ]
    assert answer["pools"][0]["room_share"] == "0.50"


def test_an_orphan_blocks_the_pool(place: Place) -> None:
    """An engine whose server is gone: nothing fits, and the reason stands with the pool and below the table."""
    place.tree.add(400, b"VLLM::EngineCore\0\0\0")
    answer = status(place)
    assert (answer["pools"][0]["blocked_by"], answer["pools"][0]["room_share"]) == ("orphan", "0.00")
    assert answer["claims"][0]["orphan"] is True
    assert "Every start on ram is refused: nobody knows how much pid 400 holds, or will." in text(place)


def test_hidden_processes_are_said(place: Place) -> None:
    """hidepid=2 takes even process 1 away."""
    place.tree.remove(1)
    place.vllm(100, "m", "--gpu-memory-utilization", "0.1")
    assert status(place)["hidden_processes"] is True
    assert "hidepid=" in text(place)


def test_a_name_from_a_process_cannot_steer_the_terminal(place: Place) -> None:
    """A unit whose name systemd has escaped an escape sequence in is shown as text."""
    place.vllm(100, "m", "--gpu-memory-utilization", "0.1", unit="evil\\x1b\\x5b2J.service")
    assert "\x1b[2J" not in text(place)
    assert "evil\\x1b[2J.service" in text(place)


def test_a_ledger_that_cannot_be_used_is_said(place: Place) -> None:
    """The rest is shown all the same."""
    place.write("run/sparkguard", "a file where the folder should be")
    answer = status(place)
    assert "no reservation can be kept" in answer["ledger_error"] or "belongs to somebody else" in answer["ledger_error"]
    assert answer["pools"][0]["claimed_share"] == "0.00"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "some avg10=1.50 avg60=0.00 avg300=0.00 total=1\nfull avg10=0.25 avg60=0.00 avg300=0.00 total=1\n",
            {"some_avg10": 1.5, "full_avg10": 0.25},
        ),
        ("some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n", {"some_avg10": 0.0}),
        ("", None),
        (None, None),
    ],
    ids=["both", "an older kernel", "empty", "no PSI"],
)
def test_pressure(place: Place, text: str | None, expected: dict[str, float] | None) -> None:
    """The kernel's avg10, in percent; null where the kernel has none."""
    if text is not None:
        (place.tree.root / "pressure").mkdir()
        (place.tree.root / "pressure" / "memory").write_text(text)
    assert read_pressure(place.roots.proc) == expected


def test_no_meminfo_is_71(place: Place) -> None:
    """A machine that cannot be read is no idle machine."""
    (place.tree.root / "meminfo").unlink()
    with pytest.raises(SparkguardError) as error:
        status(place)
    assert error.value.status == 71


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """The real /proc, for people: a pool of the RAM's size."""
    assert main(["status"]) == 0
    assert capsys.readouterr().out.startswith("POOL ")


def test_watch_until_ctrl_c() -> None:
    """With --json one object a line, until SIGINT, and then 130."""
    argv = [sys.executable, "-I", "-m", "sparkguard", "status", "--json", "--watch", "0.1"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=os.environ) as watching:
        assert watching.stdout is not None
        lines = [watching.stdout.readline(), watching.stdout.readline()]
        watching.send_signal(signal.SIGINT)
        assert watching.wait(10) == 130
    assert all(line.startswith('{"schema_version": 1, ') and line.endswith("}\n") for line in lines)


def test_watch_redraws_a_terminal() -> None:
    """On a terminal each look goes over the former one."""
    main_end, child_end = os.openpty()
    with subprocess.Popen([sys.executable, "-I", "-m", "sparkguard", "status", "--watch", "0.1"], stdout=child_end) as watching:
        os.close(child_end)
        seen = b""
        while seen.count(b"\x1b[H") < 2:
            seen += os.read(main_end, 4096)
        watching.send_signal(signal.SIGINT)
        assert watching.wait(10) == 130
    os.close(main_end)
    assert b"every 0.1 s; Ctrl-C ends" in seen


def test_a_watch_that_never_comes(capsys: pytest.CaptureFixture[str]) -> None:
    """nan seconds lie outside of every range, and are 2."""
    assert main(["status", "--watch", "nan"]) == USAGE
    assert "nan" in capsys.readouterr().err
