"""What `watch` knows, for Prometheus: from this laptop, so that nothing has to be installed on the nodes.

Only fresh values are there: what is unknown is absent, never 0. Engines' own series are not repeated; who wants all of them
scrapes the engine.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Any

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from sparkguard.cluster.watch.node_samples import OK, STALE
from sparkguard.core.cluster import READY, UNKNOWN
from sparkguard.errors import OSERR, USAGE, SparkguardError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from prometheus_client.core import Metric

DEFAULT_HOST = "127.0.0.1"

# Name, meaning, labels besides the node's.
_NODE = (
    ("spark_node_cpu_ratio", "Busy share of all cores.", ()),
    ("spark_node_load1", "Load average of one minute.", ()),
    ("spark_node_memory_total_bytes", "Memory, CPU's and GPU's in one.", ()),
    ("spark_node_memory_available_bytes", "Memory that can be had without swapping.", ()),
    ("spark_node_swap_used_bytes", "Swap in use.", ()),
    ("spark_node_pressure_ratio", "Share of the last 10 s in which tasks waited (PSI).", ("resource", "kind")),
    ("spark_node_gpu_utilization_ratio", "Share of time in which a kernel ran.", ("gpu",)),
    ("spark_node_gpu_temperature_celsius", "GPU temperature.", ("gpu",)),
    ("spark_node_gpu_power_watts", "GPU power.", ("gpu",)),
    ("spark_node_gpu_sm_hertz", "Clock of the SMs.", ("gpu",)),
    ("spark_node_temperature_celsius", "Thermal zones.", ("zone",)),
    ("spark_node_network_bytes_per_second", "Traffic of a network interface, RDMA not counted.", ("device", "direction")),
    ("spark_node_roce_bytes_per_second", "RDMA traffic of a device.", ("device", "direction")),
    ("spark_node_roce_errors_per_second", "What went wrong on a device's port.", ("device",)),
    ("spark_node_disk_bytes_per_second", "Traffic of all disks.", ("direction",)),
    ("spark_node_disk_free_bytes", "Room where the Hugging Face cache is.", ()),
)
_MODEL = (
    ("spark_model_requests_running", "Requests that are worked on.", ()),
    ("spark_model_requests_waiting", "Requests that wait.", ()),
    ("spark_model_kv_used_ratio", "Share of the KV cache in use.", ()),
    ("spark_model_prompt_tokens_per_second", "Prompt tokens, cached ones included where the engine counts them.", ()),
    ("spark_model_generation_tokens_per_second", "Generated tokens.", ()),
    ("spark_model_cached_ratio", "Share of prompt tokens from the cache, of the last minute.", ()),
    ("spark_model_acceptance_ratio", "Share of drafted tokens accepted, of the last minute.", ()),
    ("spark_model_latency_seconds", "Percentiles of the last minute.", ("what", "quantile")),
)


def address(text: str) -> tuple[str, int]:
    """HOST:PORT, :PORT or PORT; this machine alone where no host is given."""
    host, _, port = text.rpartition(":")
    host = host.strip("[]") or DEFAULT_HOST
    if not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise SparkguardError(f"{text!r} is no HOST:PORT", "for example --prometheus 127.0.0.1:9410", USAGE)
    return host, int(port)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Exporter:
    """`async with Exporter(host, port, picture) as exporter`; exporter.url is where it answers."""

    def __init__(self, host: str, port: int, picture: Callable[[], Mapping[str, Any]]) -> None:
        self._host, self._port = host, port
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Collector(picture))
        application = web.Application()
        application.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(application, access_log=None)
        self.url = ""

    async def __aenter__(self) -> Exporter:
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise SparkguardError(f"{self._host}:{self._port} cannot be listened on: {error.strerror}", None, OSERR) from None
        port = self._runner.addresses[0][1]
        self.url = f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{port}/metrics"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _metrics(self, request: web.Request) -> web.Response:
        # A page in the browser may be made to ask by a name of its own (DNS rebinding): this machine's is asked as this machine.
        if is_loopback(self._host) and not is_loopback(request.url.host or ""):
            raise web.HTTPMisdirectedRequest
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})


class _Collector:
    def __init__(self, picture: Callable[[], Mapping[str, Any]]) -> None:
        self._picture = picture

    def collect(self) -> Iterator[Metric]:
        tick = self._picture()
        up = GaugeMetricFamily("spark_node_up", "Whether the node's values are fresh.", labels=("node",))
        age = GaugeMetricFamily("spark_node_age_seconds", "Age of the node's last reading.", labels=("node",))
        nodes = {name: GaugeMetricFamily(name, text, labels=("node", *labels)) for name, text, labels in _NODE}
        for node in tick["nodes"]:
            fresh = node["state"] == OK
            up.add_metric((node["node"],), fresh)
            if node["age_s"] is not None:
                age.add_metric((node["node"],), node["age_s"])
            if fresh:
                for name, labels, value in _node(node):
                    if value is not None:
                        nodes[name].add_metric((node["node"], *labels), value)
        ready = GaugeMetricFamily("spark_model_ready", "1 ready, 0 not; absent where nobody can tell.", labels=("model", "nodes"))
        models = {name: GaugeMetricFamily(name, text, labels=("model", "nodes", *labels)) for name, text, labels in _MODEL}
        for allocation in tick["allocations"]:
            who = (allocation["model"], "+".join(allocation["nodes"]))
            if allocation["state"] not in (UNKNOWN, STALE):
                ready.add_metric(who, allocation["state"] == READY)
            engine = allocation["engine"]
            if engine is not None and engine["state"] == OK:
                for name, labels, value in _model(engine):
                    if value is not None:
                        models[name].add_metric((*who, *labels), value)
        yield from (up, age, *nodes.values(), ready, *models.values())


Sample = tuple[str, tuple[str, ...], "float | None"]


def _node(node: Mapping[str, Any]) -> Iterator[Sample]:
    memory = node["memory"]
    yield "spark_node_cpu_ratio", (), _scaled(node["cpu_percent"], 0.01)
    yield "spark_node_load1", (), node["load1"]
    yield "spark_node_memory_total_bytes", (), memory["total_bytes"]
    yield "spark_node_memory_available_bytes", (), memory["available_bytes"]
    yield "spark_node_swap_used_bytes", (), memory["swap_used_bytes"]
    for name, percent in node["psi"].items():
        resource, _, kind = name.removesuffix("10").partition("_")
        yield "spark_node_pressure_ratio", (resource, kind), _scaled(percent, 0.01)
    for index, gpu in enumerate(node["gpus"] or ()):
        yield "spark_node_gpu_utilization_ratio", (str(index),), _scaled(gpu["utilization_percent"], 0.01)
        yield "spark_node_gpu_temperature_celsius", (str(index),), gpu["temperature_c"]
        yield "spark_node_gpu_power_watts", (str(index),), gpu["power_w"]
        yield "spark_node_gpu_sm_hertz", (str(index),), _scaled(gpu["clock_mhz"], 1e6)
    for zone in node["thermal"] or ():
        yield "spark_node_temperature_celsius", (zone["zone"],), zone["celsius"]
    for it in node["network"]:
        yield "spark_node_network_bytes_per_second", (it["name"], "in"), it["rx_bytes_s"]
        yield "spark_node_network_bytes_per_second", (it["name"], "out"), it["tx_bytes_s"]
    for it in node["roce"]:
        yield "spark_node_roce_bytes_per_second", (it["device"], "in"), it["rx_bytes_s"]
        yield "spark_node_roce_bytes_per_second", (it["device"], "out"), it["tx_bytes_s"]
        yield "spark_node_roce_errors_per_second", (it["device"],), it["errors_s"]
    yield "spark_node_disk_bytes_per_second", ("read",), node["disk"]["read_bytes_s"]
    yield "spark_node_disk_bytes_per_second", ("written",), node["disk"]["write_bytes_s"]
    yield "spark_node_disk_free_bytes", (), node["disk"]["free_bytes"]


def _model(engine: Mapping[str, Any]) -> Iterator[Sample]:
    yield "spark_model_requests_running", (), engine["running"]
    yield "spark_model_requests_waiting", (), engine["waiting"]
    yield "spark_model_kv_used_ratio", (), engine["kv_usage"]
    yield "spark_model_prompt_tokens_per_second", (), engine["prompt_tokens_s"]
    yield "spark_model_generation_tokens_per_second", (), engine["generation_tokens_s"]
    yield "spark_model_cached_ratio", (), engine["cached_ratio"]
    yield "spark_model_acceptance_ratio", (), engine["accepted_ratio"]
    for what in ("ttft", "itl", "e2e"):
        for quantile in ("50", "95", "99"):
            yield "spark_model_latency_seconds", (what, f"0.{quantile}"), engine[f"{what}_s"][f"p{quantile}"]


def _scaled(value: float | None, by: float) -> float | None:
    return None if value is None else value * by
