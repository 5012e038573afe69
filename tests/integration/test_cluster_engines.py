"""A real llama-server, watched as a model of the cluster is: what it counts, what it serves, and the one token."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import mkgguf
import pytest

from sparkguard.cluster import http
from sparkguard.cluster.watch.endpoint import Endpoint
from sparkguard.core.cluster import SINGLE, Allocation

TESTS = Path(__file__).parents[1]
SECONDS = 30.0


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    cache = Path(os.environ.get("SPARKGUARD_TEST_CACHE", "/var/cache/sparkguard-tests")) / "llama"
    made = subprocess.run([TESTS / "tools" / "llama-server.sh", cache], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    model = mkgguf.make(tmp_path_factory.mktemp("models") / "m.gguf")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    options = ["--metrics", "-c", "2048", "-t", "1", "--no-warmup", "--host", "127.0.0.1", "--port", port, "--alias", "m"]
    engine = subprocess.Popen(
        [cache / "engine" / "llama-server", "-m", model, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        url = f"http://127.0.0.1:{port}"
        asyncio.run(_until_it_serves(url))
        yield url
    finally:
        engine.kill()
        engine.wait()


async def _until_it_serves(url: str) -> None:
    async def ask() -> None:
        while True:
            try:
                if (await http.ask(f"{url}/health", seconds=5)).status == 200:
                    return
            except http.Unanswered:
                pass
            await asyncio.sleep(0.05)

    await asyncio.wait_for(ask(), SECONDS)


def test_a_real_llama_server_is_watched(url: str) -> None:
    """Idle at first, it makes the token that it is asked for; then its own count of a request is the request's."""

    async def main() -> None:
        clock = [100.0]
        endpoint = Endpoint(Allocation("m", "M", SINGLE, ("head",), (), "d", "m", url, engine="llamacpp"), 2.0, lambda: clock[0])
        await endpoint.scrape(("c",))
        await endpoint.ask_models()
        assert endpoint.seen.answers, endpoint.seen.error
        assert endpoint.is_idle
        await endpoint.ask_token(lambda: True)
        assert endpoint.token.came, endpoint.token.error

        await endpoint.scrape(("c",))
        clock[0] += 2.0
        body = {"model": "m", "prompt": "hello world", "max_tokens": 16, "ignore_eos": True}
        answer = (await http.ask(f"{url}/v1/completions", body, seconds=SECONDS)).json()
        await endpoint.scrape(("c",))
        view = endpoint.view()
        assert answer["usage"]["completion_tokens"] == 16
        assert view["generation_tokens_s"] == 8
        assert (view["running"], view["waiting"], view["kv_usage"], view["reset"]) == (0, 0, None, False)
        assert view["ttft_s"]["n"] is None  # it has no histograms

        clock[0] += 2.0
        await endpoint.scrape(("another container",))
        assert (endpoint.view()["reset"], endpoint.view()["generation_tokens_s"]) == (True, None)

    asyncio.run(main())
