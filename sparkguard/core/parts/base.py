"""What every part stands on: the tensors of a layer by name, the sizes of results, and where inputs lie."""

from __future__ import annotations

from sparkguard.core.architectures import Shape
from sparkguard.core.ggml import BlockType, ModelFile, Stored, pad
from sparkguard.core.graph import CPU_ALIGNMENT, Graph, Node
from sparkguard.core.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

FLOAT = 4
INDEX = 8  # int64
GPU_ALIGNMENT = 128  # CUDA's; its pads of quantised rows do not concern results, which are floats
# From this build on a graph also has the inputs of a batch that mixes tokens and embeddings, and a norm without a mean
# may overwrite what it reads. Between 10068 and 11434, both measured.
MIXED_BATCHES = 11434
_CENTRED_BY_NAME_ONLY = frozenset({"nemotron_h", "nemotron_h_moe", "granitehybrid"})


class Batch(Record):
    """What the graph is built for."""

    tokens: int
    sequences: int
    outputs: int
    cells: int  # of the cache, for each sequence that has its own
    window_cells: int
    flash_attention: bool
    key: BlockType
    value: BlockType
    build: int
    host_experts: frozenset[int] = frozenset()  # layers whose experts are on the host


class UnknownPart(Exception):
    """A layer lacks a tensor that it would have if it were built as the known ones are."""


class Tensors(dict[str, Stored]):
    """A layer's tensors by name; to want one that is not there is a graph of another kind."""

    def __missing__(self, name: str) -> Stored:
        raise UnknownPart(name)

    def width_of(self, name: str) -> int:
        """How many columns a matrix makes."""
        shape = self[name].shape
        if len(shape) < 2:
            raise UnknownPart(name)
        return shape[1]


def named(tensors: Mapping[str, Stored]) -> Tensors:
    """By their names without what all matrices and vectors end in."""
    return Tensors({name.removesuffix(".weight"): stored for name, stored in tensors.items()})


def has_centred_norms(file: ModelFile) -> bool:
    """Whether the model's norms take the mean away, which the key of their epsilon tells."""
    name = file.architecture
    return f"{name}.attention.layer_norm_epsilon" in file.metadata and name not in _CENTRED_BY_NAME_ONLY


class Base(Graph):
    """tokens is how many rows there are now: all of the batch, and after narrow() those that are wanted."""

    positions: Node
    rows: Node
    per_layer: Node

    def __init__(self, file: ModelFile, shape: Shape, batch: Batch, on_device: bool) -> None:
        super().__init__(GPU_ALIGNMENT if on_device else CPU_ALIGNMENT)
        self.shape, self.batch, self.metadata = shape, batch, file.metadata
        self.name = shape.architecture
        self.tokens = pad(batch.tokens, batch.sequences)
        self.globals = named(file.table.others)
        self.by_layer = [Tensors() for _ in shape.layers]
        alike: dict[int, Tensors] = {}
        for number, tensors in file.table.layers:
            if number < len(self.by_layer):
                if id(tensors) not in alike:
                    alike[id(tensors)] = named({rest[1:]: stored for rest, stored in tensors.items()})
                self.by_layer[number] = alike[id(tensors)]
        self.t = Tensors()
        self.masks: dict[bool, Node] = {}
        self.indices: dict[tuple[bool, str], Node] = {}
        self.rotations: dict[tuple[bool, str], Node] = {}
        self.on_device = on_device
        self.host_bytes = 0  # of the host's own buffer, where the layers are on a device
        self.copies_norms = batch.build < MIXED_BATCHES
        self.centred = has_centred_norms(file)
        self.has_windows = any(layer.windowed for layer in shape.layers)
        self.experts_on_host = self.scaled_rows = False
        self.states: Node | None = None
        self.first_value: Node | None = None
        self.deep_rows: list[Node] = []

    def row(self, width: int) -> int:
        """Bytes of one float for each token and each of width columns."""
        return FLOAT * width * self.tokens

    def number(self, key: str, default: int = 0) -> int:
        value = self.metadata.get(f"{self.name}.{key}", default)
        return value if isinstance(value, int) else default

    def matmul(self, name: str, source: Node, scope: Tensors | None = None, tokens: int | None = None) -> Node:
        columns = (self.t if scope is None else scope).width_of(name)
        result = self.op(FLOAT * columns * (self.tokens if tokens is None else tokens), source)
        bias = f"{name}.bias"
        return self.over(result) if bias in self.t and scope is None else result

    def norm(self, name: str, source: Node, scope: Tensors | None = None) -> Node:
        """A norm of the kind that the model has: one without a mean may overwrite, one with may not (ggml-alloc.c)."""
        tensors = self.t if scope is None else scope
        result = self.op(source.bytes, source) if self.centred or self.copies_norms else self.over(source)
        if name in tensors:
            result = self.over(result)
            if name + ".bias" in tensors:
                result = self.over(result)
        return result

    def select(self, source: Node, rows: Node, width: int) -> Node:
        return self.op(FLOAT * width * self.batch.outputs, source, rows)

    def narrow(self) -> None:
        """From here on only the rows that are wanted are left."""
        self.tokens = self.batch.outputs

    def input(self, size: int) -> Node:
        if self.on_device:
            self.host_bytes += pad(size, 32)
        return super().input(size)

    def input_of_host(self, size: int) -> None:
        """An input that nobody reads, and so is not copied to the device."""
        if self.on_device:
            self.host_bytes += pad(size, 32)
        else:
            super().input(size)

    def gathered(self, size: int, rows: Node) -> Node:
        """Rows of the embeddings, which are on the host: the device has a copy of what was found."""
        if not self.on_device:
            return self.op(size, rows)
        self.host_bytes += pad(size, 32)
        return self.copied(size)

    def copied(self, size: int) -> Node:
        """The device's copy of what was computed on the host."""
        return super().input(size)
