"""Attention: its inputs, its caches, with all the ways of making queries, keys and values."""

from __future__ import annotations

from sparkguard.core.architectures import BOTH, CACHE, NOTHING, Layer
from sparkguard.core.graph import Node
from sparkguard.core.parts.base import FLOAT, INDEX, MIXED_BATCHES, Base


class Attention(Base):
    def inputs_of_attention(self) -> None:
        encoder = all(layer.keeps == NOTHING for layer in self.shape.layers)
        readers = [layer for layer in self.shape.layers if encoder or layer.keeps in (CACHE, BOTH)]
        widest = max((layer.value * layer.kv_heads for layer in readers), default=0)
        for windowed in sorted({layer.windowed for layer in readers}):
            if not encoder:
                self.indices[windowed, "key"] = self.input(INDEX * self.tokens)
                if not self.shape.mla:
                    # A transposed cache is written element by element.
                    rows = 1 if self.batch.flash_attention else widest
                    self.indices[windowed, "value"] = self.input(INDEX * self.tokens * rows)
            cells = self.tokens if encoder else self.cells(windowed)
            self.masks[windowed] = self.input((2 if self.batch.flash_attention else FLOAT) * cells * self.tokens)
            if not encoder:
                self.rotate(windowed, [layer for layer in readers if layer.windowed == windowed])

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
            owns = layer.owns_cache or layer.keeps == NOTHING
            k = self.view(self.matmul("attn_k", cur)) if owns and "attn_k" in t else None
            v = self.view(self.matmul("attn_v", cur)) if owns and "attn_v" in t else k if owns else None
            q = self.view(full, query_bytes)
            if gated:
                gate = self.view(full, query_bytes)
            strided = gated
        if "attn_q_norm" in t:
            by_row = t["attn_q_norm"].shape[0] > layer.key
            q, k = self.norm_of_heads(q, by_row), self.norm_of_heads(k, by_row) if k else None
            strided = False
        if self.name in ("gemma3n", "gemma4") and v:
            v = self.over(v)
        if rope:
            q = self.op(query_bytes, q, self.positions) if strided else self.over(q, self.positions)
            if k:
                k = self.op(key_bytes, k, self.positions) if strided and "attn_qkv" in t else self.over(k, self.positions)
        if self.name in ("gemma2", "gemma3", "phi3", "gemma"):
            # Measured with build 10068, whose source was not at hand: Gemma's copy is one of its own there.
            q = self.op(q.bytes, q) if self.copies_norms and self.name != "phi3" else self.over(q)
        if self.name == "llama4" and rope and self.number("attention.use_qk_norm", 1):
            q = self.over(q)
            k = self.over(k) if k else None
        cur = self.attend(layer, q, k, v, layer.value)
        if gate is not None:
            cur = self.over(cur, self.over(self.op(query_bytes, gate)))
        return self.matmul("attn_output", cur)

    def norm_of_heads(self, rows: Node, by_row: bool) -> Node:
        """One norm for each head, of what is seen as heads; or one over all of them, before they are seen so."""
        if not by_row:
            return self.over(self.over(rows))
        source = rows.sources[0] if rows.seen and rows.sources[0].root is rows.seen else rows
        return self.view(self.over(self.op(source.bytes, source) if self.copies_norms else self.over(source)))

    def ropes(self, layer: Layer) -> bool:
        """Whether queries and keys are rotated by their position."""
        if self.name == "granitehybrid":
            return bool(self.metadata.get("granitehybrid.rope.scaling.finetuned", True))
        if self.name == "bert" or self.name.startswith(("nemotron_h", "jamba")):
            return False
        return layer.windowed if self.name == "cohere2" else True

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
        windowed, cached = layer.windowed, layer.keeps != NOTHING
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
        if self.has_windows or not cached:
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
