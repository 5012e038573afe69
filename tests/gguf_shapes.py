"""Writes the header of a GGUF file of a model's shape, with a hole where the weights would be.

A shape is what llama.cpp's loader asks for: keys and a table of tensors. The files take kilobytes of disk and claim gigabytes,
so a real engine can be asked what it would need (tests/llama_server.py). The sizes are those of published models.

    python tests/gguf_shapes.py FOLDER [NAME...]
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from pathlib import Path

# Number in the file, elements and bytes of a block.
TYPES = {
    "f32": (0, 1, 4),
    "f16": (1, 1, 2),
    "q4_0": (2, 32, 18),
    "q8_0": (8, 32, 34),
    "q4_k": (12, 256, 144),
    "q6_k": (14, 256, 210),
    "bf16": (30, 1, 2),
    "mxfp4": (39, 32, 17),
}
ALIGNMENT = 32


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def value_of(value: object) -> bytes:
    """A value with its type's number before it."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    assert isinstance(value, list)
    first = value[0] if value else 0
    if isinstance(first, bool):
        return struct.pack("<IIQ", 9, 7, len(value)) + bytes(value)
    if isinstance(first, str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(text(item) for item in value)
    if isinstance(first, float):
        return struct.pack(f"<IIQ{len(value)}f", 9, 6, len(value), *value)
    return struct.pack(f"<IIQ{len(value)}I", 9, 4, len(value), *value)


def header(keys: dict[str, object], tensors: list[tuple[str, tuple[int, ...], str]], version: int = 3) -> tuple[bytes, int]:
    """The header, padded to where the data begins, and the bytes of data that it describes."""
    table, offset = b"", 0
    for name, shape, kind in tensors:
        number, elements, size = TYPES[kind]
        assert shape[0] % elements == 0, (name, shape, kind)
        table += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, number, offset)
        count = 1
        for extent in shape:
            count *= extent
        offset += -(-(count // elements * size) // ALIGNMENT) * ALIGNMENT
    start = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys))
    start += b"".join(text(key) + value_of(value) for key, value in keys.items()) + table
    return start + bytes(-len(start) % ALIGNMENT), offset


class Maker:
    """Collects the keys and the tensors of one model."""

    def __init__(
        self, architecture: str, layers: int, width: int, vocabulary: int, context: int, kind: str = "q4_k", **keys: object
    ) -> None:
        self.architecture, self.layers, self.width, self.kind = architecture, layers, width, kind
        self.keys: dict[str, object] = {
            "general.architecture": architecture,
            "general.name": "synthetic",
            "tokenizer.ggml.model": "no_vocab",
        }
        self.tensors: list[tuple[str, tuple[int, ...], str]] = []
        self.set(vocab_size=vocabulary, context_length=context, embedding_length=width, block_count=layers)
        self.set(**{"attention.layer_norm_rms_epsilon": 1e-6, **keys})
        self.vocabulary = vocabulary

    def set(self, **keys: object) -> None:
        for key, value in keys.items():
            self.keys[f"{self.architecture}.{key}"] = value

    def add(self, name: str, *shape: int, kind: str | None = None) -> None:
        """A matrix in the model's type, a vector in f32; a name without a suffix gets '.weight'."""
        if kind is None:
            kind = "f32" if len(shape) == 1 else self.kind
            if shape[0] % TYPES[kind][1]:
                kind = "q8_0" if shape[0] % 32 == 0 else "f16"
        full = name if name.endswith((".bias", ".scale", "ssm_a", "ssm_d", ".raw")) else name + ".weight"
        self.tensors.append((full.removesuffix(".raw"), shape, kind))

    def ends(self, tied: bool = False, norm: str = "output_norm", kind: str | None = None, bias: bool = False) -> None:
        kind = kind or ("q6_k" if self.kind == "q4_k" and self.width % 256 == 0 else None)
        self.add("token_embd", self.width, self.vocabulary, kind=kind)
        self.add(norm, self.width)
        if bias:
            self.add(norm + ".bias", self.width)
        if not tied:
            self.add("output", self.width, self.vocabulary, kind=kind)

    def heads(self, count: int, kv: object, size: int, value: int | None = None) -> None:
        self.set(
            **{
                "attention.head_count": count,
                "attention.head_count_kv": kv,
                "attention.key_length": size,
                "attention.value_length": value or size,
                "rope.dimension_count": size,
            }
        )

    def attention(
        self,
        i: int,
        heads: int,
        kv: int,
        size: int,
        *,
        norms: str = "",
        bias: bool = False,
        gate: bool = False,
        out_bias: bool = False,
        fused: bool = False,
        value: bool = True,
    ) -> None:
        """norms: 'head' for one norm per head, 'row' for one over all heads."""
        blk, q = f"blk.{i}.", heads * size * (2 if gate else 1)
        if fused:
            self.add(blk + "attn_qkv", self.width, (heads + 2 * kv) * size)
        else:
            self.add(blk + "attn_q", self.width, q)
            self.add(blk + "attn_k", self.width, kv * size)
            if value:
                self.add(blk + "attn_v", self.width, kv * size)
        if bias:
            for part, count in (("q", heads), ("k", kv), ("v", kv)):
                self.add(f"{blk}attn_{part}.bias", count * size)
        self.add(blk + "attn_output", heads * size, self.width)
        if out_bias:
            self.add(blk + "attn_output.bias", self.width)
        if norms == "head":
            self.add(blk + "attn_q_norm", size)
            self.add(blk + "attn_k_norm", size)
        elif norms == "row":
            self.add(blk + "attn_q_norm", heads * size)
            self.add(blk + "attn_k_norm", kv * size)

    def norms(self, i: int, *names: str) -> None:
        for name in names:
            self.add(f"blk.{i}.{name}", self.width)

    def feed_forward(self, i: int, width: int, gate: bool = True) -> None:
        if gate:
            self.add(f"blk.{i}.ffn_gate", self.width, width)
        self.add(f"blk.{i}.ffn_up", self.width, width)
        self.add(f"blk.{i}.ffn_down", width, self.width)

    def experts(
        self,
        i: int,
        count: int,
        width: int,
        shared: int = 0,
        *,
        kind: str | None = None,
        merged: bool = False,
        gate: bool = True,
        bias: bool = False,
        inner: int | None = None,
    ) -> None:
        blk, size = f"blk.{i}.", inner or self.width
        self.add(blk + "ffn_gate_inp", self.width, count, kind="f32")
        if bias:
            self.add(blk + "exp_probs_b.bias", count)
        if merged:
            self.add(blk + "ffn_gate_up_exps", size, 2 * width, count, kind=kind)
        else:
            if gate:
                self.add(blk + "ffn_gate_exps", size, width, count, kind=kind)
            self.add(blk + "ffn_up_exps", size, width, count, kind=kind)
        self.add(blk + "ffn_down_exps", width, size, count, kind=kind)
        if shared:
            if gate:
                self.add(blk + "ffn_gate_shexp", self.width, shared)
            self.add(blk + "ffn_up_shexp", self.width, shared)
            self.add(blk + "ffn_down_shexp", shared, self.width)

    def write(self, path: Path) -> None:
        start, size = header(self.keys, self.tensors)
        with path.open("wb") as file:
            file.write(start)
            file.truncate(len(start) + size)


def dense(
    architecture: str,
    layers: int,
    width: int,
    heads: int,
    kv: int,
    size: int,
    ff: int,
    vocabulary: int,
    context: int,
    *,
    tied: bool = False,
    norms: str = "",
    bias: bool = False,
    post: bool = False,
    pre: bool = True,
    ffn_norm: bool = True,
    fused: bool = False,
    **keys: object,
) -> Maker:
    m = Maker(architecture, layers, width, vocabulary, context, feed_forward_length=ff, **keys)
    m.heads(heads, kv, size)
    m.ends(tied)
    for i in range(layers):
        m.norms(i, *(["attn_norm"] if pre else []), *(["ffn_norm"] if ffn_norm else []))
        m.attention(i, heads, kv, size, norms=norms, bias=bias, fused=fused)
        if post:
            m.norms(i, "post_attention_norm", "post_ffw_norm")
        if fused:
            m.add(f"blk.{i}.ffn_up", width, 2 * ff)
            m.add(f"blk.{i}.ffn_down", ff, width)
        else:
            m.feed_forward(i, ff)
    return m


def sparse(
    architecture: str,
    layers: int,
    width: int,
    heads: int,
    kv: int,
    size: int,
    experts: int,
    used: int,
    ff: int,
    vocabulary: int,
    context: int,
    *,
    shared: int = 0,
    lead: int = 0,
    lead_ff: int = 0,
    norms: str = "",
    bias: bool = False,
    kind: str | None = None,
    merged: bool = False,
    predicted: int = 0,
    expert_bias: bool = False,
    tied: bool = False,
    second_norm: str = "ffn_norm",
    **keys: object,
) -> Maker:
    m = Maker(
        architecture,
        layers + predicted,
        width,
        vocabulary,
        context,
        expert_count=experts,
        expert_used_count=used,
        expert_feed_forward_length=ff,
        feed_forward_length=lead_ff or ff,
        **keys,
    )
    if predicted:
        m.set(nextn_predict_layers=predicted)
    if lead:
        m.set(leading_dense_block_count=lead)
    m.heads(heads, kv, size)
    m.ends(tied)
    for i in range(layers + predicted):
        m.norms(i, "attn_norm", second_norm)
        m.attention(i, heads, kv, size, norms=norms, bias=bias)
        if i < lead:
            m.feed_forward(i, lead_ff)
        else:
            m.experts(i, experts, ff, shared, kind=kind, merged=merged, bias=expert_bias)
        if i >= layers:
            next_token(m, i)
    return m


def next_token(m: Maker, i: int) -> None:
    """What a layer that predicts the token after the next has beside the others."""
    m.add(f"blk.{i}.nextn.eh_proj", 2 * m.width, m.width)
    m.norms(i, "nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm")


def mixtral() -> Maker:
    m = Maker("llama", 32, 4096, 32000, 32768, feed_forward_length=14336, expert_count=8, expert_used_count=2)
    m.heads(32, 8, 128)
    m.ends()
    for i in range(32):
        m.norms(i, "attn_norm", "ffn_norm")
        m.attention(i, 32, 8, 128)
        m.experts(i, 8, 14336)
    return m


def llama4() -> Maker:
    m = Maker(
        "llama4",
        48,
        5120,
        202048,
        10485760,
        feed_forward_length=16384,
        expert_count=16,
        expert_used_count=1,
        expert_feed_forward_length=8192,
        interleave_moe_layer_step=1,
    )
    m.heads(40, 8, 128)
    m.ends()
    for i in range(48):
        m.norms(i, "attn_norm", "ffn_norm")
        m.attention(i, 40, 8, 128)
        m.experts(i, 16, 8192, 8192)
    return m


def qwen2moe() -> Maker:
    m = sparse(
        "qwen2moe",
        24,
        2048,
        16,
        16,
        128,
        60,
        4,
        1408,
        151936,
        32768,
        shared=5632,
        bias=True,
        kind="q8_0",
        expert_shared_feed_forward_length=5632,
    )
    for i in range(24):
        m.add(f"blk.{i}.ffn_gate_inp_shexp", 2048)
    return m


def delta_net(
    architecture: str,
    layers: int,
    width: int,
    heads: int,
    kv: int,
    size: int,
    experts: int,
    used: int,
    ff: int,
    key_heads: int,
    value_heads: int,
    state: int,
    vocabulary: int,
    predicted: int = 0,
) -> Maker:
    inner, keys = value_heads * state, key_heads * state
    m = Maker(architecture, layers + predicted, width, vocabulary, 262144, feed_forward_length=9216)
    if experts:
        m.set(expert_count=experts, expert_used_count=used, expert_feed_forward_length=ff, expert_shared_feed_forward_length=ff)
    m.set(
        **{
            "ssm.conv_kernel": 4,
            "ssm.inner_size": inner,
            "ssm.state_size": state,
            "ssm.time_step_rank": value_heads,
            "ssm.group_count": key_heads,
        }
    )
    m.heads(heads, kv, size)
    m.set(**{"rope.dimension_count": 64})
    if architecture != "qwen3next":
        m.set(**{"rope.dimension_sections": [11, 11, 10, 0]})
    if predicted:
        m.set(nextn_predict_layers=predicted)
    m.ends()
    for i in range(layers + predicted):
        blk = f"blk.{i}."
        m.norms(i, "attn_norm", "post_attention_norm")
        if (i + 1) % 4 == 0 or i >= layers:
            m.attention(i, heads, kv, size, norms="head", gate=True)
        else:
            if architecture == "qwen3next":
                m.add(blk + "ssm_in", width, 2 * keys + 2 * inner)
                m.add(blk + "ssm_ba", width, 2 * value_heads)
            else:
                m.add(blk + "attn_qkv", width, 2 * keys + inner)
                m.add(blk + "attn_gate", width, inner)
                m.add(blk + "ssm_beta", width, value_heads)
                m.add(blk + "ssm_alpha", width, value_heads)
            m.add(blk + "ssm_conv1d", 4, 2 * keys + inner, kind="f32")
            m.add(blk + "ssm_dt.bias", value_heads)
            m.add(blk + "ssm_a", value_heads)
            m.add(blk + "ssm_norm", state)
            m.add(blk + "ssm_out", inner, width)
        if experts:
            m.experts(i, experts, ff, ff)
            m.add(blk + "ffn_gate_inp_shexp", width)
        else:
            m.feed_forward(i, 9216)
        if i >= layers:
            next_token(m, i)
    return m


def gemma3n() -> Maker:
    layers, width, ff, small, altup = 35, 2048, 16384, 256, 4
    m = Maker(
        "gemma3n",
        layers,
        width,
        262144,
        32768,
        feed_forward_length=ff,
        embedding_length_per_layer_input=small,
        **{"altup.num_inputs": altup, "altup.active_idx": 0, "attention.sliding_window": 512},
    )
    m.heads(8, 2, 256)
    m.ends(tied=True)
    m.add("altup_proj", width, width, altup - 1, kind="f16")
    m.add("altup_unembd_proj", width, width, altup - 1, kind="f16")
    m.add("per_layer_token_embd", small * layers, 262144, kind="q8_0")
    m.add("per_layer_model_proj", width, small * layers, kind="f16")
    m.add("per_layer_proj_norm", small)
    for i in range(layers):
        blk = f"blk.{i}."
        m.norms(
            i,
            "attn_norm",
            "post_attention_norm",
            "ffn_norm",
            "post_ffw_norm",
            "post_norm",
            "altup_correct_scale",
            "altup_router_norm",
            "laurel_post_norm",
        )
        m.attention(i, 8, 2, 256, norms="head")
        m.feed_forward(i, ff)
        m.add(blk + "inp_gate", width, small)
        m.add(blk + "proj", small, width)
        m.add(blk + "altup_correct_coef", altup, altup, kind="f32")
        m.add(blk + "altup_predict_coef", altup, altup * altup, kind="f32")
        m.add(blk + "altup_router", width, altup, kind="f32")
        m.add(blk + "laurel_l", width, 64)
        m.add(blk + "laurel_r", 64, width)
    return m


def gemma4(
    layers: int, width: int, heads: int, kv: int, ff: int, *, period: int = 6, shared: int = 0, small: int = 0, experts: int = 0
) -> Maker:
    """Layers with a window have heads of 256, those without of 512; every `period`th has none."""
    pattern = [(i + 1) % period != 0 for i in range(layers)]
    m = Maker("gemma4", layers, width, 262144, 131072, feed_forward_length=ff)
    m.heads(heads, kv, 512)
    m.set(
        **{
            "attention.key_length_swa": 256,
            "attention.value_length_swa": 256,
            "rope.dimension_count_swa": 256,
            "attention.sliding_window": 512 if small else 1024,
            "attention.sliding_window_pattern": pattern,
            "attention.shared_kv_layers": shared,
            "embedding_length_per_layer_input": small,
        }
    )
    if experts:
        m.set(expert_count=experts, expert_used_count=8, expert_feed_forward_length=704)
    m.ends(tied=True)
    if small:
        m.add("per_layer_token_embd", small * layers, 262144, kind="q8_0")
        m.add("per_layer_model_proj", width, small * layers, kind="f16")
        m.add("per_layer_proj_norm", small)
    m.add("rope_freqs", 256)
    for i in range(layers):
        blk, size = f"blk.{i}.", 256 if pattern[i] else 512
        m.norms(i, "attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
        m.attention(i, heads, kv, size, norms="head")
        m.add(blk + "layer_output_scale", 1)
        m.feed_forward(i, ff)
        if experts:
            m.experts(i, experts, 704, merged=True, kind="q8_0")
            m.add(blk + "ffn_gate_inp.scale", width)
            m.norms(i, "pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2")
        if small:
            m.add(blk + "inp_gate", width, small)
            m.add(blk + "proj", small, width)
            m.norms(i, "post_norm")
    return m


def phi(layers: int, width: int, heads: int, kv: int, ff: int, vocabulary: int, tied: bool) -> Maker:
    m = Maker(
        "phi3",
        layers,
        width,
        vocabulary,
        131072,
        feed_forward_length=ff,
        **{"rope.scaling.original_context_length": 4096, "attention.sliding_window": 262144},
    )
    size = width // heads
    m.set(**{"attention.head_count": heads, "attention.head_count_kv": kv, "rope.dimension_count": size})
    m.ends(tied)
    for i in range(layers):
        m.norms(i, "attn_norm", "ffn_norm")
        m.attention(i, heads, kv, size, fused=True)
        m.add(f"blk.{i}.ffn_up", width, 2 * ff)
        m.add(f"blk.{i}.ffn_down", ff, width)
    return m


def cohere2() -> Maker:
    m = dense(
        "cohere2",
        32,
        4096,
        32,
        8,
        128,
        14336,
        256000,
        8192,
        tied=True,
        ffn_norm=False,
        logit_scale=0.25,
        **{"attention.sliding_window": 4096, "attention.layer_norm_epsilon": 1e-5},
    )
    return m


def glm4() -> Maker:
    m = Maker("glm4", 40, 4096, 151552, 32768, feed_forward_length=13696)
    m.heads(32, 2, 128)
    m.ends()
    for i in range(40):
        m.norms(i, "attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm")
        m.attention(i, 32, 2, 128)
        m.add(f"blk.{i}.ffn_up", 4096, 2 * 13696)
        m.add(f"blk.{i}.ffn_down", 13696, 4096)
    return m


def mamba2() -> Maker:
    m = Maker("mamba2", 24, 1024, 50288, 1048576, "q8_0", feed_forward_length=0, **{"attention.head_count": 0})
    state_keys(m, 2048, 128, 1, 32)
    m.ends()
    for i in range(24):
        m.norms(i, "attn_norm")
        mamba2_layer(m, i, 2048, 128, 1, 32)
    return m


def qwen3vl() -> Maker:
    m = dense("qwen3vl", 36, 2560, 32, 8, 128, 9728, 151936, 262144, norms="head")
    m.set(**{"rope.dimension_sections": [24, 20, 20, 0], "n_deepstack_layers": 3})
    return m


def granite() -> Maker:
    m = dense("granite", 40, 2048, 32, 8, 64, 8192, 49152, 131072, tied=True)
    m.set(**{"embedding_scale": 12.0, "logit_scale": 8.0, "residual_scale": 0.22, "attention.scale": 0.0156})
    return m


def exaone4() -> Maker:
    m = dense("exaone4", 64, 5120, 40, 8, 128, 27392, 102400, 131072, norms="head", pre=False, ffn_norm=False, post=True)
    m.set(**{"attention.sliding_window": 4096})
    return m


def command_r() -> Maker:
    m = dense("command-r", 40, 8192, 64, 64, 128, 22528, 256000, 131072, tied=True, ffn_norm=False)
    m.set(**{"logit_scale": 0.0625, "attention.layer_norm_epsilon": 1e-5})
    return m


def minimax_m2() -> Maker:
    m = sparse("minimax-m2", 62, 3072, 48, 8, 128, 256, 8, 1536, 200064, 196608, norms="row", expert_bias=True)
    m.set(expert_gating_func=2)
    return m


def gpt_oss() -> Maker:
    layers, width, heads, kv, size, ff, experts = 24, 2880, 64, 8, 64, 2880, 32
    m = Maker(
        "gpt-oss",
        layers,
        width,
        201088,
        131072,
        "q8_0",
        feed_forward_length=ff,
        expert_count=experts,
        expert_used_count=4,
        expert_feed_forward_length=ff,
        **{"attention.sliding_window": 128},
    )
    m.heads(heads, kv, size)
    m.ends()
    for i in range(layers):
        blk = f"blk.{i}."
        m.norms(i, "attn_norm", "post_attention_norm")
        m.attention(i, heads, kv, size, bias=True, out_bias=True)
        m.add(blk + "attn_sinks", heads)
        m.experts(i, experts, ff, kind="mxfp4")
        m.add(blk + "ffn_gate_inp.bias", experts)
        for part, count in (("gate", ff), ("up", ff), ("down", width)):
            m.add(f"{blk}ffn_{part}_exps.bias", count, experts, kind="f32")
    return m


def latent(
    m: Maker, i: int, heads: int, rank: int, rope: int, nope: int, value: int, query_rank: int = 0, old: bool = False
) -> None:
    """Multi-head latent attention; old: as written before llama.cpp cached the latent alone."""
    blk = f"blk.{i}."
    m.add(blk + "attn_kv_a_norm", rank)
    if query_rank:
        m.add(blk + "attn_q_a_norm", query_rank)
        m.add(blk + "attn_q_a", m.width, query_rank)
        m.add(blk + "attn_q_b", query_rank, heads * (nope + rope))
    else:
        m.add(blk + "attn_q", m.width, heads * (nope + rope))
    m.add(blk + "attn_kv_a_mqa", m.width, rank + rope)
    if old:
        m.add(blk + "attn_kv_b", rank, heads * (nope + value))
    else:
        m.add(blk + "attn_k_b", nope, rank, heads)
        m.add(blk + "attn_v_b", rank, value, heads)
    m.add(blk + "attn_output", heads * value, m.width)


def deepseek2(
    layers: int,
    width: int,
    heads: int,
    experts: int,
    used: int,
    ff: int,
    shared: int,
    lead: int,
    lead_ff: int,
    vocabulary: int,
    *,
    query_rank: int = 0,
    old: bool = False,
    predicted: int = 0,
    groups: int = 0,
) -> Maker:
    rank, rope, nope, value = 512, 64, 128, 128
    m = Maker(
        "deepseek2",
        layers + predicted,
        width,
        vocabulary,
        163840,
        "q8_0",
        feed_forward_length=lead_ff,
        leading_dense_block_count=lead,
        expert_count=experts,
        expert_used_count=used,
        expert_shared_count=shared,
        expert_feed_forward_length=ff,
        expert_weights_scale=2.5,
    )
    m.heads(heads, heads if old else 1, nope + rope if old else rank + rope, value if old else rank)
    m.set(**{"rope.dimension_count": rope, "attention.kv_lora_rank": rank})
    if not old:
        m.set(**{"attention.key_length_mla": nope + rope, "attention.value_length_mla": value})
    if query_rank:
        m.set(**{"attention.q_lora_rank": query_rank})
    if groups:
        m.set(expert_group_count=groups, expert_group_used_count=groups // 2, expert_gating_func=2, expert_weights_norm=True)
    if predicted:
        m.set(nextn_predict_layers=predicted)
    m.ends()
    for i in range(layers + predicted):
        m.norms(i, "attn_norm", "ffn_norm")
        latent(m, i, heads, rank, rope, nope, value, query_rank, old)
        if i < lead:
            m.feed_forward(i, lead_ff)
        else:
            m.experts(i, experts, ff, shared * ff, bias=bool(groups))
        if i >= layers:
            next_token(m, i)
    return m


def kimi_linear() -> Maker:
    layers, width, heads, size, experts, ff = 27, 2304, 32, 128, 256, 1024
    full = [(i + 1) % 4 == 0 or i == layers - 1 for i in range(layers)]
    m = Maker(
        "kimi-linear",
        layers,
        width,
        163840,
        1048576,
        "q8_0",
        feed_forward_length=9216,
        expert_count=experts,
        expert_used_count=8,
        expert_feed_forward_length=ff,
        expert_shared_count=1,
        leading_dense_block_count=1,
        expert_weights_scale=2.446,
        expert_gating_func=2,
    )
    m.heads(heads, [1 if layer else 0 for layer in full], 576, 512)
    m.set(
        **{
            "rope.dimension_count": 64,
            "attention.kv_lora_rank": 512,
            "attention.key_length_mla": 192,
            "attention.value_length_mla": 128,
            "ssm.conv_kernel": 4,
            "kda.head_dim": size,
        }
    )
    m.ends()
    for i in range(layers):
        blk = f"blk.{i}."
        m.norms(i, "attn_norm", "ffn_norm")
        if full[i]:
            latent(m, i, heads, 512, 64, 128, 128)
        else:
            inner = heads * size
            for part in "qkv":
                m.add(f"{blk}ssm_conv1d_{part}", 4, 1, inner, kind="f32")
                m.add(f"{blk}attn_{part}", width, inner)
            for part in "fg":
                m.add(f"{blk}ssm_{part}_a", width, size)
                m.add(f"{blk}ssm_{part}_b", size, inner)
            m.add(blk + "ssm_beta", width, heads)
            m.add(blk + "ssm_a", 1, heads, kind="f32")
            m.add(blk + "ssm_dt.bias", inner)
            m.add(blk + "ssm_norm", size)
            m.add(blk + "attn_output", inner, width)
        if i < 1:
            m.feed_forward(i, 9216)
        else:
            m.experts(i, experts, ff, ff, bias=True)
    return m


def mamba() -> Maker:
    layers, width, state, kernel, rank = 64, 2560, 16, 4, 160
    m = Maker(
        "mamba",
        layers,
        width,
        50280,
        1048576,
        "q8_0",
        feed_forward_length=0,
        **{
            "attention.head_count": 0,
            "ssm.conv_kernel": kernel,
            "ssm.inner_size": 2 * width,
            "ssm.state_size": state,
            "ssm.time_step_rank": rank,
        },
    )
    m.ends(tied=True)
    for i in range(layers):
        m.norms(i, "attn_norm")
        mamba_layer(m, i, 2 * width, state, kernel, rank)
    return m


def mamba_layer(m: Maker, i: int, inner: int, state: int, kernel: int, rank: int) -> None:
    blk = f"blk.{i}."
    m.add(blk + "ssm_in", m.width, 2 * inner)
    m.add(blk + "ssm_conv1d", kernel, inner, kind="f32")
    m.add(blk + "ssm_conv1d.bias", inner)
    m.add(blk + "ssm_x", inner, rank + 2 * state)
    m.add(blk + "ssm_dt", rank, inner)
    m.add(blk + "ssm_dt.bias", inner)
    m.add(blk + "ssm_a", state, inner, kind="f32")
    m.add(blk + "ssm_d", inner)
    m.add(blk + "ssm_out", inner, m.width)


def mamba2_layer(m: Maker, i: int, inner: int, state: int, groups: int, heads: int, norm: bool = True) -> None:
    blk, conv = f"blk.{i}.", inner + 2 * groups * state
    m.add(blk + "ssm_in", m.width, inner + conv + heads)
    m.add(blk + "ssm_conv1d", 4, conv, kind="f32")
    m.add(blk + "ssm_conv1d.bias", conv)
    m.add(blk + "ssm_dt.bias", heads)
    m.add(blk + "ssm_a", 1, heads, kind="f32")
    m.add(blk + "ssm_d", 1, heads, kind="f32")
    if norm:
        m.add(blk + "ssm_norm", inner // groups, groups, kind="f32")
    m.add(blk + "ssm_out", inner, m.width)


def state_keys(m: Maker, inner: int, state: int, groups: int, heads: int) -> None:
    m.set(
        **{
            "ssm.conv_kernel": 4,
            "ssm.inner_size": inner,
            "ssm.state_size": state,
            "ssm.group_count": groups,
            "ssm.time_step_rank": heads,
        }
    )


def rwkv7() -> Maker:
    layers, width, ff = 24, 2048, 8192
    ranks = {"decay": 96, "iclr": 96, "value_residual_mix": 64, "gate": 256}
    m = Maker(
        "rwkv7",
        layers,
        width,
        65536,
        1048576,
        "q8_0",
        feed_forward_length=ff,
        **{"attention.head_count": 0, "wkv.head_size": 64, "attention.layer_norm_epsilon": 1e-5},
    )
    m.set(**{f"attention.{name}_lora_rank": rank for name, rank in ranks.items()})
    m.ends(bias=True)
    m.add("token_embd_norm", width)
    m.add("token_embd_norm.bias", width)
    for i in range(layers):
        blk, value_rank = f"blk.{i}.", ranks["iclr"] if i == 0 else ranks["value_residual_mix"]
        m.norms(i, "attn_norm", "attn_norm.bias", "attn_norm_2", "attn_norm_2.bias", "time_mix_ln", "time_mix_ln.bias")
        for part, rank in (("w", 96), ("a", 96), ("v", value_rank), ("g", 256)):
            if part != "g":
                m.add(f"{blk}time_mix_{part}0", width)
            m.add(f"{blk}time_mix_{part}1", width, rank)
            m.add(f"{blk}time_mix_{part}2", rank, width)
        m.add(blk + "time_mix_lerp_fused", width, 1, 1, 6, kind="f32")
        m.norms(i, "time_mix_k_k", "time_mix_k_a", "time_mix_r_k")
        for part in ("key", "value", "receptance", "output"):
            m.add(f"{blk}time_mix_{part}", width, width)
        m.add(blk + "channel_mix_lerp_k", width, 1, 1, kind="f32")
        m.add(blk + "channel_mix_key", width, ff)
        m.add(blk + "channel_mix_value", ff, width)
    return m


def jamba() -> Maker:
    layers, width, ff, inner, state, rank = 32, 4096, 14336, 8192, 16, 256
    kv = [8 if i % 8 == 4 else 0 for i in range(layers)]
    m = Maker(
        "jamba",
        layers,
        width,
        65536,
        262144,
        feed_forward_length=ff,
        expert_count=16,
        expert_used_count=2,
        **{
            "attention.head_count": 32,
            "attention.head_count_kv": kv,
            "ssm.conv_kernel": 4,
            "ssm.inner_size": inner,
            "ssm.state_size": state,
            "ssm.time_step_rank": rank,
        },
    )
    m.ends()
    for i in range(layers):
        m.norms(i, "attn_norm", "ffn_norm")
        if kv[i]:
            m.attention(i, 32, 8, 128)
        else:
            mamba_layer(m, i, inner, state, 4, rank)
            for part, size in (("dt", rank), ("b", state), ("c", state)):
                m.add(f"blk.{i}.ssm_{part}_norm", size)
        if i % 2:
            m.experts(i, 16, ff)
        else:
            m.feed_forward(i, ff)
    return m


def granite_hybrid() -> Maker:
    layers, width, inner, state, heads, ff = 40, 4096, 8192, 128, 128, 768
    kv = [8 if i in (5, 15, 25, 35) else 0 for i in range(layers)]
    m = Maker(
        "granitehybrid",
        layers,
        width,
        100352,
        131072,
        feed_forward_length=ff,
        expert_count=72,
        expert_used_count=10,
        expert_shared_feed_forward_length=1536,
        **{
            "attention.head_count": 32,
            "attention.head_count_kv": kv,
            "rope.dimension_count": 128,
            "logit_scale": 16.0,
            "residual_scale": 0.22,
            "embedding_scale": 12.0,
            "attention.scale": 0.0078125,
        },
    )
    state_keys(m, inner, state, 1, heads)
    m.ends(tied=True)
    for i in range(layers):
        m.norms(i, "attn_norm", "ffn_norm")
        if kv[i]:
            m.attention(i, 32, 8, 128)
        else:
            mamba2_layer(m, i, inner, state, 1, heads)
        m.experts(i, 72, ff, 1536)
    return m


def nemotron_h() -> Maker:
    """M: mamba2, *: attention, -: feed forward; as in the 8B model."""
    order = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-"
    layers, width, inner, state, groups, heads = len(order), 4096, 8192, 128, 8, 128
    m = Maker(
        "nemotron_h",
        layers,
        width,
        131072,
        8192,
        feed_forward_length=[21504 if kind == "-" else 0 for kind in order],
        **{
            "attention.head_count": [32 if kind == "*" else 0 for kind in order],
            "attention.head_count_kv": [8 if kind == "*" else 0 for kind in order],
            "attention.key_length": 128,
            "attention.value_length": 128,
            "rope.dimension_count": 128,
        },
    )
    m.keys["nemotron_h.attention.head_count"] = 32
    m.set(**{"attention.layer_norm_epsilon": 1e-5})
    state_keys(m, inner, state, groups, heads)
    m.ends()
    for i, kind in enumerate(order):
        m.norms(i, "attn_norm")
        if kind == "M":
            mamba2_layer(m, i, inner, state, groups, heads)
        elif kind == "*":
            m.attention(i, 32, 8, 128)
        else:
            m.feed_forward(i, 21504, gate=False)
    return m


def falcon_h1() -> Maker:
    layers, width, inner, state, groups, heads, ff = 44, 3072, 3072, 256, 1, 24, 12288
    m = Maker("falcon-h1", layers, width, 130048, 262144, feed_forward_length=ff)
    m.heads(12, 2, 128)
    state_keys(m, inner, state, groups, heads)
    m.ends()
    for i in range(layers):
        m.norms(i, "attn_norm", "ffn_norm")
        m.tensors[-1] = (f"blk.{i}.ffn_norm", *m.tensors[-1][1:])
        mamba2_layer(m, i, inner, state, groups, heads, norm=False)
        m.attention(i, 12, 2, 128)
        m.feed_forward(i, ff)
    return m


def lfm2() -> Maker:
    layers, width, heads, ff = 16, 2048, 32, 8192
    kv = [8 if i in (2, 5, 8, 10, 12, 14) else 0 for i in range(layers)]
    m = Maker(
        "lfm2",
        layers,
        width,
        65536,
        128000,
        "q8_0",
        feed_forward_length=ff,
        **{"attention.head_count": heads, "attention.head_count_kv": kv, "shortconv.l_cache": 3},
    )
    m.ends(tied=True, norm="token_embd_norm")
    for i in range(layers):
        m.norms(i, "attn_norm", "ffn_norm")
        m.feed_forward(i, ff)
        if kv[i]:
            m.attention(i, heads, 8, 64, norms="head")
        else:
            m.add(f"blk.{i}.shortconv.conv", 3, width, kind="f32")
            m.add(f"blk.{i}.shortconv.in_proj", width, 3 * width)
            m.add(f"blk.{i}.shortconv.out_proj", width, width)
    return m


def encoder(architecture: str) -> Maker:
    """The bert family: a norm after each part, not before."""
    layers, width, heads, ff, vocabulary, context = (
        (24, 1024, 16, 4096, 30522, 512) if architecture == "bert" else (12, 768, 12, 3072, 30522, 2048)
    )
    m = Maker(
        architecture,
        layers,
        width,
        vocabulary,
        context,
        "f16",
        feed_forward_length=ff,
        pooling_type=1,
        **{"attention.head_count": heads, "attention.layer_norm_epsilon": 1e-12, "attention.causal": False},
    )
    m.keys["tokenizer.ggml.token_type_count"] = 2
    m.add("token_embd", width, vocabulary)
    m.add("token_types", width, 2, kind="f32")
    m.norms(0)
    m.add("token_embd_norm", width)
    m.add("token_embd_norm.bias", width)
    if architecture == "bert":
        m.add("position_embd", width, context, kind="f32")
    for i in range(layers):
        blk = f"blk.{i}."
        if architecture == "bert":
            m.attention(i, heads, heads, 64, bias=True, out_bias=True)
        else:
            m.attention(i, heads, heads, 64, fused=True)
        m.norms(i, "attn_output_norm", "attn_output_norm.bias", "layer_output_norm", "layer_output_norm.bias")
        m.feed_forward(i, ff, gate=architecture != "bert")
        if architecture == "bert":
            m.add(blk + "ffn_up.bias", ff)
            m.add(blk + "ffn_down.bias", width)
    return m


SHAPES: dict[str, Callable[[], Maker]] = {
    "llama-1b-tied": lambda: dense("llama", 16, 2048, 32, 8, 64, 8192, 128256, 131072, tied=True),
    "llama-8b": lambda: dense("llama", 32, 4096, 32, 8, 128, 14336, 128256, 131072),
    "llama-70b": lambda: dense("llama", 80, 8192, 64, 8, 128, 28672, 128256, 131072),
    "llama4-scout": llama4,
    "mistral-7b": lambda: dense("llama", 32, 4096, 32, 8, 128, 14336, 32768, 32768),
    "mixtral-8x7b": mixtral,
    "qwen2-7b": lambda: dense("qwen2", 28, 3584, 28, 4, 128, 18944, 152064, 32768, bias=True),
    "qwen3-8b": lambda: dense("qwen3", 36, 4096, 32, 8, 128, 12288, 151936, 40960, norms="head"),
    "qwen2moe-14b": qwen2moe,
    "qwen3moe-30b": lambda: sparse("qwen3moe", 48, 2048, 32, 4, 128, 128, 8, 768, 151936, 40960, norms="head"),
    "qwen3next-80b": lambda: delta_net("qwen3next", 48, 2048, 16, 2, 256, 512, 10, 512, 16, 32, 128, 151936),
    "qwen35moe-35b": lambda: delta_net("qwen35moe", 40, 2048, 16, 2, 256, 256, 8, 512, 16, 32, 128, 248320),
    "qwen35moe-35b-mtp": lambda: delta_net("qwen35moe", 40, 2048, 16, 2, 256, 256, 8, 512, 16, 32, 128, 248320, predicted=1),
    "qwen3next-80b-mtp": lambda: delta_net("qwen3next", 48, 2048, 16, 2, 256, 512, 10, 512, 16, 32, 128, 151936, predicted=1),
    "qwen35-4b-mtp": lambda: delta_net("qwen35", 32, 2560, 16, 4, 256, 0, 0, 0, 16, 32, 128, 248320, predicted=1),
    "gemma2-9b": lambda: dense(
        "gemma2",
        42,
        3584,
        16,
        8,
        256,
        14336,
        256000,
        8192,
        tied=True,
        post=True,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        **{"attention.sliding_window": 4096},
    ),
    "gemma3-12b": lambda: dense(
        "gemma3",
        48,
        3840,
        16,
        8,
        256,
        15360,
        262144,
        131072,
        tied=True,
        norms="head",
        post=True,
        **{"attention.sliding_window": 1024},
    ),
    "gemma3n-e4b": gemma3n,
    "gemma4-e2b": lambda: gemma4(35, 1536, 8, 1, 6144, period=5, shared=20, small=256),
    "gemma4-e4b": lambda: gemma4(42, 2560, 8, 2, 10240, shared=18, small=256),
    "gemma4-31b": lambda: gemma4(60, 5376, 32, 8, 21504),
    "gemma4-26b-moe": lambda: gemma4(30, 2816, 16, 8, 2112, experts=128),
    "phi3-mini": lambda: phi(32, 3072, 32, 32, 8192, 32064, False),
    "phi4-mini": lambda: phi(32, 3072, 24, 8, 8192, 200064, True),
    "olmo2-7b": lambda: dense(
        "olmo2", 32, 4096, 32, 32, 128, 11008, 100352, 4096, norms="row", pre=False, ffn_norm=False, post=True
    ),
    "olmo3-32b": lambda: dense(
        "olmo2",
        64,
        5120,
        40,
        8,
        128,
        27648,
        100352,
        65536,
        norms="row",
        pre=False,
        ffn_norm=False,
        post=True,
        **{"attention.sliding_window": 4096},
    ),
    "cohere2-7b": cohere2,
    "glm4moe-air": lambda: sparse(
        "glm4moe",
        46,
        4096,
        96,
        8,
        128,
        128,
        8,
        1408,
        151552,
        131072,
        shared=1408,
        lead=1,
        lead_ff=10944,
        bias=True,
        kind="q8_0",
        predicted=1,
        expert_bias=True,
        second_norm="post_attention_norm",
        expert_shared_count=1,
    ),
    "ernie4.5-21b-moe": lambda: sparse(
        "ernie4_5-moe",
        28,
        2560,
        20,
        4,
        128,
        64,
        6,
        1536,
        103424,
        131072,
        shared=3072,
        lead=1,
        lead_ff=12288,
        expert_bias=True,
        expert_shared_count=2,
        expert_shared_feed_forward_length=3072,
        interleave_moe_layer_step=1,
        tied=True,
    ),
    "gpt-oss-20b": gpt_oss,
    "deepseek2-lite": lambda: deepseek2(27, 2048, 16, 64, 6, 1408, 2, 1, 10944, 102400),
    "deepseek2-lite-old": lambda: deepseek2(27, 2048, 16, 64, 6, 1408, 2, 1, 10944, 102400, old=True),
    "deepseek3-671b": lambda: deepseek2(61, 7168, 128, 256, 8, 2048, 1, 3, 18432, 129280, query_rank=1536, groups=8),
    "deepseek3-671b-mtp": lambda: deepseek2(
        61, 7168, 128, 256, 8, 2048, 1, 3, 18432, 129280, query_rank=1536, predicted=1, groups=8
    ),
    "kimi-linear-48b": kimi_linear,
    "mamba-2.8b": mamba,
    "rwkv7-1.5b": rwkv7,
    "jamba-52b": jamba,
    "granite-hybrid-32b": granite_hybrid,
    "nemotron-h-8b": nemotron_h,
    "falcon-h1-3b": falcon_h1,
    "lfm2-1.2b": lfm2,
    "mamba2-370m": mamba2,
    "mistral3-8b": lambda: dense("mistral3", 32, 4096, 32, 8, 128, 14336, 131072, 262144),
    "qwen3vl-4b": qwen3vl,
    "smollm3-3b": lambda: dense("smollm3", 36, 2048, 16, 4, 128, 11008, 128256, 65536, tied=True),
    "gemma-2b": lambda: dense("gemma", 18, 2048, 8, 1, 256, 16384, 256000, 8192, tied=True),
    "granite-2b": granite,
    "glm4-9b": glm4,
    "exaone4-32b": exaone4,
    "command-r-35b": command_r,
    "ernie4.5-dense": lambda: dense("ernie4_5", 28, 2560, 20, 4, 128, 12288, 103424, 131072, tied=True),
    "olmoe-7b": lambda: sparse("olmoe", 16, 2048, 16, 16, 128, 64, 8, 1024, 50304, 4096, norms="row"),
    "minimax-m2": minimax_m2,
    "bert-large": lambda: encoder("bert"),
    "nomic-bert": lambda: encoder("nomic-bert"),
}


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[2:] or SHAPES:
        SHAPES[name]().write(folder / f"{name}.gguf")


if __name__ == "__main__":
    main()
