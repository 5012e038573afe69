"""What only one family has: Gemma's inputs for each layer and its experts, Gemma 3n, RWKV 7."""

from __future__ import annotations

from sparkguard.core.architectures import Layer
from sparkguard.core.graph import Node
from sparkguard.core.parts.base import FLOAT
from sparkguard.core.parts.states import States


class Families(States):
    def rows_of_layers(self) -> Node:
        """What each layer adds for each token, gathered for all layers at once."""
        found = self.gathered(self.row(self.globals["per_layer_token_embd"].shape[0]), self.input(4 * self.tokens))
        return self.over(found if self.on_device else self.view(found))

    def per_layer_inputs(self, hidden: Node) -> Node:
        found = self.per_layer
        self.expand(found)
        projected = self.over(self.op(found.bytes, hidden))
        projected = self.norm("per_layer_proj_norm", self.view(projected), self.globals)
        return self.op(found.bytes, self.view(self.over(self.over(projected, found))))

    def per_layer_part(self, cur: Node) -> Node:
        gated = self.over(self.matmul("inp_gate", cur))
        gated = self.over(gated, self.view(self.per_layer, gated.bytes))
        return self.over(cur, self.norm("post_norm", self.matmul("proj", gated)))

    def gemma4_experts(self, layer: Layer, added: Node) -> Node:
        dense = self.matmul("ffn_down", self.gate("", self.norm("ffn_norm", added)))
        dense = self.norm("post_ffw_norm_1", dense)
        cur = self.norm("pre_ffw_norm_2", added)
        scaled = self.over(self.over(self.over(added)))
        mixed = self.experts(layer, cur, self.op(self.row(self.shape.experts), scaled))
        return self.over(dense, self.norm("post_ffw_norm_2", mixed))

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

    def by_number(self, i: int) -> bool:
        """What depends on a layer's number alone: Gemma 3n's first keep only the largest activations."""
        return self.name == "gemma3n" and i < 10

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
        if self.by_number(i):
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
