"""Reads the header of a GGUF file, and trusts nothing in it.

Every count is bounded before it is believed, by what can be left in the file and by limits far above any model's. Nothing is
allocated from a number in the file. The strings of a vocabulary are passed over, not decoded. The format is that of ggml's
gguf.cpp, and what llama.cpp refuses is refused here too. Little-endian files of version 2 and 3.
"""

from __future__ import annotations

import os
import re
import struct

from sparkguard.core.ggml import TYPES, ModelFile, Stored, pad, row_bytes
from sparkguard.core.table import Table
from sparkguard.errors import CONFIG, SparkguardError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, NoReturn

_MOST_KEYS = 1 << 16  # models have tens
_MOST_TENSORS = 1 << 16  # the largest have a few thousand
_MOST_STRINGS = 1 << 22  # all arrays together; the largest vocabularies have 262,144 tokens and 500,000 merges
_MOST_NAME_BYTES = 65535  # a key, by the format's description
_MOST_TENSOR_NAME_BYTES = 63  # GGML_MAX_NAME less its zero
_MOST_DIMENSIONS = 4
_MOST_SHARDS = 4096
_KEPT_STRING_BYTES = 1024
_KEPT_ELEMENTS = 4096  # per-layer arrays have at most 512
_WINDOW_BYTES = 1 << 17
_LOOK_AHEAD_BYTES = (1 << 23, 1 << 26)  # most vocabularies end within the first, all known ones within the second
_MOST_BYTES = 1 << 62

_STRING, _ARRAY = 8, 9
# Numbers of types, and how one value of each is read.
_SCALARS = {number: struct.Struct(f"<{letter}") for number, letter in zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd")}
_U32, _U64 = _SCALARS[4], _SCALARS[10]
_LEAST_VALUE_BYTES = 13  # a key of one letter and a value of one byte
_LEAST_TENSOR_BYTES = 33
_MOST_ENTRY_BYTES = 8 + _MOST_TENSOR_NAME_BYTES + 4 + 8 * _MOST_DIMENSIONS + 4 + 8
_SHARD = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$", re.DOTALL)
_ZEROS = b"\0" * 6  # the upper bytes of the length of a string shorter than 65,536 bytes
# How what follows an array of strings begins: another key, or the first tensor's name. No vocabulary has a word that begins
# like the first; it may have the others.
_NEXT_KEY = b"tokenizer.ggml."
_NEXT_NAMES = (b"tokenizer.", b"general.", b"split.", b"quantize.", b"token_embd", b"output", b"blk.")


def read_model(path: str) -> ModelFile:
    """The header of a model; of all its shards, if path is the first of them.

    Raises SparkguardError with what is wrong with the file, or with the name of the shard that is missing.
    """
    first = _read_file(path)
    count = first.metadata.get("split.count", 0)
    if not isinstance(count, int) or not 0 <= count <= _MOST_SHARDS:
        _refuse(path, f"split.count is {count!r}", "the file is damaged: download it again")
    if count <= 1:
        return first
    files = [first]
    for number, name in enumerate(_shard_names(path, first.metadata, count)):
        if number == 0:
            continue
        if not os.path.exists(name):
            _refuse(path, f"shard {number + 1} of {count} is missing: {name}", "download it to the folder of the first")
        shard = _read_file(name)
        if shard.metadata.get("split.no") != number:
            _refuse(name, f"calls itself shard number {shard.metadata.get('split.no')!r}, not {number}", "download it again")
        files.append(shard)
    tensors = sum(len(file.table.by_name) for file in files)
    stated = first.metadata.get("split.tensors.count")
    if isinstance(stated, int) and stated != tensors:
        _refuse(path, f"its {count} shards have {tensors} tensors, not {stated}", "shards of two models are mixed")
    table = {name: stored for file in files for name, stored in file.table.by_name.items()}
    if len(table) != tensors:
        _refuse(path, "two of its shards have the same tensor", "shards of two models are mixed")
    return first.replace(
        table=Table(table),
        file_bytes=sum(file.file_bytes for file in files),
        shards=tuple(file.path for file in files),
    )


def _shard_names(path: str, metadata: object, count: int) -> list[str]:
    """Where the shards must be: beside the first, named as llama.cpp's splitter names them."""
    number = metadata.get("split.no") if isinstance(metadata, dict) else None
    if number != 0:
        _refuse(path, f"is shard number {number!r} of {count}", "name the first one: the file that ends in -00001-of-....gguf")
    folder, name = os.path.split(path)
    named = _SHARD.match(name)
    if named is None or int(named["number"]) != 1 or int(named["count"]) != count:
        _refuse(path, f"is the first of {count} shards but is not named so", f"rename it to NAME-00001-of-{count:05}.gguf")
    return [os.path.join(folder, f"{named['stem']}-{shard + 1:05}-of-{count:05}.gguf") for shard in range(count)]


def _read_file(path: str) -> ModelFile:
    try:
        # Without O_NONBLOCK a named pipe that nobody writes to would be waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise SparkguardError(f"{path}: {reason}", "check the name and the permissions of the file") from error
    try:
        return _Reader(path, descriptor).read()
    except OSError as error:
        raise SparkguardError(f"{path}: {error.strerror}", "check the disk, and that it is a file") from error
    finally:
        os.close(descriptor)


def _refuse(path: str, what: str, hint: str) -> NoReturn:
    raise SparkguardError(f"{path}: {what}", hint, CONFIG)


class _Reader:
    """A window on the file that moves forward with `at`, the place in the file that is read next."""

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self.size = os.fstat(descriptor).st_size
        self.at = 0
        self.start = 0
        self.window = b""
        self.strings_left = _MOST_STRINGS

    def read(self) -> ModelFile:
        tensor_count, key_count = self._begin()
        metadata: dict[str, object] = {}
        lengths: dict[str, int] = {}
        for _ in range(key_count):
            key = self._text(_MOST_NAME_BYTES, "a key")
            if not key:
                self._damaged("a key is empty")
            if key in metadata:
                self._damaged(f"the key {key!r} occurs twice")
            metadata[key] = self._value(key, lengths)
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment < 1 << 31 or alignment & (alignment - 1):
            self._damaged(f"general.alignment is {alignment!r}, not a power of 2")
        table, data_bytes = self._tensors(tensor_count, alignment)
        missing = pad(self.at, alignment) + data_bytes - self.size
        if table and missing > 0:  # a file of a vocabulary alone ends with its header
            self._damaged(f"the last {missing} bytes of its tensors are missing")
        architecture = metadata.get("general.architecture")
        return ModelFile(
            self.path,
            architecture if isinstance(architecture, str) else "",
            metadata,
            lengths,
            Table(table),
            self.size,
            (self.path,),
        )

    def _begin(self) -> tuple[int, int]:
        magic = self._bytes(4) if self.size >= 4 else b""
        if magic != b"GGUF":
            begins = f"begins with {magic!r}" if magic else "is empty" if not self.size else "is too short"
            if magic == b"vers":
                begins = "is a Git LFS pointer, not the file itself"
            _refuse(self.path, f"is no GGUF file: it {begins}", "download the model's .gguf file again")
        version = self._number(_U32)
        if version and not version & 0xFFFF:
            _refuse(self.path, "is a big-endian GGUF file", "convert it with gguf_convert_endian.py, or download the usual one")
        if version == 1:
            _refuse(self.path, "is a GGUF file of version 1", "llama.cpp no longer reads it: download a current one")
        if version not in (2, 3):
            _refuse(self.path, f"is a GGUF file of version {version}", "versions 2 and 3 are known: update sparkguard")
        tensors, keys = self._number(_U64), self._number(_U64)
        if tensors > min(_MOST_TENSORS, (self.size - self.at) // _LEAST_TENSOR_BYTES):
            self._damaged(f"it claims to have {tensors} tensors")
        if keys > min(_MOST_KEYS, (self.size - self.at) // _LEAST_VALUE_BYTES):
            self._damaged(f"it claims to have {keys} keys")
        return tensors, keys

    def _value(self, key: str, lengths: dict[str, int]) -> object:
        kind = self._number(_U32)
        if kind == _STRING:
            return self._kept_text(key)
        if kind == _ARRAY:
            return self._array(key, lengths)
        if kind not in _SCALARS:
            self._damaged(f"the key {key!r} has a value of type {kind}")
        return self._number(_SCALARS[kind])

    def _kept_text(self, key: str) -> str | None:
        length = self._number(_U64)
        if length > self.size - self.at:
            self._damaged(f"the text of {key!r} has {length} bytes")
        if length > _KEPT_STRING_BYTES:
            self.at += length
            return None
        return self._bytes(length).decode(errors="replace")

    def _array(self, key: str, lengths: dict[str, int]) -> object:
        kind, count = self._number(_U32), self._number(_U64)
        lengths[key] = count
        if kind == _STRING:
            self._skip_strings(key, count)
            return None
        if kind not in _SCALARS:
            self._damaged(f"the array {key!r} has elements of type {kind}")
        element = _SCALARS[kind]
        if count > (self.size - self.at) // element.size:
            self._damaged(f"the array {key!r} claims to have {count} elements")
        if count > _KEPT_ELEMENTS:
            self.at += count * element.size
            return None
        return struct.unpack(f"<{count}{element.format[1:]}", self._bytes(count * element.size))

    def _skip_strings(self, key: str, count: int) -> None:
        """Passes over an array of strings.

        A vocabulary has up to 262,144 of them and half a million merges: a loop takes 0.1 s. So the name of what follows is
        searched. Where it might be a word of the vocabulary, it is believed if in between there are as many lengths as there
        should be strings: a length ends in six zeros. Else the strings are walked. A file made to deceive this can say no
        more than it could have said without: the header that it shows is its own choice either way.
        """
        if count > (self.size - self.at) // 8 or count > self.strings_left:
            self._damaged(f"the array {key!r} claims to have {count} strings")
        self.strings_left -= count
        if count > 1000 and self._leap(count):
            return
        for _ in range(count):
            length = self._number(_U64)
            if length > self.size - self.at:
                self._damaged(f"a string of {key!r} has {length} bytes")
            self.at += length

    def _leap(self, count: int) -> bool:
        for most in _LOOK_AHEAD_BYTES:
            region = os.pread(self.descriptor, most, self.at)
            end = region.find(_ZEROS + _NEXT_KEY) - 2
            if end >= 8 * count:
                self.at += end
                return True
            for name in _NEXT_NAMES:
                end = region.find(_ZEROS + name) - 2
                if end >= 8 * count and region.count(_ZEROS, 0, end) == count:
                    self.at += end
                    return True
            if len(region) < most:
                break
        return False

    def _tensors(self, count: int, alignment: int) -> tuple[dict[str, Stored], int]:
        """The table of tensors, and the bytes of data that it describes: the last one needs no padding."""
        table: dict[str, Stored] = {}
        known: dict[bytes, tuple[Stored, int]] = {}  # by what is said of shape and type: a model has few kinds of tensors
        begin = end = 0
        for name, said, offset in self._entries(count):
            if name in table:
                self._damaged(f"the tensor {name!r} occurs twice")
            kind = known.get(said)
            if kind is None:
                stored = self._stored(name, said)
                kind = known[said] = stored, pad(stored.bytes, alignment)
            stored, padded = kind
            if offset != begin:
                self._damaged(f"the tensor {name!r} begins at {offset}, not at {begin}")
            end = begin + stored.bytes
            begin += padded
            table[name] = stored
        return table, end

    def _entries(self, count: int) -> Iterator[tuple[str, bytes, int]]:
        """Of each tensor its name, what is said of its shape and type, and where its data begins.

        An entry that the window has whole, as it nearly always has, is taken at once: a library has 100,000 of them.
        """
        window, at = self.window, self.at - self.start
        length_at = _U64.unpack_from
        for _ in range(count):
            if 0 <= at <= len(window) - _MOST_ENTRY_BYTES:
                name_end = at + 8 + length_at(window, at)[0]
                if name_end - at <= 8 + _MOST_TENSOR_NAME_BYTES and window[name_end] <= _MOST_DIMENSIONS:
                    end = name_end + 8 + 8 * window[name_end]
                    yield window[at + 8 : name_end].decode("utf-8", "replace"), window[name_end:end], length_at(window, end)[0]
                    at = end + 8
                    continue
            self.at = self.start + at
            name = self._text(_MOST_TENSOR_NAME_BYTES, "the name of a tensor")
            dimensions = self._number(_U32)
            if dimensions > _MOST_DIMENSIONS:
                self._too_deep(name, dimensions)
            said = struct.pack("<I", dimensions) + self._bytes(8 * dimensions + 4)
            offset = self._number(_U64)
            window, at = self.window, self.at - self.start
            yield name, said, offset
        self.at = self.start + at

    def _stored(self, name: str, said: bytes) -> Stored:
        dimensions, *shape, number = struct.unpack(f"<I{len(said) // 8 - 1}QI", said)
        if dimensions != len(shape):
            self._too_deep(name, dimensions)
        kind = TYPES.get(number)
        if kind is None:
            _refuse(
                self.path,
                f"the tensor {name!r} is stored as type {number}",
                "that type is unknown here: update sparkguard, or the file is damaged",
            )
        rows = 1
        for extent in shape[1:]:
            rows *= extent
        row = shape[0] if shape else 1
        if row % kind.elements:
            self._damaged(f"the tensor {name!r} has rows of {row}, which is no multiple of {kind.elements} ({kind.name})")
        size = row_bytes(kind, row) * rows
        if max(shape, default=1) >= _MOST_BYTES or size >= _MOST_BYTES:
            self._damaged(f"the tensor {name!r} has the shape {tuple(shape)}")
        return Stored(tuple(shape), kind, size)

    def _too_deep(self, name: str, dimensions: int) -> NoReturn:
        self._damaged(f"the tensor {name!r} has {dimensions} dimensions")

    def _text(self, most: int, what: str) -> str:
        length = self._number(_U64)
        if length > most:
            self._damaged(f"{what} has {length} bytes")
        return self._bytes(length).decode(errors="replace")

    def _number(self, layout: struct.Struct) -> Any:
        begin = self.at - self.start
        if 0 <= begin <= len(self.window) - layout.size:
            self.at += layout.size
            return layout.unpack_from(self.window, begin)[0]
        return layout.unpack(self._bytes(layout.size))[0]

    def _bytes(self, count: int) -> bytes:
        """The next count bytes; count is bounded by the caller."""
        begin = self.at - self.start
        if not 0 <= begin <= len(self.window) - count:
            if self.at + count > self.size:
                self._damaged("it ends within its header")
            self.start, begin = self.at, 0
            self.window = os.pread(self.descriptor, max(count, _WINDOW_BYTES), self.at)
            if len(self.window) < count:
                self._damaged("it became shorter while it was read")
        self.at += count
        return self.window[begin : begin + count]

    def _damaged(self, what: str) -> NoReturn:
        _refuse(
            self.path, f"is no usable GGUF file: {what}", "the file is damaged or was not downloaded whole: download it again"
        )
