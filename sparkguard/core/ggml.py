"""What a GGUF header says, and what ggml makes of a tensor: its type, and the bytes that it takes."""

from __future__ import annotations

from sparkguard.core.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from sparkguard.core.table import Table

MIB = 1 << 20


class BlockType(Record):
    """How ggml stores numbers: `elements` of them in `bytes`."""

    name: str
    elements: int
    bytes: int


# The number that stands in the file, from ggml.h; sizes are those of the structs in ggml-common.h. The gaps are types that
# were withdrawn from files.
TYPES = {
    0: BlockType("f32", 1, 4),
    1: BlockType("f16", 1, 2),
    2: BlockType("q4_0", 32, 18),
    3: BlockType("q4_1", 32, 20),
    6: BlockType("q5_0", 32, 22),
    7: BlockType("q5_1", 32, 24),
    8: BlockType("q8_0", 32, 34),
    9: BlockType("q8_1", 32, 36),
    10: BlockType("q2_k", 256, 84),
    11: BlockType("q3_k", 256, 110),
    12: BlockType("q4_k", 256, 144),
    13: BlockType("q5_k", 256, 176),
    14: BlockType("q6_k", 256, 210),
    15: BlockType("q8_k", 256, 292),
    16: BlockType("iq2_xxs", 256, 66),
    17: BlockType("iq2_xs", 256, 74),
    18: BlockType("iq3_xxs", 256, 98),
    19: BlockType("iq1_s", 256, 50),
    20: BlockType("iq4_nl", 32, 18),
    21: BlockType("iq3_s", 256, 110),
    22: BlockType("iq2_s", 256, 82),
    23: BlockType("iq4_xs", 256, 136),
    24: BlockType("i8", 1, 1),
    25: BlockType("i16", 1, 2),
    26: BlockType("i32", 1, 4),
    27: BlockType("i64", 1, 8),
    28: BlockType("f64", 1, 8),
    29: BlockType("iq1_m", 256, 56),
    30: BlockType("bf16", 1, 2),
    34: BlockType("tq1_0", 256, 54),
    35: BlockType("tq2_0", 256, 66),
    39: BlockType("mxfp4", 32, 17),
    40: BlockType("nvfp4", 64, 36),
    41: BlockType("q1_0", 128, 18),
    42: BlockType("q2_0", 64, 18),
}
BY_NAME = {kind.name: kind for kind in TYPES.values()}


def row_bytes(kind: BlockType, elements: int) -> int:
    """Bytes of a row, which is a whole number of blocks."""
    return elements // kind.elements * kind.bytes


def pad(amount: int, unit: int) -> int:
    """The next multiple of unit."""
    return -(-amount // unit) * unit


class Stored(Record):
    """How a tensor lies in its file: shape is ggml's, the row's length first. Tensors that are alike share one."""

    shape: tuple[int, ...]
    kind: BlockType
    bytes: int


class ModelFile(Record):
    """The header of a model, of all its shards together.

    metadata has numbers, booleans, short strings and short arrays of numbers. Longer ones are not kept: their value is None,
    and lengths has the number of their elements, as it has for every array.
    """

    path: str
    architecture: str
    metadata: Mapping[str, object]
    lengths: Mapping[str, int]
    table: Table
    file_bytes: int  # of all shards
    shards: tuple[str, ...]
