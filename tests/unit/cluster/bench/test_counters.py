"""An engine's own counters, by the engine."""

from __future__ import annotations

import pytest

from sparkguard.cluster.bench.counters import Counters, grown, read

VLLM = """
vllm:generation_tokens_total{engine="0",model_name="m"} 100.0
vllm:generation_tokens_total{engine="1",model_name="m"} 20.0
vllm:generation_tokens_total{engine="0",model_name="lora"} 7.0
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 16.0
vllm:request_prefill_time_seconds_sum{engine="0",model_name="m"} 1.5
process_start_time_seconds 1000.5
"""
LLAMA = "llamacpp:tokens_predicted_total 30\nllamacpp:requests_processing 1\nllamacpp:requests_deferred 3\n"
SGLANG = 'sglang:generation_tokens_total{model_name="m"} 9\nsglang:num_queue_reqs{model_name="m"} 1\n'
NIM = 'generation_tokens_total{model_name="m"} 5\nnum_requests_waiting{model_name="m"} 2\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (VLLM, Counters(generated=120.0, running=2.0, cached=16.0, prefill_seconds=1.5, started=1000.5)),
        (LLAMA, Counters(generated=30.0, running=1.0, waiting=3.0)),
        (SGLANG, Counters(generated=9.0, waiting=1.0)),
        (NIM, Counters(generated=5.0, waiting=2.0)),
        ("", Counters()),
    ],
    ids=["vllm", "llama-server", "sglang", "nim", "nothing"],
)
def test_what_an_engine_tells(text: str, expected: Counters) -> None:
    """All of its engines together, no other model's, and None for what it does not say."""
    assert read(text, "m") == expected


def test_a_counter_that_fell_tells_nothing() -> None:
    """The engine began anew in between."""
    assert grown(Counters(generated=5.0), Counters(generated=4.0), "generated") is None
    assert grown(Counters(generated=5.0), Counters(), "generated") is None
    assert grown(None, Counters(generated=5.0), "generated") is None
