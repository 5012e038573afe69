"""Makes a tiny llama with random weights and its own tokenizer, in the format of the hub: make_tiny_hf.py DIR.

For the interpreter of the vLLM environment. It answers nonsense, in milliseconds; the tests ask whether a server is
there and what it holds, never what it says. The same model each time: the seed is fixed.
"""

from __future__ import annotations

import os
import shutil
import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}assistant:"


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE, trained on this file: every text can be encoded, whatever the merges are."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False)
    with open(__file__, encoding="utf-8") as file:
        bpe.train_from_iterator(file, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def model(vocabulary: int) -> LlamaForCausalLM:
    """Two layers; the sizes are the smallest that vLLM's CPU attention takes (heads of 64)."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def main(out: str) -> None:
    new = f"{out}.{os.getpid()}.new"
    words = tokenizer()
    words.save_pretrained(new)
    model(len(words)).save_pretrained(new)
    for name in os.listdir(new):
        os.chmod(os.path.join(new, name), 0o644)  # weights are written for their owner alone; the tests' user reads them
    shutil.rmtree(out, ignore_errors=True)
    os.rename(new, out)


if __name__ == "__main__":
    main(sys.argv[1])
