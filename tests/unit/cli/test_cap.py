"""sparkguard cap: values, the drop-in, and whose file it is. Real caps are in tests/system/test_cli.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from sparkguard.cli import cap, main
from sparkguard.cli.cap import Cap, drop_in, full_name, parse_amount
from sparkguard.errors import SparkguardError

if TYPE_CHECKING:
    from conftest import Place

GIB = 1 << 30
TOTAL = 128 * GIB
UNIT = "vims-server.service"
FILE = f".config/systemd/user/{UNIT}.d/50-sparkguard-cap.conf"


@pytest.fixture
def vims(place: Place) -> Place:
    place.unit(UNIT, "[Service]\nExecStart=/bin/true\n")
    return place


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("25%", 32 * GIB),
        ("12.5%", 16 * GIB),
        ("100%", TOTAL),
        ("0", 0),
        ("1048576", 1 << 20),
        ("30G", 30 * GIB),
        ("1.5g", 3 * GIB // 2),
        ("512M", 512 << 20),
        ("4K", 4096),
        ("2T", 2 << 40),
        ("infinity", None),
    ],
)
def test_an_amount(text: str, amount: int | None) -> None:
    """As systemd reads it: a percentage of the RAM, or powers of 1024."""
    assert parse_amount(text, TOTAL) == amount


@pytest.mark.parametrize("text", ["", "%", "G", "30GB", "30GiB", "-1G", "101%", "1e3", "1e1%", "0x10", "half", "nan", "30 G B"])
def test_no_amount(text: str) -> None:
    """What systemd would ignore with a line in a log is refused here."""
    with pytest.raises(SparkguardError) as error:
        parse_amount(text, TOTAL)
    assert error.value.status == 2


@pytest.mark.parametrize(
    ("typed", "unit"), [("vims-server", UNIT), (UNIT, UNIT), ("inference.slice", "inference.slice"), ("a.b", "a.b.service")]
)
def test_the_full_name(typed: str, unit: str) -> None:
    """A service where no type is given."""
    assert full_name(typed) == unit


@pytest.mark.parametrize("typed", ["x.timer", "x.socket", "../x", "a/b", "-x", ".."])
def test_what_has_no_memory_of_its_own(typed: str) -> None:
    """Only services and slices are capped, and no path is a unit."""
    with pytest.raises(SparkguardError) as error:
        full_name(typed)
    assert error.value.status == 2


def test_the_drop_in_of_a_service() -> None:
    """What was typed stands in it, with why and how to take it back."""
    lines = drop_in(UNIT, Cap("25%", "30%", "0", "continue"), TOTAL).splitlines()
    assert lines[0] == f"# Written by `sparkguard cap`; `sparkguard cap {UNIT} --revert` removes it."
    assert lines[3:] == ["[Service]", "MemoryHigh=25%", "MemoryMax=30%", "MemorySwapMax=0", "OOMPolicy=continue"]
    assert "CUDA memory is charged to no cgroup" in lines[2]


def test_the_drop_in_of_a_slice() -> None:
    """A slice has no OOMPolicy=, and only what was given is written."""
    lines = drop_in("inference.slice", Cap(None, "100G", "2G", "kill"), TOTAL).splitlines()
    assert lines[3:] == ["[Slice]", "MemoryMax=100G", "MemorySwapMax=2G"]


@pytest.mark.parametrize(("high", "most"), [("31%", "30%"), ("40G", "30%"), ("infinity", "30%"), (None, "0"), ("0%", None)])
def test_caps_that_make_no_sense(high: str | None, most: str | None) -> None:
    """A unit that is killed before it is slowed down, or that may have nothing."""
    with pytest.raises(SparkguardError) as error:
        drop_in(UNIT, Cap(high, most, "0", "kill"), TOTAL)
    assert error.value.status == 2


@pytest.mark.parametrize(("high", "most"), [("30%", "30%"), ("25%", "infinity"), ("infinity", "infinity"), ("38G", "30%")])
def test_caps_that_do(high: str, most: str) -> None:
    """Equal ones too; 30 % of 128 GiB are more than 38 GiB."""
    assert f"MemoryHigh={high}\nMemoryMax={most}\n" in drop_in(UNIT, Cap(high, most, "0", "kill"), TOTAL)


def test_set_show_and_revert(vims: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """The file comes, is shown, comes again unchanged, and goes with its folder."""
    assert main(["cap", "vims-server", "--high", "25%", "--max", "30%"]) == 0
    out, err = capsys.readouterr()
    assert f"wrote {vims.home}/{FILE}" in err
    assert f"{UNIT}: {vims.home}/{FILE}" in out
    text = (vims.home / FILE).read_text()
    assert main(["cap", "vims-server", "--high", "25%", "--max", "30%"]) == 0
    assert (vims.home / FILE).read_text() == text
    assert [file.name for file in (vims.home / FILE).parent.iterdir()] == ["50-sparkguard-cap.conf"]

    assert main(["cap", "vims-server", "--revert"]) == 0
    assert not (vims.home / FILE).parent.exists()
    assert main(["cap", "vims-server", "--revert"]) == 0
    assert "nothing to revert" in capsys.readouterr().err


def test_revert_leaves_other_drop_ins(vims: Place) -> None:
    """The folder stays when somebody else has a file in it."""
    other = vims.unit(f"{UNIT}.d/override.conf", "[Service]\n")
    main(["cap", "vims-server", "--max", "30%"])
    assert main(["cap", "vims-server", "--revert"]) == 0
    assert [file.name for file in other.parent.iterdir()] == ["override.conf"]


def test_a_foreign_file_stays(vims: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """One of that name that is not ours is neither overwritten nor removed: 78."""
    file = vims.write(FILE, "[Service]\nMemoryMax=1G\n")
    assert main(["cap", "vims-server", "--max", "30%"]) == 78
    assert main(["cap", "vims-server", "--revert"]) == 78
    assert file.read_text() == "[Service]\nMemoryMax=1G\n"
    assert "was not written by sparkguard cap" in capsys.readouterr().err


def test_dry_run(vims: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """The file is printed and not written; nor is one removed."""
    assert main(["cap", "vims-server", "--max", "30G", "--dry-run"]) == 0
    assert "MemoryMax=30G" in capsys.readouterr().out
    assert not (vims.home / FILE).exists()
    main(["cap", "vims-server", "--max", "30G"])
    assert main(["cap", "vims-server", "--revert", "--dry-run"]) == 0
    assert (vims.home / FILE).exists()


@pytest.mark.parametrize(
    "words", [["--swap-max", "1G"], ["--revert", "--max", "1G"], ["--max", "lots"], ["--oom-policy", "maim", "--max", "1G"]]
)
def test_bad_usage(vims: Place, words: list[str]) -> None:
    """Is 2, and writes nothing."""
    assert main(["cap", "vims-server", *words]) == 2
    assert not (vims.home / FILE).exists()


def test_no_such_unit(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """A mistyped name gets no drop-in; without a user manager, that none answers is said as well."""
    assert main(["cap", "nosuch", "--max", "1G"]) == 78
    assert "there is no file of a user unit nosuch.service, and no user manager answers" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written(vims: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """Is 71, with the reason."""
    vims.write(f".config/systemd/user/{UNIT}.d", "a file where the folder should be")
    assert main(["cap", "vims-server", "--max", "1G"]) == 71
    assert "cannot be" in capsys.readouterr().err


def test_without_a_manager_it_is_said(vims: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """The drop-in is written; what is in force cannot be told."""
    assert main(["cap", "vims-server", "--max", "30G", "--json"]) == 0
    out, err = capsys.readouterr()
    assert "no user manager answers" in err
    assert f'"drop_in": "{vims.home}/{FILE}"' in out
    assert '"configured": null' in out


@pytest.mark.parametrize(
    ("present", "equal"),
    [({"MemoryMax": 8192}, True), ({"MemoryMax": 12288}, False), ({"MemoryMax": None}, False), ({}, True)],
)
def test_the_kernel_counts_whole_pages(present: dict[str, int | None], equal: bool) -> None:
    """A cap of 8193 bytes is in force when the kernel has 8192."""
    assert cap._equal({"MemoryMax": 8193, "MemoryHigh": None}, present) is equal
