"""What llama.cpp reads from the keys of a model, layer by layer: heads, windows, and which layer keeps what.

The rules are those of llama-hparams.cpp, llama-model.cpp and models/*.cpp of builds 10068 to 11434. What is no rule for all
stands in one row of a table per architecture, by the name that general.architecture has.
"""

from __future__ import annotations

from sparkguard.core.ggml import ModelFile
from sparkguard.core.record import Record
from sparkguard.errors import CONFIG, SparkguardError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

MOST_LAYERS = 512  # LLAMA_MAX_LAYERS
MOST_EXPERTS = 1024  # LLAMA_MAX_EXPERTS

# What a layer keeps between tokens.
NOTHING, CACHE, STATE, BOTH = "nothing", "cache", "state", "both"


class Window(Record):
    """Sliding windows: of each `period` layers all but one have the window. None: only the file's own pattern says which."""

    period: int | None
    full_first: bool = False  # the layer without a window is the first of the period, not the last
    size: int | None = None  # where the file does not say
    needs_key: bool = False  # without attention.sliding_window there is none
    fixed: bool = False  # the size is not the file's to say


_WINDOWS = {
    "afmoe": Window(4, needs_key=True),
    "cohere2": Window(4),
    "cohere2moe": Window(4, full_first=True),
    "exaone-moe": Window(4, size=128),
    "exaone4": Window(4, size=4096),
    "gemma-embedding": Window(6),
    "gemma2": Window(2, size=4096),
    "gemma3": Window(6, needs_key=True),
    "gemma3n": Window(5),
    "gemma4": Window(None),
    "gpt-oss": Window(2),
    "granite-swa": Window(None),
    "laguna": Window(4, full_first=True, needs_key=True),
    "llama4": Window(4, size=8192, fixed=True),
    "maple": Window(None),
    "mellum": Window(4, needs_key=True),
    "mimo2": Window(None),
    "modern-bert": Window(3, full_first=True, needs_key=True),
    "muse-glimmer": Window(4),
    "olmo2": Window(4, needs_key=True),
    "plamo3": Window(8, needs_key=True),
    "smallthinker": Window(4, full_first=True, size=4096, needs_key=True, fixed=True),
    "spark2-5": Window(None),
    "step35": Window(None),
}
RECURRENT = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})
# Hybrids: which layers keep a state instead of a cache.
_BY_HEADS = frozenset({"jamba", "granitehybrid", "lfm2", "lfm2moe", "kimi-linear", "plamo2", "bailingmoe3"})
_BY_INTERVAL = frozenset({"qwen3next", "qwen35", "qwen35moe", "minimax-01"})
_BY_WIDTH = frozenset({"nemotron_h", "nemotron_h_moe"})
_BOTH = frozenset({"falcon-h1"})
HYBRID = _BY_HEADS | _BY_INTERVAL | _BY_WIDTH | _BOTH
# Encoders and diffusion models attend to their batch, not to a past.
NO_MEMORY = frozenset(
    """
    bert jina-bert-v2 jina-bert-v3 nomic-bert nomic-bert-moe neo-bert eurobert modern-bert gemma-embedding
    wavtokenizer-dec dream llada llada-moe rnd1
    """.split()
)
# Compressed or indexed caches that are not written here yet: their cache is underestimated by the general rule.
_OTHER_CACHES = frozenset(
    """
    deepseek32 deepseek4 glm-dsa glm5-next hy-v4 dots3note minimax-m3 qwen4exp kimi-k3
    """.split()
)
# These behave as the plain transformer does: no window, state or sharing beyond what their keys say.
_PLAIN = frozenset(
    """
    llama deci mistral3 mistral4 baichuan falcon grok gpt2 gptneox mpt starcoder refact bloom stablelm qwen qwen2
    qwen2moe qwen2vl qwen3 qwen3moe qwen3vl qwen3vlmoe phi2 phi3 phimoe gemma starcoder2 command-r dbrx olmo olmoe
    openelm arctic deepseek deepseek2 chatglm glm4 glm4moe bitnet nemotron exaone granite granitemoe chameleon
    minicpm minicpm3 internlm2 orion xverse codeshell plamo plm bailingmoe bailingmoe2 dots1 arcee ernie4_5
    ernie4_5-moe hunyuan-moe hunyuan-dense smollm3 seed_oss apertus minimax-m2 cogvlm grovemoe pangu-embedded jais
    jais2
    """.split()
)
KNOWN = _PLAIN | frozenset(_WINDOWS) | RECURRENT | HYBRID | NO_MEMORY


class Layer(Record):
    """One layer: sizes of its heads, and what it keeps. One without a cache of its own may read that of an earlier layer."""

    heads: int
    kv_heads: int
    key: int
    value: int
    windowed: bool
    keeps: str
    owns_cache: bool
    feed_forward: int
    experts_used: int


class Shape(Record):
    """A model's shape as llama.cpp sees it. layers are those that it runs; a file may have more (MTP), which it does not load."""

    architecture: str
    layers: tuple[Layer, ...]
    predicted: int  # how many more layers the file has
    width: int  # of the hidden state
    output_width: int
    context: int  # that it was trained for
    vocabulary: int
    window: int
    mla: bool
    key_mla: int
    value_mla: int
    rope: int
    experts: int
    expert_groups: int
    state_rows: int  # floats of convolution state for each layer with a state, and
    state_size: int  # of the state itself
    causal: bool
    doubts: tuple[str, ...]  # why an estimate may be wrong


def shape_of(file: ModelFile) -> Shape:
    """Raises SparkguardError where llama.cpp would not load such a file."""
    keys = _Keys(file)
    name = file.architecture
    if not name:
        raise SparkguardError(f"{file.path}: has no general.architecture", "It is no language model.", CONFIG)
    if name == "clip":
        raise SparkguardError(f"{file.path}: is a projector, not a model", "Name the model, and this as its projector.", CONFIG)
    total = keys.number("block_count")
    if not 0 < total <= MOST_LAYERS:
        keys.refuse("block_count", total)
    predicted = keys.number("nextn_predict_layers", 0)
    if predicted >= total:
        keys.refuse("nextn_predict_layers", predicted)
    width = keys.number("embedding_length")
    if not 0 < width < 1 << 24:
        keys.refuse("embedding_length", width)
    experts = keys.number("expert_count", 0)
    if experts > MOST_EXPERTS:
        keys.refuse("expert_count", experts)
    heads = keys.numbers("attention.head_count", total, 0)
    kv_heads = keys.numbers("attention.head_count_kv", total, None) or heads
    feed_forward = keys.numbers("feed_forward_length", total, 0) or []
    used = keys.numbers("expert_used_count", total, 0) or []
    if max(used) > experts or (experts and not max(used)):
        keys.refuse("expert_used_count", max(used))
    default = width // heads[0] if heads and heads[0] else 0
    key = keys.number("attention.key_length", default)
    value = keys.number("attention.value_length", default)
    window, pattern = _window(name, keys, total, predicted)
    if name == "lfm2" and keys.number("attention.sliding_window", 0):
        window, pattern = keys.number("attention.sliding_window"), [bool(count) for count in kv_heads]
    key_windowed = keys.number("attention.key_length_swa", key)
    value_windowed = keys.number("attention.value_length_swa", value)
    count = total - predicted
    keeps = _keeps(name, keys, count, kv_heads, feed_forward)
    first_shared = count
    if name == "gemma3n":
        first_shared = 20
    elif name == "gemma4":
        first_shared = total - keys.number("attention.shared_kv_layers", 0)
    layers = []
    alike: dict[tuple[object, ...], Layer] = {}  # one for all that are, since most are
    for i in range(count):
        owns_cache = keeps[i] in (CACHE, BOTH) and i < first_shared
        said = heads[i], kv_heads[i], pattern[i], keeps[i], owns_cache, feed_forward[i], used[i]
        if said not in alike:
            alike[said] = Layer(
                heads=heads[i],
                kv_heads=kv_heads[i],
                key=key_windowed if pattern[i] else key,
                value=value_windowed if pattern[i] else value,
                windowed=pattern[i],
                keeps=keeps[i],
                owns_cache=owns_cache,
                feed_forward=feed_forward[i],
                experts_used=used[i],
            )
        layers.append(alike[said])
    rows, size = _state(name, keys, width, heads)
    return Shape(
        architecture=name,
        layers=tuple(layers),
        predicted=predicted,
        width=width,
        output_width=keys.number("embedding_length_out", width),
        context=keys.number("context_length", 0),
        vocabulary=_vocabulary(file, keys),
        window=window,
        mla=bool(keys.number("attention.key_length_mla", 0) and keys.number("attention.value_length_mla", 0)),
        key_mla=keys.number("attention.key_length_mla", key),
        value_mla=keys.number("attention.value_length_mla", value),
        rope=keys.number("rope.dimension_count", key),
        experts=experts,
        expert_groups=keys.number("expert_group_count", 0),
        state_rows=rows,
        state_size=size,
        causal=keys.number("attention.causal", 1 if name not in NO_MEMORY else 0) != 0,
        doubts=_doubts(name),
    )


def _doubts(name: str) -> tuple[str, ...]:
    if name in _OTHER_CACHES:
        return (f"the architecture {name} has caches of its own kind, which are not counted",)
    if name not in KNOWN:
        return (f"the architecture {name} is unknown: estimated as a plain transformer",)
    return ()


def _vocabulary(file: ModelFile, keys: _Keys) -> int:
    """llama.cpp counts the tokens that stand in the file; without any, the key says how many."""
    tokens = file.lengths.get("tokenizer.ggml.tokens")
    return tokens if tokens is not None else keys.number("vocab_size", 0)


def _window(name: str, keys: _Keys, total: int, predicted: int) -> tuple[int, list[bool]]:
    """The window in tokens, and which layers have it."""
    none = [False] * total
    rule = _WINDOWS.get(name)
    stated = keys.number("attention.sliding_window", 0)
    present = keys.present("attention.sliding_window")
    if rule is None:
        return 0, none
    if (rule.needs_key and not stated) or (name == "llama4" and present and not stated):
        return 0, none
    size = rule.size if rule.fixed and rule.size else stated or rule.size or 0
    pattern = keys.array("attention.sliding_window_pattern")
    if pattern is not None:
        return size, [bool(layer) for layer in (*pattern, *[0] * total)][:total]
    period = keys.number("attention.sliding_window_pattern", rule.period or 0)
    count = total - predicted
    if rule.period is None or period == 0:
        return size, [i < count and period == 0 and rule.period is not None for i in range(total)]
    if rule.full_first:
        return size, [i < count and i % period != 0 for i in range(total)]
    return size, [i < count and i % period < period - 1 for i in range(total)]


def _keeps(name: str, keys: _Keys, count: int, kv_heads: list[int], feed_forward: list[int]) -> list[str]:
    if name in NO_MEMORY:
        return [NOTHING] * count
    if name in RECURRENT:
        return [STATE] * count
    if name in _BOTH:
        return [BOTH] * count
    if name in _BY_HEADS:
        return [CACHE if kv_heads[i] else STATE for i in range(count)]
    if name in _BY_WIDTH:
        return [NOTHING if feed_forward[i] else CACHE if kv_heads[i] else STATE for i in range(count)]
    if name in _BY_INTERVAL:
        recurrent = keys.array("attention.recurrent_layers")
        if recurrent is not None:
            return [STATE if layer else CACHE for layer in recurrent[:count]]
        interval = keys.number("full_attention_interval", 4) or 4
        return [CACHE if (i + 1) % interval == 0 else STATE for i in range(count)]
    return [CACHE] * count


def _state(name: str, keys: _Keys, width: int, heads: list[int]) -> tuple[int, int]:
    """Floats of a layer's state for one sequence: llama_hparams::n_embd_r() and n_embd_s()."""
    if head := keys.number("wkv.head_size", 0):
        return keys.number("token_shift_count", 2) * width, width * head
    if cached := keys.number("shortconv.l_cache", 0):
        return width * (cached - 1), 0
    kernel = keys.number("ssm.conv_kernel", 0)
    if head := keys.number("kda.head_dim", 0):
        inner = heads[0] * head
        return 3 * (kernel - 1 if kernel else 3) * inner, head * head * heads[0]
    if name == "minimax-01":
        head = keys.number("attention.key_length", 0)
        return 0, head * head * heads[0]
    inner, states = keys.number("ssm.inner_size", 0), keys.number("ssm.state_size", 0)
    rows = max(0, kernel - 1) * (inner + 2 * keys.number("ssm.group_count", 0) * states)
    return rows, states * inner


class _Keys:
    """The keys below the architecture's name. What a key may hold is bounded here, once."""

    def __init__(self, file: ModelFile) -> None:
        self.file = file

    def _get(self, key: str) -> Any:
        return self.file.metadata.get(f"{self.file.architecture}.{key}")

    def present(self, key: str) -> bool:
        return f"{self.file.architecture}.{key}" in self.file.metadata

    def number(self, key: str, default: int | None = None) -> int:
        """A whole number of up to 2^40; of an array, its first element, as where the layers do not differ."""
        value = self._get(key)
        if isinstance(value, tuple):
            value = value[0] if value else None
        number: object = default if value is None else value
        if not isinstance(number, int) or not 0 <= number <= 1 << 40:
            self.refuse(key, number)
        return int(number)

    def array(self, key: str) -> tuple[Any, ...] | None:
        value = self._get(key)
        return value if isinstance(value, tuple) else None

    def numbers(self, key: str, count: int, default: int | None) -> list[int]:
        """One number per layer; empty when the key is absent and default is None."""
        value = self._get(key)
        if value is None and default is None:
            return []
        if not isinstance(value, tuple):
            return [self.number(key, default)] * count
        if len(value) < count or not all(isinstance(number, int) and 0 <= number <= 1 << 40 for number in value):
            self.refuse(key, value)
        return [int(number) for number in value[:count]]

    def refuse(self, key: str, value: object) -> NoReturn:
        what = "lacks" if value is None else "has an impossible value of"
        raise SparkguardError(
            f"{self.file.path}: {what} {self.file.architecture}.{key}{'' if value is None else f': {value!r}'}",
            "The file is damaged, or no language model.",
            CONFIG,
        )
