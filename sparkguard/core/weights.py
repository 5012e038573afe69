"""Where each tensor of a model goes: which are loaded, and which of them stay in the host's memory."""

from __future__ import annotations

from sparkguard.core.compute import NO_OUTPUT
from sparkguard.core.ggml import pad
from sparkguard.core.table import layer_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sparkguard.core.architectures import Shape
    from sparkguard.core.estimate import Ask
    from sparkguard.core.ggml import ModelFile, Stored

    Chooser = Callable[[str], str | None]

HOST, DEVICE = "host", "device"
# Before the layers that predict further tokens stayed in the file, these had the weights of theirs loaded.
_LOADED_PREDICTION = frozenset({"qwen35", "qwen35moe"})
SKIPS_PREDICTION = 11434
# Read row by row on the host, whatever the device of the layers.
_INPUTS = ("token_embd.weight", "token_types.weight", "position_embd.weight", "per_layer_token_embd.weight")
# llama.cpp makes their tied output before the embedding, and so both, even on one device.
_TWICE = frozenset({"gemma3n", "gemma4"})
# common.h: LLM_FFN_EXPS_REGEX, LLM_FFN_DENSE_REGEX.
_EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
_DENSE = r"\.ffn_(up|down|gate)\."
_TIED = "token_embd.weight"


class Weights:
    """Bytes by memory, layers whose routed experts are on the host, and how many other tensors were put there by hand."""

    def __init__(self, file: ModelFile, shape: Shape, ask: Ask) -> None:
        self.bytes = {HOST: 0, DEVICE: 0}
        self.host_experts: set[int] = set()
        self.moved = 0
        self._table, self._shape, self._ask = file.table, shape, ask
        self._usual = DEVICE if ask.on_device else HOST
        self._chosen = _chooser(ask)
        if ask.on_device and self._chosen:
            self._add_one_by_one(self._chosen)
        else:
            self._add_by_layer()
        untied = "output.weight" in file.table.by_name or shape.architecture in NO_OUTPUT
        if not untied and _TIED in file.table.by_name and (ask.on_device or shape.architecture in _TWICE):
            # Tied: the rows of the embedding on the host, and again as the output on the device.
            memory = (self._chosen and self._chosen(_TIED)) or self._usual
            if memory == DEVICE or shape.architecture in _TWICE:
                self.bytes[memory] += _padded(file.table.by_name[_TIED])

    def _add_by_layer(self) -> None:
        sizes: dict[int, int] = {}
        for number, tensors in self._table.layers:
            if self._loads(number):
                alike = id(tensors)
                if alike not in sizes:
                    sizes[alike] = sum(map(_padded, tensors.values()))
                self.bytes[self._usual] += sizes[alike]
        for name, stored in self._table.others.items():
            self.bytes[HOST if name in _INPUTS else self._usual] += _padded(stored)

    def _add_one_by_one(self, chosen: Chooser) -> None:
        for name, stored in self._table.by_name.items():
            layer = layer_of(name)
            if not self._loads(layer):
                continue
            memory = chosen(name)
            if memory == HOST:
                if layer is not None and "exps" in name:
                    self.host_experts.add(layer)
                else:
                    self.moved += name not in _INPUTS
            self.bytes[memory or (HOST if name in _INPUTS else DEVICE)] += _padded(stored)

    def add(self, adapters: Iterable[ModelFile]) -> None:
        """Each part of an adapter lies beside the tensor that it changes (llama-adapter.cpp)."""
        for adapter in adapters:
            for name, stored in adapter.table.by_name.items():
                base = name.removesuffix(".lora_a").removesuffix(".lora_b")
                self.bytes[self._memory(base)] += _padded(stored)

    def _memory(self, name: str) -> str:
        """Of a tensor; of one that is not loaded, that of the layers."""
        if not self._ask.on_device or name not in self._table.by_name or not self._loads(layer_of(name)):
            return self._usual
        return (self._chosen and self._chosen(name)) or (HOST if name in _INPUTS else DEVICE)

    def _loads(self, layer: int | None) -> bool:
        """Layers beyond the last are for predicting further tokens, and stay in the file."""
        if layer is None or layer < len(self._shape.layers):
            return True
        return (self._ask.build or SKIPS_PREDICTION) < SKIPS_PREDICTION and self._shape.architecture in _LOADED_PREDICTION


def _padded(stored: Stored) -> int:
    return pad(stored.bytes, 32)


def _chooser(ask: Ask) -> Chooser | None:
    """The memory that the arguments choose for a tensor; None: the usual one. The first pattern that is found counts."""
    if not (ask.overrides or ask.cpu_moe_layers or ask.cpu_ffn_layers):
        return None
    import re  # 1 ms that only who chooses pays

    experts, dense = re.compile(_EXPERTS), re.compile(_DENSE)
    patterns = []
    for pattern, memory in ask.overrides:
        try:
            patterns.append((re.compile(pattern), memory))
        except re.error:
            from sparkguard.errors import USAGE, SparkguardError

            raise SparkguardError(f"--override-tensor: {pattern!r} is no pattern", status=USAGE) from None

    def choose(name: str) -> str | None:
        layer = layer_of(name)
        if layer is not None and layer < ask.cpu_moe_layers and experts.search(name):
            return HOST
        if layer is not None and layer < ask.cpu_ffn_layers and dense.search(name):
            return HOST
        return next((memory for pattern, memory in patterns if pattern.search(name)), None)

    return choose
