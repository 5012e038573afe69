"""What Prometheus reads: the supervisor's counters as they are when it asks, and the times that the front measures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

    from sparkguard.supervisor.protocol import Supervisor

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
# From a tiny model's answer to a long generation on a CPU, queue and load included.
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_COUNTERS = (
    ("requests", "spark_requests", "Requests that ended, well or not."),
    ("failed", "spark_requests_failed", "Requests that ended badly."),
    ("prompt_tokens", "spark_prompt_tokens", "Prompt tokens, cached ones included."),
    ("generated_tokens", "spark_generated_tokens", "Tokens generated."),
    ("loads", "spark_loads", "Times the model was loaded."),
    ("crashes", "spark_crashes", "Times its runner crashed, hung or ran out of memory."),
    ("seconds", "spark_busy_seconds", "Seconds in which requests held a runner."),
)


class Metrics:
    """A registry of its own: a second server in one process, as in the tests, counts for itself."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        self.answers = Counter(
            "spark_http_responses", "Answers of the model APIs, by status.", ("model", "status"), registry=self.registry
        )
        self.seconds = Histogram(
            "spark_request_seconds",
            "From a request's arrival to its answer's end, queue and load included.",
            ("model",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.first_byte = Histogram(
            "spark_first_byte_seconds",
            "From a request's arrival to its answer's first byte.",
            ("model",),
            buckets=_SECONDS,
            registry=self.registry,
        )

    def collect(self) -> Iterator[Metric]:
        """Called by the registry at each scrape."""
        counts = self._supervisor.counters()
        for key, name, meaning in _COUNTERS:
            family = CounterMetricFamily(name, meaning, labels=("model",))
            for count in counts:
                family.add_metric((count["model"],), count[key])
            yield family
        queue = GaugeMetricFamily("spark_queue", "Requests that wait for a runner.", labels=("model",))
        for count in counts:
            queue.add_metric((count["model"],), count["queue"])
        yield queue
        memory = GaugeMetricFamily("spark_runner_memory_bytes", "Memory that a runner holds.", labels=("model", "device"))
        for runner in self._supervisor.runners():
            if runner.get("memory_bytes") is not None:
                memory.add_metric((runner["model"], runner.get("device") or ""), runner["memory_bytes"])
        yield memory

    def text(self) -> bytes:
        return generate_latest(self.registry)
