"""runners.toml: read, refused where it is wrong, and changed without losing what a person wrote."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from sparkguard.errors import SparkguardError
from sparkguard.supervisor.runners_toml import BadSetting, ModelSettings, change, parse, read

WRITTEN = """\
# Mine.
[models.small]  # the one for tests
context = 8192   # enough
aliases = ["s"]

[models."folder/large"]
unload_when_idle = false
"""


def test_all_keys() -> None:
    """Each has its meaning; args may be a text, split as a shell would."""
    text = """[models.a]
    file = "x/y.gguf"
    aliases = ["b", "c"]
    device = "cuda:0"
    context = 0
    kv_type = "q8_0"
    parallel = 4
    threads = 2
    unload_when_idle = false
    args = "--seed 1 --samplers 'top_k;top_p'"
    projector = false
    draft = "d.gguf"
    lora = ["l.gguf"]
    """
    assert parse(text, "f") == {
        "a": ModelSettings(
            "x/y.gguf", ("b", "c"), "cuda:0", 0, "q8_0", 4, 2, False, ("--seed", "1", "--samplers", "top_k;top_p"), False,
            "d.gguf", ("l.gguf",),
        )
    }  # fmt: skip


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("contxt = 1", "unknown key 'contxt' of model 'a'"),
        ("context = -1", "context of model 'a' is -1"),
        ("context = true", "context of model 'a' is True"),
        ("context = 4096.0", "context of model 'a' is 4096.0"),
        ('device = "gpu"', "device of model 'a' is 'gpu'"),
        ('kv_type = "q9"', "kv_type of model 'a' is 'q9'"),
        ("parallel = 0", "parallel of model 'a' is 0"),
        ('aliases = "b"', "aliases of model 'a'"),
        ("aliases = [1]", "aliases of model 'a'"),
        ("projector = true", "projector of model 'a' is True"),
        ('args = ["--port=1"]', "args of model 'a' has --port=1"),
        ('args = ["--ctx_size", "9"]', "args of model 'a' has --ctx_size"),
        ('args = "--version"', "args of model 'a': --version makes llama-server print something and end"),
        ('args = ["--temp", "1", "-h"]', "args of model 'a': -h makes llama-server print"),
        ('args = "--gpt_oss_20b_default"', "args of model 'a': --gpt-oss-20b-default makes llama-server take another model"),
        ('args = "-np 64"', "args of model 'a' has -np"),
        ('args = "\'"', "args of model 'a' cannot be split"),
        ('unload_when_idle = "no"', "unload_when_idle of model 'a' is 'no'"),
        ("lora = [", "f: "),
        ('[models.b]\naliases = ["a"]', "'a' is an alias of 'b' and a name of 'a'"),
        ("[other]", "unknown table 'other'"),
    ],
)
def test_what_is_refused(line: str, said: str) -> None:
    """With the file, the model and the key."""
    with pytest.raises(SparkguardError) as caught:
        parse(f"[models.a]\n{line}\n", "f")
    assert caught.value.message.startswith("f") and said in caught.value.message


@pytest.mark.parametrize("text", ["a\0b", "half \ud800 a character"])
@pytest.mark.parametrize("key", ["args", "lora", "aliases", "draft", "file", "projector"])
def test_what_no_process_and_no_file_can_take_is_refused(key: str, text: str, tmp_path: Path) -> None:
    """JSON can say both; nothing is written, and no temporary file stays."""
    with pytest.raises(SparkguardError, match=f"{key} of model 'a'"):
        change(str(tmp_path / "runners.toml"), "a", {key: [text] if key in ("args", "lora", "aliases") else text})
    assert list(tmp_path.iterdir()) == []


def test_the_nearest_key_is_offered() -> None:
    """A slip of the finger is the most likely reason."""
    with pytest.raises(SparkguardError) as caught:
        parse("[models.a]\nunload_when_iddle = true\n", "f")
    assert caught.value.hint == "did you mean unload_when_idle?"


def test_a_change_keeps_comments_and_order(tmp_path: Path) -> None:
    """Only the changed value differs."""
    file = tmp_path / "runners.toml"
    file.write_text(WRITTEN)
    change(str(file), "small", {"context": 512})
    assert file.read_text() == WRITTEN.replace("8192", "512")


def test_a_key_is_taken_away(tmp_path: Path) -> None:
    """None means: as if it had never been set; a model without keys is no table any more."""
    file = tmp_path / "runners.toml"
    file.write_text(WRITTEN)
    change(str(file), "folder/large", {"unload_when_idle": None})
    assert "folder/large" not in file.read_text() and read(str(file))["small"].context == 8192


@pytest.mark.parametrize("id", ["new", "folder/new", "模型 'ü\" x.y"])
def test_a_model_is_added(id: str, tmp_path: Path) -> None:
    """To a file that is not there yet, under any name that a file can have."""
    file = tmp_path / "spark" / "runners.toml"
    change(str(file), id, {"args": ["--seed", "1"], "unload_when_idle": False})
    assert read(str(file)) == {id: ModelSettings(args=("--seed", "1"), unload_when_idle=False)}


@pytest.mark.parametrize("changes", [{"context": "x"}, {"nonsense": 1}, {"nonsense": None}, {"aliases": ["folder/large"]}])
def test_a_bad_change_changes_nothing(changes: dict[str, Any], tmp_path: Path) -> None:
    """It names the key, and leaves no file beside it."""
    file = tmp_path / "runners.toml"
    file.write_text(WRITTEN)
    with pytest.raises(BadSetting) as raised:
        change(str(file), "small", {"parallel": 2, **changes})
    assert raised.value.param == next(iter(changes))
    assert file.read_text() == WRITTEN and list(tmp_path.iterdir()) == [file]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    """Into a repository of dot files, for example; the file keeps its mode."""
    file, link = tmp_path / "real.toml", tmp_path / "runners.toml"
    file.write_text(WRITTEN)
    file.chmod(0o640)
    link.symlink_to(file)
    change(str(link), "small", {"context": 1024})
    assert link.is_symlink() and read(str(file))["small"].context == 1024 and file.stat().st_mode & 0o777 == 0o640


def test_what_is_no_file_is_told_and_not_waited_for(tmp_path: Path) -> None:
    """A fifo that nobody writes, a device without an end, a list in a list in a list."""
    path = tmp_path / "runners.toml"
    os.mkfifo(path)
    with pytest.raises(SparkguardError, match="is no regular file"):
        read(str(path))
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(SparkguardError, match="is no regular file"):
        read(str(path))
    path.unlink()
    path.write_text("a = " + "[" * 100_000)
    with pytest.raises(SparkguardError, match="nested"):
        read(str(path))


def test_the_example_has_every_key() -> None:
    """Each with its meaning above it, and valid when the # before it is taken away."""
    text = (Path(__file__).parents[3] / "config" / "runners.toml").read_text()
    assert parse(text, "example") == {}
    lines = text.splitlines()
    keys = {match[1]: at for at, line in enumerate(lines) if (match := re.match(r"#(\w+) = ", line))}
    assert keys.keys() == set(ModelSettings._fields)
    assert all(lines[at - 1].startswith("# ") for at in keys.values())
    bare = re.sub(r"^#(?=\[|\w+ = )", "", text, flags=re.MULTILINE)
    assert parse(bare, "example")["ID"].replace(file=None, draft=None, projector=None) == ModelSettings(
        device="auto", context=4096, kv_type="f16", parallel=1, threads=0
    )
