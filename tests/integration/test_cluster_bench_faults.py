"""Streams that are not as they should be: each is its own class, and none is counted as whole."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from bench_servers import DONE, FINISH, chunk, counted, stand_in, stream, whole

from sparkguard.cluster.bench import leases, start
from sparkguard.cluster.bench.client import Endpoint
from sparkguard.cluster.bench.request import OFF, Settings
from sparkguard.core.measure import FAILED, INCOMPLETE, OK, Measured, measure
from sparkguard.errors import SparkguardError

ROLE = chunk(role="assistant", content="")
TOKENS = [chunk(content="x")] * 16
ERROR = json.dumps({"error": {"message": "EngineDeadError", "type": "InternalServerError", "code": 500}})
SETTINGS = Settings(requests=2, max_tokens=16, prompt_tokens=(64,), request_seconds=10.0)

CASES: dict[str, tuple[list[str], str, str]] = {
    "whole": ([ROLE, *TOKENS, FINISH, counted(20, 16), DONE], OK, ""),
    "no usage": ([ROLE, *TOKENS, FINISH, DONE], INCOMPLETE, "no_usage"),
    "no [DONE]": ([ROLE, *TOKENS, FINISH, counted(20, 16)], INCOMPLETE, "no_done"),
    "a sum that is wrong": ([ROLE, *TOKENS, FINISH, counted(20, 16, 99), DONE], INCOMPLETE, "usage_sum"),
    "only a role": ([ROLE, FINISH, counted(20, 0), DONE], INCOMPLETE, "no_output"),
    "an error in the middle": ([ROLE, *TOKENS, ERROR, DONE], FAILED, "error_event"),
    "text in the middle": ([ROLE, *TOKENS, "Internal Server Error"], FAILED, "bad_json"),
    "more after [DONE]": ([ROLE, *TOKENS, counted(20, 16), DONE, chunk(content="y")], FAILED, "after_done"),
    "only reasoning": ([ROLE, *[chunk(reasoning_content="x")] * 16, FINISH, counted(20, 16), DONE], OK, ""),
}


def ask(answer: Any, seconds: float = 10.0) -> Measured:
    async def once() -> Measured:
        async with stand_in(answer) as server, Endpoint(server.url) as endpoint:
            return measure(await endpoint.stream({"model": "m", "stream": True}, seconds))

    return asyncio.run(once())


@pytest.mark.parametrize("case", CASES)
def test_the_class_of_a_stream(case: str) -> None:
    """Over a real connection, each way to end has its own class and reason."""
    events, outcome, reason = CASES[case]
    found = ask(lambda request, _: stream(request, events))
    assert (found.outcome, found.reason) == (outcome, reason)


def test_reasoning_alone_has_a_first_token_and_nothing_visible() -> None:
    """Time to first token is the first thought's; there is no time to first visible output."""
    found = ask(lambda request, _: stream(request, CASES["only reasoning"][0]))
    assert found.ttft is not None
    assert found.ttfo is None


def test_the_first_token_comes_after_the_role() -> None:
    """vLLM sends the role at once and the first token when it is there: the second is what counts."""

    async def answer(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        return await stream(request, whole(), wait=0.02)

    found = ask(answer)
    assert found.ttft is not None
    assert found.ttft > 0.02


def test_a_200_with_an_error_for_a_body_failed() -> None:
    """A proxy's or an engine's error under a good status is no answer."""

    async def answer(_: web.Request, __: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "out of memory"}})

    assert (ask(answer).outcome, ask(answer).reason) == (FAILED, "error_body")


def test_an_answer_that_is_no_stream_failed() -> None:
    """A server that ignores `stream` lets nobody measure a first token."""

    async def answer(_: web.Request, __: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"choices": [{"message": {"content": "hi"}}]})

    assert ask(answer).reason == "not_a_stream"


@pytest.mark.parametrize("status", [302, 400, 401, 429, 500, 503])
def test_a_status_is_a_class(status: int) -> None:
    """A refusal is told by its status, and a redirect is not followed."""

    async def answer(_: web.Request, __: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no"}}, status=status, headers={"Location": "/elsewhere"})

    assert (ask(answer).outcome, ask(answer).reason) == (FAILED, f"http_{status}")


def test_a_connection_that_breaks_failed() -> None:
    """The tokens that came before are no result."""
    found = ask(lambda request, _: stream(request, [ROLE, *TOKENS], cut=True))
    assert (found.outcome, found.reason, found.decode_rate) == (FAILED, "connection", None)


def test_a_server_that_goes_silent_is_a_timeout() -> None:
    """The request ends by our clock."""

    async def answer(request: web.Request, _: dict[str, Any]) -> web.StreamResponse:
        sent = await stream(request, [ROLE, *TOKENS])
        await asyncio.Event().wait()
        return sent

    found = ask(answer, 0.3)
    assert (found.outcome, found.reason) == (FAILED, "timeout")


def test_nobody_there_is_unreachable() -> None:
    """A refused connection is told apart from one that broke."""

    async def once() -> Measured:
        async with Endpoint("http://127.0.0.1:9") as endpoint:
            return measure(await endpoint.stream({}, 5.0))

    assert asyncio.run(once()).reason == "unreachable"


def run(answer: Any, home: Path, settings: Settings = SETTINGS, **more: Any) -> tuple[dict[str, Any], Any]:
    """A whole run against a stand-in; `prepare` may change it first."""
    prepare = more.pop("prepare", lambda server: None)

    async def once() -> tuple[dict[str, Any], Any]:
        async with stand_in(answer) as server:
            prepare(server)
            asked = start.Asked(settings, url=server.url, **more)
            return await start.start(asked, home, None, lambda event: None), server

    return asyncio.run(once())


def test_requests_that_are_not_whole_are_in_no_statistic(home: Path) -> None:
    """Of three requests one lacks its usage: it is counted as incomplete, and the statistics are of two."""
    count = 0

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal count
        count += 1
        lacking = count == 5  # after three warm-ups, the second that is measured
        return await stream(request, CASES["no usage"][0] if lacking else whole(), wait=0.005)

    level = run(answer, home, SETTINGS.replace(requests=3))[0]["levels"][0]
    assert (level["n"], level["ok"], level["incomplete"], level["statistics"]["ttft_s"]["n"]) == (3, 2, 1, 2)
    assert level["over_repeats"]["generated_tokens_per_s"] is None


def test_a_server_that_refuses_unknown_fields_is_asked_without(home: Path) -> None:
    """NIM may take no ignore_eos: the output's length is then bounded and not fixed, and the record says which."""

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if "ignore_eos" in body:
            return web.json_response({"error": {"message": "extra fields not permitted"}}, status=422)
        return await stream(request, whole(12))

    record, server = run(answer, home)
    assert (record["status"], record["method"]["output_length"]) == ("completed", "max_tokens")
    assert record["checks"]["output_length_fixed"] is False
    assert ["ignore_eos" in body for body in server.asked] == [True, False, False, False, False, False]


def test_what_is_asked(home: Path) -> None:
    """Usage, greedy, a fixed length, and reasoning only where it was named."""

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await stream(request, whole())

    body = run(answer, home)[1].asked[-1]
    assert (body["stream_options"], body["temperature"], body["max_tokens"]) == ({"include_usage": True}, 0, 16)
    assert (body["ignore_eos"], "chat_template_kwargs" in body) == (True, False)
    body = run(answer, home, SETTINGS.replace(reasoning=OFF))[1].asked[-1]
    assert body["chat_template_kwargs"]["enable_thinking"] is False


def test_reasoning_that_comes_all_the_same_is_noted(home: Path) -> None:
    """What was asked and what came are two things."""
    events = CASES["only reasoning"][0]
    record, _ = run(lambda request, _: stream(request, events), home, SETTINGS.replace(reasoning=OFF))
    assert record["checks"]["reasoning_seen"] is True
    assert any("reasoning" in note for note in record["notes"])


def test_the_key_is_sent_and_kept_nowhere(home: Path) -> None:
    """It is in the header of each request, and in no file of the state folder."""

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await stream(request, whole())

    record, server = run(answer, home, key="sk-very-secret")
    assert set(server.keys) == {"Bearer sk-very-secret"}
    assert "very-secret" not in json.dumps(record)
    assert [path for path in home.rglob("*") if path.is_file() and b"very-secret" in path.read_bytes()] == []


def test_another_server_in_the_middle_ends_the_run(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of two servers are not in one run: a new process behind the same port is seen by its start time."""
    monkeypatch.setattr("sparkguard.cluster.bench.run.IDENTITY_SECONDS", 0.01)
    servers: list[Any] = []

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        servers[0].metrics = f"process_start_time_seconds {100 + len(servers[0].asked)}\n"
        return await stream(request, whole(), wait=0.01)

    record, _ = run(answer, home, SETTINGS.replace(requests=200), prepare=servers.append)
    assert (record["status"], record["reason"]) == ("failed", "what answers is not what answered at the start")


def test_an_engine_that_works_for_others_is_not_measured(home: Path) -> None:
    """Both would be slowed; --shared measures all the same."""

    def busy(server: Any) -> None:
        server.metrics = 'vllm:num_requests_running{model_name="m"} 2.0\n'

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await stream(request, whole())

    with pytest.raises(SparkguardError) as caught:
        run(answer, home, prepare=busy)
    assert caught.value.status == 75
    assert run(answer, home, prepare=busy, shared=True)[0]["status"] == "completed"


def test_tokens_of_others_are_seen(home: Path) -> None:
    """The engine generated more than was asked of it here: the run is not exclusive, and says how much."""
    servers: list[Any] = []

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        asked = len(servers[0].asked)
        servers[0].metrics = f'vllm:generation_tokens_total{{model_name="m"}} {asked * 40}\n'
        return await stream(request, whole())

    def begin(server: Any) -> None:
        servers.append(server)
        server.metrics = 'vllm:generation_tokens_total{model_name="m"} 0\n'

    record, _ = run(answer, home, prepare=begin)
    assert (record["checks"]["exclusive"], record["checks"]["usage_tokens"]) == (False, 32)


def test_a_cache_that_answers_is_seen(home: Path) -> None:
    """More cached tokens than a template's own words: the prompts were not new to the server."""
    events = [ROLE, *TOKENS, FINISH, counted(200, 16, prompt_tokens_details={"cached_tokens": 160}), DONE]
    record, _ = run(lambda request, _: stream(request, events), home)
    assert (record["checks"]["cache_missed"], record["checks"]["cached_tokens_most"]) == (False, 160)


def test_sixty_four_streams_are_sixty_four(home: Path) -> None:
    """All at once: the server answers none before it has them all."""
    waiting = 0
    full = asyncio.Event()

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal waiting
        if body["max_tokens"] == 20:  # the warm-up asks alone, once with the run's own length
            waiting += 1
            if waiting == 65:
                full.set()
            if waiting > 1:
                await full.wait()
        return await stream(request, whole(20))

    level = run(answer, home, SETTINGS.replace(requests=1, concurrency=(64,), max_tokens=20))[0]["levels"][0]
    assert (level["n"], level["ok"]) == (64, 64)


HOSTILE = {
    "a huge count": json.dumps({"choices": [], "usage": {"prompt_tokens": 10**400, "completion_tokens": 1, "total_tokens": 1}}),
    "no number": '{"choices": [], "usage": {"prompt_tokens": NaN, "completion_tokens": 1, "total_tokens": 1}}',
    "no time": json.dumps(
        {"choices": [], "timings": {"prompt_n": 9, "prompt_ms": 5e-324, "predicted_n": 1, "predicted_ms": 1e308}}
    ),
    "no end of choices": json.dumps({"choices": [{"delta": {}}] * 10_000}),
    "nested": '{"choices": ' + "[" * 100_000 + "]" * 100_000 + "}",
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_stream_breaks_nothing(case: str, home: Path) -> None:
    """The run ends, with a record that can be read: such a request is whole, incomplete or failed, and no number is infinite."""
    events = [ROLE, *TOKENS, HOSTILE[case], FINISH, counted(20, 16), DONE]
    warm = [ROLE, *TOKENS, FINISH, counted(20, 16), DONE]
    count = 0

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal count
        count += 1
        return await stream(request, events if count > 3 else warm)

    record, _ = run(answer, home)
    assert record["status"] in ("completed", "failed")
    json.dumps(record, allow_nan=False)


def test_a_model_that_is_not_served_is_refused(home: Path) -> None:
    """Before anything is asked of it, with the ids that are."""
    with pytest.raises(SparkguardError) as caught:
        run(lambda request, _: stream(request, whole()), home, model="another")
    assert "serves m, not another" in caught.value.message
    assert leases.living(home) == []
