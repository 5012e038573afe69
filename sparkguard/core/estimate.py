"""What a model needs on each device: the same sums as llama.cpp does, before it is started.

Weights, caches and states are exact; the compute buffers are those of its graph, rebuilt (core/compute.py).
"""

from __future__ import annotations

from sparkguard.core.architectures import BOTH, CACHE, STATE, Shape, shape_of
from sparkguard.core.compute import NO_OUTPUT, buffers, rough_buffers
from sparkguard.core.ggml import BY_NAME, ModelFile, Tensor, pad, row_bytes
from sparkguard.core.parts.base import FLOAT, Batch, UnknownPart
from sparkguard.core.record import Record
from sparkguard.errors import USAGE, SparkguardError

NEWEST_BUILD = 11434
KNOWN_BUILDS = (10068, 11434)
# Before the layers that predict further tokens stayed in the file: whose weights were loaded, and for whom all such layers had
# a cache, though nothing read it.
_LOADED_PREDICTION = frozenset({"qwen35", "qwen35moe"})
_CACHED_PREDICTION = frozenset({"glm4moe"})
_SKIPS_PREDICTION = 11434
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
MOST_SEQUENCES = 256  # LLAMA_MAX_SEQ
HOST, DEVICE = "host", "device"


class Ask(Record):
    """How the engine would be started; its own defaults where they are no matter of memory."""

    context: int = 4096  # 0: what the model was trained for
    parallel: int = 1
    key_type: str = "f16"
    value_type: str = "f16"
    batch: int = 2048
    ubatch: int = 512
    flash_attention: bool = True
    full_window: bool = False  # --swa-full
    unified_cache: bool = False  # --kv-unified
    cpu_moe_layers: int = 0
    on_device: bool = False  # all layers on one device
    build: int = NEWEST_BUILD
    quick: bool = False  # for a list of models: a few MB less exact, several times as fast


class DeviceNeeds(Record):
    """Bytes on one device."""

    device: str
    weights_bytes: int
    kv_cache_bytes: int
    state_bytes: int
    compute_bytes: int
    output_bytes: int
    projector_bytes: int

    @property
    def total_bytes(self) -> int:
        return (
            self.weights_bytes
            + self.kv_cache_bytes
            + self.state_bytes
            + self.compute_bytes
            + self.output_bytes
            + self.projector_bytes
        )


class Needs(Record):
    """Bytes on all devices. doubts says why a number may be wrong; without any, all is counted as llama.cpp counts it."""

    context: int  # tokens, as the engine rounds them
    devices: tuple[DeviceNeeds, ...]
    doubts: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        return sum(device.total_bytes for device in self.devices)

    def sum_of(self, field: str) -> int:
        return sum(int(getattr(device, field)) for device in self.devices)


def estimate(file: ModelFile, ask: Ask, projector: ModelFile | None = None, adapters: tuple[ModelFile, ...] = ()) -> Needs:
    """What the model needs with these settings. Raises SparkguardError for settings or files that the engine refuses."""
    shape = shape_of(file)
    _check(ask)
    build = max((known for known in KNOWN_BUILDS if known <= ask.build), default=KNOWN_BUILDS[0])
    wanted_build = ask.build
    ask = ask.replace(build=build)
    context, cells, streams = _cells(shape, ask)
    tokens = min(context, _ubatch(shape, ask, context))
    window_cells = cells
    if any(layer.windowed for layer in shape.layers) and not ask.full_window:
        sequences = ask.parallel if ask.unified_cache else 1
        window_cells = pad(min(cells, shape.window * sequences + _ubatch(shape, ask, context)), 256)
    weights = _weights(file, shape, ask)
    for adapter in adapters:
        weights[DEVICE if ask.on_device else HOST] += sum(pad(tensor.bytes, 32) for tensor in adapter.tensors)
    cache = _cache(shape, ask, cells, window_cells, streams)
    state = (
        FLOAT * (shape.state_rows + shape.state_size) * ask.parallel * sum(layer.keeps in (STATE, BOTH) for layer in shape.layers)
    )
    batch = Batch(
        tokens=tokens,
        sequences=ask.parallel,
        outputs=min(tokens, ask.parallel),
        cells=cells,
        window_cells=window_cells,
        flash_attention=ask.flash_attention,
        key=BY_NAME[ask.key_type],
        value=BY_NAME[ask.value_type],
        build=build,
        host_experts=ask.cpu_moe_layers,
        quick=ask.quick,
    )
    doubts = shape.doubts
    try:
        compute = buffers(file, shape, batch, ask.on_device)
    except UnknownPart as part:
        compute = rough_buffers(shape, batch, ask.on_device)
        doubts += (f"its layers have no {part}, as those of known architectures do: work buffers are roughly estimated",)
    output = ask.parallel * FLOAT * (shape.vocabulary if shape.causal else shape.output_width)
    in_projector = sum(pad(tensor.bytes, 32) for tensor in projector.tensors) if projector else 0
    if projector:
        doubts += ("the work buffers of the projector are not counted",)
    if wanted_build not in KNOWN_BUILDS:
        doubts += (f"build {wanted_build} is not known: estimated as build {build}",)
    on = ask.on_device
    host = DeviceNeeds(
        HOST, weights[HOST], 0 if on else cache, 0 if on else state, compute.host, output, 0 if on else in_projector
    )
    if not on:
        return Needs(context, (host,), doubts)
    device = DeviceNeeds(DEVICE, weights[DEVICE], cache, state, compute.device, 0, in_projector)
    return Needs(context, (host, device), doubts)


def _check(ask: Ask) -> None:
    wrong = None
    if not 0 <= ask.context < 1 << 32:
        wrong = f"a context of {ask.context} tokens"
    elif not 1 <= ask.parallel <= MOST_SEQUENCES:
        wrong = f"{ask.parallel} parallel sequences"
    elif not 1 <= ask.ubatch < 1 << 24 or not 1 <= ask.batch < 1 << 24:
        wrong = f"a batch of {ask.ubatch}"
    elif ask.key_type not in CACHE_TYPES or ask.value_type not in CACHE_TYPES:
        wrong = f"a cache of type {ask.key_type if ask.key_type not in CACHE_TYPES else ask.value_type}"
    elif not ask.flash_attention and BY_NAME[ask.value_type].elements > 1:
        wrong = "a quantised cache of values without flash attention"
    if wrong:
        raise SparkguardError(f"llama.cpp cannot have {wrong}", f"Types of caches are {', '.join(CACHE_TYPES)}.", USAGE)


def _cells(shape: Shape, ask: Ask) -> tuple[int, int, int]:
    """Tokens of context, cells of the cache per stream, and streams: llama_context's own rounding."""
    context = pad(ask.context or shape.context, 256)
    if ask.unified_cache:
        return context, context, 1
    cells = pad(context // ask.parallel, 256)
    return cells * ask.parallel, cells, ask.parallel


def _ubatch(shape: Shape, ask: Ask, context: int) -> int:
    """A batch is no longer than the context, where a token sees only those before it."""
    batch = min(ask.context or shape.context, ask.batch) if shape.causal else max(ask.batch, ask.ubatch)
    return min(batch, ask.ubatch)


def _cache(shape: Shape, ask: Ask, cells: int, window_cells: int, streams: int) -> int:
    key, value = BY_NAME[ask.key_type], BY_NAME[ask.value_type]
    layers = [layer for layer in shape.layers if layer.keeps in (CACHE, BOTH)]
    # Without flash attention the values are stored transposed, and all layers as wide as the widest.
    widest = max((layer.value * layer.kv_heads for layer in layers), default=0)
    total = 0
    if layers and ask.build < _SKIPS_PREDICTION and shape.architecture in _CACHED_PREDICTION:
        layers += [layers[-1]] * shape.predicted
    for layer in layers:
        if not layer.owns_cache:
            continue
        rows = (window_cells if layer.windowed else cells) * streams
        total += row_bytes(key, layer.key * layer.kv_heads) * rows
        if not shape.mla:
            total += row_bytes(value, layer.value * layer.kv_heads if ask.flash_attention else widest) * rows
    return total


# Read row by row on the host, whatever the device of the layers.
_INPUTS = ("token_embd.weight", "token_types.weight", "position_embd.weight", "per_layer_token_embd.weight")
# llama.cpp makes their tied output before the embedding, and so both, even on one device.
_TWICE = frozenset({"gemma3n", "gemma4"})


def _weights(file: ModelFile, shape: Shape, ask: Ask) -> dict[str, int]:
    """Bytes of the tensors that the engine loads, on the host and on the device."""
    sums = {HOST: 0, DEVICE: 0}
    names = set()
    for tensor in file.tensors:
        names.add(tensor.name)
        if not _loaded(tensor, shape, ask):
            continue
        on_host = not ask.on_device or tensor.name in _INPUTS or _is_host_expert(tensor, ask)
        sums[HOST if on_host else DEVICE] += pad(tensor.bytes, 32)
    if "output.weight" not in names and shape.architecture not in NO_OUTPUT and (ask.on_device or shape.architecture in _TWICE):
        # Tied: the rows of the embedding on the host, and again as the output on the device.
        sums[DEVICE if ask.on_device else HOST] += sum(
            pad(tensor.bytes, 32) for tensor in file.tensors if tensor.name == "token_embd.weight"
        )
    return sums


def _layer_of(tensor: Tensor) -> int | None:
    if not tensor.name.startswith("blk."):
        return None
    number = tensor.name[4:].partition(".")[0]
    return int(number) if number.isdigit() and len(number) < 5 else None


def _loaded(tensor: Tensor, shape: Shape, ask: Ask) -> bool:
    """Layers beyond the last are for predicting further tokens, and stay in the file."""
    layer = _layer_of(tensor)
    if layer is None or layer < len(shape.layers):
        return True
    return ask.build < _SKIPS_PREDICTION and shape.architecture in _LOADED_PREDICTION


def _is_host_expert(tensor: Tensor, ask: Ask) -> bool:
    layer = _layer_of(tensor)
    return layer is not None and layer < ask.cpu_moe_layers and "_exps." in tensor.name
