"""sparkguard check: the guard's verdict on a machine made of files, with nothing reserved."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from sparkguard.cli import main
from sparkguard.cli.check import judge
from sparkguard.errors import SparkguardError

if TYPE_CHECKING:
    from conftest import Place

KEYS = [
    "schema_version",
    "verdict",
    "reason",
    "name",
    "wanted",
    "budget",
    "pools",
    "claims",
    "allow_unknown",
    "overridden",
    "hint",
]


def reason(place: Place, *words: str, gone: tuple[str, ...] = (), **env: str) -> str:
    return judge(words, gone, {**place.env, **env}, place.roots).reason


def test_a_spec_is_judged_like_its_start(place: Place) -> None:
    """Admitted alone, refused beside a server that takes too much."""
    place.spec("mymodel", "VLLM_MODEL=org/m\nVLLM_GPU_MEM_UTIL=0.70\n")
    assert reason(place, "mymodel") == "fits"
    place.vllm(100, "m", "--port", "8001", "--gpu-memory-utilization", "0.2")
    assert reason(place, "mymodel") == "over_budget"


def test_arguments_beat_the_spec(place: Place) -> None:
    """As on the launcher's command line."""
    place.spec("mymodel", "VLLM_MODEL=org/m\nVLLM_GPU_MEM_UTIL=0.70\n")
    assert reason(place, "mymodel", "--gpu-memory-utilization", "0.9") == "never_fits"


def test_arguments_alone(place: Place) -> None:
    """Any vLLM that somebody would start by hand, without a spec or a model."""
    assert judge(["--gpu-memory-utilization", "0.4"], (), place.env, place.roots).wanted.name == "unnamed"
    assert reason(place, "--gpu-memory-utilization=0.81") == "never_fits"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpu-memory-utilization", "0.4"], "no port is named, so it is judged for port 8000"),
        (["--gpu-memory-utilization", "0.4", "--port", "8003"], ""),
        (["mymodel"], "no port is named, so it is judged for port 8000"),
        (["withport"], ""),
    ],
)
def test_the_port_that_is_judged_is_said(place: Place, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    """Where nothing names one, since a server on that port would turn the verdict."""
    place.spec("mymodel", "VLLM_MODEL=org/m\nVLLM_GPU_MEM_UTIL=0.70\n")
    place.spec("withport", "VLLM_MODEL=org/m\nVLLM_GPU_MEM_UTIL=0.70\nVLLM_PORT=8003\n")
    judge(words, (), place.env, place.roots)
    assert capsys.readouterr().err == (f"sparkguard: {said}\n" if said else "")


def test_a_drop_in_counts(place: Place) -> None:
    """The unit's environment is read, whatever the name was typed as."""
    place.shipped_units()
    place.spec("longcontext", "VLLM_MODEL=org/m\nVLLM_GPU_MEM_UTIL=0.70\n")
    place.unit("vllm-longcontext.service.d/r.conf", "[Service]\nEnvironment=VLLM_GPU_MEM_UTIL=0.85\n")
    assert [reason(place, name) for name in ("longcontext", "vllm-longcontext", "vllm-longcontext.service")] == ["never_fits"] * 3


def test_the_arguments_of_the_unit_count(place: Place) -> None:
    """A unit that hands the launcher an argument is judged with it."""
    place.spec("a", "VLLM_MODEL=org/m\nVLLM_GPU_MEM_UTIL=0.10\n")
    place.unit("vllm-a.service", "[Service]\nExecStart=%h/.local/bin/vllm-serve.sh a --gpu-memory-utilization 0.95\n")
    assert reason(place, "a") == "never_fits"


def test_what_its_start_would_stop_is_gone(place: Place) -> None:
    """A Conflicts= peer, and its own former run, are not in its way; anybody else is."""
    place.shipped_units()
    place.spec("longcontext", "VLLM_MODEL=org/m\nVLLM_GPU_MEM_UTIL=0.70\n")
    place.vllm(100, "m", "--gpu-memory-utilization", "0.65", unit="vllm-vision-agent.service")
    place.vllm(200, "m", "--gpu-memory-utilization", "0.70", unit="vllm-longcontext.service")
    assert reason(place, "longcontext") == "fits"
    place.vllm(300, "m", "--port", "8001", "--gpu-memory-utilization", "0.2", unit="vllm-embeddings.service")
    assert reason(place, "longcontext") == "over_budget"


@pytest.mark.parametrize("gone", ["100", "vllm-model@qwen2.5.service", "vllm-model@qwen2.5", "qwen2.5"])
def test_a_holder_can_be_counted_as_gone(place: Place, gone: str) -> None:
    """By pid, unit or spec."""
    place.vllm(100, "m", "--gpu-memory-utilization", "0.7", unit="vllm-model@qwen2.5.service")
    assert reason(place, "--gpu-memory-utilization", "0.4") == "over_budget"
    assert reason(place, "--gpu-memory-utilization", "0.4", gone=(gone,)) == "fits"


def test_what_if(place: Place) -> None:
    """A setting in the shell's environment asks about another configuration."""
    assert reason(place, "--gpu-memory-utilization", "0.85", VLLM_MEM_BUDGET="0.90") == "fits"


def test_nothing_is_reserved(place: Place) -> None:
    """Neither an admitted nor a refused check leaves a reservation or a record."""
    for share in ("0.4", "0.9"):
        reason(place, "--gpu-memory-utilization", share)
    assert os.listdir(place.home / "run" / "sparkguard") == ["lock"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nosuch"], "no model is set for nosuch"),
        (["../x"], "cannot be a model's name"),
        (["m", "--gpu-memory-utilization", "40%"], "is no share"),
    ],
)
def test_what_cannot_be_judged(place: Place, words: list[str], message: str) -> None:
    """Is said, with 78."""
    with pytest.raises(SparkguardError, match=message) as error:
        judge(words, (), place.env, place.roots)
    assert error.value.status == 78


def test_the_streams(capsys: pytest.CaptureFixture[str]) -> None:
    """The FATAL text goes to stderr, the guard's object to stdout, and the status is the guard's; options may stand anywhere."""
    assert main(["check", "--gpu-memory-utilization", "0.95", "--json"]) == 78
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert list(answer) == KEYS
    assert (answer["verdict"], answer["reason"], answer["wanted"]["share"]) == ("refused", "never_fits", "0.95")
    assert err.startswith(
        "sparkguard: no port is named, so it is judged for port 8000\nFATAL: unnamed wants --gpu-memory-utilization 0.95"
    )


def test_an_error_is_an_object_too(capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be judged has the guard's object on stdout, and its words on stderr."""
    assert main(["check", "nosuch", "--json"]) == 78
    out, err = capsys.readouterr()
    assert (json.loads(out)["reason"], json.loads(out)["name"]) == ("error", "nosuch")
    assert err.startswith("sparkguard: no model is set for nosuch")


def test_short_options_of_vllm_pass(capsys: pytest.CaptureFixture[str]) -> None:
    """-tp is vLLM's, and no bundle of ours."""
    assert main(["check", "-tp", "2", "--gpu-memory-utilization", "0.95"]) == 78
    assert capsys.readouterr().out == ""
