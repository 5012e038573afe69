"""The picture for people: every fact in words, a dash for what is unknown, and nothing that steers the terminal."""

from __future__ import annotations

import asyncio
import io
import sys
from contextlib import aclosing
from pathlib import Path
from typing import Any

import click
import pytest
from stand_in_engine import engine

from sparkguard.cli.cluster.screen import Screen, lines
from sparkguard.cluster.watch.picture import Found, Watch, Watched
from sparkguard.core.cluster import DISTRIBUTED, READY, Allocation


@pytest.fixture(scope="module")
def tick(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The first picture of a watch whose nodes have not said anything yet."""

    async def main() -> dict[str, Any]:
        async with engine() as served:
            allocation = Allocation("m", "M", DISTRIBUTED, ("head", "worker"), (), "d", "m", served.url)
            found = Found((Watched(allocation, "g", READY),))
            watch = Watch({"head": _Silent(), "worker": _Silent()}, lambda: found, tmp_path_factory.mktemp("state"))
            async with aclosing(watch.ticks()) as ticks:
                return await anext(ticks)

    return asyncio.run(main())


class _Silent:
    async def stream(self, *_: Any, **__: Any) -> Any:
        await asyncio.Event().wait()
        yield {}


def plain(tick: dict[str, Any]) -> str:
    return click.unstyle(lines(tick))


def known(tick: dict[str, Any]) -> dict[str, Any]:
    """A node and a model at work."""
    gpu = {
        "utilization_percent": 96.0, "temperature_c": 71.0, "power_w": 20.0, "clock_mhz": 611.0, "throttle": ["power_cap"],
    }  # fmt: skip
    before = tick["nodes"][0]
    node = {
        **before,
        "state": "ok",
        "connection": "open",
        "age_s": 0.1,
        "cpu_percent": 31.0,
        "load1": 3.2,
        "memory": {**before["memory"], "total_bytes": 128 << 30, "used_bytes": 96 << 30, "swap_used_bytes": 0},
        "psi": {**before["psi"], "memory_full10": 12.5},
        "gpus": [gpu],
        "roce": [{"device": "rocep1s0f1", "rx_bytes_s": 10e9, "tx_bytes_s": None}],
        "network": [{"name": "down0", "rx_bytes_s": 0.0, "tx_bytes_s": 0.0, "state": "down"}],
    }
    times = {"mean": 0.1, "p50": 0.052, "p95": 1.25, "p99": 12.0, "n": 9}
    engine = {
        **tick["allocations"][0]["engine"],
        "running": 3, "waiting": 0, "kv_usage": 0.5, "generation_tokens_s": 43.2, "window_s": 60.0,
        "ttft_s": times, "error": None,
    }  # fmt: skip
    allocation = {**tick["allocations"][0], "engine": engine, "state": "ready"}
    lost = {**tick["nodes"][1], "connection": "lost", "error": "no \033[31mroute", "retry_in_s": 4.0}
    worker = {"node": "worker", "state": "busy", "jobs": ["job-7"]}
    return {**tick, "nodes": [node, lost], "allocations": [allocation], "yue": [worker]}


def test_unknown_is_said_to_be(tick: dict[str, Any]) -> None:
    """Nodes that have said nothing yet are connecting, and a model without a token is no green one."""
    text = plain(tick)
    assert "head  connecting" in text
    assert "m on head + worker  unknown" in text


def test_a_node_and_a_model_at_work(tick: dict[str, Any]) -> None:
    """Load, memory, what holds the clocks back, RDMA, speeds and percentiles; an interface that is down is left out."""
    text = plain(known(tick))
    assert "load 3.2" in text
    assert "96.0 GiB of 128 GiB" in text
    assert "stalled 12.5%" in text
    assert "96%  71 C  20.0 W  611 MHz  held back by power_cap" in text
    assert "rocep1s0f1    9.3 GiB/s in            -/s out" in text
    assert "down0" not in text
    assert "running 3  waiting 0" in text
    assert "43.2 tok/s out  - tok/s in" in text
    assert "yue on worker  busy  job-7" in text
    assert "p50/p95/p99 of 60 s: first token 52 ms/1.2 s/12 s" in text


def test_a_slow_fabric_is_said(tick: dict[str, Any]) -> None:
    """Half the speed has a reason, which stands at the model."""
    assert "sockets" not in plain(tick)
    slow = {**tick["allocations"][0], "slow_fabric": True}
    assert "its ranks talk over sockets, not RDMA" in plain({**tick, "allocations": [slow]})


def test_what_a_node_says_cannot_steer_the_terminal(tick: dict[str, Any]) -> None:
    """Escape sequences are shown as text."""
    assert "no \\x1b[31mroute (again in 4 s)" in plain(known(tick))


def test_the_screen_fits_and_is_given_back(tick: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Lines are cut at the terminal's width, too many end in a word about it, and an error gives the terminal back."""
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("LINES", "6")
    with pytest.raises(KeyboardInterrupt), Screen() as screen:
        screen.show(lines(known(tick)))
        raise KeyboardInterrupt
    text = out.getvalue()
    assert text.startswith("\033[?1049h")
    assert text.endswith("\033[?1049l")
    shown = click.unstyle(text).split("\n")
    assert len(shown) == 6
    assert "too low" in shown[-1]
