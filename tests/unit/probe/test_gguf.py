"""The GGUF reader: what it takes from a header, and that no header hurts it."""

from __future__ import annotations

import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf_shapes import SHAPES, Maker, header, text, value_of
from hypothesis import given
from hypothesis import strategies as st

from sparkguard.core.ggml import ModelFile
from sparkguard.errors import CONFIG, SparkguardError
from sparkguard.probe.gguf import read_model

Write = Callable[[bytes], Path]
KEYS: dict[str, object] = {"general.architecture": "llama", "llama.block_count": 1}
TENSORS = [("token_embd.weight", (32, 4), "q8_0"), ("blk.0.attn_norm.weight", (4,), "f32")]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(data: bytes) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(data)
        return path

    return write


def whole(keys: dict[str, object] | None = None, tensors: list[tuple[str, tuple[int, ...], str]] | None = None) -> bytes:
    """A small model with its (zero) weights."""
    start, size = header(KEYS if keys is None else keys, TENSORS if tensors is None else tensors)
    return start + bytes(size)


def refused(path: Path) -> SparkguardError:
    with pytest.raises(SparkguardError) as caught:
        read_model(str(path))
    assert caught.value.status == CONFIG
    assert caught.value.message.startswith(f"{path}: ")
    assert caught.value.hint
    return caught.value


def test_it_reads_keys_and_tensors(write: Write) -> None:
    """Scalars, texts and short arrays are kept as they are; tensors have ggml's shape and size."""
    keys = {
        **KEYS,
        "a.flag": True,
        "a.ratio": 0.5,
        "a.layers": [1, 2, 3],
        "a.pattern": [True, False],
        "a.words": ["x", "y"],
        "a.empty": [],
    }
    model = read_model(str(write(whole(keys))))
    assert model.architecture == "llama"
    assert (model.metadata["a.flag"], model.metadata["a.ratio"], model.metadata["a.layers"]) == (True, 0.5, (1, 2, 3))
    assert model.metadata["a.pattern"] == (True, False)
    assert (model.metadata["a.words"], model.metadata["a.empty"]) == (None, ())
    assert model.lengths == {"a.layers": 3, "a.pattern": 2, "a.words": 2, "a.empty": 0}
    assert [(name, stored.shape, stored.kind.name, stored.bytes) for name, stored in model.table.by_name.items()] == [
        ("token_embd.weight", (32, 4), "q8_0", 136),
        ("blk.0.attn_norm.weight", (4,), "f32", 16),
    ]


def test_every_shape_of_the_tests_is_read(tmp_path: Path) -> None:
    """What the tests make is read back with all its tensors."""
    for name in ("llama-8b", "gpt-oss-20b", "kimi-linear-48b", "gemma4-e4b"):
        maker = SHAPES[name]()
        maker.write(tmp_path / f"{name}.gguf")
        assert len(read_model(str(tmp_path / f"{name}.gguf")).table.by_name) == len(maker.tensors)


def test_version_2_is_read(write: Write) -> None:
    """Version 2 differs from 3 in nothing that is read."""
    start, size = header(KEYS, TENSORS, version=2)
    assert len(read_model(str(write(start + bytes(size)))).table.by_name) == 2


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b"GG", "is too short"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"PK\x03\x04 something else entirely", "begins with"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 4, 0, 0), "version 4"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 63, 0), "tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 40), "keys"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + bytes(8), "tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 60) + bytes(40), "a key has"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("") + bytes(40), "a key is empty"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<I", 13) + bytes(40), "type 13"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<IQ", 8, 1 << 62) + bytes(8), "the text of 'a'"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<IIQ", 9, 4, 1 << 61) + bytes(8), "claims to have"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<IIQ", 9, 8, 1 << 61) + bytes(8), "claims to have"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<IIQ", 9, 9, 1) + bytes(40), "elements of type 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * (text("a") + value_of(1)), "occurs twice"),
        (whole({**KEYS, "general.alignment": "32"}), "general.alignment"),
        (whole({**KEYS, "general.alignment": 24}), "general.alignment"),
        (whole({**KEYS, "general.alignment": 0}), "general.alignment"),
        (whole(tensors=[TENSORS[0], TENSORS[0]]), "occurs twice"),
        (whole(tensors=[("x" * 64, (4,), "f32")]), "name of a tensor"),
        (whole()[:-100], "bytes of its tensors are missing"),
    ],
)
def test_what_it_refuses(write: Write, data: bytes, words: str) -> None:
    """Each kind of damage is named, with the file and a remedy, under status 78."""
    assert words in refused(write(data)).message


@pytest.mark.parametrize(
    ("dimensions", "shape", "kind", "offset", "words"),
    [
        (5, (1, 1, 1, 1, 1), 0, 0, "5 dimensions"),
        (1, (4,), 4, 0, "type 4"),
        (1, (4,), 1 << 31, 0, "type 2147483648"),
        (1, (31,), 8, 0, "rows of 31"),
        (1, (1 << 63,), 0, 0, "the shape"),
        (4, (1 << 32, 1 << 32, 1 << 32, 1 << 32), 0, 0, "the shape"),
        (1, (4,), 0, 32, "begins at 32"),
        (1, (4,), 0, (1 << 64) - 32, "begins at"),
    ],
)
def test_tensors_it_refuses(write: Write, dimensions: int, shape: tuple[int, ...], kind: int, offset: int, words: str) -> None:
    """No shape, type or place of a tensor is believed that ggml would not take."""
    table = text("x") + struct.pack(f"<I{len(shape)}QIQ", dimensions, *shape, kind, offset)
    assert words in refused(write(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + table + bytes(64))).message


@pytest.mark.parametrize("after", [16, 512])
@pytest.mark.parametrize(
    ("said", "words"),
    [
        (struct.pack("<I2QI", (1 << 24) + 2, 4, 4, 0), "16777218 dimensions"),
        (struct.pack("<I5QI", 5, 1, 1, 1, 1, 1, 0), "5 dimensions"),
        (struct.pack("<IQI", 1, 4, 4), "type 4"),
        (struct.pack("<IQI", 1, 31, 8), "rows of 31"),
    ],
)
def test_a_tensor_is_refused_wherever_it_stands(write: Write, said: bytes, words: str, after: int) -> None:
    """At the end of a file, where it is read piece by piece, and before other data, where it is read at once."""
    table = text("x") + said + bytes(8)
    assert words in refused(write(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + table + bytes(after))).message


def test_a_header_cut_anywhere_is_refused(write: Write) -> None:
    """At every length short of the whole file there is an error, never another exception."""
    data = whole({**KEYS, "a.words": ["one", "two"], "a.numbers": [1, 2, 3]})
    for length in range(len(data) - 16):  # the last tensor's padding may be missing
        refused(write(data[:length]))


@given(st.data())
def test_damage_anywhere_is_an_error_or_harmless(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """With any bytes changed, the reader returns a model or refuses with status 78."""
    path = tmp_path_factory.getbasetemp() / f"damaged-{os.getpid()}.gguf"
    content = bytearray(whole({**KEYS, "a.words": ["one"], "a.numbers": [1, 2], "a.flag": True}))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(4, len(content) - 9))
        new = data.draw(
            st.one_of(st.binary(min_size=1, max_size=8), st.integers(0, (1 << 64) - 1).map(lambda n: struct.pack("<Q", n)))
        )
        content[at : at + len(new)] = new
    path.write_bytes(content)
    try:
        assert isinstance(read_model(str(path)), ModelFile)
    except SparkguardError as error:
        assert error.status == CONFIG


@given(st.binary(max_size=200))
def test_any_bytes_after_the_magic(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """Noise is refused."""
    path = tmp_path_factory.getbasetemp() / f"noise-{os.getpid()}.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", 3) + data)
    try:
        assert isinstance(read_model(str(path)), ModelFile)
    except SparkguardError as error:
        assert error.status == CONFIG


def test_memory_stays_bounded(write: Write, tmp_path: Path) -> None:
    """A file that claims the most that its size allows is read in a window, not at once."""
    path = write(b"")
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<IIQ", 9, 4, 1 << 28))
        file.truncate(1 << 34)
    tracemalloc.start()
    try:
        assert read_model(str(path)).lengths == {"a": 1 << 28}
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def vocabulary(words: list[str], key: str = "tokenizer.ggml.scores") -> dict[str, object]:
    return {**KEYS, "tokenizer.ggml.tokens": words, key: [0.0] * len(words), "llama.context_length": 77}


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ([f"token{i}" for i in range(5000)], "tokenizer.ggml.scores"),
        (["x" * 300 if i % 7 == 0 else "" for i in range(5000)], "tokenizer.ggml.scores"),
        ([f"token{i}" for i in range(5000)], "unheard.of"),
        (["general.name", "output", "blk.0", "split.count", "tokenizer.py"] * 1000, "tokenizer.ggml.scores"),
        (["general.name", "output", "blk.0", "split.count", "tokenizer.py"] * 1000, "quantize.something"),
        (["\0" * 9] * 5000, "unheard.of"),
    ],
    ids=["usual", "long and empty", "followed by an unknown key", "names as words", "names, another key", "zeros"],
)
def test_a_long_vocabulary_is_passed_over(write: Write, words: list[str], key: str) -> None:
    """Whatever the words are and whatever follows them, the next key is found."""
    model = read_model(str(write(whole(vocabulary(words, key)))))
    assert model.lengths["tokenizer.ggml.tokens"] == 5000
    assert model.metadata["llama.context_length"] == 77
    assert len(model.table.by_name) == 2


def test_a_vocabulary_that_ends_beyond_the_file(write: Write) -> None:
    """A string longer than what is left is refused, also in a long array."""
    start = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<IIQ", 9, 8, 2000)
    assert "a string of 'a'" in refused(write(start + 1999 * text("x") + struct.pack("<Q", 1 << 40) + bytes(64))).message


def split(folder: Path, count: int = 3) -> list[Path]:
    """A model in count shards; the first has no tensors, as some converters write it."""
    paths = []
    for number in range(count):
        path = folder / f"big model-{number + 1:05}-of-{count:05}.gguf"
        keys = {**(KEYS if number == 0 else {}), "split.no": number, "split.count": count, "split.tensors.count": count - 1}
        path.write_bytes(whole(keys, [(f"blk.{number}.x.weight", (32,), "f32")] if number else []))
        paths.append(path)
    return paths


def test_shards_are_one_model(tmp_path: Path) -> None:
    """Tensors and bytes of all shards are counted, the keys are the first's."""
    paths = split(tmp_path)
    model = read_model(str(paths[0]))
    assert list(model.table.by_name) == ["blk.1.x.weight", "blk.2.x.weight"]
    assert model.file_bytes == sum(path.stat().st_size for path in paths)
    assert model.shards == tuple(map(str, paths))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    """The error has the name of the file to get."""
    paths = split(tmp_path)
    paths[1].unlink()
    assert str(paths[1]) in refused(paths[0]).message


def test_only_the_first_shard_is_a_model(tmp_path: Path) -> None:
    """Another one says which to name."""
    error = refused(split(tmp_path)[1])
    assert "shard number 1 of 3" in error.message
    assert error.hint is not None
    assert "00001-of" in error.hint


def test_shards_of_two_models_are_refused(tmp_path: Path) -> None:
    """A shard that is not the one its name says, or has too few tensors, is refused."""
    paths = split(tmp_path)
    kept = paths[1].read_bytes()
    paths[1].write_bytes(paths[2].read_bytes())
    assert "calls itself shard number 2" in refused_of(paths[0], paths[1]).message
    paths[1].write_bytes(kept)
    paths[2].write_bytes(whole({"split.no": 2, "split.count": 3}, []))
    assert "have 1 tensors, not 2" in refused(paths[0]).message


def refused_of(first: Path, named: Path) -> SparkguardError:
    with pytest.raises(SparkguardError) as caught:
        read_model(str(first))
    assert str(named) in caught.value.message
    return caught.value


def test_a_renamed_first_shard_is_refused(tmp_path: Path) -> None:
    """Without its number the others cannot be found."""
    paths = split(tmp_path)
    assert "is not named so" in refused(paths[0].rename(tmp_path / "model.gguf")).message


def test_files_that_are_none(tmp_path: Path) -> None:
    """A missing file, a folder, a pipe that nobody writes to: an error at once."""
    os.mkfifo(tmp_path / "pipe.gguf")
    for path in (tmp_path / "none.gguf", tmp_path, tmp_path / "pipe.gguf", Path("a\0b")):
        refused(path)


def test_names_that_are_hard(tmp_path: Path) -> None:
    """Blanks, quotes and other alphabets in a path are no matter."""
    path = tmp_path / "模型 'ü\" $(x).gguf"
    path.write_bytes(whole())
    assert read_model(str(path)).path == str(path)


def test_a_large_vocabulary_is_not_walked(tmp_path: Path) -> None:
    """262,144 tokens cost no string each: the whole header takes less memory than its vocabulary."""
    maker = Maker("llama", 1, 32, 262144, 4096, "f32")
    maker.keys["tokenizer.ggml.tokens"] = [f"word{i}" for i in range(262144)]
    maker.keys["tokenizer.ggml.merges"] = [f"{i} {i}" for i in range(262144)]
    maker.keys["tokenizer.ggml.bos_token_id"] = 1
    maker.ends()
    maker.write(tmp_path / "model.gguf")
    model = read_model(str(tmp_path / "model.gguf"))
    assert model.lengths["tokenizer.ggml.tokens"] == model.lengths["tokenizer.ggml.merges"] == 262144
    assert model.metadata["tokenizer.ggml.bos_token_id"] == 1
