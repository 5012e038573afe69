"""What Prometheus is told: only what is fresh, in base units, on this machine alone unless asked otherwise."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from spark_tree import Tree

from sparkguard.cluster import http
from sparkguard.cluster.node.host import Host
from sparkguard.cluster.watch.exporter import Exporter, address, is_loopback
from sparkguard.cluster.watch.node_samples import NodeSamples
from sparkguard.errors import SparkguardError


def picture(folder: Path) -> dict[str, Any]:
    """Two nodes, one of them never reached, and a model."""
    clock = [100.0]
    tree = Tree(folder)
    host = Host(str(tree.proc), str(tree.sys))
    head, worker = (NodeSamples(name, 2.0, lambda: clock[0]) for name in ("head", "worker"))
    head.line({"hello": host.about()})
    gpu = {"utilization_percent": 37.0, "celsius": 61.0, "watts": 45.0, "sm_mhz": 2405.0, "reasons": None}
    for second in (0.0, 2.0):
        clock[0] += 2.0
        tree.count(second)
        head.line({"tick": {**host.quick(), "gpus": [gpu], "gpu_error": None, "steady_s": clock[0]}, "slow": host.slow([])})
    worker.lost("refused", "refused", 1.0)
    latency = {"mean": 0.1, "p50": 0.1, "p95": 0.2, "p99": None, "n": 3}
    engine = {
        "state": "ok", "running": 2, "waiting": 0, "kv_usage": 0.25,
        "prompt_tokens_s": None, "generation_tokens_s": 33.0,
        "cached_ratio": None, "accepted_ratio": 0.8, "ttft_s": latency, "itl_s": latency, "e2e_s": latency,
    }  # fmt: skip
    allocation = {"model": "m", "nodes": ["head", "worker"], "state": "unknown", "engine": engine}
    return {"nodes": [head.view(), worker.view()], "allocations": [allocation]}


Samples = list[tuple[str, dict[str, str], float]]


def value(found: Samples, name: str, **labels: str) -> float | None:
    return next((value for its, theirs, value in found if (its, theirs) == (name, labels)), None)


def scraped(tick: dict[str, Any], **headers: str) -> tuple[int, Samples]:
    async def main() -> http.Answer:
        async with Exporter("127.0.0.1", 0, lambda: tick) as exporter:
            return await http.ask(exporter.url, seconds=10, headers=headers)

    answer = asyncio.run(main())
    families = text_string_to_metric_families(answer.body.decode()) if answer.status == 200 else ()
    samples = [sample for family in families for sample in family.samples]
    return answer.status, [(sample.name, dict(sample.labels), sample.value) for sample in samples]


def test_fresh_values_in_base_units(tmp_path: Path) -> None:
    """Ratios, bytes, seconds and hertz, as Prometheus's own rules want them."""
    status, found = scraped(picture(tmp_path))
    assert status == 200
    assert value(found, "spark_node_up", node="head") == 1
    assert value(found, "spark_node_gpu_utilization_ratio", node="head", gpu="0") == pytest.approx(0.37)
    assert value(found, "spark_node_gpu_sm_hertz", node="head", gpu="0") == 2405e6
    roce = {"node": "head", "device": "rocep1s0f1"}
    assert value(found, "spark_node_roce_bytes_per_second", direction="in", **roce) == pytest.approx(10e9)
    assert value(found, "spark_node_memory_total_bytes", node="head") == 127600748 * 1024
    model = {"model": "m", "nodes": "head+worker"}
    assert value(found, "spark_model_generation_tokens_per_second", **model) == 33
    assert value(found, "spark_model_latency_seconds", what="ttft", quantile="0.95", **model) == 0.2


def test_what_is_unknown_is_absent(tmp_path: Path) -> None:
    """A node that was not reached is down and has no values; a null is no sample; a health that nobody knows is no 0."""
    _, found = scraped(picture(tmp_path))
    assert value(found, "spark_node_up", node="worker") == 0
    assert {name for name, labels, _ in found if labels.get("node") == "worker"} == {"spark_node_up"}
    names = {name for name, _, _ in found}
    assert not {"spark_model_ready", "spark_model_prompt_tokens_per_second", "spark_model_cached_ratio"} & names
    assert "0.99" not in {labels.get("quantile") for _, labels, _ in found}


def test_a_page_that_rebinds_a_name_is_not_answered(tmp_path: Path) -> None:
    """On loopback, a request for another machine's name comes from a browser that was lied to."""
    tick = picture(tmp_path)
    assert scraped(tick, Host="attacker.example:9410")[0] == 421
    assert scraped(tick, Host="localhost:9410")[0] == 200


def test_addresses() -> None:
    """A port alone is this machine's."""
    assert [address(text) for text in ("9410", ":9410", "0.0.0.0:1", "[::1]:9410")] == [
        ("127.0.0.1", 9410),
        ("127.0.0.1", 9410),
        ("0.0.0.0", 1),
        ("::1", 9410),
    ]
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "x")] == [True, True, True, False, False]
    for text in ("", "x", "1:2:x", "70000"):
        with pytest.raises(SparkguardError):
            address(text)


def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    """With the address, and without a traceback."""

    async def main() -> None:
        async with Exporter("127.0.0.1", 0, dict) as first:
            port = int(first.url.rsplit(":", 1)[1].split("/")[0])
            with pytest.raises(SparkguardError, match=f"127.0.0.1:{port} cannot be listened on"):
                async with Exporter("127.0.0.1", port, dict):
                    pass

    asyncio.run(main())
