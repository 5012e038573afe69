"""vllm-model@NAME: any spec, under its plain name or systemd's escaped one, and no name that is a path."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from system.installed import Installed

# A start that has passed the guard and is not a server yet; the file is systemd's event for going on.
HELD = "[Service]\nExecStartPre=/bin/sh -c 'touch %h/held; read line <%h/go'\n"


@pytest.mark.parametrize("instance", ["my-model", r"my\x2dmodel", "qwen2.5-7b_q4", r"a\x3ab"])
def test_any_spec(installed: Installed, instance: str) -> None:
    """The instance's name, unescaped, is the spec's; claims show the unit unescaped."""
    name = instance.replace(r"\x2d", "-").replace(r"\x3a", ":")
    installed.spec(name, "0.20", 8005)
    unit = f"vllm-model@{instance}"
    assert installed.start(unit) == 0
    installed.until_it_serves(8005)
    assert installed.starts() == [f"serve org/{name} --port 8005 --gpu-memory-utilization 0.20"]
    _, verdict = installed.guard("other", "--gpu-memory-utilization", "0.10")
    assert [claim["unit"] for claim in verdict["claims"]] == [f"vllm-model@{name}.service"]


@pytest.mark.parametrize("instance", ["..", r"\x2e\x2e", r"a\x2fb", r"a\x25b", r"a\x20b", r"\x2dx", ".x", "nospec"])
def test_refused_names(installed: Installed, instance: str) -> None:
    """A path, a specifier, a blank, an option, a hidden file and a spec that is not there are refused with 78."""
    unit = f"vllm-model@{instance}"
    assert installed.start(unit) == 1
    state = installed.state(unit)
    assert "status=78" in state["ExecStartPre"]
    assert state["StatusText"].startswith("refused: ")
    assert installed.reservations() == []
    assert installed.starts() == []


@pytest.mark.parametrize("instance", ["my-model", r"my\x2dmodel"])
def test_a_start_under_way_is_counted(installed: Installed, instance: str) -> None:
    """Between the guard's end and the server's first moment the reservation stands for the start: systemd says it is alive."""
    installed.spec("my-model", "0.50", 8005)
    unit = f"vllm-model@{instance}"
    installed.drop_in(unit, HELD)
    installed.exec("mkfifo ~/go", check=True)
    installed.systemctl("start", "--no-block", unit)
    installed.until("[ -e ~/held ]")

    status, verdict = installed.guard("other", "--gpu-memory-utilization", "0.40")
    assert (status, verdict["reason"]) == (75, "over_budget")
    claim = verdict["claims"][0]
    assert (claim["source"], claim["share"], claim["port"]) == ("reservation", "0.50", 8005)
    assert claim["unit"] == "vllm-model@my-model.service"

    installed.exec("echo >~/go", check=True)
    installed.until_it_serves(8005)
    _, verdict = installed.guard("other", "--gpu-memory-utilization", "0.30")
    assert [(claim["source"], claim["share"]) for claim in verdict["claims"]] == [("argument", "0.50")]


def test_a_start_that_is_stopped_frees_its_share(installed: Installed) -> None:
    """A start that is called off between the guard and the server leaves nothing behind."""
    installed.spec("my-model", "0.50", 8005)
    installed.drop_in("vllm-model@my-model", HELD)
    installed.exec("mkfifo ~/go", check=True)
    installed.systemctl("start", "--no-block", "vllm-model@my-model")
    installed.until("[ -e ~/held ]")
    installed.systemctl("stop", "vllm-model@my-model")
    assert installed.guard("other", "--gpu-memory-utilization", "0.80")[0] == 0
    assert installed.starts() == []


def test_the_guard_is_asked_once(installed: Installed) -> None:
    """The launcher takes the unit's own guard's word: the reservation in force is the one that ExecStartPre= made."""
    installed.spec("my-model", "0.50", 8005)
    assert installed.start(r"vllm-model@my\x2dmodel") == 0
    installed.until_it_serves(8005)
    state = installed.state(r"vllm-model@my\x2dmodel")
    held = installed.reservations()
    assert [(one["invocation"], one["unit"]) for one in held] == [(state["InvocationID"], r"vllm-model@my\x2dmodel.service")]
    assert f"pid={held[0]['pid']}" in state["ExecStartPre"]
