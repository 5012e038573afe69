"""Feed-forward parts: one for all tokens, or experts of which each token takes a few."""

from __future__ import annotations

from sparkguard.core.architectures import Layer
from sparkguard.core.graph import Node
from sparkguard.core.parts.attention import Attention
from sparkguard.core.parts.base import FLOAT, UnknownPart


class FeedForward(Attention):
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
        if t.width_of("ffn_up" + end) == 2 * t["ffn_down" + end].shape[0]:  # the gate is the second half
            return self.op(up.bytes // 2, up)
        return self.over(self.over(up)) if self.name.startswith("nemotron") else self.over(up)

    def experts(self, layer: Layer, cur: Node, logits: Node | None = None) -> Node:
        t, shape, tokens = self.t, self.shape, self.tokens
        used, count = layer.experts_used, shape.experts
        if not used:
            raise UnknownPart("expert_used_count")
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
