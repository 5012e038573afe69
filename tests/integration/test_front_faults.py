"""The front under engines that die or misbehave, and under clients that do."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import anthropic
import openai
import pytest
from stand_in import SECONDS, STREAM, Step, World, answers, chunk, sends, sends_until_closed

from sparkguard.supervisor.protocol import Refused
from sparkguard.web import aiohttp_log, bodies, half_open, stream
from sparkguard.web import front as model_apis

HELLO = b'data: {"choices":[{"index":0,"text":"hello"}]}\n\n'
HALF = b'data: {"choices":[{"index'
WHOLE = json.dumps({"model": "m", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}).encode()
DIES = sends(close=True)


@pytest.fixture
def front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(model_apis, "REASON_SECONDS", 0.01)
    world = World(tmp_path, body_limit_bytes=1 << 20)
    yield world
    world.close()


class Answer:
    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self.status = answer.status
        self.headers = answer.headers
        self.body = answer.read()

    @property
    def json(self) -> dict[str, object]:
        parsed = json.loads(self.body)
        assert isinstance(parsed, dict)
        return parsed


def post(front: World, path: str, body: object, **headers: str) -> Answer:
    return Answer(front.ask("POST", path, body, **headers))


COMPLETION = ("/v1/completions", {"model": "m", "prompt": "x", "stream": True})
MESSAGES = ("/v1/messages", {"model": "m", "stream": True})
RESPONSES = ("/v1/responses", {"model": "m", "stream": True})


def events(body: bytes) -> list[tuple[str, dict[str, object]]]:
    """[(name, data)]; every event must be a whole one."""
    assert body.endswith(b"\n\n")
    told = []
    for event in body.decode().split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in event.split("\n"))
        told.append((fields.get("event", ""), json.loads(fields["data"])))
    return told


@pytest.mark.parametrize("end", [b"", HALF, HELLO + HALF], ids=["between events", "within an event", "within the second"])
def test_a_stream_that_breaks_off_ends_with_one_error_in_openais_words(front: World, end: bytes) -> None:
    """Whole events and then one error; the half of an event is dropped, and nothing says that the answer is complete."""
    front.engine("m", sends(STREAM, chunk(HELLO), *([chunk(end)] if end else []), close=True))
    answer = post(front, *COMPLETION)
    *before, (_, last) = events(answer.body)
    assert answer.status == 200
    assert len(before) == 1 + end.count(HELLO)
    assert last["error"] == {"message": last["error"]["message"], "type": "server_error", "param": None, "code": "runner_died"}  # type: ignore[index]
    assert all("error" not in data for _, data in before)
    assert front.notes[-1] == "failed"


def test_a_stream_that_breaks_off_ends_with_one_error_in_anthropics_words(front: World) -> None:
    """Its client raises it, and the event has the name that the client looks for."""
    begin = b'event: message_start\ndata: {"type":"message_start"}\n\n'
    front.engine("m", *[sends(STREAM, chunk(begin), close=True)] * 2)
    assert [name for name, _ in events(post(front, *MESSAGES).body)] == ["message_start", "error"]
    with anthropic.Anthropic(base_url=front.url, api_key="none", max_retries=0) as client:
        asked = client.messages.create(model="m", max_tokens=9, messages=[], stream=True)
        with pytest.raises(anthropic.APIStatusError, match="the answer ends here"):
            list(asked)


def test_a_response_that_breaks_off_ends_with_one_error_event(front: World) -> None:
    """OpenAI's Responses API has an event of its own for it, which its client reads as one."""
    begin = b'event: response.created\ndata: {"type":"response.created"}\n\n'
    front.engine("m", *[sends(STREAM, chunk(begin), close=True)] * 2)
    assert [name for name, _ in events(post(front, *RESPONSES).body)] == ["response.created", "error"]
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as client:
        asked = list(client.responses.create(model="m", input="x", stream=True))
    assert [event.type for event in asked] == ["response.created", "error"]


def test_a_runner_that_is_to_be_stopped_loses_its_stream_at_once(front: World) -> None:
    """The front closes its connection to the engine, which a stop waits for, and the client is told why."""
    engine = front.engine("m", sends_until_closed(STREAM, chunk(HELLO)))
    answer = front.ask("POST", *COMPLETION)
    assert answer.read(len(HELLO)) == HELLO
    front.loop.call(front.supervisor.end, "m", "it made no progress for 120 s")
    assert "it made no progress for 120 s" in answer.read().decode()
    front.loop.run(engine.closed.wait())


@pytest.mark.parametrize(
    "death",
    [
        DIES,
        sends(STREAM, close=True),
        sends(STREAM, chunk(HALF), close=True),
        sends(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{", close=True),
    ],
    ids=["before the answer", "after the head of a stream", "within the first event", "within a whole answer"],
)
def test_a_request_of_which_nothing_was_sent_runs_again(front: World, death: Step) -> None:
    """The client sees only the second runner's answer."""
    front.engine("m", death)
    connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=SECONDS)
    connection.request("POST", COMPLETION[0], json.dumps(COMPLETION[1]))
    front.wait("replay")
    second = front.engine("m", answers(WHOLE))
    answer = Answer(connection.getresponse())
    connection.close()
    assert (answer.status, answer.body) == (200, WHOLE)
    assert len(second.requests) == 1
    assert front.notes[-1] == "done"


def test_a_request_whose_runner_is_nowhere_runs_again(front: World) -> None:
    """It has ended, and the supervisor did not know yet."""
    front.loop.call(front.supervisor.start, "m", "")
    connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=SECONDS)
    connection.request("POST", COMPLETION[0], json.dumps(COMPLETION[1]))
    front.wait("replay")
    front.engine("m", answers(WHOLE))
    answer = Answer(connection.getresponse())
    connection.close()
    assert (answer.status, answer.body) == (200, WHOLE)


def test_a_request_that_kills_every_runner_is_answered_in_the_end(front: World) -> None:
    """It runs again only so often."""
    front.engine("m")
    connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=SECONDS)
    connection.request("POST", COMPLETION[0], json.dumps(COMPLETION[1]))
    for replays in (1, 2):
        front.wait("replay", replays)
        front.engine("m")
    answer = Answer(connection.getresponse())
    connection.close()
    assert (answer.status, answer.json["error"]["code"]) == (502, "runner_died")  # type: ignore[index]


def test_a_connection_that_the_engine_has_just_closed_costs_nothing(front: World) -> None:
    """An engine may close a kept connection at any time; the request goes over a new one, and is no replay."""
    engine = front.engine("m", answers(WHOLE), DIES, answers(WHOLE))
    assert [post(front, "/tokenize", {"model": "m"}).status for _ in range(2)] == [200, 200]
    assert len(engine.requests) == 3
    assert "replay" not in front.notes


def test_a_connection_that_carried_a_stream_is_not_used_again(front: World) -> None:
    """llama-server says keep-alive on it and closes it all the same."""
    done = [STREAM, chunk(HELLO), chunk(b"")]
    engine = front.engine("m", sends_until_closed(*done), answers(WHOLE))
    assert post(front, *COMPLETION).body == HELLO
    front.loop.run(engine.closed.wait())
    assert post(front, *COMPLETION).body == WHOLE


def test_each_event_is_passed_on_when_it_comes(front: World) -> None:
    """The client has read the first event before the engine has sent the second."""
    more = front.loop.call(asyncio.Event)

    async def step(reader, writer):  # type: ignore[no-untyped-def]
        await sends(STREAM, chunk(HELLO))(reader, writer)
        await more.wait()
        await sends(chunk(b"data: [DONE]\n\n"), chunk(b""))(reader, writer)

    front.engine("m", step)
    answer = front.ask("POST", *COMPLETION)
    assert answer.read(len(HELLO)) == HELLO
    front.loop.call(more.set)
    assert answer.read() == b"data: [DONE]\n\n"


def test_a_client_that_leaves_cancels_its_generation(front: World) -> None:
    """The engine's connection is closed, before an answer's head as well as within a stream."""
    for begun in ([], [STREAM, chunk(HELLO)]):
        engine = front.engine("m", sends_until_closed(*begun))
        client = _start(front)
        front.loop.run(engine.asked.wait())
        if begun:
            _read_until(client, b"hello")
        client.close()
        front.loop.run(engine.closed.wait())
    front.wait("failed", 2)


def test_a_waiting_client_that_leaves_frees_its_place(front: World) -> None:
    """The queue is empty again, and the next request does not wait for it."""
    engine = front.engine("m", sends_until_closed(), answers(WHOLE))
    clients = [_start(front), _start(front)]
    front.wait("waiting", 2)
    front.loop.run(engine.asked.wait())
    clients[1].close()
    front.wait("left", 2)
    assert front.supervisor.all["m"].waiting == 0
    clients[0].close()
    assert post(front, *COMPLETION).body == WHOLE


def test_a_client_that_has_closed_its_half_gets_its_answer(front: World) -> None:
    """Whole or as a stream, at once or after a while; then the connection is closed."""
    go = front.loop.call(asyncio.Event)

    async def later(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await go.wait()
        await answers(WHOLE)(reader, writer)

    async def halves(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await sends(STREAM, chunk(HELLO))(reader, writer)
        await go.wait()
        await sends(chunk(HELLO), chunk(b""), close=True)(reader, writer)

    engine = front.engine("m", answers(WHOLE), later, halves)
    for turn, expected in enumerate((WHOLE, WHOLE, HELLO)):
        client = _start(front)
        client.shutdown(socket.SHUT_WR)
        front.loop.run(engine.asked.wait())
        if turn:
            seen = client.recv(4096)  # what asks whether it is there still, or the stream's beginning
            front.loop.call(go.set)
        else:
            seen = b""
        while more := client.recv(4096):
            seen += more
        client.close()
        front.loop.call(engine.asked.clear)
        front.loop.call(go.clear)
        assert b"HTTP/1.1 200 OK\r\n" in seen and seen.count(expected) == (2 if turn == 2 else 1)
        assert seen.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"").startswith(b"HTTP/1.1 200 OK\r\n")
    front.wait("done", 3)


@pytest.mark.parametrize(
    "sent", [b"POST /v1/completions HT", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{"]
)
def test_a_client_that_ends_within_its_request_is_closed(front: World, sent: bytes) -> None:
    """There is nothing to wait for."""
    with socket.create_connection(("127.0.0.1", front.port), SECONDS) as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        while client.recv(4096):
            pass
    assert front.notes == []


def _start(front: World) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", front.port), SECONDS)
    body = json.dumps(COMPLETION[1]).encode()
    client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    return client


def _read_until(client: socket.socket, end: bytes) -> None:
    seen = b""
    while end not in seen:
        more = client.recv(4096)
        assert more, seen
        seen += more


def test_a_death_after_the_answer_changes_nothing_of_it(front: World) -> None:
    """A client that does not read waits within an answer of which the engine's part is over; it gets no error in it."""
    body = json.dumps({"text": "x" * (30 << 10)}).encode()
    engine = front.engine("m", *[answers(body)] * 600)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(SECONDS)
        client.connect(("127.0.0.1", front.port))
        asked = json.dumps({"model": "m"}).encode()
        request = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n%s" % (len(asked), asked)
        client.sendall(request * 600)
        same, steps = 0, -1
        while same < 50:  # no more is asked of the engine, at so many looks in the loop
            before, steps = steps, front.loop.call(lambda: len(engine.steps))
            same = same + 1 if steps == before else 0
        assert steps > 0 and "failed" not in front.notes
        front.loop.call(front.supervisor.end, "m", "it is stopped")
        front.engine("m", *[answers(body)] * 600)
        read = 0
        with client.makefile("rb") as stream:
            while read < 600:
                assert stream.readline() == b"HTTP/1.1 200 OK\r\n"
                while stream.readline() != b"\r\n":
                    pass
                assert stream.read(len(body)) == body
                read += 1


def test_a_slow_reader_does_not_hold_its_runner(front: World) -> None:
    """The engine's answer of two megabytes ends, and the next request runs, while the client has read none of it."""
    event = b"data: " + b"x" * 65000 + b"\n\n"
    front.engine("m", sends(STREAM, *[chunk(event)] * 32, chunk(b"")), answers(WHOLE))
    slow = _start(front)
    front.wait("done")
    assert post(front, *COMPLETION).body == WHOLE
    slow.close()


def test_a_reader_that_takes_nothing_is_given_up(front: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the limit of what may lie unread the engine waits, and after a while the client counts as gone."""
    monkeypatch.setattr(stream, "UNREAD_BYTES", 1 << 16)
    monkeypatch.setattr(stream, "STALL_SECONDS", 0.5)
    event = b"data: " + b"x" * 65000 + b"\n\n"
    engine = front.engine("m", sends_until_closed(STREAM, *[chunk(event)] * 400))
    stalled = _start(front)
    front.loop.run(engine.closed.wait())
    front.wait("failed")
    stalled.close()


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/v1/completions", b"", 400, "invalid_json"),
        ("/v1/completions", b"{", 400, "invalid_json"),
        ("/v1/completions", b"\xff\xfe{", 400, "invalid_json"),
        ("/v1/completions", b"[" * 100_000, 400, "invalid_json"),
        ("/v1/completions", b"[1]", 400, "invalid_json"),
        ("/v1/completions", b'{"model": "m", "x": [' + b"[]," * 100_000 + b"0]}", 400, "invalid_body"),
        ("/v1/completions", b"{}", 400, "model_missing"),
        ("/v1/completions", b'{"model": 7}', 400, "model_missing"),
        ("/v1/completions", b'{"model": "nobody"}', 404, "model_not_found"),
        ("/v1/completions", b" " * (1 << 20) + b"{}", 413, "body_too_large"),
        ("/v1/nothing", b"{}", 404, "not_found"),
        ("/v1/models", b"{}", 405, "method_not_allowed"),
        ("/api/models/nobody/load", b"", 404, "model_not_found"),
        ("/api/runners/nobody/kill", b"", 404, "runner_not_found"),
    ],
)
def test_a_bad_request_is_told_what_is_wrong(
    front: World, path: str, body: bytes, status: int, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the right status and OpenAI's shape; the server lives on."""
    monkeypatch.setattr(bodies, "MOST_VALUES", 100_100)
    answer = post(front, path, body)
    error = answer.json["error"]
    assert isinstance(error, dict)
    assert (answer.status, error["code"], error.keys()) == (status, code, {"message", "type", "param", "code"})
    assert post(front, "/v1/completions", b"{").status == 400


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        (b"{", 400, "invalid_request_error"),
        (b'{"model": "nobody"}', 404, "not_found_error"),
        (b" " * (1 << 20) + b"{}", 413, "request_too_large"),
    ],
)
def test_anthropics_clients_are_told_in_its_words(front: World, body: bytes, status: int, kind: str) -> None:
    """The Messages API has a shape and types of its own."""
    answer = post(front, "/v1/messages", body)
    assert answer.status == status
    assert answer.json["type"] == "error"
    assert answer.json["error"]["type"] == kind  # type: ignore[index]


def test_a_body_that_is_not_what_its_encoding_says_is_told_so(front: World) -> None:
    """400, for the model APIs and for the control API."""
    for method, path in (("POST", "/v1/completions"), ("PATCH", "/api/models/m")):
        connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=SECONDS)
        connection.request(method, path, b"no gzip", {"Content-Encoding": "gzip"})
        answer = Answer(connection.getresponse())
        connection.close()
        assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_body")  # type: ignore[index]


@pytest.mark.parametrize(
    "sent",
    [
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\ncanary\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n3\r\ncanary\r\n0\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}canary more\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer canary\0\r\n\r\n",
        b"GET /canary no HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /" + b"canary" * 2000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"canary\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused_and_not_repeated_in_the_log(
    front: World, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Not a word of it at any level, and not a line at the usual one: it may be a prompt or a key, and come without end."""
    caplog.set_level(logging.DEBUG)
    with socket.create_connection(("127.0.0.1", front.port), SECONDS) as client:
        client.sendall(sent)
        answer = b""
        while part := client.recv(1 << 16):
            answer += part
    assert b" 400 Bad Request\r\n" in answer
    assert "canary" not in caplog.text
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []


def test_what_all_clients_send_at_once_is_bounded(front: World) -> None:
    """Who waits for a model with a large body holds its memory meanwhile: another is told to come back, a small one is not."""
    front.server._front._bodies.most_held_bytes = 1_500_000  # of 512 MB
    engine = front.engine("m", sends_until_closed(STREAM, chunk(HELLO)))
    large = {"model": "m", "prompt": "x" * 1_000_000, "stream": True}
    first = front.ask("POST", "/v1/completions", large)
    front.loop.run(engine.asked.wait())
    answer = post(front, "/v1/completions", large)
    assert (answer.status, answer.json["error"]["code"], answer.headers["Retry-After"]) == (503, "busy", "5")  # type: ignore[index]
    assert post(front, "/v1/completions", b"{").status == 400
    first.close()


def test_more_clients_than_there_are_descriptors_for_are_turned_away(tmp_path: Path) -> None:
    """At once, and only they; who leaves makes place."""
    world = World(tmp_path, most_connections=2)
    try:
        inside = [socket.create_connection(("127.0.0.1", world.port), SECONDS) for _ in range(2)]
        for client in inside:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 OK")
        with socket.create_connection(("127.0.0.1", world.port), SECONDS) as third:
            assert _closed(third)
        for client in inside:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            while client.recv(1 << 16):
                pass
            client.close()
        assert world.ask("GET", "/health").status == 200
    finally:
        world.close()


def test_a_connection_that_asks_nothing_is_closed(front: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hold its place for ever, also with the half of a request."""
    monkeypatch.setattr(half_open, "FIRST_SECONDS", 0.05)
    for sent in (b"", b"POST /v1/completions HT"):
        with socket.create_connection(("127.0.0.1", front.port), SECONDS) as client:
            client.sendall(sent)
            assert _closed(client)


def _closed(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_client_that_leaves_is_no_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """It is met where an answer is written, now and then."""
    caplog.set_level(logging.INFO)
    aiohttp_log.log.exception("Error handling request", exc_info=ConnectionResetError("Cannot write to closing transport"))
    assert caplog.records == []


def test_a_bug_is_told_with_its_place_and_without_its_words(
    front: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Python's exceptions quote what they stumble over."""
    monkeypatch.setattr(front.supervisor, "runners", lambda: int("canary"))
    assert post(front, "/v1/completions", b"{").status == 400
    assert Answer(front.ask("GET", "/api/runners")).status == 500
    assert "ValueError" in caplog.text
    assert "control.py" in caplog.text
    assert "canary" not in caplog.text.replace('int("canary")', "")


def test_a_body_of_no_stated_length_has_the_same_limit(front: World) -> None:
    """A chunked body is cut off where it becomes too large."""
    connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=SECONDS)
    connection.request(
        "POST", "/v1/completions", iter([b" " * (1 << 19)] * 3), encode_chunked=True, headers={"Transfer-Encoding": "chunked"}
    )
    assert connection.getresponse().status == 413
    connection.close()


def test_a_refusal_has_its_status_arithmetic_and_time(front: World) -> None:
    """503 with the supervisor's sentence, 429 with when to come back; both clients raise what they have for it."""
    front.engine("m")
    arithmetic = "m needs 606 MB, cuda:0 has 500 MB free; 2048 tokens of context would fit"
    front.supervisor.refusal = Refused(503, "no_room", arithmetic)
    answer = post(front, *COMPLETION)
    assert (answer.status, answer.json["error"]["message"]) == (503, arithmetic)  # type: ignore[index]
    front.supervisor.refusal = Refused(429, "queue_full", "100 requests wait already", 7)
    assert post(front, *MESSAGES).headers["Retry-After"] == "7"
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as gpt, pytest.raises(openai.RateLimitError):
        gpt.completions.create(model="m", prompt="x")
    with (
        anthropic.Anthropic(base_url=front.url, api_key="none", max_retries=0) as claude,
        pytest.raises(anthropic.RateLimitError),
    ):
        claude.messages.create(model="m", max_tokens=1, messages=[])


def test_the_keys_and_cookies_of_a_client_stay_here(front: World) -> None:
    """The engine is sent what it reads, and nothing that is secret or would make it answer for other sites."""
    engine = front.engine("m", answers(WHOLE))
    post(front, *COMPLETION, Authorization="Bearer secret", X_Api_Key="secret", Cookie="secret")
    assert b"secret" not in engine.requests[0]


def test_the_engines_headers_for_other_sites_are_dropped(front: World) -> None:
    """llama-server allows every origin; the front allows none."""
    raw = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nAccess-Control-Allow-Origin: *\r\n\r\n{}"
    front.engine("m", sends(raw))
    assert not [name for name in post(front, *COMPLETION).headers if name.lower().startswith("access-control")]


def test_a_drain_lets_running_requests_end_and_takes_no_more(tmp_path: Path) -> None:
    """A stream that runs is whole, a new connection is refused, and followers of events are let go."""
    front = World(tmp_path)
    more = front.loop.call(asyncio.Event)

    async def step(reader, writer):  # type: ignore[no-untyped-def]
        await sends(STREAM, chunk(HELLO))(reader, writer)
        await more.wait()
        await sends(chunk(b"data: [DONE]\n\n"), chunk(b""))(reader, writer)

    front.engine("m", step)
    watcher = http.client.HTTPConnection("127.0.0.1", front.port, timeout=SECONDS)
    watcher.request("GET", "/api/events")
    events_answer = watcher.getresponse()
    answer = front.ask("POST", *COMPLETION)
    assert answer.read(len(HELLO)) == HELLO
    closing = front.loop.start(front.server.close())
    events_answer.read()  # ends
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", front.port), SECONDS)
    front.loop.call(more.set)
    assert answer.read() == b"data: [DONE]\n\n"
    closing.result(SECONDS)
    watcher.close()
    front.close()


def test_a_drain_has_one_deadline(tmp_path: Path) -> None:
    """What does not end by then is cut off, and its engine's connection closed."""
    front = World(tmp_path, drain_seconds=0.2)
    engine = front.engine("m", sends_until_closed(STREAM, chunk(HELLO)))
    client = _start(front)
    _read_until(client, b"hello")
    front.loop.run(front.server.close())
    front.loop.run(engine.closed.wait())
    client.close()
    front.close()


def test_a_form_is_passed_on_as_it_is(front: World) -> None:
    """To the model that it names, byte for byte; a form elsewhere, or none where one must be, is told."""
    engine = front.engine("m", answers(b'{"text":"hello"}'))
    body = (
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n\0\1\r\n\2\r\n'
        b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n--x--\r\n'
    )
    kind = {"Content_Type": "multipart/form-data; boundary=x"}
    answer = front.ask("POST", "/v1/audio/transcriptions", body, **kind)
    assert (answer.status, answer.read()) == (200, b'{"text":"hello"}')
    assert engine.requests[0].endswith(b"\r\n\r\n" + body) and b"boundary=x" in engine.requests[0]
    for path, sent, said in (
        ("/v1/chat/completions", body, "takes a JSON object, not a form"),
        ("/v1/audio/transcriptions", b"--x", "takes a form"),
        ("/v1/audio/transcriptions", body.replace(b'name="model"', b'name="other"'), "no model is named"),
    ):
        answer = front.ask("POST", path, sent, **kind)
        assert answer.status == 400 and said in answer.read().decode()
