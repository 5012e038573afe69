"""sparkguard plan: installed units and specs on a machine made of files."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from sparkguard.cli import main
from sparkguard.cli.plan import collect, describe
from sparkguard.errors import SparkguardError

if TYPE_CHECKING:
    from conftest import Place

KEYS = ["schema_version", "budget", "pools", "units", "conflicts", "maximal_sets", "never_together", "port_clashes"]
UNIT = ["unit", "name", "share", "devices", "port", "conflicts", "budget", "error"]


def plan(place: Place, *only: str, **env: str) -> dict[str, Any]:
    return collect(only, {**place.env, **env}, place.roots)


def specs(place: Place, **shares: str) -> None:
    for name, share in shares.items():
        place.spec(name.replace("_", "-"), f"VLLM_MODEL=org/m\nVLLM_GPU_MEM_UTIL={share}\n")


def test_the_shipped_units(place: Place) -> None:
    """The always-on one fits beside either of the two that take turns; their Conflicts= is in the answer."""
    place.shipped_units()
    specs(place, embeddings="0.10", longcontext="0.70", vision_agent="0.65")
    answer = plan(place)
    assert list(answer) == KEYS
    assert all(list(unit) == UNIT for unit in answer["units"])
    assert answer["budget"] == {"share": "0.80", "reserve_bytes": None}
    assert answer["units"][1] == {
        "unit": "vllm-longcontext.service",
        "name": "longcontext",
        "share": "0.70",
        "devices": ["ram"],
        "port": 8000,
        "conflicts": ["vllm-vision-agent.service"],
        "budget": None,
        "error": None,
    }
    assert answer["conflicts"] == [["vllm-longcontext.service", "vllm-vision-agent.service"]]
    assert answer["maximal_sets"] == [
        ["vllm-embeddings.service", "vllm-longcontext.service"],
        ["vllm-embeddings.service", "vllm-vision-agent.service"],
    ]
    assert answer["never_together"] == []


def test_a_configuration_that_was_in_use(place: Place) -> None:
    """Specs alone, as vllm-model@NAME: 0.10, 0.65, 0.75 and 0.95, and all of it is in the help."""
    specs(place, embeddings="0.10", gemma4="0.65", vision_agent="0.75", longcontext="0.95")
    answer = plan(place)
    assert answer["never_together"] == [
        ["vllm-model@longcontext.service"],
        ["vllm-model@embeddings.service", "vllm-model@vision-agent.service"],
        ["vllm-model@gemma4.service", "vllm-model@vision-agent.service"],
    ]
    assert answer["maximal_sets"] == [
        ["vllm-model@vision-agent.service"],
        ["vllm-model@embeddings.service", "vllm-model@gemma4.service"],
    ]
    text = describe(answer)
    assert "vllm-model@embeddings + vllm-model@vision-agent: 0.10 + 0.75 = 0.85" in text
    assert "  vllm-model@longcontext: 0.95\n" in text


def test_a_spec_with_a_unit_of_its_own_counts_once(place: Place) -> None:
    """Also when the unit launches a spec of another name."""
    place.unit("vllm-a.service", "[Service]\nExecStart=%h/.local/bin/vllm-serve.sh b\n")
    specs(place, b="0.30", c="0.20")
    assert [(unit["unit"], unit["name"], unit["share"]) for unit in plan(place)["units"]] == [
        ("vllm-a.service", "b", "0.30"),
        ("vllm-model@c.service", "c", "0.20"),
    ]


def test_a_drop_in_counts(place: Place) -> None:
    """Its share, and a budget of its own."""
    place.shipped_units()
    specs(place, embeddings="0.10", longcontext="0.70", vision_agent="0.65")
    place.unit("vllm-longcontext.service.d/r.conf", "[Service]\nEnvironment=VLLM_GPU_MEM_UTIL=0.75 VLLM_MEM_BUDGET=0.90\n")
    answer = plan(place)
    assert (answer["units"][1]["share"], answer["units"][1]["budget"]) == ("0.75", "0.90")
    assert ["vllm-embeddings.service", "vllm-longcontext.service"] in answer["maximal_sets"]
    assert "own budget 0.90" in describe(answer)


def test_what_if_it_is_the_budget(place: Place) -> None:
    """The shell's budget counts; its VLLM_GPU_MEM_UTIL or VLLM_PORT is no unit's."""
    specs(place, a="0.40", b="0.30")
    answer = plan(place, VLLM_MEM_BUDGET="0.65", VLLM_GPU_MEM_UTIL="0.1", VLLM_PORT="1")
    assert answer["never_together"] == [["vllm-model@a.service", "vllm-model@b.service"]]
    assert [(unit["share"], unit["port"]) for unit in answer["units"]] == [("0.40", 8000), ("0.30", 8000)]


@pytest.mark.parametrize(
    ("spec", "share", "error"),
    [
        ("VLLM_MODEL=/nowhere\nVLLM_GPU_MEM_UTIL=0.70\n", "0.70", "does not exist"),
        ("VLLM_MODEL=org/m\nVLLM_GPU_MEM_UTIL=70%\n", None, "is no share"),
        ("VLLM_MODEL=org/m\nVLLM_PORTS=1\n", None, "unknown key VLLM_PORTS"),
    ],
    ids=["a missing folder", "no share", "an unknown key"],
)
def test_a_broken_unit(place: Place, spec: str, share: str | None, error: str) -> None:
    """It is named with what is wrong, and counts at its share where that can be told."""
    place.spec("broken", spec)
    specs(place, other="0.40")
    answer = plan(place)
    assert answer["units"][0]["share"] == share
    assert error in answer["units"][0]["error"]
    together = [["vllm-model@broken.service", "vllm-model@other.service"]]
    assert answer["never_together"] == (together if share else [])
    assert f"  vllm-model@broken: {answer['units'][0]['error']}" in describe(answer)


def test_a_spec_without_a_model_is_not_broken(place: Place) -> None:
    """It counts at its share, and is said to wait for one, as doctor says it."""
    place.spec("new", "VLLM_MODEL=\nVLLM_GPU_MEM_UTIL=0.70\n")
    answer = plan(place)
    assert (answer["units"][0]["share"], answer["units"][0]["error"]) == ("0.70", "no model is set yet")
    text = describe(answer)
    assert text.count("no model is set yet") == 1
    assert "roken" not in text


def test_a_unit_that_starts_vllm_by_itself(place: Place) -> None:
    """Without our launcher, its command line says what it takes; one that says nothing is named."""
    place.unit("vllm-own.service", "[Service]\nExecStart=/opt/bin/vllm serve m --port 9000 --gpu-memory-utilization 0.6\n")
    place.unit("vllm-vims.service", "[Service]\nExecStart=/opt/bin/vims-server vllm-exec gemma\n")
    specs(place, a="0.30")
    answer = plan(place)
    own, vims = answer["units"][0], answer["units"][1]
    assert (own["unit"], own["share"], own["port"], own["error"]) == ("vllm-own.service", "0.60", 9000, None)
    assert (vims["share"], vims["error"]) == (None, "nobody knows the share of what it starts: /opt/bin/vims-server")
    assert answer["never_together"] == [["vllm-own.service", "vllm-model@a.service"]]


def test_two_units_on_one_port(place: Place) -> None:
    """Without a Conflicts= the second one would load and then fail; that is a warning, and no set."""
    specs(place, a="0.10", b="0.20")
    answer = plan(place)
    assert answer["port_clashes"] == [{"units": ["vllm-model@a.service", "vllm-model@b.service"], "port": 8000}]
    assert answer["maximal_sets"] == [["vllm-model@a.service", "vllm-model@b.service"]]
    assert "vllm-model@a and vllm-model@b: 8000" in describe(answer)


def test_the_default_share_counts(place: Place) -> None:
    """A spec that sets none gets vLLM's own, which fits no budget of 0.80."""
    place.spec("a", "VLLM_MODEL=org/m\n")
    answer = plan(place)
    assert answer["units"][0]["share"] == "0.92"
    assert answer["never_together"] == [["vllm-model@a.service"]]


def test_the_reserve_is_no_room(place: Place) -> None:
    """Under a budget of 1.00 the live check still keeps 5 % of the pool."""
    specs(place, a="0.50", b="0.48")
    assert plan(place, VLLM_MEM_BUDGET="1")["never_together"] == [["vllm-model@a.service", "vllm-model@b.service"]]


def test_too_many_units(place: Place) -> None:
    """Beyond 20 it is said what to do instead; named ones still work."""
    specs(place, **{f"m{i:02}": "0.10" for i in range(21)})
    with pytest.raises(SparkguardError, match="21 units are too many") as error:
        plan(place)
    assert (error.value.status, error.value.hint) == (2, "name those that matter: sparkguard plan UNIT...")
    assert plan(place, "m01", "vllm-model@m02")["maximal_sets"] == [["vllm-model@m01.service", "vllm-model@m02.service"]]


def test_many_sets_are_cut_short_for_people(place: Place) -> None:
    """Ten units of 0.20 make 210 sets of four, which nobody reads; the object has them all."""
    specs(place, **{f"m{i}": "0.20" for i in range(10)})
    answer = plan(place)
    assert len(answer["maximal_sets"]) == 210
    lines = describe(answer).splitlines()
    assert "  and 170 more: see --json" in lines
    assert sum(line.count(" + ") == 6 and line.endswith("= 0.80") for line in lines) == 40


def test_a_unit_that_is_not_there(place: Place) -> None:
    """A name that somebody mistyped is said to be nowhere."""
    assert "there is no unit vllm-model@nosuch.service" in plan(place, "nosuch")["units"][0]["error"]


def test_nothing_installed(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """Is no error."""
    assert main(["plan"]) == 0
    assert capsys.readouterr().out == "No vllm-*.service and no spec is installed.\n"


def test_files_that_are_none(place: Place) -> None:
    """Whatever lies among the specs and the units: it is named, and nobody waits for it."""
    specs(place, good="0.40")
    models = place.home / ".config" / "spark" / "models"
    os.mkfifo(models / "fifo.env")
    (models / "folder.env").mkdir()
    (models / "zero.env").symlink_to("/dev/zero")
    for name in (b"\xff.env", b"a b.env", b"new\nline.env"):
        (models / os.fsdecode(name)).write_text("VLLM_MODEL=o/n\n")
    place.unit("vllm-good.service", "[Service]\nExecStart=/x/vllm-serve.sh good\n")
    os.mkfifo(place.home / ".config" / "systemd" / "user" / "vllm-fifo.service")
    answer = plan(place)
    right = [unit["name"] for unit in answer["units"] if not unit["error"]]
    assert (right, len(answer["units"])) == (["good"], 8)
    describe(answer).encode()
