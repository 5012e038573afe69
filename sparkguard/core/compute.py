"""What llama.cpp lays out for one batch: its graph, rebuilt from the names and shapes of the tensors of each layer.

llama.cpp reserves its compute buffers by building the graph of the largest batch and asking ggml's allocator what that
takes (llama_context::sched_reserve). So the same is done here with sizes alone. The order of the operations is that of
llama-graph.cpp and models/*.cpp, because it decides what is alive at the same time. What a layer does follows from its
tensors, so that a new architecture of known parts is right, or near; the few that are built otherwise have their own rules.
"""

from __future__ import annotations

from sparkguard.core.architectures import BOTH, STATE, Shape
from sparkguard.core.ggml import ModelFile, pad
from sparkguard.core.graph import Node
from sparkguard.core.parts.base import FLOAT, INDEX, MIXED_BATCHES, Batch
from sparkguard.core.parts.families import Families
from sparkguard.core.record import Record
from sparkguard.core.repeats import without_repeats

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sparkguard.core.repeats import Chosen

_NO_MIXED_BATCHES = frozenset({"cogvlm", "deepseek4", "granite-switch", "eagle3", "dflash", "gemma4-assistant"})
# These select the rows that are wanted after the last layer, not within it.
_SELECT_LATE = frozenset({"qwen3next", "qwen35", "qwen35moe", "gemma4", "gemma3n"})
# These scale the rows of the tokens alone, on the host, since batches may be mixed.
_SCALES_ROWS = frozenset({"gemma3", "gemma3n", "gemma4", "gemma-embedding"})
# These add a part to what went around it, not the other way round: that is what the sum may overwrite.
_RESIDUAL_FIRST = frozenset({"jamba", "lfm2", "lfm2moe"})
_USUAL_NODES, _MOST_NODES = 100, 100_000  # of a layer, and of a graph that is laid out whole
_WORTH_A_TRY = 0.7  # of the layers; what turns out to be too few is laid out in vain
_MOST_DIFFERENT_LAYERS = 64  # models have a handful of kinds
# These end with what they know about a text, not with the next token.
NO_OUTPUT = frozenset(
    {
        "bert",
        "jina-bert-v2",
        "jina-bert-v3",
        "nomic-bert",
        "nomic-bert-moe",
        "neo-bert",
        "eurobert",
        "modern-bert",
        "gemma-embedding",
    }
)


class Buffers(Record):
    """Bytes of the compute buffers; with everything on one device, only its own."""

    host: int
    device: int


def buffers(file: ModelFile, shape: Shape, batch: Batch, on_device: bool) -> Buffers:
    """The compute buffers of a model that is wholly on one device, or wholly on the host. Raises UnknownPart."""
    for choose in _CHOICES:
        graph = _Model(file, shape, batch, on_device)
        size = graph.build(choose)
        if size is not None:
            return Buffers(graph.host_bytes, size) if on_device else Buffers(size, 0)
    raise AssertionError("two layers of each kind are never too many")


def rough_buffers(shape: Shape, batch: Batch, on_device: bool) -> Buffers:
    """For a model whose graph is not known: what the widest layer of a plain transformer would take."""
    width, tokens = shape.width, batch.tokens
    widest = max((layer.feed_forward for layer in shape.layers), default=0)
    heads = max((layer.heads for layer in shape.layers), default=0)
    size = FLOAT * tokens * (3 * widest + 8 * width) + FLOAT * shape.vocabulary * batch.outputs
    mask = (2 if batch.flash_attention else FLOAT) * tokens * max(batch.cells, batch.window_cells)
    if not batch.flash_attention:
        size += FLOAT * tokens * batch.cells * heads
    return Buffers(mask + 4 * FLOAT * tokens * width, size + mask) if on_device else Buffers(size + mask, 0)


def _all(kinds: Sequence[int]) -> Chosen:
    return list(range(len(kinds))), []


def _two_of_each(kinds: Sequence[int]) -> Chosen:
    """For a graph that is too large to be laid out, two layers of each kind and the last need nearly the same.

    What differs is where the allocator finds gaps: 8 MB at most in the shapes of the tests.
    """
    kept: list[int] = []
    for i, kind in enumerate(kinds):
        if (kinds[:i].count(kind) < 2 and len(kept) < _MOST_DIFFERENT_LAYERS) or i == len(kinds) - 1:
            kept.append(i)
    return kept, []


# The first that leads to an answer counts. Six of seven models repeat with their first period.
_CHOICES: tuple[Callable[[Sequence[int]], Chosen], ...] = (
    without_repeats,
    lambda kinds: without_repeats(kinds, periods=2),
    _all,
    _two_of_each,
)


class _Model(Families):
    def build(self, choose: Callable[[Sequence[int]], Chosen]) -> int | None:
        """The size of the buffer of the device that the layers are on; None: the layers chosen do not tell it."""
        hidden = self.embeddings()
        self.positions = self.input(4 * self.tokens * (4 if f"{self.name}.rope.dimension_sections" in self.metadata else 1))
        self.states = (
            self.input(4 * self.batch.sequences) if any(layer.keeps in (STATE, BOTH) for layer in self.shape.layers) else None
        )
        self.inputs_of_attention()
        self.rows = self.input(4 * self.batch.outputs)
        hidden = self.before_layers(hidden)
        chosen, pairs = choose(self.kinds())
        nodes = len(chosen) * (_USUAL_NODES + max(layer.experts_used for layer in self.shape.layers))
        if nodes >= _MOST_NODES or (pairs and len(chosen) > _WORTH_A_TRY * len(self.by_layer)):
            return None
        begins = []
        for i in chosen:
            self.t = self.by_layer[i]
            self.experts_on_host = self.on_device and i in self.batch.host_experts
            begins.append(len(self.order))
            hidden = self.layer(i, hidden, last=i == len(self.by_layer) - 1)
        self.finish(hidden)
        size, moments = self.lay_out([begins[place] for pair in pairs for place in pair])
        repeats = all(later.is_like(earlier) for earlier, later in zip(moments[::2], moments[1::2], strict=True))
        return size if repeats else None

    def kinds(self) -> list[int]:
        """A number for each layer, the same for those that are built alike."""
        last = len(self.by_layer) - 1
        numbers: dict[object, int] = {}
        shapes: dict[int, int] = {}  # of a layer's tensors
        found = []
        for i, (layer, t) in enumerate(zip(self.shape.layers, self.by_layer)):
            if id(t) not in shapes:
                shapes[id(t)] = numbers.setdefault(tuple((name, stored.shape) for name, stored in t.items()), len(numbers))
            brought = id(t) if i in self.batch.host_experts else None
            by_number = i if i < len(self.deep_rows) or i == last else self.by_number(i)
            found.append(numbers.setdefault((id(layer), shapes[id(t)], brought, by_number), len(numbers)))
        return found

    def embeddings(self) -> Node:
        mixed = self.batch.build >= MIXED_BATCHES and self.name not in _NO_MIXED_BATCHES
        self.scaled_rows = mixed and self.name in _SCALES_ROWS
        size = self.row(self.shape.width)
        if self.on_device and self.scaled_rows and "per_layer_token_embd" in self.globals:
            # The rows for each layer are gathered on the host too, and keep all that comes before them there.
            self.host_bytes += 3 * pad(4 * self.tokens, 32) + pad(INDEX * self.tokens, 32) + 5 * pad(size, 32)
            self.per_layer = self.rows_of_layers()
            return self.copied(size)
        # Vision models of Qwen's take further rows of each image token beside the first (deepstack), zeros for text.
        deep = size * (1 + min(16, self.number("n_deepstack_layers")))
        tokens = self.input(4 * self.tokens)
        self.input_of_host(deep)
        if self.on_device and mixed and deep != size:
            # The host widens the rows itself, and gathers the other branch's where the narrow ones were.
            # Each part of them comes to the device as a copy as long as the whole, since it is a view with gaps.
            self.host_bytes += pad(deep, 32)
            found = self.copied(deep)
            self.deep_rows = [self.copied(deep) for _ in range(deep // size - 1)]
        else:
            found = self.padded(self.gathered(size, tokens), deep)
        self.expand(found)
        if mixed:
            # Nobody reads what the mixed branch results in, so its copy of the embeddings is never given back.
            slots, rows = self.input(INDEX * self.tokens), self.input(deep)
            written = self.padded(self.gathered(size, self.input(4 * self.tokens)), deep)
            copy = self.op(deep, rows)
            target = self.view(copy)
            target.sources = (written, slots, copy)
            self.expand(target)
        if deep != size:
            self.deep_rows = self.deep_rows or [found] * (deep // size - 1)
            found = self.view(found, size)
        if self.scaled_rows:
            found = self.over(found, self.input(4 * self.tokens))
            self.expand(found)
        if "per_layer_token_embd" in self.globals:
            self.per_layer = self.rows_of_layers()
        return found

    def padded(self, rows: Node, size: int) -> Node:
        return rows if rows.bytes == size else self.op(size, rows)

    def before_layers(self, hidden: Node) -> Node:
        scope = self.globals
        if "token_types" in scope:
            hidden = self.over(hidden)
        if "position_embd" in scope and self.name == "bert":
            hidden = self.over(self.op(hidden.bytes, self.positions), hidden)
        if "token_embd_norm" in scope and self.name not in ("lfm2", "lfm2moe"):
            hidden = self.norm("token_embd_norm", hidden, scope)
        if self.copies_norms and self.name == "gemma4":
            hidden = self.op(hidden.bytes, hidden)  # measured with build 10068
        elif self.name.startswith("gemma") and not self.scaled_rows:
            hidden = self.over(hidden)
        if "per_layer_token_embd" in scope:
            self.per_layer = self.per_layer_inputs(hidden)
        if "altup_proj" in scope:
            hidden = self.altup_start(hidden)
        return hidden

    def layer(self, i: int, hidden: Node, last: bool) -> Node:
        layer, t = self.shape.layers[i], self.t
        if "time_mix_w1" in t and "channel_mix_key" in t:
            return self.rwkv7(hidden, last)
        if self.name == "gemma3n":
            return self.gemma3n(i, layer, hidden, last)
        residual = hidden
        cur = self.norm("attn_norm", hidden) if "attn_norm" in t else hidden
        normed = cur
        if self.name in ("qwen3next", "qwen35", "qwen35moe", "kimi-linear"):
            self.expand(cur)
        if layer.keeps == BOTH:
            attended = self.attention(layer, cur)
            second = self.norm("attn_norm", hidden)
            cur = self.over(attended, self.mamba2(second))
        elif layer.keeps == STATE:
            cur = self.recurrent(layer, cur)
        elif "attn_output" in t:
            cur = self.attention(layer, cur)
        else:  # nemotron_h: a layer of experts or of a feed-forward part alone
            cur = self.feed_forward(layer, cur)
        chosen = last and self.name not in _SELECT_LATE
        if self.name == "falcon-h1":
            residual = self.over(cur, residual)
            if chosen:
                self.narrow()
                self.expand(self.select(cur, self.rows, self.shape.width))
                residual = self.select(residual, self.rows, self.shape.width)
            cur = self.feed_forward(layer, self.norm("ffn_norm", residual))
            return self.over(cur, residual)
        if chosen and not self.name.startswith("nemotron_h"):
            self.narrow()
            cur = self.select(cur, self.rows, self.shape.width)
            residual = self.select(residual, self.rows, self.shape.width)
            if "ffn_norm" not in t and "post_attention_norm" not in t and not self.centred_after():
                normed = self.select(normed, self.rows, self.shape.width)
        elif chosen:
            self.narrow()
            cur = self.select(cur, self.rows, self.shape.width)
            residual = self.select(residual, self.rows, self.shape.width)
        if not any(name in t for name in ("ffn_up", "ffn_up_exps", "ffn_gate_up_exps")) or self.name.startswith("nemotron_h"):
            return self.over(cur, residual)
        if self.centred_after():
            cur = self.over(cur, residual)
            cur = self.norm("attn_output_norm", cur)
            cur = self.over(self.feed_forward(layer, cur), cur)
            return self.norm("layer_output_norm", cur)
        if "ffn_norm" not in t and "post_ffw_norm" not in t and "post_attention_norm" not in t:
            # Attention and feed-forward part side by side, from one norm.
            fed = self.feed_forward(layer, normed)
            return self.over(self.over(fed, residual), cur)
        if "post_attention_norm" in t and ("ffn_norm" in t or "post_ffw_norm" in t):
            cur = self.norm("post_attention_norm", cur)
        first = self.name in _RESIDUAL_FIRST
        added = self.over(residual, cur) if first else self.over(cur, residual)
        before = "ffn_norm" if "ffn_norm" in t else "post_attention_norm" if "post_ffw_norm" not in t else ""
        if "pre_ffw_norm_2" in t:
            cur = self.gemma4_experts(layer, added)
        else:
            cur = self.feed_forward(layer, self.norm(before, added) if before else added)
        if "post_ffw_norm" in t:
            cur = self.norm("post_ffw_norm", cur)
        cur = self.over(added, cur) if first else self.over(cur, added)
        if i < len(self.deep_rows):
            cur = self.over(cur, self.view(self.deep_rows[i], cur.bytes))
        if "inp_gate" in t:
            cur = self.per_layer_part(cur)
        if "layer_output_scale" in t:
            cur = self.over(cur)
        return cur

    def centred_after(self) -> bool:
        """The bert family: norms after the parts."""
        return "attn_output_norm" in self.t

    def finish(self, hidden: Node) -> None:
        width = self.shape.width
        if self.name in NO_OUTPUT:
            self.expand(self.pooled(hidden))
            return
        if "altup_unembd_proj" in self.globals:
            hidden = self.altup_end(hidden)
        late = self.name in _SELECT_LATE
        if late and self.name == "gemma3n":
            hidden = self.select(hidden, self.rows, width)
        norm = "output_norm" if "output_norm" in self.globals else "token_embd_norm"
        cur = self.norm(norm, hidden, self.globals)
        if late and self.name != "gemma3n":
            cur = self.select(cur, self.rows, width)
        logits = self.op(FLOAT * self.shape.vocabulary * self.batch.outputs, cur)
        self.expand(logits)

    def pooled(self, hidden: Node) -> Node:
        """The mean over a sequence, as encoders have it: a transposed copy times a matrix of shares."""
        shares = self.input(FLOAT * self.batch.tokens * self.batch.sequences)
        return self.op(FLOAT * self.shape.width * self.batch.sequences, self.op(hidden.bytes, self.view(hidden)), shares)
