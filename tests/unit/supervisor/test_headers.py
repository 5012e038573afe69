"""What is known of models' headers, and what is kept of it for the next start."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mkgguf
import pytest

from sparkguard.core.estimate import Ask
from sparkguard.errors import SparkguardError
from sparkguard.supervisor import headers
from sparkguard.supervisor.headers import Headers, Sources


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return mkgguf.make(tmp_path / "ü.gguf", experts=4)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "models.json"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files whose headers are read."""
    names: list[str] = []
    original = headers.read_model
    monkeypatch.setattr(headers, "read_model", lambda path: names.append(path) or original(path))
    return names


def known(path: Path, model: Path) -> tuple[object, object]:
    """What is said of a model, and kept."""
    some = Headers(str(path))
    header = some.of(Sources(str(model)))
    said = header.facts, header.needs(Ask(context=1024))
    some.save()
    return said


def written(path: Path) -> Any:
    """What stands below the seal."""
    return json.loads(path.read_bytes().partition(b"\n")[2])


def sealed(raw: bytes) -> bytes:
    return hashlib.sha256(raw).hexdigest().encode() + b"\n" + raw


def test_the_next_start_reads_no_header(path: Path, model: Path, read: list[str]) -> None:
    """It says the same, to the byte."""
    first = known(path, model)
    assert read == [str(model)]
    assert known(path, model) == first
    assert read == [str(model)]
    assert os.stat(path).st_mode & 0o777 == 0o600


def test_another_question_reads_the_header(path: Path, model: Path, read: list[str]) -> None:
    """What is not known is reckoned, and then kept beside the rest."""
    known(path, model)
    some = Headers(str(path))
    needs = some.of(Sources(str(model))).needs(Ask(context=2048))
    some.save()
    assert len(read) == 2
    assert Headers(str(path)).of(Sources(str(model))).needs(Ask(context=2048)) == needs
    assert len(read) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.write_bytes(model.read_bytes() + b"\0"),
        lambda model: os.utime(model, ns=(0, 0)),
        lambda model: (mkgguf.make(model.with_name("new"), experts=2), os.replace(model.with_name("new"), model)),
    ],
)
def test_another_file_is_read(path: Path, model: Path, read: list[str], change: Callable[[Path], object]) -> None:
    """By its size, its time or its inode."""
    known(path, model)
    change(model)
    known(path, model)
    assert len(read) == 2


def test_what_belongs_to_a_model_counts(path: Path, model: Path, tmp_path: Path, read: list[str]) -> None:
    """A changed adapter changes what is needed, and one that is gone is told."""
    adapter = mkgguf.make_adapter(tmp_path / "adapter.gguf")
    sources = Sources(str(model), adapters=(str(adapter),))
    some = Headers(str(path))
    needs = some.of(sources).needs(Ask())
    assert needs.total_bytes > some.of(Sources(str(model))).needs(Ask()).total_bytes
    adapter.unlink()
    with pytest.raises(SparkguardError, match="adapter"):
        some.of(sources).needs(Ask())


def test_another_program_reads_anew(path: Path, model: Path, read: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its arithmetic may be another."""
    known(path, model)
    monkeypatch.setattr(headers, "version", lambda: "another")
    known(path, model)
    assert len(read) == 2


def test_a_damaged_file_counts_for_nothing(path: Path, model: Path, read: list[str]) -> None:
    """Cut anywhere, or with anything in it that does not belong there: the headers are read, and the file is written anew."""
    first = known(path, model)
    whole = path.read_bytes()
    kept = written(path)
    (entry,) = kept["models"].values()
    damaged = [whole[:size] for size in range(0, len(whole), 61)]
    for key in ("files", "facts", "needs"):
        for value in (None, 7, [], {"x": 1}, [[1, 2]], "x", {"x": [1, [["host", 1.5]], [], 1]}):
            broken = {**kept, "models": {str(model): {**entry, key: value}}}
            damaged.append(sealed(json.dumps(broken).encode()))
    damaged += [sealed(b"[" * 100_000), sealed(b"\xff"), sealed(json.dumps({**kept, "models": 3}).encode())]
    for raw in damaged:
        path.write_bytes(raw)
        assert known(path, model) == first


def test_another_number_counts_for_nothing(path: Path, model: Path, read: list[str]) -> None:
    """One bit of a disk's makes a model of 9 GB one of 1 GB, and a start would be admitted by it."""
    first = known(path, model)
    whole = path.read_bytes()
    digits = [at for at in range(len(whole)) if whole[at : at + 1].isdigit()]
    for at in digits[:: max(1, len(digits) // 50)]:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        read.clear()
        assert known(path, model) == first and read


def test_a_link_is_not_followed(path: Path, model: Path, tmp_path: Path, read: list[str]) -> None:
    """Neither to read nor to write; it is replaced."""
    known(path, model)
    elsewhere = tmp_path / "elsewhere"
    os.replace(path, elsewhere)
    path.symlink_to(elsewhere)
    before = elsewhere.read_bytes()
    known(path, model)
    assert len(read) == 2 and not path.is_symlink() and elsewhere.read_bytes() == before


def test_a_place_that_takes_nothing_costs_nothing(tmp_path: Path, model: Path) -> None:
    """And no half-written file is left."""
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert known(tmp_path / "cache" / "models.json", model)[0]
    (tmp_path / "models.json").mkdir()
    known(tmp_path / "models.json", model)
    assert sorted(each.name for each in tmp_path.glob("models.json*")) == ["models.json"]


def test_it_is_bounded(path: Path, model: Path) -> None:
    """Models that are gone, and questions that nobody asks any more, are dropped."""
    some = Headers(str(path))
    header = some.of(Sources(str(model)))
    for context in range(256, 256 * 40, 256):
        header.needs(Ask(context=context))
    assert header.facts.kind == "model"
    some.save()
    assert len(written(path)["models"][str(model)]["needs"]) == 16
    some.keep_only([])
    header.needs(Ask(context=0))
    some.save()
    assert written(path)["models"] == {}
