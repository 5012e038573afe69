"""Makes tiny GGUF models with random weights that a real llama-server loads, and that answer in printable ASCII.

The rows of the output for every token that is no printable ASCII, and for the end of a text, are zero and the others large:
an answer has exactly the length that was asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

_MERGES = ("t h", "h e", "i n", "e r", "a n", "r e", "o n", "a t", "e n", "n d", *(f"\u0120 {letter}" for letter in "taiswo"))
_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make(
    path: Path,
    *,
    layers: int = 2,
    width: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    hidden: int = 128,
    context: int = 2048,
    experts: int = 0,
    seed: int = 0,
) -> Path:
    """A llama of a quarter of a megabyte by default; with experts, a mixture of them of which two are used."""
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(path.stem)
    writer.add_context_length(context)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_feed_forward_length(hidden)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(width // heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(1)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(2)
    words = _add_vocabulary(writer)

    def matrix(name: str, *shape: int) -> None:
        data = random.standard_normal(shape, dtype=np.float32) * shape[-1] ** -0.5
        writer.add_tensor(f"{name}.weight", data.astype(np.float16))

    def ones(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(width, np.float32))

    matrix("token_embd", words, width)
    output = random.standard_normal((words, width), dtype=np.float32) * (12 * width**-0.5)
    output[[word for word in range(words) if not (32 <= word < 127 or 256 <= word < 256 + len(_MERGES))]] = 0
    writer.add_tensor("output.weight", output.astype(np.float16))
    ones("output_norm")
    head = width // heads
    for layer in range(layers):
        block = f"blk.{layer}."
        ones(f"{block}attn_norm")
        ones(f"{block}ffn_norm")
        matrix(f"{block}attn_q", width, width)
        matrix(f"{block}attn_k", kv_heads * head, width)
        matrix(f"{block}attn_v", kv_heads * head, width)
        matrix(f"{block}attn_output", width, width)
        if experts:
            gate = random.standard_normal((experts, width), dtype=np.float32)
            writer.add_tensor(f"{block}ffn_gate_inp.weight", gate)
            for name, shape in (("gate", (hidden, width)), ("up", (hidden, width)), ("down", (width, hidden))):
                matrix(f"{block}ffn_{name}_exps", experts, *shape)
        else:
            matrix(f"{block}ffn_gate", hidden, width)
            matrix(f"{block}ffn_up", hidden, width)
            matrix(f"{block}ffn_down", width, hidden)
    _close(writer)
    return path


def make_adapter(path: Path, *, layers: int = 2, width: int = 64, rank: int = 4) -> Path:
    """A LoRA for make()'s model of the same layers and width, on the queries."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 1.0)
    for layer in range(layers):
        name = f"blk.{layer}.attn_q.weight"
        writer.add_tensor(f"{name}.lora_a", np.zeros((rank, width), np.float32))
        writer.add_tensor(f"{name}.lora_b", np.zeros((width, rank), np.float32))
    _close(writer)
    return path


def make_ranker(path: Path, *, layers: int = 2, width: int = 64, heads: int = 4, hidden: int = 128, seed: int = 0) -> Path:
    """A bert that gives one number for a question and a text: how well they fit. Its words are the letters."""
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_name(path.stem)
    writer.add_context_length(512)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_head_count(heads)
    writer.add_feed_forward_length(hidden)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.RANK)
    writer.add_file_type(0)
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    # A word's first letter carries the mark, its others go without.
    words = [*specials, *(f"\u2581{chr(code)}" for code in range(33, 127)), *(chr(code) for code in range(33, 127))]
    writer.add_tokenizer_model("bert")
    writer.add_token_list(words)
    writer.add_token_types([3] * len(specials) + [1] * (len(words) - len(specials)))
    writer.add_token_type_count(2)
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_sep_token_id(3)
    writer.add_eos_token_id(3)
    writer.add_mask_token_id(4)
    writer.add_vocab_size(len(words))

    def layer(name: str, *shape: int) -> None:
        weights = random.standard_normal(shape, dtype=np.float32) * shape[-1] ** -0.5
        writer.add_tensor(f"{name}.weight", weights)
        writer.add_tensor(f"{name}.bias", np.zeros(shape[0], np.float32))

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(width, np.float32))
        writer.add_tensor(f"{name}.bias", np.zeros(width, np.float32))

    for name, rows in (("token_embd", len(words)), ("position_embd", 512), ("token_types", 2)):
        writer.add_tensor(f"{name}.weight", random.standard_normal((rows, width), dtype=np.float32))
    norm("token_embd_norm")
    for number in range(layers):
        block = f"blk.{number}."
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            layer(block + name, width, width)
        norm(f"{block}attn_output_norm")
        layer(f"{block}ffn_up", hidden, width)
        layer(f"{block}ffn_down", width, hidden)
        norm(f"{block}layer_output_norm")
    layer("cls", width, width)
    layer("cls.output", 1, width)
    _close(writer)
    return path


def _add_vocabulary(writer: Any) -> int:
    """GPT-2's 256 bytes as it writes them, a few merges, three specials, and as many unused as make a multiple of 32."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {byte: chr(byte) for byte in plain} | {byte: chr(256 + at) for at, byte in enumerate(others)}
    words = [letters[byte] for byte in range(256)] + [merge.replace(" ", "") for merge in _MERGES]
    kinds = [1] * len(words) + [3] * len(_SPECIALS)
    first = len(words)
    words += _SPECIALS
    while len(words) % 32:
        words.append(f"<unused{len(words)}>")
        kinds.append(5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types(kinds)
    writer.add_token_merges(list(_MERGES))
    writer.add_bos_token_id(first)
    writer.add_pad_token_id(first)
    writer.add_eos_token_id(first + 2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(_TEMPLATE)
    writer.add_vocab_size(len(words))
    return len(words)


def _close(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
