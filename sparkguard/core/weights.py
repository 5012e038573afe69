"""Where each tensor of a model goes: which are loaded, and which of them stay in the host's memory."""

from __future__ import annotations

from sparkguard.core.compute import NO_OUTPUT
from sparkguard.core.ggml import pad

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sparkguard.core.architectures import Shape
    from sparkguard.core.estimate import Ask
    from sparkguard.core.ggml import ModelFile, Tensor

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
        self._ask = ask
        self._chosen = _chooser(ask)
        self._of: dict[str, str] = {}
        for tensor in file.tensors:
            if not _loaded(tensor, shape, ask):
                continue
            memory = self._of[tensor.name] = self._memory(tensor.name)
            self.bytes[memory] += pad(tensor.bytes, 32)
        untied = "output.weight" in self._of or shape.architecture in NO_OUTPUT
        if not untied and (ask.on_device or shape.architecture in _TWICE):
            # Tied: the rows of the embedding on the host, and again as the output on the device.
            memory = self._chosen(_TIED) or (DEVICE if ask.on_device else HOST)
            if memory == DEVICE or shape.architecture in _TWICE:
                self.bytes[memory] += sum(pad(tensor.bytes, 32) for tensor in file.tensors if tensor.name == _TIED)

    def add(self, adapters: Iterable[ModelFile]) -> None:
        """Each part of an adapter lies beside the tensor that it changes (llama-adapter.cpp)."""
        for adapter in adapters:
            for tensor in adapter.tensors:
                base = tensor.name.removesuffix(".lora_a").removesuffix(".lora_b")
                self.bytes[self._of.get(base, DEVICE if self._ask.on_device else HOST)] += pad(tensor.bytes, 32)

    def _memory(self, name: str) -> str:
        if not self._ask.on_device:
            return HOST
        chosen = self._chosen(name)
        if chosen == HOST:
            layer = layer_of(name)
            if layer is not None and "exps" in name:
                self.host_experts.add(layer)
            else:
                self.moved += name not in _INPUTS
        return chosen or (HOST if name in _INPUTS else DEVICE)


def _chooser(ask: Ask) -> Callable[[str], str | None]:
    """The memory that the arguments choose for a tensor; None: the usual one. The first pattern that is found counts."""
    if not (ask.overrides or ask.cpu_moe_layers or ask.cpu_ffn_layers):
        return lambda name: None
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


def layer_of(name: str) -> int | None:
    if not name.startswith("blk."):
        return None
    number = name[4:].partition(".")[0]
    return int(number) if number.isdigit() and len(number) < 5 else None


def _loaded(tensor: Tensor, shape: Shape, ask: Ask) -> bool:
    """Layers beyond the last are for predicting further tokens, and stay in the file."""
    layer = layer_of(tensor.name)
    if layer is None or layer < len(shape.layers):
        return True
    return (ask.build or SKIPS_PREDICTION) < SKIPS_PREDICTION and shape.architecture in _LOADED_PREDICTION
