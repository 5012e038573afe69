"""One record from every engine's own words: recorded scrapes of vLLM and llama-server, and the names of the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparkguard.cluster.watch.engine_metrics import EngineMetrics, read
from sparkguard.core.rates import between, mean, quantile

DATA = Path(__file__).parents[3] / "data" / "metrics"


def scrape(name: str, engine: str = "vllm", served: str = "tiny", at: float = 0.0) -> EngineMetrics:
    return read(engine, (DATA / f"{name}.txt").read_text(encoding="utf-8"), served, at)


def totals(metrics: EngineMetrics) -> dict[str, float]:
    return {name: sum(series.values()) for name, series in metrics.reading.counters.items()}


def test_a_real_vllm_after_three_requests() -> None:
    """The counts are those of the requests: 3 times 176 prompt tokens, of which 256 were cached, and 24 generated ones."""
    metrics = scrape("vllm-0.32-after-3")
    assert (metrics.running, metrics.waiting, metrics.kv_used) == (0, 0, 0)
    assert totals(metrics) == {
        "prompt_tokens": 528,
        "generation_tokens": 72,
        "cached_tokens": 256,
        "prefix_queries": 528,
        "prefix_hits": 256,
        "finished": 3,
        "preemptions": 0,
    }
    assert {reason: number for reason, number in metrics.finished.items() if number} == {"length": 3}
    assert metrics.reading.histograms["ttft"].count == 3
    assert metrics.reading.histograms["itl"].count == 69
    assert set(metrics.reading.histograms) == {"ttft", "itl", "e2e", "queue", "prefill"}


def test_a_real_vllm_between_two_scrapes() -> None:
    """From idle to three requests within two seconds: rates, means and percentiles of those alone."""
    before, now = scrape("vllm-0.32-idle").reading, scrape("vllm-0.32-after-3", at=2.0).reading
    made = between(before, now, 2.0)
    assert (made.reason, made.rates["generation_tokens"], made.rates["prompt_tokens"]) == (None, 36, 264)
    assert mean(before.histograms["ttft"], now.histograms["ttft"]) == pytest.approx(0.02506685 / 3, rel=1e-3)
    median = quantile(0.5, before.histograms["ttft"], now.histograms["ttft"])
    assert median is not None
    assert 0.001 <= median <= 0.02


def test_a_vllm_that_began_anew_is_another_process() -> None:
    """Its start time differs, so nothing is computed across it."""
    assert between(scrape("vllm-0.32-after-3").reading, scrape("vllm-0.32-running", at=2.0).reading, 2.0).reason is None
    text = (DATA / "vllm-0.32-after-3.txt").read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.startswith("process_start_time_seconds "))
    other = read("vllm", text.replace(line, "process_start_time_seconds 1.9e9"), "tiny", 2.0)
    assert between(scrape("vllm-0.32-after-3").reading, other.reading, 2.0).reason == "changed"


def test_a_real_vllm_while_it_generates() -> None:
    """One request runs, and the cache is used by a share of 1."""
    metrics = scrape("vllm-0.32-running")
    assert metrics.running == 1
    assert metrics.kv_used is not None
    assert 0 < metrics.kv_used < 0.001


def test_another_models_series_are_left_out() -> None:
    """Where all series bear another model's name nothing is known, and whose they are is said."""
    metrics = scrape("vllm-0.32-after-3", served="other")
    assert (metrics.running, totals(metrics), metrics.foreign) == (None, {}, ("tiny",))
    assert scrape("vllm-0.32-after-3", served="").running == 0


def test_engines_are_added_up() -> None:
    """Requests and tokens are sums, the cache's use is that of the fullest; series of another model do not count."""
    text = "".join(
        f'vllm:num_requests_running{{engine="{engine}",model_name="{model}"}} {running}\n'
        f'vllm:kv_cache_usage_perc{{engine="{engine}",model_name="{model}"}} {used}\n'
        f'vllm:generation_tokens_total{{engine="{engine}",model_name="{model}"}} {tokens}\n'
        for engine, model, running, used, tokens in ((0, "m", 2, 0.25, 10), (1, "m", 3, 0.75, 20), (0, "x", 9, 0.99, 99))
    )
    metrics = read("vllm", text, "m", 0.0)
    assert (metrics.running, metrics.kv_used, totals(metrics), metrics.foreign) == (5, 0.75, {"generation_tokens": 30}, ("x",))


def test_names_of_older_vllms() -> None:
    """gpu_cache_usage_perc, gpu_prefix_cache_* and time_per_output_token_seconds, until 0.15 at the latest."""
    text = (
        "vllm:gpu_cache_usage_perc 0.5\nvllm:gpu_prefix_cache_queries_total 8\nvllm:gpu_prefix_cache_hits_total 4\n"
        'vllm:time_per_output_token_seconds_bucket{le="0.1"} 2\nvllm:time_per_output_token_seconds_bucket{le="+Inf"} 2\n'
        "vllm:time_per_output_token_seconds_sum 0.1\nvllm:time_per_output_token_seconds_count 2\n"
    )
    metrics = read("vllm", text, "m", 0.0)
    assert (metrics.kv_used, totals(metrics)) == (0.5, {"prefix_queries": 8, "prefix_hits": 4})
    assert metrics.reading.histograms["itl"].buckets == ((0.1, 2),)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama-b11434", {"prompt_tokens": 38, "cached_tokens": 18, "generation_tokens": 32, "drafts": 0}),
        ("llama-b10068", {"prompt_tokens": 20, "generation_tokens": 32}),
    ],
)
def test_a_real_llama_server(name: str, expected: dict[str, float]) -> None:
    """All prompt tokens where it counts the cached ones, else the computed ones; its cache's use is unknown."""
    metrics = scrape(name, "llamacpp", "whatever")
    found = totals(metrics)
    assert {key: found.get(key) for key in expected} == expected
    assert "cached_tokens" in expected or "cached_tokens" not in found
    assert (metrics.running, metrics.waiting, metrics.kv_used, metrics.finished) == (0, 0, None, {})


def test_sglang() -> None:
    """Shards of one engine count the same requests: rank 0 is taken."""
    text = "".join(
        f'sglang:num_running_reqs{{model_name="m",tp_rank="{rank}"}} 3\n'
        f'sglang:token_usage{{model_name="m",tp_rank="{rank}"}} 0.2\n'
        for rank in (0, 1)
    )
    text += 'sglang:prompt_tokens_total{model_name="m"} 7\nsglang:cached_tokens_total{cache_source="device",model_name="m"} 2\n'
    text += 'sglang:num_queue_reqs{model_name="m",tp_rank="0"} 1\nsglang:gen_throughput{model_name="m"} 55\n'
    metrics = read("sglang", text, "m", 0.0)
    assert (metrics.running, metrics.waiting, metrics.kv_used, metrics.foreign) == (3, 1, 0.2, ())
    assert totals(metrics) == {"prompt_tokens": 7, "cached_tokens": 2}


@pytest.mark.parametrize("prefix", ["", "vllm:"])
def test_a_nim(prefix: str) -> None:
    """With names of its own, or vLLM's."""
    text = (
        f'{prefix}num_requests_running{{model_name="m"}} 1\n{prefix}gpu_cache_usage_perc{{model_name="m"}} 0.1\n'
        f'{prefix}generation_tokens_total{{model_name="m"}} 5\n'
        f'{prefix}request_success_total{{finished_reason="stop",model_name="m"}} 2\n'
    )
    metrics = read("nim", text, "m", 0.0)
    assert (metrics.running, metrics.kv_used, metrics.finished) == (1, 0.1, {"stop": 2})
    assert totals(metrics) == {"generation_tokens": 5, "finished": 2}


def test_ds4() -> None:
    """Prefilled tokens of all kinds are its prompt tokens; its 60 s gauges are not read."""
    text = 'ds4_tokens_decoded_total 9\nds4_tokens_prefilled_total{kind="a"} 2\nds4_tokens_prefilled_total{kind="b"} 3\n'
    metrics = read("ds4", text + "ds4_requests_inflight 1\nds4_spec_accept_ratio 0.5\n", "m", 0.0)
    assert (metrics.running, metrics.acceptance, totals(metrics)) == (1, None, {"prompt_tokens": 5, "generation_tokens": 9})


def test_tensorfold() -> None:
    """It tells its counts in the JSON of /health; what is no number is unknown."""
    body = json.dumps(
        {"requests_running": 2, "prompt_tokens_total": 10, "completion_tokens_total": 4.0, "requests_waiting": None}
    )
    metrics = read("tensorfold", body, "m", 0.0)
    assert (metrics.running, metrics.waiting, totals(metrics)) == (2, None, {"prompt_tokens": 10, "generation_tokens": 4})


@pytest.mark.parametrize("engine", ["vllm", "nim", "sglang", "llamacpp", "ds4", "tensorfold"])
@pytest.mark.parametrize(
    "body", ["", "<html>", "[]", "null", "{", "\x00", '{"requests_running": true}', '{"requests_running": NaN}']
)
def test_a_body_of_another_kind_says_nothing(engine: str, body: str) -> None:
    """Everything is unknown then, not 0."""
    metrics = read(engine, body, "m", 0.0)
    assert (metrics.running, metrics.waiting, metrics.kv_used, totals(metrics)) == (None, None, None, {})
