"""Names of units and specs, and unit files read without a manager (sparkguard/units.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from sparkguard import units
from sparkguard.errors import SparkguardError

if TYPE_CHECKING:
    from conftest import Place


@pytest.mark.parametrize(
    ("typed", "unit", "name"),
    [
        ("vllm-longcontext", "vllm-longcontext.service", "longcontext"),
        ("vllm-longcontext.service", "vllm-longcontext.service", "longcontext"),
        ("longcontext", "vllm-longcontext.service", "longcontext"),
        ("mymodel", "vllm-model@mymodel.service", "mymodel"),
        ("vllm-model@mymodel", "vllm-model@mymodel.service", "mymodel"),
        ("vllm-model@qwen2.5-7b.service", "vllm-model@qwen2.5-7b.service", "qwen2.5-7b"),
        (r"vllm-model@my\x2dmodel", "vllm-model@my-model.service", "my-model"),
        ("größe", r"vllm-model@gr\xc3\xb6\xc3\x9fe.service", "größe"),
        ("vllm-other", "vllm-model@vllm-other.service", "vllm-other"),
    ],
)
def test_what_somebody_types_names_a_unit_and_a_spec(place: Place, typed: str, unit: str, name: str) -> None:
    """A unit of its own where one is installed, else the template's instance."""
    place.shipped_units()
    assert units.resolve(typed, place.env) == (unit, name)


@pytest.mark.parametrize("typed", ["", "a/b", "..", "a b", "50%", "-x", "vllm-model@"])
def test_what_can_name_neither_is_refused(place: Place, typed: str) -> None:
    """Nothing that could leave the folder of specs becomes a path or a unit."""
    with pytest.raises(SparkguardError) as error:
        units.resolve(typed, place.env)
    assert error.value.status == 78


def test_what_is_installed(place: Place) -> None:
    """Templates, other units and samples are no models."""
    place.shipped_units()
    place.unit("other.service", "")
    place.spec("mymodel", "")
    place.write(".config/spark/models/example.env.sample", "")
    assert units.installed(place.env) == ["vllm-embeddings.service", "vllm-longcontext.service", "vllm-vision-agent.service"]
    assert units.specs(place.env) == ["mymodel"]


def test_without_a_home_nothing_is_installed(place: Place) -> None:
    """No folder is no error."""
    assert (units.installed(place.env), units.specs(place.env)) == ([], [])


def test_the_shipped_units_launch_their_specs(place: Place) -> None:
    """The spec's name is the launcher's argument, and Conflicts= is seen."""
    place.shipped_units()
    unit = units.load("vllm-longcontext.service", place.env)
    assert unit.launches() == ("longcontext", ())
    assert unit.conflicts == ("vllm-vision-agent.service",)
    assert unit.argv[0] == f"{place.home}/.local/bin/vllm-serve.sh"


def test_an_instance_launches_the_spec_of_its_name(place: Place) -> None:
    r"""%i is the escaped name, and \xNN is undone."""
    place.shipped_units()
    assert units.load(r"vllm-model@my\x2dmodel.service", place.env).launches() == ("my-model", ())


def test_drop_ins_add_up(place: Place) -> None:
    """In the order of their names, over all folders that systemd reads; an empty assignment starts anew."""
    place.unit("vllm-a-b.service", "[Service]\nEnvironment=A=unit B=unit C=unit\nExecStart=%h/vllm-serve.sh a-b\n")
    place.unit("service.d/10.conf", "[Service]\nEnvironment=A=all\n")
    place.unit("vllm-.service.d/20.conf", "[Service]\nEnvironment=B=prefix\n")
    place.unit("vllm-a-b.service.d/30.conf", '[Service]\nEnvironment="C=x y" D=1\n')
    place.unit("vllm-a-b.service.d/40.conf", "[Service]\nExecStart=\nExecStart=-%h/bin/vllm-serve.sh \\\n  a-b --seed 3\n")
    place.unit("vllm-a-b.service.d/not-a-drop-in", "[Service]\nEnvironment=D=2\n")
    unit = units.load("vllm-a-b.service", place.env)
    assert unit.environment == {"A": "all", "B": "prefix", "C": "x y", "D": "1"}
    assert unit.launches() == ("a-b", ("--seed", "3"))


def test_the_more_specific_drop_in_replaces_its_namesake(place: Place) -> None:
    """One name in two folders is one drop-in, as systemd has it."""
    place.unit("vllm-model@.service", "[Service]\nExecStart=vllm-serve.sh %i\n")
    place.unit("vllm-model@.service.d/x.conf", "[Service]\nEnvironment=A=template B=template\n")
    place.unit("vllm-model@m.service.d/x.conf", "[Service]\nEnvironment=A=instance\n")
    assert units.load("vllm-model@m.service", place.env).environment == {"A": "instance"}


def test_an_environment_file_beats_environment(place: Place) -> None:
    """As in systemd; a missing file with '-' is none."""
    file = place.write("site.env", "# comment\nA='from file'\nB=2\n")
    place.unit(
        "vllm-a.service", f"[Service]\nEnvironment=A=unit\nEnvironmentFile={file}\nEnvironmentFile=-/nowhere\nExecStart=x\n"
    )
    assert units.load("vllm-a.service", place.env).environment == {"A": "from file", "B": "2"}


@pytest.mark.parametrize(
    ("word", "value"),
    [("%%", "%"), ("100%%x", "100%x"), ("%i-%n", "m-vllm-x@m.service"), ("%p", "vllm-x"), ("%z", "%z"), ("a%", "a%")],
)
def test_specifiers(place: Place, word: str, value: str) -> None:
    """Those that model units use; an unknown one stays as it is."""
    place.unit("vllm-x@.service", f"[Service]\nExecStart=/bin/x {word}\n")
    assert units.load("vllm-x@m.service", place.env).argv == ("/bin/x", value)


def test_no_unit_has_no_argv(place: Place) -> None:
    """A unit that is nowhere sets nothing and launches nothing."""
    unit = units.load("vllm-nosuch.service", place.env)
    assert (unit.environment, unit.conflicts, unit.argv, unit.launches()) == ({}, (), (), None)


@pytest.mark.parametrize(
    ("unit", "label"),
    [("vllm-t.service", "vllm_2dt_2eservice"), ("9a.service", "_39a_2eservice"), ("ä.slice", "_c3_a4_2eslice")],
)
def test_the_bus_name_of_a_unit(unit: str, label: str) -> None:
    """Letters and digits stay; a leading digit and every other byte become _xx."""
    assert units._bus_label(unit) == label


def test_no_manager_is_none(place: Place) -> None:
    """Where no manager answers, that is said and not guessed."""
    assert units.manager_environment(place.env) is None
    assert units.properties("vllm-a.service", "Unit", ("LoadState",), place.env) is None
    assert units.systemctl(place.env, "daemon-reload") is False
    assert units.bus({**place.env, "PATH": "/nowhere"}, "list") is None
