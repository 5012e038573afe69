"""The dashboard over a spark-serve that a test scripts, and the states that it is shown in."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from sparkguard.cluster.bench.compare import compare
from sparkguard.cluster.bench.report import Request, level, summary
from sparkguard.cluster.bench.request import Settings
from sparkguard.cluster.bench.run import Target, blank
from sparkguard.cluster.ui.server import Dashboard
from sparkguard.core.measure import Measured

GB = 1 << 30
HEAD, WORKER = {"node": "head", "host": "spark-head"}, {"node": "worker", "host": "spark-worker"}


class Script:
    """What the scripted spark-serve will say."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write("list", catalog())
        self.write("status", status())
        self.write("bench-list", {"schema_version": 1, "runs": []})
        (folder / "watch.jsonl").write_text("")
        (folder / "watch.hold").touch()

    def write(self, verb: str, *objects: dict[str, Any]) -> None:
        (self.folder / f"{verb}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in objects))

    def add(self, verb: str, *objects: dict[str, Any]) -> None:
        with (self.folder / f"{verb}.jsonl").open("a") as file:
            file.write("".join(json.dumps(one) + "\n" for one in objects))

    def hold(self, verb: str, kind: str = "hold") -> None:
        (self.folder / f"{verb}.{kind}").touch()

    def release(self, verb: str, kind: str = "hold") -> None:
        (self.folder / f"{verb}.{kind}").unlink(missing_ok=True)

    def fail(self, verb: str, text: str) -> None:
        (self.folder / f"{verb}.error").write_text(text)

    def calls(self, verb: str | None = None) -> list[dict[str, Any]]:
        path = self.folder / "calls.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [call for line in lines if verb in (None, (call := json.loads(line))["argv"][0])]


class Served:
    """A dashboard that runs in a thread."""

    def __init__(self, folder: Path) -> None:
        os.environ["FAKE_SPARK_SERVE"] = str(folder)
        self.script = Script(folder)
        program = (sys.executable, str(Path(__file__).with_name("fake_spark_serve.py")))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.dashboard = Dashboard(program, "127.0.0.1", 0)
        self.entry = self._run(self.dashboard.start())
        self.origin, _, self.token = self.entry.partition("/enter?token=")

    def close(self) -> None:
        for path in self.script.folder.glob("*.hold"):
            path.unlink()
        self._run(self.dashboard.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def wait_for(self, condition: Callable[[], bool], seconds: float = 30.0) -> None:
        """Looks until it holds: the end of another's process has no event to wait for."""
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, "it did not come to pass"
            time.sleep(0.02)

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)


def model(id: str, label: str, **more: Any) -> dict[str, Any]:
    return {
        "id": id,
        "aliases": [],
        "label": label,
        "sparks": 1,
        "mode": "single",
        "context": 131072,
        "wrapper": "vllm",
        "served": id,
        "recipe": "",
        "notes": "",
        "vision": False,
        "client": "spark",
        **more,
    }


def catalog() -> dict[str, Any]:
    models = [
        model("ds4", "DeepSeek-V4-Flash", sparks=2, mode="distributed", context=1048576, notes="fp8 KV cache, two drafts."),
        model("glm53", "GLM-5.3-Flash NVFP4", sparks=2, mode="distributed", vision=True),
        model("qwen", "Qwen3.8-Flash-Next"),
        model("yue", "YuE song workers", sparks=2, mode="yue", context=None, wrapper="yue"),
    ]
    nodes = [{**HEAD, "lan_url": "http://192.168.1.10:8000"}, {**WORKER, "lan_url": "http://192.168.1.11:8000"}]
    return {"schema_version": 1, "catalog": "models.toml", "nodes": nodes, "models": models}


def node_status(spark: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        **spark,
        "state": "gone",
        "phase": "stopped",
        "mode": None,
        "model": None,
        "served": None,
        "url": None,
        "can_use": False,
        "generation": None,
        "error": None,
        "age_s": 0.1,
        **more,
    }


def status(*nodes: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "nodes": list(nodes) or [node_status(HEAD), node_status(WORKER)],
        "active_node": None,
        "mode": None,
        "phase": "stopped",
        "transition_error": None,
        "yue_workers": [],
        "ready_workers": 0,
        **more,
    }


def serving(model: str = "ds4", phase: str = "ready") -> dict[str, Any]:
    both = {
        "state": "running",
        "phase": phase,
        "mode": "distributed",
        "model": model,
        "served": "deepseek-v4-flash",
        "can_use": phase == "ready",
        "url": "http://192.168.1.10:8000",
        "generation": "g1",
    }
    return status(node_status(HEAD, **both), node_status(WORKER, **both), mode="distributed", phase=phase, active_node="head")


def figures(value: float) -> dict[str, Any]:
    return {"mean": value, "p50": value, "p95": value * 2, "p99": value * 3, "n": 40}


def node_sample(spark: dict[str, Any], step: int = 0, **more: Any) -> dict[str, Any]:
    return {
        **spark,
        "state": "ok",
        "age_s": 0.2,
        "error": None,
        "boot_id": "b",
        "reset": False,
        "cpu_percent": 20.0 + 3 * (step % 7),
        "cores": 20,
        "load1": 3.2,
        "memory": {"total_bytes": 128 * GB, "available_bytes": 30 * GB, "used_bytes": 98 * GB, "swap_used_bytes": 0},
        "psi": {"cpu_some10": 1.2, "memory_some10": 0.4, "memory_full10": 0.1, "io_some10": 0.3, "io_full10": 0.2},
        "gpu": {
            "name": "NVIDIA GB10",
            "utilization_percent": 70 + 4 * (step % 5),
            "temperature_c": 66,
            "power_w": 58.5,
            "clock_mhz": 2411,
            "throttle": [],
        },
        "network": [{"name": "enP7s7", "state": "up", "speed_mbps": 10000, "rx_bytes_s": 42000.0, "tx_bytes_s": 913000.0}],
        "roce": [
            {
                "device": "rocep1s0f1",
                "port": 1,
                "state": "ACTIVE",
                "netdev": "enp1s0f1np1",
                "rx_bytes_s": 2.4e9,
                "tx_bytes_s": 2.3e9,
                "errors_s": 0.0,
            }
        ],
        "disk": {"read_bytes_s": 0.0, "write_bytes_s": 81000.0, "free_bytes": 900 * GB},
        **more,
    }


def allocation(step: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "model": "ds4",
        "label": "DeepSeek-V4-Flash",
        "mode": "distributed",
        "nodes": ["head", "worker"],
        "url": "http://192.168.1.10:8000",
        "state": "ready",
        "age_s": 0.3,
        "error": None,
        "ranks": [
            {"node": "head", "rank": 0, "state": "running", "container": "a" * 64},
            {"node": "worker", "rank": 1, "state": "running", "container": "b" * 64},
        ],
        "engine": {
            "running": 2,
            "waiting": 0,
            "kv_usage": 0.31,
            "prompt_tokens_s": 812.5,
            "generation_tokens_s": 43.0 + step % 4,
            "requests_s": 0.2,
            "ttft_s": figures(0.38),
            "itl_s": figures(0.021),
            "e2e_s": figures(6.4),
            "cached_ratio": 0.44,
            "accepted_ratio": 0.71,
            "reset": False,
        },
        "canary": {"ok": True, "age_s": 12.0, "seconds": 0.21, "error": None},
        **more,
    }


def sample(step: int = 0, **more: Any) -> dict[str, Any]:
    at = datetime.fromtimestamp(time.time() - max(0, 90 - 2 * step), timezone.utc).isoformat()
    return {
        "schema_version": 1,
        "type": "sample",
        "at": at,
        "interval_s": 2.0,
        "gap": False,
        "nodes": [node_sample(HEAD, step), node_sample(WORKER, step + 2)],
        "allocations": [allocation(step)],
        "yue": [],
        **more,
    }


def run(id: str, kind: str = "decode", **more: Any) -> dict[str, Any]:
    """A row of `bench list --json`."""
    summary = {"decode_tokens_per_s": 44.1, "ttft_s": 0.36, "ttfo_s": 0.4, "prefill_tokens_per_s": 1850.0}
    counts = {"n": 60, "ok": 60, "incomplete": 0, "failed": 0, "cancelled": 0}
    return {
        "id": bench_id(id, kind),
        "at": "2026-11-28T21:10:00.000Z",
        "kind": kind,
        "model": "deepseek-v4-flash",
        "nodes": ["head", "worker"],
        "url": "http://192.168.1.10:8000",
        "status": "completed",
        "reason": None,
        "summary": {"kind": kind, **summary, "best_generated_tokens_per_s": 131.0, "levels": 3, **counts},
        **more,
    }


def bench_id(id: str, kind: str = "decode") -> str:
    return f"20261128T211000{int(id[1:]):03}Z-{kind}-abcdef"


def whole_run(id: str) -> dict[str, Any]:
    """What `bench show --json` prints: three levels of twenty requests, as the benchmark itself makes a record of them."""
    target = Target("http://192.168.1.10:8000", "deepseek-v4-flash", "ds4", ("head", "worker"), "d1", "sha256:1")
    settings = Settings(requests=20, concurrency=(1, 2, 4), max_tokens=256, prompt_tokens=(512,), reasoning="off")
    made = blank(bench_id(id), target, settings)
    levels = []
    for streams in settings.concurrency:
        each = 44.1 / streams**0.3
        requests = []
        for number in range(20):
            rate = each * (0.9 + number / 95)
            one = Measured("ok", ttft=0.36, ttfo=0.4, seconds=6.2, decode_rate=rate, prefill_rate=1850.0, gaps=(0.021, 0.022))
            one = one.replace(prompt=512, completion=256, chunks=256)
            requests.append(Request(number, 1, 6.2 * (number // streams), 0.0, "", one))
        levels.append(level(512, streams, requests))
    record = {
        **made,
        "at": "2026-11-28T21:10:00.000Z",
        "status": "completed",
        "levels": levels,
        "summary": summary("decode", levels),
    }
    return {"schema_version": 1, "type": "shown", "run": record}


def comparison() -> dict[str, Any]:
    """What `bench compare --json` prints of two runs on two images."""
    first, second = whole_run("r2")["run"], whole_run("r1")["run"]
    return compare(first, {**second, "target": {**second["target"], "image": "sha256:2"}})
