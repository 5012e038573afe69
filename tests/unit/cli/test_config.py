"""sparkguard config: values, origins, and what is wrong with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from sparkguard.cli import main
from sparkguard.cli.config import collect
from sparkguard.errors import SparkguardError
from sparkguard.settings import MODEL, SETTINGS

if TYPE_CHECKING:
    from conftest import Place

KEYS = ["schema_version", "name", "spec", "settings", "passed_on"]
ROW = ["key", "value", "origin", "default", "valid", "meaning", "scope", "error"]


def rows(answer: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {row["key"]: (row["value"], row["origin"]) for row in answer["settings"]}


def test_the_site(place: Place) -> None:
    """Without a name: every site setting, none of a model's, and where each came from."""
    conf = place.conf('VLLM_MEM_BUDGET="0.65"\n')
    answer, wrong = collect(None, {**place.env, "VLLM_CPU_SHARE": "0.5"})
    assert wrong == []
    assert list(answer) == KEYS
    assert all(list(row) == ROW for row in answer["settings"])
    assert list(rows(answer)) == [key for key, setting in SETTINGS.items() if setting.scope != MODEL]
    assert rows(answer)["VLLM_MEM_BUDGET"] == ("0.65", f"{conf}, line 1")
    assert rows(answer)["VLLM_CPU_SHARE"] == ("0.5", "the environment")
    assert rows(answer)["VLLM_MEM_WAIT"] == ("60", "default")
    assert (answer["name"], answer["spec"], answer["passed_on"]) == (None, None, [])


def test_a_model(place: Place) -> None:
    """With a name: its spec, what a drop-in sets over it, and what the server gets."""
    place.shipped_units()
    spec = place.spec("longcontext", "VLLM_MODEL=org/m\nVLLM_GPU_MEM_UTIL=0.70\nHF_HUB_OFFLINE=1\n")
    place.unit("vllm-longcontext.service.d/r.conf", "[Service]\nEnvironment=VLLM_GPU_MEM_UTIL=0.75\n")
    answer, wrong = collect("vllm-longcontext", place.env)
    assert wrong == []
    assert rows(answer)["VLLM_GPU_MEM_UTIL"] == ("0.75", "the environment of vllm-longcontext.service")
    assert rows(answer)["VLLM_MODEL"] == ("org/m", f"{spec}, line 1")
    assert (answer["name"], answer["spec"]) == ("longcontext", str(spec))
    assert answer["passed_on"] == [{"key": "HF_HUB_OFFLINE", "value": "1", "origin": f"{spec}, line 3"}]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("VLLM_MEM_BUDGET", "80%"),
        ("VLLM_MEM_WAIT", "soon"),
        ("SPARK_MEMORY_POOL", "vram"),
        ("VLLM_PORT", "0"),
        ("VLLM_EXTRA_ARGS", "'"),
    ],
)
def test_a_bad_value_is_shown_and_said(place: Place, key: str, value: str) -> None:
    """All the rest is still printed; the bad one carries its error."""
    place.spec("m", f"{key}={value}\n" if value != "'" else "VLLM_EXTRA_ARGS=--a 'b\n")
    answer, wrong = collect("m", place.env)
    assert len(wrong) == 1
    errors = {row["key"]: row["error"] for row in answer["settings"] if row["error"]}
    assert errors == {key: wrong[0].message}
    assert len(answer["settings"]) == len(SETTINGS)


def test_a_file_that_cannot_be_read_is_an_error(place: Place) -> None:
    """An unknown key makes every value doubtful."""
    place.conf("VLLM_MEM_BUDGE=0.5\n")
    with pytest.raises(SparkguardError, match="unknown key VLLM_MEM_BUDGE"):
        collect(None, place.env)


def test_the_status_and_the_streams(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """0 and a table; with a bad value 78, the table all the same, and the reason on stderr."""
    assert main(["config"]) == 0
    assert "VLLM_MEM_BUDGET             0.80" in capsys.readouterr().out
    place.conf("VLLM_MEM_BUDGET=2\n")
    assert main(["config"]) == 78
    out, err = capsys.readouterr()
    assert "VLLM_MEM_BUDGET             2" in out
    assert "VLLM_MEM_BUDGET in" in err
