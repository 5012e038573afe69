"""What a model needs on each device: the same sums as llama.cpp does, before it is started.

Weights, caches and states are exact; the compute buffers are those of its graph, rebuilt (core/compute.py).
"""

from __future__ import annotations

from sparkguard.core.architectures import BOTH, CACHE, STATE, Shape, shape_of
from sparkguard.core.compute import Buffers, buffers, rough_buffers
from sparkguard.core.ggml import BY_NAME, ModelFile, pad, row_bytes
from sparkguard.core.parts.base import FLOAT, Batch, UnknownPart
from sparkguard.core.record import Record
from sparkguard.core.weights import DEVICE, HOST, SKIPS_PREDICTION, Weights
from sparkguard.errors import USAGE, SparkguardError

__all__ = ("DEVICE", "HOST", "Ask", "DeviceNeeds", "Needs", "estimate")

NEWEST_BUILD = 11434
KNOWN_BUILDS = (10068, 11434)
# Before the layers that predict further tokens stayed in the file, all such layers of these had a cache, though nothing read it.
_CACHED_PREDICTION = frozenset({"glm4moe"})
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
MOST_SEQUENCES = 256  # LLAMA_MAX_SEQ
DRAFTED = 3  # tokens that a draft model proposes at a time (--spec-draft-n-max)


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
    build: int | None = NEWEST_BUILD  # None: the engine does not say
    # What only arguments of the engine's own change (core/engine_args.py).
    embeddings: bool = False  # --embeddings, --rerank: every token of a batch has a result
    cache_on_host: bool = False  # --no-kv-offload
    projector_on_host: bool = False
    cpu_ffn_layers: int = 0
    overrides: tuple[tuple[str, str], ...] = ()  # (pattern of names of tensors, HOST or DEVICE)
    gpu_layers: int | None = None  # as it was asked for; None: all, or none
    prompt_cache_bytes: int = 0
    metadata: tuple[tuple[str, object], ...] = ()  # --override-kv
    draft_key_type: str = "f16"
    draft_value_type: str = "f16"
    draft_cpu_moe_layers: int = 0
    draft_overrides: tuple[tuple[str, str], ...] = ()
    draft_on_host: bool = False
    drafted: int = DRAFTED
    not_counted: tuple[str, ...] = ()


class DeviceNeeds(Record):
    """Bytes on one device."""

    device: str
    weights_bytes: int
    kv_cache_bytes: int
    state_bytes: int
    compute_bytes: int
    output_bytes: int
    projector_bytes: int
    prompt_cache_bytes: int = 0  # the most that it may grow to

    @property
    def total_bytes(self) -> int:
        return (
            self.weights_bytes
            + self.kv_cache_bytes
            + self.state_bytes
            + self.compute_bytes
            + self.output_bytes
            + self.projector_bytes
            + self.prompt_cache_bytes
        )


class Needs(Record):
    """Bytes on all devices. doubts says why a number may be wrong; without any, all is counted as llama.cpp counts it."""

    context: int  # tokens, as the engine rounds them
    devices: tuple[DeviceNeeds, ...]
    doubts: tuple[str, ...] = ()
    build: int = NEWEST_BUILD  # the known one by whose rules it was counted

    @property
    def total_bytes(self) -> int:
        return sum(device.total_bytes for device in self.devices)

    def sum_of(self, field: str) -> int:
        return sum(int(getattr(device, field)) for device in self.devices)


def estimate(
    file: ModelFile,
    ask: Ask,
    projector: ModelFile | None = None,
    adapters: tuple[ModelFile, ...] = (),
    draft: ModelFile | None = None,
) -> Needs:
    """What the model needs with these settings. Raises SparkguardError for settings or files that the engine refuses."""
    needs = _of_model(file, ask, adapters, 1 + ask.drafted if draft else 1)
    host, *device = needs.devices
    if projector:
        size = sum(pad(stored.bytes, 32) for stored in projector.table.by_name.values())
        if device and not ask.projector_on_host:
            device[0] = device[0].replace(projector_bytes=size)
        else:
            host = host.replace(projector_bytes=size)
        needs = needs.replace(doubts=(*needs.doubts, "not counted: the work buffers of the projector"))
    if adapters:
        needs = needs.replace(doubts=(*needs.doubts, "not counted: the work buffers of adapters"))
    host = host.replace(prompt_cache_bytes=ask.prompt_cache_bytes)
    needs = needs.replace(devices=(host, *device), doubts=(*needs.doubts, *ask.not_counted))
    return _together(needs, _of_model(draft, _drafts(ask))) if draft else needs


def _drafts(ask: Ask) -> Ask:
    """How the draft model of such a start is started: common_base_params_to_speculative()."""
    return ask.replace(
        key_type=ask.draft_key_type,
        value_type=ask.draft_value_type,
        cpu_moe_layers=ask.draft_cpu_moe_layers,
        cpu_ffn_layers=0,
        overrides=ask.draft_overrides,
        on_device=ask.on_device and not ask.draft_on_host,
        gpu_layers=None,
        embeddings=False,
        metadata=(),
    )


def _together(model: Needs, draft: Needs) -> Needs:
    parts = {part.device: part for part in model.devices}
    for part in draft.devices:
        mine = parts[part.device]
        sums = {field: getattr(mine, field) + getattr(part, field) for field in DeviceNeeds._fields if field != "device"}
        parts[part.device] = mine.replace(**sums)
    doubts = (f"draft model: {doubt}" for doubt in draft.doubts if doubt not in model.doubts)
    return model.replace(devices=tuple(parts.values()), doubts=(*model.doubts, *doubts))


def _of_model(file: ModelFile, ask: Ask, adapters: tuple[ModelFile, ...] = (), results: int = 1) -> Needs:
    """results: tokens of each sequence that the engine wants results of at a time."""
    if ask.metadata:
        file = file.replace(metadata={**file.metadata, **dict(ask.metadata)})
    shape = shape_of(file)
    _check(ask)
    build = _build(ask.build)
    doubts = shape.doubts
    ask = ask.replace(build=build)
    context, cells, streams = _cells(shape, ask)
    ubatch = _ubatch(shape, ask, context)
    tokens = min(context, ubatch)
    window_cells = cells
    if any(layer.windowed for layer in shape.layers) and not ask.full_window:
        sequences = ask.parallel if ask.unified_cache else 1
        window_cells = pad(min(cells, shape.window * sequences + ubatch), 256)
    weights = Weights(file, shape, ask)
    weights.add(adapters)
    cache = _cache(shape, ask, cells, window_cells, streams)
    state = (
        FLOAT * (shape.state_rows + shape.state_size) * ask.parallel * sum(layer.keeps in (STATE, BOTH) for layer in shape.layers)
    )
    every = ask.embeddings and shape.causal
    batch = Batch(
        tokens=tokens,
        sequences=ask.parallel,
        outputs=tokens if every else min(tokens, ask.parallel * results),
        cells=cells,
        window_cells=window_cells,
        flash_attention=ask.flash_attention,
        key=BY_NAME[ask.key_type],
        value=BY_NAME[ask.value_type],
        build=build,
        host_experts=frozenset(weights.host_experts),
    )
    try:
        compute = buffers(file, shape, batch, ask.on_device)
    except UnknownPart as part:
        compute = rough_buffers(shape, batch, ask.on_device)
        doubts += (f"its layers have no {part}, as those of known architectures do: work buffers are roughly estimated",)
    if ask.on_device:
        compute, more = _by_hand(shape, ask, weights, compute, cache)
        doubts += more
    output = FLOAT * (shape.vocabulary if shape.causal else shape.output_width) * ask.parallel * results
    if every:  # it grows to this with the first full batch
        output = FLOAT * (shape.vocabulary + shape.width) * tokens
    kept = (0, 0) if ask.on_device and not ask.cache_on_host else (cache, state)
    host = DeviceNeeds(HOST, weights.bytes[HOST], *kept, compute.host, output, 0)
    if not ask.on_device:
        return Needs(context, (host,), doubts, build)
    device = DeviceNeeds(DEVICE, weights.bytes[DEVICE], cache - kept[0], state - kept[1], compute.device, 0, 0)
    return Needs(context, (host, device), doubts, build)


def _build(asked: int | None) -> int:
    """The known one that comes nearest below."""
    if asked is None:
        return NEWEST_BUILD
    return max((known for known in KNOWN_BUILDS if known <= asked), default=KNOWN_BUILDS[0])


def _by_hand(shape: Shape, ask: Ask, weights: Weights, compute: Buffers, cache: int) -> tuple[Buffers, tuple[str, ...]]:
    """The work buffers where arguments keep parts of a model on the host, and what is not known of them."""
    doubts: tuple[str, ...] = ()
    if ask.gpu_layers is not None and ask.gpu_layers <= len(shape.layers):
        doubts += (f"not counted: that some layers stay on the host (--n-gpu-layers {ask.gpu_layers}); all are on the device",)
    if ask.cache_on_host:
        # A layer reads its cache in a copy on the device. Nobody counts how much of it is there at a time: all, at most.
        layers = sum(layer.keeps in (CACHE, BOTH) and layer.owns_cache for layer in shape.layers)
        compute = compute.replace(device=compute.device + cache // max(1, layers))
        doubts += ("roughly counted: copies of the cache on the device (--no-kv-offload)",)
    if weights.moved:
        doubts += (f"not counted: work buffers of the host for {weights.moved} tensors that arguments keep there",)
    return compute, doubts


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
    if layers and _build(ask.build) < SKIPS_PREDICTION and shape.architecture in _CACHED_PREDICTION:
        layers += [layers[-1]] * shape.predicted
    for layer in layers:
        if not layer.owns_cache:
            continue
        rows = (window_cells if layer.windowed else cells) * streams
        total += row_bytes(key, layer.key * layer.kv_heads) * rows
        if not shape.mla:
            total += row_bytes(value, layer.value * layer.kv_heads if ask.flash_attention else widest) * rows
    return total
