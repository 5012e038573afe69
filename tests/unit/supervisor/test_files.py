"""Which files are models, under which id, and which projector belongs to which."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkguard.supervisor import files, walk
from sparkguard.supervisor.files import Found, one


def scan(root: str) -> tuple[Found, ...]:
    scanned = files.scan(root)
    assert scanned.bound is None
    return scanned.models


def write(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 10)


@pytest.mark.parametrize(
    ("name", "id"),
    [
        ("a.gguf", "a"),
        ("a.b-Q4_K_M.GGUF", "a.b-Q4_K_M"),
        ("deep/er/a.gguf", "deep/er/a"),
        ("模型 'ü\".gguf", "模型 'ü\""),
        ("a-00001-of-00003.gguf", "a"),
        ("a-1-of-3.gguf", "a-1-of-3"),
    ],
)
def test_the_id(name: str, id: str, tmp_path: Path) -> None:
    """The stem, below its folders, without a split's number."""
    write(tmp_path, name)
    assert [found.id for found in scan(str(tmp_path))] == [id]


def test_a_split_model_is_one(tmp_path: Path) -> None:
    """Of all its parts' bytes, loaded by the first."""
    write(tmp_path, "x/a-00002-of-00003.gguf", "x/a-00001-of-00003.gguf", "x/a-00003-of-00003.gguf")
    (found,) = scan(str(tmp_path))
    assert (found.id, found.bytes, len(found.state)) == ("x/a", 30, 3)
    assert found.path == f"{tmp_path}/x/a-00001-of-00003.gguf"
    assert one("name", found.path) == found.replace(id="name")


def test_what_is_no_model(tmp_path: Path) -> None:
    """Other files, hidden ones, links to nowhere; a circle of links ends."""
    write(tmp_path, "a.gguf", "b.gguf.part", ".hidden.gguf", ".cache/c.gguf", "readme.md")
    (tmp_path / "gone.gguf").symlink_to("nowhere")
    (tmp_path / "circle").symlink_to(tmp_path)
    assert [found.id for found in scan(str(tmp_path))] == ["a"]


def test_a_folder_that_is_not_there_has_no_models(tmp_path: Path) -> None:
    """It may come later; until then that is said."""
    said = f"{tmp_path / 'none'} cannot be read: No such file or directory"
    assert files.scan(str(tmp_path / "none")) == files.Scan((), said)
    assert one("a", str(tmp_path / "none.gguf")).state == ()


@pytest.mark.parametrize(
    ("names", "projectors"),
    [
        (["x/a.gguf", "x/mmproj-F16.gguf"], {"x/a": "x/mmproj-F16.gguf"}),
        (["x/a.gguf", "x/b.gguf", "x/mmproj-F16.gguf"], {"x/a": None, "x/b": None}),
        (["a.gguf", "mmproj-F16.gguf"], {"a": None}),
        (["a-4b-Q4.gguf", "b.gguf", "mmproj-a-4b-f16.gguf"], {"a-4b-Q4": "mmproj-a-4b-f16.gguf", "b": None}),
        (
            ["a-4b.gguf", "a.gguf", "a.mmproj-f16.gguf", "a-4b-mmproj.gguf"],
            {"a-4b": "a-4b-mmproj.gguf", "a": "a.mmproj-f16.gguf"},
        ),
    ],
)
def test_the_projector(names: list[str], projectors: dict[str, str | None], tmp_path: Path) -> None:
    """By its name, the longest first; in a folder of its own a model needs no name. Never by chance in MODELS_DIR itself."""
    write(tmp_path, *names)
    found = {model.id: model.projector and str(Path(model.projector).relative_to(tmp_path)) for model in scan(str(tmp_path))}
    assert found == projectors


def test_a_change_is_seen(tmp_path: Path) -> None:
    """The state differs when a file's size or time does."""
    write(tmp_path, "a.gguf")
    before = scan(str(tmp_path))
    (tmp_path / "a.gguf").write_bytes(b"y" * 11)
    assert scan(str(tmp_path)) != before


def test_a_link_to_everything_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in real folders is found first, the walk ends at its bound, and says so."""
    models, everything = tmp_path / "models", tmp_path / "everything"
    write(models, "b/deep/er/a.gguf", "z/b.gguf")
    write(everything, *(f"{number}/c.gguf" for number in range(40)))
    (models / "a").symlink_to(everything)
    monkeypatch.setattr(walk, "MOST_ENTRIES", 50)
    scanned = files.scan(str(models))
    assert {"b/deep/er/a", "z/b"} <= {found.id for found in scanned.models}
    assert scanned.bound == f"{models} has more than 50 files and folders: not all of them were looked at"
    monkeypatch.setattr(walk, "MOST_ENTRIES", 1000)
    assert len(scan(str(models))) == 42


def test_a_link_to_the_root_ends(tmp_path: Path) -> None:
    """The whole file system, /proc and /sys included."""
    write(tmp_path, "a.gguf")
    (tmp_path / "all").symlink_to("/")
    scanned = files.scan(str(tmp_path))
    assert scanned.bound and "a" in {found.id for found in scanned.models}


def test_a_folder_of_many_files_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not read to its end either."""
    write(tmp_path, *(f"{number}.txt" for number in range(20)))
    monkeypatch.setattr(walk, "MOST_ENTRIES", 10)
    assert files.scan(str(tmp_path)).bound


def test_a_folder_too_deep_is_told(tmp_path: Path) -> None:
    """By the first of them."""
    write(tmp_path, "1/2/3/4/5/6/7/8/a.gguf")
    assert [found.id for found in scan(str(tmp_path))] == ["1/2/3/4/5/6/7/8/a"]
    write(tmp_path, "1/2/3/4/5/6/7/8/9/b.gguf")
    scanned = files.scan(str(tmp_path))
    assert len(scanned.models) == 1 and scanned.bound and scanned.bound.endswith(f"as {tmp_path}/1/2/3/4/5/6/7/8/9")


def test_a_link_and_its_folder_are_one(tmp_path: Path) -> None:
    """Under the folder's own name, wherever the link stands."""
    write(tmp_path, "b/x.gguf")
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b" / "round").symlink_to(tmp_path)
    assert [found.id for found in scan(str(tmp_path))] == ["b/x"]
