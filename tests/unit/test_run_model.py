"""Whom run-model.sh may stop, and how long it waits; the switch itself is in tests/system/test_run_model.py."""

from __future__ import annotations

import pytest

from sparkguard import run_model
from sparkguard.core.types import Claim
from sparkguard.errors import SparkguardError
from sparkguard.probe.procfs import unescape_unit

MAIN_PIDS = {
    "vllm-longcontext.service": 100,
    "jupyter.service": 200,
    "my-llama.service": 300,
    "vllm-model@my\\x2dmodel.service": 400,
}


def claim(pid: int, service: str | None, port: int = 8000, engine: str = "vllm", manager: str | None = "user") -> Claim:
    unit = service and unescape_unit(service)
    return Claim(pid, engine, (), "argument", unit, port, service=service, manager=manager)


def holders(*claims: Claim) -> list[str]:
    return run_model.holders_of(8000, claims, tuple(MAIN_PIDS), MAIN_PIDS.__getitem__)


@pytest.mark.parametrize(
    ("held", "unit"),
    [
        (claim(100, "vllm-longcontext.service"), "vllm-longcontext.service"),
        (claim(101, "vllm-longcontext.service"), "vllm-longcontext.service"),
        (claim(300, "my-llama.service", engine="llama-server"), "my-llama.service"),
        (claim(400, "vllm-model@my\\x2dmodel.service"), "vllm-model@my\\x2dmodel.service"),
    ],
    ids=["our unit", "our unit, the server below docker's client", "another engine's own unit", "an escaped name"],
)
def test_a_server_that_is_a_unit_is_stopped_by_its_unit(held: Claim, unit: str) -> None:
    """The name is the one that systemctl takes."""
    assert holders(held) == [unit]


@pytest.mark.parametrize(
    "held",
    [
        claim(500, None),
        claim(201, "jupyter.service"),
        claim(600, "vllm.service"),
        claim(700, "vllm-longcontext.service", manager=None),
    ],
    ids=["a shell's", "started inside a notebook's unit", "no unit that runs", "another user's unit of the same name"],
)
def test_a_server_that_is_no_unit_of_ours_is_not_stopped(held: Claim) -> None:
    """Stopping a notebook server for a model in it would take more than the port: refused, with the pid."""
    with pytest.raises(SparkguardError) as refused:
        holders(held)
    assert refused.value.status == 75
    assert f"pid {held.pid}" in refused.value.message


def test_servers_on_other_ports_are_left_alone() -> None:
    """Only the port that is wanted has a holder; a server counted twice is one holder."""
    twice = claim(100, "vllm-longcontext.service")
    assert holders(claim(500, None, 8001), twice, twice) == ["vllm-longcontext.service"]


@pytest.mark.parametrize("text", ["", "0", "-1", "nan", "inf", "ten"])
def test_a_timeout_that_is_no_time_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """78 before systemd is asked for anything."""
    assert run_model.main(["x"], {"RUN_MODEL_TIMEOUT": text}) == 78
    assert "RUN_MODEL_TIMEOUT" in capsys.readouterr().err


def test_a_bug_is_70(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As everywhere: 1 would look like a model that failed."""
    monkeypatch.setattr(run_model, "switch", lambda *_: 1 // 0)
    assert run_model.main(["x"], {}) == 70
    assert "this is a bug in sparkguard" in capsys.readouterr().err


def test_without_a_user_manager_it_says_so(
    home: object, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """69: macOS, a container, `su` without a session."""
    monkeypatch.setenv("PATH", "/nonexistent")
    assert run_model.main(["x"]) == 69
    assert "vllm-serve.sh" in capsys.readouterr().err
