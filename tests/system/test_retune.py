"""Retuning by drop-in: its Environment= wins over the spec, and deleting the file brings the spec back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from system.installed import HOME, UNITS

if TYPE_CHECKING:
    from system.installed import Installed

EXAMPLE = "examples/retune-longcontext.conf"


def share_of(installed: Installed, unit: str) -> str:
    """The share on the running server's own command line."""
    words = installed.exec(["cat", f"/proc/{installed.state(unit)['MainPID']}/cmdline"]).stdout.split("\0")
    return words[words.index("--gpu-memory-utilization") + 1]


@pytest.mark.parametrize("unit", UNITS)
def test_a_drop_in_wins_until_it_is_deleted(installed: Installed, unit: str) -> None:
    """On each unit and on the template."""
    port = 8001 if unit == "vllm-embeddings" else 8000
    installed.spec(unit.removeprefix("vllm-").removeprefix("model@"), "0.20", port)
    installed.drop_in(unit, "[Service]\nEnvironment=VLLM_GPU_MEM_UTIL=0.30\n")
    installed.systemctl("start", unit)
    installed.until_it_serves(port)
    assert share_of(installed, unit) == "0.30"
    assert installed.reservations()[0]["hold"].startswith("ram 300000000 ")

    installed.without_drop_in(unit)
    installed.systemctl("restart", unit)
    installed.until_it_serves(port)
    assert share_of(installed, unit) == "0.20"


def test_a_drop_in_for_every_instance(installed: Installed) -> None:
    """One on the template itself retunes what it starts."""
    installed.spec("mymodel", "0.20")
    installed.drop_in("vllm-model@", "[Service]\nEnvironment=VLLM_GPU_MEM_UTIL=0.30\n")
    installed.systemctl("start", "vllm-model@mymodel")
    installed.until_it_serves(8000)
    assert share_of(installed, "vllm-model@mymodel") == "0.30"


def test_json_in_a_drop_in(installed: Installed) -> None:
    """Quotes and blanks of JSON in VLLM_EXTRA_ARGS reach the server whole from a drop-in, as they do from a spec."""
    json = '{"method": "ngram", "num_speculative_tokens": 4}'
    installed.spec("one", "0.20", 8001, VLLM_EXTRA_ARGS=f"--speculative-config {json} --seed 1")
    installed.spec("two", "0.20", 8002)
    installed.drop_in("vllm-model@two", f"[Service]\nEnvironment='VLLM_EXTRA_ARGS=--speculative-config {json} --seed 1'\n")
    for unit, port in (("vllm-model@one", 8001), ("vllm-model@two", 8002)):
        installed.systemctl("start", unit)
        installed.until_it_serves(port)
        words = installed.exec(["cat", f"/proc/{installed.state(unit)['MainPID']}/cmdline"]).stdout.rstrip("\0").split("\0")
        assert words[-4:] == ["--speculative-config", json, "--seed", "1"]


def test_the_missions_own_example(installed: Installed) -> None:
    """longcontext at 0.75 is admitted alone and refused beside the embeddings, where its own 0.70 is admitted."""
    installed.spec("embeddings", "0.10", 8001)
    installed.spec("longcontext", "0.70", 8000)
    folder = f"{HOME}/.config/systemd/user/vllm-longcontext.service.d"
    installed.exec(f"mkdir {folder} && cp {EXAMPLE} {folder}/ && systemctl --user daemon-reload", check=True)
    assert installed.start("vllm-longcontext") == 0
    installed.until_it_serves(8000)
    assert share_of(installed, "vllm-longcontext") == "0.75"

    installed.systemctl("stop", "vllm-longcontext")
    assert installed.start("vllm-embeddings") == 0
    assert installed.start("vllm-longcontext") == 1
    assert installed.state("vllm-longcontext")["StatusText"].endswith("to 0.85, over the 0.80 budget.")

    installed.without_drop_in("vllm-longcontext", "retune-longcontext.conf")
    assert installed.start("vllm-longcontext") == 0
    assert installed.state("vllm-longcontext")["StatusText"] == "admitted: 0.80 of the 0.80 budget of system RAM"


def test_systemctl_edit(installed: Installed) -> None:
    """`systemctl --user edit` in a terminal retunes the next start, and `revert` takes it back."""
    installed.spec("longcontext", "0.20", 8000)
    installed.write("editor", '#!/bin/sh\nprintf "[Service]\\nEnvironment=VLLM_GPU_MEM_UTIL=0.30\\n" >"$1"\n')
    edit = "chmod +x ~/editor; script -qec 'SYSTEMD_EDITOR=~/editor systemctl --user edit vllm-longcontext' /dev/null"
    installed.exec(edit, check=True)
    installed.systemctl("start", "vllm-longcontext")
    installed.until_it_serves(8000)
    assert share_of(installed, "vllm-longcontext") == "0.30"

    installed.systemctl("revert", "vllm-longcontext")
    installed.systemctl("restart", "vllm-longcontext")
    installed.until_it_serves(8000)
    assert share_of(installed, "vllm-longcontext") == "0.20"
