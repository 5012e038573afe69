"""Parts that keep a state instead of a cache: Mamba, delta rules, short convolutions."""

from __future__ import annotations

from sparkguard.core.architectures import Layer
from sparkguard.core.graph import Node
from sparkguard.core.parts.base import FLOAT
from sparkguard.core.parts.feed_forward import FeedForward


class States(FeedForward):
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
        scaled = self.op(self.row(inner), x) if x.seen else self.over(x)
        out = (
            self.op(self.row(inner), self.view(y, self.row(inner)), scaled)
            if x.seen is None
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
        return self.view(self.matmul("shortconv.out_proj", self.over(c, out)))

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
        if groups != heads and "ssm_in" in t:  # the fused qkv of later models leaves that to the operation
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
