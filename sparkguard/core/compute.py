"""What llama.cpp lays out for one batch: its graph, rebuilt from the names and shapes of the tensors of each layer.

llama.cpp reserves its compute buffers by building the graph of the largest batch and asking ggml's allocator what that
takes (llama_context::sched_reserve). So the same is done here with sizes alone. The order of the operations is that of
llama-graph.cpp and models/*.cpp, because it decides what is alive at the same time. What a layer does follows from its
tensors, so that a new architecture of known parts is right, or near; the few that are built otherwise have their own rules.
"""

from __future__ import annotations

from sparkguard.core.architectures import BOTH, STATE, Layer, Shape
from sparkguard.core.ggml import BlockType, ModelFile, Tensor, pad
from sparkguard.core.graph import CPU_ALIGNMENT, Graph, Node
from sparkguard.core.record import Record

FLOAT = 4
INDEX = 8  # int64
GPU_ALIGNMENT = 128  # CUDA's; its pads of quantised rows do not concern results, which are floats
# From here on a graph also has the inputs of a batch that mixes tokens and embeddings. Between 10068 and 11434, both measured.
MIXED_BATCHES = 11434
_NO_MIXED_BATCHES = frozenset({"cogvlm", "deepseek4", "granite-switch", "eagle3", "dflash", "gemma4-assistant"})
# These select the rows that are wanted after the last layer, not within it.
_SELECT_LATE = frozenset({"qwen3next", "qwen35", "qwen35moe", "gemma4", "gemma3n"})
# These scale the rows of the tokens alone, on the host, since batches may be mixed.
_SCALES_ROWS = frozenset({"gemma3", "gemma3n", "gemma4", "gemma-embedding"})
_MOST_DIFFERENT_LAYERS = 64  # models have a handful of kinds
_GATED_TWICE = frozenset({"phi3"})  # the gate is the second half of ffn_up


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
    host_experts: int = 0  # layers whose experts are on the host


class Buffers(Record):
    """Bytes of the compute buffers; with everything on one device, only its own."""

    host: int
    device: int


class UnknownPart(Exception):
    """A layer lacks a tensor that it would have if it were built as the known ones are."""


def buffers(file: ModelFile, shape: Shape, batch: Batch, on_device: bool) -> Buffers:
    """The compute buffers of a model that is wholly on one device, or wholly on the host. Raises UnknownPart."""
    graph = _Model(file, shape, batch, GPU_ALIGNMENT if on_device else CPU_ALIGNMENT)
    size = graph.build(on_device)
    return Buffers(graph.host_bytes, size) if on_device else Buffers(size, 0)


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


class _Tensors(dict[str, Tensor]):
    """A layer's tensors by name; to want one that is not there is a graph of another kind."""

    def __missing__(self, name: str) -> Tensor:
        raise UnknownPart(name)

    def width_of(self, name: str) -> int:
        """How many columns a matrix makes."""
        shape = self[name].shape
        if len(shape) < 2:
            raise UnknownPart(name)
        return shape[1]


class _Model(Graph):
    def __init__(self, file: ModelFile, shape: Shape, batch: Batch, alignment: int) -> None:
        super().__init__(alignment)
        self.shape, self.batch, self.metadata = shape, batch, file.metadata
        self.name = shape.architecture
        self.tokens = pad(batch.tokens, batch.sequences)
        self.globals = _Tensors()
        self.by_layer = [_Tensors() for _ in shape.layers]
        for tensor in file.tensors:
            if tensor.name.startswith("blk."):
                number, _, rest = tensor.name[4:].partition(".")
                if number.isdigit() and len(number) < 5 and int(number) < len(self.by_layer):
                    self.by_layer[int(number)][rest.removesuffix(".weight")] = tensor
            else:
                self.globals[tensor.name.removesuffix(".weight")] = tensor
        self.t = _Tensors()
        self.masks: dict[bool, Node] = {}
        self.indices: dict[tuple[bool, str], Node] = {}
        self.rotations: dict[tuple[bool, str], Node] = {}
        self.host_bytes = 0
        self.on_device = False

    # Sizes

    def row(self, width: int) -> int:
        """Bytes of one float for each token and each of width columns."""
        return FLOAT * width * self.tokens

    def number(self, key: str, default: int = 0) -> int:
        value = self.metadata.get(f"{self.name}.{key}", default)
        return value if isinstance(value, int) else default

    # Parts

    def matmul(self, name: str, source: Node, scope: _Tensors | None = None, tokens: int | None = None) -> Node:
        columns = (self.t if scope is None else scope).width_of(name)
        result = self.op(FLOAT * columns * (self.tokens if tokens is None else tokens), source)
        bias = f"{name}.bias"
        return self.over(result) if bias in self.t and scope is None else result

    def norm(self, name: str, source: Node, scope: _Tensors | None = None) -> Node:
        """A norm of the kind that the model has: one without a mean may overwrite, one with may not (ggml-alloc.c)."""
        tensors = self.t if scope is None else scope
        result = self.op(source.bytes, source) if self.centred or self.batch.build < MIXED_BATCHES else self.over(source)
        if name in tensors:
            result = self.over(result)
            if name + ".bias" in tensors:
                result = self.over(result)
        return result

    def select(self, source: Node, rows: Node, width: int) -> Node:
        return self.op(FLOAT * width * self.batch.outputs, source, rows)

    # The whole

    def build(self, on_device: bool) -> int:
        self.on_device = on_device
        self.centred = f"{self.name}.attention.layer_norm_epsilon" in self.metadata and self.name not in (
            "nemotron_h",
            "nemotron_h_moe",
            "granitehybrid",
        )
        hidden = self.embeddings()
        self.positions = self.input(4 * self.tokens * (4 if f"{self.name}.rope.dimension_sections" in self.metadata else 1))
        self.states = (
            self.input(4 * self.batch.sequences) if any(layer.keeps in (STATE, BOTH) for layer in self.shape.layers) else None
        )
        self.inputs_of_attention()
        self.rows = self.input(4 * self.batch.outputs)
        hidden = self.before_layers(hidden)
        kept = self.representatives()
        for place, i in enumerate(kept):
            self.t = self.by_layer[i]
            self.experts_on_host = self.on_device and i < self.batch.host_experts
            hidden = self.layer(i, hidden, last=place == len(kept) - 1)
        self.finish(hidden)
        return self.buffer_bytes()

    def representatives(self) -> list[int]:
        """Layers of one kind need the same, so two of each stand for all; and the last, which ends differently."""
        seen: dict[object, int] = {}
        kept: list[int] = []
        count = len(self.by_layer)
        for i in range(count):
            kind = (
                i < self.batch.host_experts,
                self.shape.layers[i],
                tuple((name, tensor.shape) for name, tensor in self.by_layer[i].items()),
            )
            seen[kind] = seen.get(kind, 0) + 1
            if (seen[kind] <= 2 and len(kept) < _MOST_DIFFERENT_LAYERS) or i == count - 1:
                kept.append(i)
        return kept

    def embeddings(self) -> Node:
        mixed = self.batch.build >= MIXED_BATCHES and self.name not in _NO_MIXED_BATCHES
        self.scaled_rows = mixed and self.name in _SCALES_ROWS
        size = self.row(self.shape.width)
        if self.on_device and self.scaled_rows and "per_layer_token_embd" in self.globals:
            # The rows for each layer are gathered on the host too, and keep all that comes before them there.
            self.host_bytes += 3 * pad(4 * self.tokens, 32) + pad(INDEX * self.tokens, 32) + 5 * pad(size, 32)
            self.per_layer = self.rows_of_layers()
            return self.copied(size)
        tokens = self.input(4 * self.tokens)
        self.input_of_host(size)
        found = self.gathered(size, tokens)
        self.expand(found)
        if mixed:
            # Nobody reads what the mixed branch results in, so its copy of the embeddings is never given back.
            slots, rows = self.input(INDEX * self.tokens), self.input(size)
            written = self.gathered(size, self.input(4 * self.tokens))
            copy = self.op(size, rows)
            target = self.view(copy)
            target.sources = (written, slots, copy)
            self.expand(target)
        if self.scaled_rows:
            found = self.over(found, self.input(4 * self.tokens))
            self.expand(found)
        if "per_layer_token_embd" in self.globals:
            self.per_layer = self.rows_of_layers()
        return found

    def rows_of_layers(self) -> Node:
        """What each layer adds for each token, gathered for all layers at once."""
        found = self.gathered(self.row(self.globals["per_layer_token_embd"].shape[0]), self.input(4 * self.tokens))
        return self.over(found if self.on_device else self.view(found))

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

    def input(self, size: int) -> Node:
        if self.on_device:
            self.host_bytes += pad(size, 32)
        return super().input(size)

    def copied(self, size: int) -> Node:
        """The device's copy of what was computed on the host."""
        return super().input(size)

    def inputs_of_attention(self) -> None:
        layers = self.shape.layers
        mask_bytes = 2 if self.batch.flash_attention else FLOAT
        if not any(layer.keeps != STATE for layer in layers):
            return
        if self.shape.mla is False and not any(layer.keeps not in (STATE,) for layer in layers):
            return
        encoder = all(layer.keeps == "nothing" for layer in layers)
        caches = [layer for layer in layers if layer.keeps not in (STATE, "nothing")]
        for windowed in sorted({layer.windowed for layer in (layers if encoder else caches)}):
            mine = [layer for layer in caches if layer.windowed == windowed]
            cells = self.tokens if encoder else self.cells(windowed)
            if not encoder:
                self.indices[windowed, "key"] = self.input(INDEX * self.tokens)
                if not self.shape.mla:
                    # A transposed cache is written element by element.
                    rows = 1 if self.batch.flash_attention else max(layer.value * layer.kv_heads for layer in caches)
                    self.indices[windowed, "value"] = self.input(INDEX * self.tokens * rows)
            self.masks[windowed] = self.input(mask_bytes * cells * self.tokens)
            if not encoder:
                self.rotate(windowed, mine)

    def rotate(self, windowed: bool, layers: list[Layer]) -> None:
        """Quantised caches hold rotated rows (Hadamard matrices, as inputs) where the heads allow it."""
        for part, kind, sizes in (
            ("key", self.batch.key, {layer.key for layer in layers}),
            ("value", self.batch.value, {layer.value for layer in layers}),
        ):
            if kind.elements > 1 and len(sizes) == 1 and min(sizes) > 0 and min(sizes) % 64 == 0 and not self.shape.mla:
                side = 64
                if part == "key":
                    while min(sizes) % (2 * side) == 0:
                        side *= 2
                self.rotations[windowed, part] = self.input(FLOAT * side * side)

    def cells(self, windowed: bool) -> int:
        return self.batch.window_cells if windowed else self.batch.cells

    def before_layers(self, hidden: Node) -> Node:
        scope = self.globals
        if "token_types" in scope:
            hidden = self.over(hidden)
        if "position_embd" in scope and self.name == "bert":
            hidden = self.over(self.op(hidden.bytes, self.positions), hidden)
        if "token_embd_norm" in scope and self.name not in ("lfm2", "lfm2moe"):
            hidden = self.norm("token_embd_norm", hidden, scope)
        if self.name.startswith("gemma") and not self.scaled_rows:
            hidden = self.over(hidden)
        if "per_layer_token_embd" in scope:
            self.per_layer = self.per_layer_inputs(hidden)
        if "altup_proj" in scope:
            hidden = self.altup_start(hidden)
        return hidden

    def per_layer_inputs(self, hidden: Node) -> Node:
        found = self.per_layer
        self.expand(found)
        projected = self.over(self.op(found.bytes, hidden))
        projected = self.norm("per_layer_proj_norm", self.view(projected), self.globals)
        return self.op(found.bytes, self.view(self.over(self.over(projected, found))))

    # Layers

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
        added = self.over(cur, residual)
        before = "ffn_norm" if "ffn_norm" in t else "post_attention_norm" if "post_ffw_norm" not in t else ""
        if "pre_ffw_norm_2" in t:
            cur = self.gemma4_experts(layer, added)
        else:
            cur = self.feed_forward(layer, self.norm(before, added) if before else added)
        if "post_ffw_norm" in t:
            cur = self.norm("post_ffw_norm", cur)
        cur = self.over(cur, added)
        if "inp_gate" in t:
            cur = self.per_layer_part(cur)
        if "layer_output_scale" in t:
            cur = self.over(cur)
        return cur

    def centred_after(self) -> bool:
        """The bert family: norms after the parts."""
        return "attn_output_norm" in self.t

    def narrow(self) -> None:
        """From here on only the rows that are wanted are left."""
        self.tokens = self.batch.outputs

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

    # Attention

    def attention(self, layer: Layer, cur: Node) -> Node:
        t = self.t
        if "attn_kv_a_mqa" in t:
            return self.latent_attention(layer, cur)
        gated = layer.heads * layer.key * 2 == (t.width_of("attn_q") if "attn_q" in t else 0)
        rope = self.ropes(layer)
        query_bytes, key_bytes, value_bytes = (
            self.row(n) for n in (layer.heads * layer.key, layer.kv_heads * layer.key, layer.kv_heads * layer.value)
        )
        gate: Node | None = None
        k: Node | None
        v: Node | None
        if "attn_qkv" in t:
            qkv = self.matmul("attn_qkv", cur)
            q, k, v = self.view(qkv, query_bytes), self.view(qkv, key_bytes), self.view(qkv, value_bytes)
            strided = True
        else:
            full = self.matmul("attn_q", cur)
            owns = layer.owns_cache or layer.keeps == "nothing"
            k = self.view(self.matmul("attn_k", cur)) if owns and "attn_k" in t else None
            v = self.view(self.matmul("attn_v", cur)) if owns and "attn_v" in t else k if owns else None
            q = self.view(full, query_bytes)
            if gated:
                gate = self.view(full, query_bytes)
            strided = gated
        if "attn_q_norm" in t:
            q = self.over(self.op(query_bytes, q) if strided else self.over(q))
            k = self.over(self.op(key_bytes, k) if strided and "attn_qkv" in t else self.over(k)) if k else None
            q, k = self.view(q), self.view(k) if k else None
            strided = False
        if self.name in ("gemma3n", "gemma4") and v:
            v = self.over(v)
        if rope:
            q = self.op(query_bytes, q, self.positions) if strided else self.over(q, self.positions)
            if k:
                k = self.op(key_bytes, k, self.positions) if strided and "attn_qkv" in t else self.over(k, self.positions)
        if self.name in ("gemma2", "gemma3", "phi3", "gemma"):
            q = self.over(q)
        if self.name == "llama4" and rope and self.number("attention.use_qk_norm", 1):
            q = self.over(q)
            k = self.over(k) if k else None
        cur = self.attend(layer, q, k, v, layer.value)
        if gate is not None:
            cur = self.over(cur, self.over(self.op(query_bytes, gate)))
        return self.matmul("attn_output", cur)

    def ropes(self, layer: Layer) -> bool:
        if self.name == "bert" or self.name.startswith(("nemotron_h", "jamba", "granitehybrid")):
            return False
        if self.name == "cohere2":
            return layer.windowed
        return True

    def latent_attention(self, layer: Layer, cur: Node) -> Node:
        """Multi-head latent attention: the cache holds one row for all heads."""
        t, shape = self.t, self.shape
        heads, rank, rope = layer.heads, t["attn_kv_a_norm"].shape[0], t.width_of("attn_kv_a_mqa") - t["attn_kv_a_norm"].shape[0]
        key, value = shape.key_mla, shape.value_mla
        if "attn_q_a" in t:
            q = self.matmul("attn_q_b", self.norm("attn_q_a_norm", self.matmul("attn_q_a", cur)))
        else:
            q = self.matmul("attn_q", cur)
        q = self.view(q)
        both = self.matmul("attn_kv_a_mqa", cur)
        latent, k_rope = self.view(both, self.row(rank)), self.view(both, self.row(rope))
        if self.name != "kimi-linear":
            k_rope = self.op(self.row(rope), k_rope, self.positions)
        latent = self.over(self.op(self.row(rank), latent))
        if "attn_k_b" in t:
            q_rope = self.view(q, self.row(heads * rope))
            if self.name != "kimi-linear":
                q_rope = self.op(self.row(heads * rope), q_rope, self.positions)
            absorbed = self.op(self.row(heads * rank), self.view(q, self.row(heads * (key - rope))))
            query = self.op(self.row(heads * (rank + rope)), self.view(absorbed), q_rope)
            latent = self.view(latent)
            row = self.op(self.row(rank + rope), latent, k_rope)
            cur = self.attend(layer, query, row, latent, rank)
        else:
            full = self.op(self.row(heads * (key - rope + value)), latent)
            v = self.op(self.row(heads * value), self.view(full, self.row(heads * value)))
            query = self.rope_part(q, heads, key, rope)
            repeated = self.op(self.row(heads * rope), k_rope)
            k = self.op(self.row(heads * key), self.view(full, self.row(heads * (key - rope))), repeated)
            cur = self.attend(layer, query, k, v, value)
        return self.matmul("attn_output", cur)

    def rope_part(self, q: Node, heads: int, key: int, rope: int) -> Node:
        """Rotates the last part of each head: in place since ggml knows an offset, by taking apart and joining before."""
        if self.batch.build >= MIXED_BATCHES:
            return self.over(q, self.positions)
        turned = self.op(self.row(heads * rope), self.view(q, self.row(heads * rope)), self.positions)
        return self.op(self.row(heads * key), self.view(q, self.row(heads * (key - rope))), turned)

    def attend(self, layer: Layer, q: Node, k: Node | None, v: Node | None, value: int) -> Node:
        """Writes the cache and reads it; without one, keys and values are those of the batch."""
        windowed, cached = layer.windowed, layer.keeps != "nothing"
        mask = self.masks.get(windowed)
        back = None
        if cached:
            if rotation := self.rotations.get((windowed, "key")):
                q = self.view(self.op(q.bytes, rotation, self.view(q)))
                k = self.view(self.op(k.bytes, rotation, self.view(k))) if k else None
            if rotation := self.rotations.get((windowed, "value")):
                back = rotation
                v = self.view(self.op(v.bytes, rotation, self.view(v))) if v else None
        self.expand(q)
        if any(other.windowed for other in self.shape.layers) or not cached:
            self.expand(k, v)
        else:
            self.expand(v, k)
        sources: list[Node | None] = [self.view(q)]
        if cached:
            if k:
                self.expand(self.op(0, k, self.indices.get((windowed, "key"))))
            if v and not self.shape.mla:
                self.expand(self.op(0, v, self.indices.get((windowed, "value"))))
        cells = self.cells(windowed) if cached else self.tokens
        out = self.row(layer.heads * value)
        absorbed = "attn_v_b" in self.t
        final = self.row(layer.heads * self.shape.value_mla) if absorbed else out
        if self.batch.flash_attention:
            if not cached:
                sources += [self.op(part.bytes // 2, self.view(part)) if part else None for part in (k, v)]
            cur = self.op(out, *sources, mask)
            if absorbed:
                cur = self.op(final, self.view(self.op(final, self.view(cur))))
            cur = self.view(cur)
        else:
            scores = FLOAT * cells * self.tokens * layer.heads
            cur = self.op(scores, *([self.view(k)] if not cached and k else []), *sources)
            if f"{self.name}.attn_logit_softcapping" in self.metadata or self.name == "gemma2":
                cur = self.over(self.over(self.over(cur)))
            cur = self.over(cur, mask)
            turned: Node | None = None
            if not cached and v:
                turned = self.op(v.bytes, self.view(v))
            elif self.shape.mla:
                # The values are a view of the keys, which lie the wrong way round for this.
                turned = self.op(self.batch.key.bytes * cells * self.batch.sequences * value // self.batch.key.elements)
            cur = self.op(out, turned, cur)
            if absorbed:
                cur = self.op(final, cur)
            cur = self.op(final, self.view(cur))
        self.expand(cur)
        if back is not None:
            cur = self.view(self.op(cur.bytes, back, self.view(cur)))
        return cur

    # Feed-forward parts

    def feed_forward(self, layer: Layer, cur: Node) -> Node:
        t = self.t
        if "ffn_gate_inp" in t and ("ffn_up_exps" in t or "ffn_gate_up_exps" in t):
            mixed = self.experts(layer, cur)
            if "ffn_up_shexp" not in t:
                return mixed
            shared = self.matmul("ffn_down_shexp", self.gate("shexp", cur))
            if "ffn_gate_inp_shexp" in t:
                shared = self.over(shared, self.over(self.op(self.row(1), cur)))
            return self.over(mixed, shared)
        return self.matmul("ffn_down", self.gate("", cur))

    def gate(self, suffix: str, cur: Node) -> Node:
        """The activation, from a gate beside it where there is one."""
        t, end = self.t, f"_{suffix}" if suffix else ""
        up = self.matmul("ffn_up" + end, cur)
        if "ffn_gate" + end in t:
            return self.op(up.bytes, self.matmul("ffn_gate" + end, cur), up)
        if self.name in _GATED_TWICE and not suffix:
            return self.op(up.bytes // 2, up)
        return self.over(self.over(up)) if self.name.startswith("nemotron") else self.over(up)

    def experts(self, layer: Layer, cur: Node, logits: Node | None = None) -> Node:
        t, shape, tokens = self.t, self.shape, self.tokens
        used, count = layer.experts_used, shape.experts
        logits = self.matmul("ffn_gate_inp", cur) if logits is None else logits
        each = FLOAT * tokens * used
        weights_from: Node = logits
        kind = self.number("expert_gating_func", 0)
        late = self.name == "gpt-oss"  # the softmax is over the chosen experts
        probabilities = logits if late else self.over(logits)
        weights_from = probabilities
        selection = probabilities
        if self.name == "llama4":
            selection = logits
        if "exp_probs_b.bias" in t:
            selection = self.over(probabilities)
        if shape.expert_groups > 1:
            selection = self.grouped(selection)
        chosen = self.view(self.op(FLOAT * count * tokens, selection), each)
        weights: Node = self.op(each, self.view(weights_from), chosen)
        if late:
            weights = self.view(self.over(self.view(weights)))
        elif self.normalises(kind):
            flat = self.view(weights)
            total = self.over(self.op(FLOAT * tokens, flat))
            weights = self.view(self.over(flat, total))
        if f"{self.name}.expert_weights_scale" in self.metadata:
            weights = self.over(weights)
        self.expand(weights)
        cur = self.view(cur)
        width = cur.bytes // FLOAT // tokens
        before = self.name == "llama4"
        if before:
            cur = self.over(self.op(FLOAT * width * used * tokens, cur), weights)
        if "ffn_gate_up_exps" in t:
            both = self.op(each * t.width_of("ffn_gate_up_exps"), cur, chosen, self.brought("ffn_gate_up_exps"))
            half = each * t.width_of("ffn_gate_up_exps") // 2
            inner = self.op(half, self.view(both, half), self.view(both, half))
        else:
            up = self.op(each * t.width_of("ffn_up_exps"), cur, chosen, self.brought("ffn_up_exps"))
            if "ffn_up_exps.bias" in t:
                up = self.over(up, chosen)
            if "ffn_gate_exps" in t:
                gate = self.op(up.bytes, cur, chosen, self.brought("ffn_gate_exps"))
                if "ffn_gate_exps.bias" in t:
                    gate = self.over(gate, chosen)
                inner = self.op(up.bytes, gate, up)
            else:
                inner = self.over(self.over(up))
        out = t.width_of("ffn_down_exps")
        result = self.op(each * out, inner, chosen, self.brought("ffn_down_exps"))
        if "ffn_down_exps.bias" in t:
            result = self.over(result, chosen)
        if not before:
            result = self.over(result, weights)
        self.expand(result)
        parts = [self.view(result, FLOAT * tokens * out) for _ in range(used)]
        self.expand(*parts)
        total_out = parts[0]
        for number, part in enumerate(parts[1:]):
            # Rows of one expert lie apart in the result, so the first sum needs memory of its own.
            total_out = self.op(part.bytes, total_out, part) if number == 0 else self.over(total_out, part)
            self.expand(total_out)
        return self.op(FLOAT * tokens * out, parts[0]) if used == 1 else total_out

    def brought(self, name: str) -> Node | None:
        """Experts on the host are copied to the device for a batch that is worth it, one tensor after the other."""
        return self.op(self.t[name].bytes) if self.experts_on_host else None

    def normalises(self, kind: int) -> bool:
        if self.name in ("qwen2moe", "llama4", "jamba", "olmoe", "deepseek"):
            return False
        if self.name in ("deepseek2", "glm4moe", "dots1", "nemotron_h_moe", "bailingmoe"):
            return bool(self.metadata.get(f"{self.name}.expert_weights_norm", False))
        return True

    def grouped(self, selection: Node) -> Node:
        """Only experts of the best groups may be chosen."""
        shape, tokens = self.shape, self.tokens
        groups = shape.expert_groups
        all_bytes = FLOAT * shape.experts * tokens
        by_group = self.view(selection)
        best = self.view(self.op(all_bytes, by_group), FLOAT * 2 * groups * tokens)
        scores = self.op(FLOAT * 2 * groups * tokens, self.view(by_group), best)
        scores = self.view(self.op(FLOAT * groups * tokens, self.view(scores)))
        taken = self.number("expert_group_used_count", 1)
        chosen = self.view(self.op(FLOAT * groups * tokens, scores), FLOAT * taken * tokens)
        kept = self.op(all_bytes * taken // groups, by_group, chosen)
        filled = self.over(by_group)
        target = self.view(filled)
        target.sources = (kept, chosen, filled)
        return self.view(target)

    def gemma4_experts(self, layer: Layer, added: Node) -> Node:
        dense = self.matmul("ffn_down", self.gate("", self.norm("ffn_norm", added)))
        dense = self.norm("post_ffw_norm_1", dense)
        cur = self.norm("pre_ffw_norm_2", added)
        scaled = self.over(self.over(self.over(added)))
        mixed = self.experts(layer, cur, self.op(self.row(self.shape.experts), scaled))
        return self.over(dense, self.norm("post_ffw_norm_2", mixed))

    def per_layer_part(self, cur: Node) -> Node:
        gated = self.over(self.matmul("inp_gate", cur))
        gated = self.over(gated, self.view(self.per_layer, gated.bytes))
        return self.over(cur, self.norm("post_norm", self.matmul("proj", gated)))

    # What keeps a state

    def recurrent(self, layer: Layer, cur: Node) -> Node:
        t = self.t
        if "shortconv.in_proj" in t:
            return self.short_convolution(cur)
        if "ssm_f_a" in t:
            return self.kimi_delta(layer, cur)
        if "ssm_beta" in t or "ssm_ba" in t:
            return self.delta_net(cur)
        if "ssm_x" in t:
            return self.mamba(cur)
        if "ssm_in" in t:
            return self.mamba2(cur)
        return self.matmul("attn_output", cur) if "attn_output" in t else cur

    def state(self, floats: int) -> Node:
        """The rows of the sequences, copied out of the states of all."""
        sequences = self.batch.sequences
        found = self.op(FLOAT * floats * sequences, self.states)
        result = self.view(found, FLOAT * floats * sequences)
        self.expand(result)
        self.expand(self.op(0, self.view(found, 0)))
        return result

    def convolve(self, source: Node, channels: int, kernel: int) -> Node:
        """The last columns of the state before the batch's own; the new last ones go back to the state."""
        before = self.view(self.state(max(0, kernel - 1) * channels))
        joined = self.op(FLOAT * channels * (self.tokens + max(0, kernel - 1) * self.batch.sequences), before, self.view(source))
        self.expand(self.op(0, self.view(joined, 0)))
        return joined

    def mamba(self, cur: Node) -> Node:
        t = self.t
        inner, state, rank = t["ssm_out"].shape[0], self.number("ssm.state_size"), self.number("ssm.time_step_rank")
        both = self.matmul("ssm_in", self.view(cur))
        x, z = self.view(both, self.row(inner)), self.view(both, self.row(inner))
        x = self.over(self.over(self.op(self.row(inner), self.convolve(x, inner, t["ssm_conv1d"].shape[0]))))
        small = self.matmul("ssm_x", x)
        dt, b, c = self.view(small, self.row(rank)), self.view(small, self.row(state)), self.view(small, self.row(state))
        if "ssm_dt_norm" in t:
            dt, b, c = (self.over(self.op(part.bytes, part)) for part in (dt, b, c))
        else:
            dt = self.op(dt.bytes, dt)
        dt = self.matmul("ssm_dt", dt)
        return self.scan(x, dt, b, c, z, inner, state)

    def mamba2(self, cur: Node) -> Node:
        t = self.t
        inner, state = t["ssm_out"].shape[0], self.number("ssm.state_size")
        heads = t["ssm_dt.bias"].shape[0]
        conv = t.width_of("ssm_conv1d")
        both = self.view(self.matmul("ssm_in", cur))
        z, x, dt = self.view(both, self.row(inner)), self.view(both, self.row(conv)), self.view(both, self.row(heads))
        x = self.over(self.over(self.op(self.row(conv), self.convolve(x, conv, t["ssm_conv1d"].shape[0]))))
        parts = [self.view(x, self.row(inner)), self.view(x, 0), self.view(x, 0)]
        dt = self.over(self.op(self.row(heads), dt))
        return self.scan(parts[0], dt, parts[1], parts[2], z, inner, state)

    def scan(self, x: Node, dt: Node, b: Node, c: Node, z: Node, inner: int, state: int) -> Node:
        sequences = self.batch.sequences
        y = self.op(self.row(inner) + FLOAT * state * inner * sequences, self.states, self.view(x), dt, b, c)
        self.expand(y)
        self.expand(self.op(0, self.view(y, 0)))
        scaled = self.op(self.row(inner), x) if x.root is not x else self.over(x)
        out = (
            self.op(self.row(inner), self.view(y, self.row(inner)), scaled)
            if x.root is x
            else self.over(self.view(y, -1), scaled)
        )
        out = self.op(self.row(inner), self.op(self.row(inner), z), out)
        if "ssm_norm" in self.t:
            out = self.over(self.over(self.view(out)))
        return self.matmul("ssm_out", self.view(out))

    def short_convolution(self, cur: Node) -> Node:
        width = self.shape.width
        all_three = self.matmul("shortconv.in_proj", self.view(cur))
        b, c, x = (self.view(all_three, self.row(width)) for _ in range(3))
        product = self.op(self.row(width), b, x)
        joined = self.convolve(product, width, self.t["shortconv.conv"].shape[0])
        out = self.op(self.row(width), joined)
        return self.view(self.matmul("shortconv.out_proj", self.op(self.row(width), c, out)))

    def delta_net(self, cur: Node) -> Node:
        """Gated delta rule, as in the Qwen models of which every fourth layer attends."""
        t = self.t
        state, groups, heads = self.number("ssm.state_size"), self.number("ssm.group_count"), self.number("ssm.time_step_rank")
        keys, inner = state * groups, self.number("ssm.inner_size")
        channels = 2 * keys + inner
        if "ssm_in" in t:
            joined = self.view(self.matmul("ssm_in", cur))
            z = self.op(self.row(inner), self.view(joined, self.row(inner)))
            q, k, v = (self.op(self.row(n), self.view(joined, self.row(n))) for n in (keys, keys, inner))
            mixed = self.op(self.row(channels), self.op(self.row(2 * keys), q, k), v)
        else:
            mixed = self.view(self.matmul("attn_qkv", cur))
            z = self.matmul("attn_gate", cur)
        if "ssm_ba" in t:
            both = self.view(self.matmul("ssm_ba", cur))
            beta = self.over(self.op(self.row(heads), self.view(both, self.row(heads))))
            alpha = self.op(self.row(heads), self.view(both, self.row(heads)))
        else:
            beta = self.over(self.view(self.matmul("ssm_beta", cur)))
            alpha = self.view(self.matmul("ssm_alpha", cur))
        gate = self.view(self.over(self.over(self.over(alpha))))
        kernel = t["ssm_conv1d"].shape[0]
        joined = self.convolve(mixed, channels, kernel)
        kept = self.view(self.state(self.shape.state_size))
        out = self.over(self.op(self.row(channels), joined))
        q, k = (self.op(self.row(keys), self.view(out, self.row(keys))) for _ in range(2))
        v = self.view(out, self.row(inner))
        if groups != heads:
            q, k = (self.view(self.op(self.row(state * heads), self.view(part))) for part in (q, k))
        output = self.delta_rule(q, k, v, gate, self.view(beta), kept, inner)
        normed = self.over(self.op(self.row(inner), output))
        cur = self.over(normed, self.over(self.view(z)))
        return self.view(self.matmul("ssm_out", self.view(cur)))

    def delta_rule(self, q: Node, k: Node, v: Node, gate: Node, beta: Node, kept: Node, inner: int) -> Node:
        result = self.op(self.row(inner) + FLOAT * self.shape.state_size * self.batch.sequences, q, k, v, gate, beta, kept)
        self.expand(self.op(0, self.view(result, 0)))
        return self.view(result, self.row(inner))

    def kimi_delta(self, layer: Layer, cur: Node) -> Node:
        t = self.t
        inner = t.width_of("attn_q")
        kernel = t["ssm_conv1d_q"].shape[0]
        states = self.state(self.shape.state_rows)
        out = []
        for part in "qkv":
            state_bytes = FLOAT * max(0, kernel - 1) * inner * self.batch.sequences
            before = self.view(states, state_bytes)
            projected = self.view(self.matmul(f"attn_{part}", cur))
            joined = self.op(
                FLOAT * inner * (self.tokens + max(0, kernel - 1) * self.batch.sequences), before, self.view(projected)
            )
            self.expand(self.op(0, self.view(joined, 0)))
            out.append(self.view(self.over(self.view(self.op(self.row(inner), joined)))))
        gate = self.matmul("ssm_f_b", self.matmul("ssm_f_a", cur))
        gate = self.view(self.over(self.view(self.over(self.over(gate)))))
        beta = self.over(self.view(self.matmul("ssm_beta", cur)))
        cur3 = self.view(cur)
        kept = self.view(self.state(self.shape.state_size))
        q, k = (self.op(self.row(inner), part) for part in out[:2])
        output = self.op(self.row(inner), self.delta_rule(q, k, out[2], gate, beta, kept, inner))
        g = self.view(self.matmul("ssm_g_b", self.matmul("ssm_g_a", self.view(cur3))))
        normed = self.over(self.over(self.view(output)))
        gated = self.op(self.row(inner), self.over(normed, self.over(g)))
        return self.matmul("attn_output", gated)

    # Architectures of their own kind

    def rwkv7(self, hidden: Node, last: bool) -> Node:
        _t, width, sequences = self.t, self.shape.width, self.batch.sequences
        size = self.row(width)
        hidden = self.view(hidden)
        shift = self.view(self.state(2 * width))
        normed = self.norm("attn_norm", hidden)
        previous = self.op(size, self.view(shift, FLOAT * width * sequences), self.view(normed, size))
        # Time mixing
        delta = self.over(previous, normed)
        repeated = self.op(6 * size, delta)
        mixed = self.over(self.over(repeated), normed)
        r, w, k, v, a, g = (self.view(mixed, size) for _ in range(6))
        receptance = self.matmul("time_mix_receptance", r)
        w = self.over(self.op(size, self.over(self.matmul("time_mix_w1", w))))
        w = self.over(self.over(self.over(w)))
        key = self.matmul("time_mix_key", k)
        value = self.matmul("time_mix_value", v)
        if getattr(self, "first_value", None) is None:
            self.first_value: Node | None = value
        else:
            blend = self.over(self.over(self.op(size, self.matmul("time_mix_v1", v))))
            value = self.over(value, self.over(self.over(self.first_value, value), blend))
        gate = self.op(size, self.over(self.matmul("time_mix_g1", g)))
        rate = self.over(self.over(self.op(size, self.matmul("time_mix_a1", a))))
        kk = self.op(size, self.view(self.over(key)))
        ka = self.over(key)
        key = self.over(key, self.over(self.over(rate, ka), ka))
        receptance, w, key, value, rate = (self.view(part) for part in (receptance, w, key, value, rate))
        kept = self.state(self.shape.state_size)
        out = self.op(
            size + FLOAT * self.shape.state_size * sequences, receptance, w, key, value, self.over(kk), self.over(kk, rate), kept
        )
        cur = self.view(out, size)
        self.expand(self.op(0, self.view(out, 0)))
        cur = self.over(self.over(self.view(self.op(size, self.view(cur)))))
        rk = self.op(size // 64, self.over(self.over(key, receptance)))
        cur = self.over(cur, self.view(self.over(value, rk)))
        cur = self.over(cur, gate)
        cur = self.view(self.matmul("time_mix_output", cur))
        fed = self.over(cur, hidden)
        # Channel mixing
        normed2 = self.norm("attn_norm_2", fed)
        previous = self.op(size, self.view(shift, FLOAT * width * sequences), self.view(normed2, size))
        ends = self.op(FLOAT * 2 * width * sequences, self.view(normed, 0), self.view(normed2, 0))
        self.expand(self.op(0, self.view(ends)))
        fed, normed2, previous = self.view(fed), self.view(normed2), self.view(previous)
        if last:
            self.narrow()
            fed, normed2, previous = (self.select(part, self.rows, width) for part in (fed, normed2, previous))
        xk = self.over(self.over(self.over(previous, normed2)), normed2)
        k = self.over(self.over(self.matmul("channel_mix_key", xk)))
        return self.over(self.matmul("channel_mix_value", k), fed)

    def magnitude(self, source: Node) -> Node:
        return self.over(self.op(source.bytes // self.shape.width, self.over(source)))

    def altup_start(self, hidden: Node) -> Node:
        size, others = hidden.bytes, self.globals["altup_proj"].shape[2]
        target = self.magnitude(hidden)
        added = self.op(others * size, self.op(others * size, hidden))
        added = self.over(self.over(added, target), self.magnitude(added))
        return self.op((others + 1) * size, hidden, added)

    def altup_end(self, hidden: Node) -> Node:
        count = self.globals["altup_proj"].shape[2] + 1
        size = hidden.bytes // count
        target = self.magnitude(self.view(hidden, size))
        others = self.op((count - 1) * size, self.view(hidden, (count - 1) * size))
        others = self.over(self.over(others, target), self.magnitude(others))
        cur: Node = self.view(hidden, size)
        for number in range(count - 1):
            part = self.view(others, size)
            cur = self.op(size, cur, part) if number == 0 else self.over(cur, part)
        return self.over(cur)

    def altup_router(self, source: Node) -> Node:
        return self.over(self.op(self.row(4), self.over(self.norm("altup_router_norm", source))))

    def gemma3n(self, i: int, layer: Layer, hidden: Node, last: bool) -> Node:
        _t, width = self.t, self.shape.width
        size = self.row(width)
        count = hidden.bytes // size
        coefficients = self.view(self.matmul("altup_predict_coef", self.altup_router(self.view(hidden, size))))
        turned = self.op(hidden.bytes, self.view(hidden))
        predictions = self.over(self.op(hidden.bytes, self.view(self.op(hidden.bytes, turned, coefficients))), hidden)
        active = self.view(predictions, size)
        cur = self.over(self.op(size, active))
        laurel = self.over(self.norm("laurel_post_norm", self.matmul("laurel_r", self.matmul("laurel_l", cur))), cur)
        cur = self.attention(layer, cur)
        cur = self.over(self.norm("post_attention_norm", cur), active)
        joined = self.over(self.over(cur, laurel))
        normed = self.norm("ffn_norm", joined)
        up, gate = self.matmul("ffn_up", normed), self.matmul("ffn_gate", normed)
        if i < 10:  # the first layers keep only the largest activations
            mean = self.op(self.row(1), gate)
            deviation = self.over(self.op(self.row(1), self.over(self.op(gate.bytes, gate, mean))))
            gate = self.over(self.over(gate, self.over(mean, deviation)))
        fed = self.matmul("ffn_down", self.over(up, self.over(gate)))
        gated = self.over(self.norm("post_ffw_norm", fed), joined)
        # Correction of all predictions by the one that was computed
        router = self.altup_router(gated)
        innovation = self.over(gated, self.view(predictions, size))
        weights = self.op(self.row(count), self.view(self.over(self.matmul("altup_correct_coef", router))))
        corrected = self.over(self.over(self.op(count * size, innovation), weights), predictions)
        first = self.op(size, self.view(corrected, size))
        first = self.over(self.matmul("inp_gate", first))
        first = self.over(first, self.view(self.per_layer, first.bytes))
        first = self.norm("post_norm", self.matmul("proj", first))
        rest = self.op((count - 1) * size, self.view(corrected, (count - 1) * size), first)
        return self.op(count * size, self.view(corrected, size), rest)


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
