"""A real vLLM, watched as a model of the cluster is: its names, its counts, and the one token."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkguard.cluster import http
from sparkguard.cluster.watch.endpoint import Endpoint
from sparkguard.core.cluster import SINGLE, Allocation

LOADING_SECONDS = 240  # 25 on an idle machine
SMALL = ("--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "4")


@pytest.fixture
def url(vllm: Path, tiny_model: Path, tmp_path: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "VLLM_CPU_KVCACHE_SPACE": "1",  # without, it takes all memory there is
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    command = [vllm / "bin" / "vllm", "serve", tiny_model, "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", port]
    with (tmp_path / "log").open("wb") as log:
        server_process = subprocess.Popen(
            [*command, *SMALL], env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        asyncio.run(_until_it_serves(url, server_process))
        yield url
    finally:
        os.killpg(server_process.pid, signal.SIGKILL)
        server_process.wait()


async def _until_it_serves(url: str, process: subprocess.Popen[bytes]) -> None:
    async def ask() -> None:
        while process.poll() is None:
            try:
                if (await http.ask(f"{url}/health", seconds=5)).status == 200:
                    return
            except http.Unanswered:
                pass
            await asyncio.sleep(0.2)
        raise AssertionError("vLLM has ended")

    await asyncio.wait_for(ask(), LOADING_SECONDS)


def test_a_real_vllm_is_watched(url: str) -> None:
    """Four requests within eight seconds: their tokens, their cached prompts, and percentiles of them alone."""

    async def main() -> None:
        clock = [0.0]
        endpoint = Endpoint(Allocation("m", "M", SINGLE, ("head",), (), "d", "tiny", url), 2.0, lambda: clock[0])
        await endpoint.scrape(("c",))
        await endpoint.ask_models()
        await endpoint.ask_token(lambda: True)
        assert endpoint.token.came, (endpoint.seen, endpoint.token)
        await endpoint.scrape(("other",))  # from here on, so that the token above is in no figure
        body = {
            "model": "tiny",
            "prompt": "the quick brown fox jumps " * 20,
            "max_tokens": 50,
            "ignore_eos": True,
            "temperature": 0,
        }
        prompts = 0
        for _ in range(4):
            answer = (await http.ask(f"{url}/v1/completions", body, seconds=60)).json()
            prompts = answer["usage"]["prompt_tokens"]
            clock[0] += 2.0
            await endpoint.scrape(("other",))
        view = endpoint.view()
        assert (view["running"], view["waiting"], view["error"], view["reset"]) == (0, 0, None, False)
        assert (view["generation_tokens_s"], view["prompt_tokens_s"], view["requests_s"]) == (25, prompts / 2, 0.5)
        assert view["ttft_s"]["n"] == view["e2e_s"]["n"] == view["queue_s"]["n"] == view["prefill_s"]["n"] == 4
        assert view["itl_s"]["n"] == 4 * 49
        assert 0 < view["ttft_s"]["p50"] <= view["ttft_s"]["p95"] <= view["ttft_s"]["p99"]
        assert 0.4 < view["cached_ratio"] < 0.8  # three of four found their prompt, in whole blocks
        assert view["kv_usage"] == 0
        assert view["finished"]["length"] == 5

    asyncio.run(main())
