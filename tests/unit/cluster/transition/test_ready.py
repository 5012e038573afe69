"""Readiness as a client would find it, at a server that says what a test wants."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping

import pytest
from cluster_views import lost, node, owned, pair, solo

from sparkguard.cluster.transition import ready
from sparkguard.cluster.transition.ready import Readiness
from sparkguard.core.cluster import Allocation

MODELS = {"data": [{"id": "small"}]}
TOKEN = {"choices": [{"message": {"content": "1"}}], "usage": {"completion_tokens": 1}}
GOOD = {"/v1/models": (200, MODELS), "/v1/chat/completions": (200, TOKEN)}

ANSWERS: dict[str, tuple[dict[str, tuple[int, object]], bool, str]] = {
    "all well": (GOOD, True, ""),
    "a model without a chat template": (
        {**GOOD, "/v1/chat/completions": (400, {"error": "no chat template"}), "/v1/completions": (200, TOKEN)},
        True,
        "",
    ),
    "still loading": ({**GOOD, "/v1/models": (503, {})}, False, "is not up yet (status 503, not small)"),
    "another model": (
        {**GOOD, "/v1/models": (200, {"data": [{"id": "x"}]})},
        False,
        "is misrouted: another model answers (x, not small)",
    ),
    "an answer of another form": ({**GOOD, "/v1/models": (200, [1])}, False, "is not up yet"),
    "an error in a good answer": (
        {**GOOD, "/v1/chat/completions": (200, {"error": {"message": "EngineDeadError"}})},
        False,
        "EngineDeadError",
    ),
    "no token": ({**GOOD, "/v1/chat/completions": (200, {"choices": []})}, False, "is answered without one"),
    "none counted": ({**GOOD, "/v1/chat/completions": (200, {**TOKEN, "usage": {"completion_tokens": 0}})}, False, "without one"),
    "a dead engine": ({**GOOD, "/v1/chat/completions": (500, {})}, False, "is answered with 500"),
}


async def asked(answers: Mapping[str, tuple[int, object]], wanted: Allocation, canary: bool = True) -> Readiness:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
        status, value = answers.get(path, (404, {}))
        body = json.dumps(value).encode()
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        return await ready.probe(wanted.replace(url=f"http://127.0.0.1:{port}"), canary=canary)
    finally:
        server.close()


@pytest.mark.parametrize(("answers", "is_ready", "reason"), ANSWERS.values(), ids=ANSWERS)
def test_what_an_endpoint_says(answers: dict[str, tuple[int, object]], is_ready: bool, reason: str) -> None:
    """Only the right id and a token that was generated are readiness."""
    found = asyncio.run(asked(answers, solo()))
    assert (found.ready, reason in found.reason) == (is_ready, True), found


def test_a_name_without_end_is_cut() -> None:
    """Whoever answers there fills nobody's terminal, and no record."""
    found = asyncio.run(asked({**GOOD, "/v1/models": (200, {"data": [{"id": "x" * 500_000}] * 2})}, solo()))
    assert len(found.reason) < 500 and found.served is not None and len(found.served) < 500


def test_a_health_route_is_asked_first() -> None:
    """An engine with a better route than /v1/models is not asked further until that says yes."""
    found = asyncio.run(asked(GOOD, solo(health_path="/v1/health/ready")))
    assert (found.ready, found.reason) == (False, "/v1/health/ready answers 404")


def test_without_a_canary_no_token_is_asked_for() -> None:
    """The served id is enough where a token would disturb."""
    assert asyncio.run(asked({"/v1/models": (200, MODELS)}, solo(), canary=False)).ready


RANKS = (owned("spark-ds4", "ds4", 0), owned("spark-ds4", "ds4", 1))
VIEWS = {
    "both alive": ({"head": node("head", RANKS[0]), "worker": node("worker", RANKS[1])}, None),
    "one exited": (
        {"head": node("head", RANKS[0]), "worker": node("worker", RANKS[1].replace(state="exited"))},
        Readiness(False, "rank 1 on worker is exited"),
    ),
    "one gone": ({"head": node("head", RANKS[0]), "worker": node("worker")}, Readiness(False, "rank 1 on worker is gone")),
    "one unknown": (
        {"head": node("head", RANKS[0]), "worker": lost("worker")},
        Readiness(None, "rank 1 on worker is unknown: no answer within 10 s"),
    ),
    "of two starts": (
        {"head": node("head", RANKS[0]), "worker": node("worker", RANKS[1].replace(generation="g0"))},
        Readiness(False, "its ranks are of different starts"),
    ),
}


@pytest.mark.parametrize("case", VIEWS.values(), ids=VIEWS)
def test_the_ranks_of_a_model(case: tuple[dict[str, object], Readiness | None]) -> None:
    """All of them, of one start; one that nobody can ask makes it unknown, not dead."""
    views, expected = case
    assert ready.alive(views, pair()) == expected  # type: ignore[arg-type]
