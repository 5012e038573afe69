"""The control API, metrics, and who may ask."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from stand_in import World, answers

from sparkguard.errors import SparkguardError
from sparkguard.supervisor.protocol import Refused
from sparkguard.web import page
from sparkguard.web.app import Options, Server
from sparkguard.web.keys import CREDENTIAL, read_keys

ID = "folder/model"
ANSWER = b'{"usage": {"prompt_tokens": 3, "completion_tokens": 4}}'


@pytest.fixture
def front(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    world.engine(ID, answers(ANSWER))
    yield world
    world.close()


def read(answer: http.client.HTTPResponse) -> tuple[int, dict[str, object]]:
    with answer:
        parsed = json.loads(answer.read())
    assert isinstance(parsed, dict)
    return answer.status, parsed


@pytest.mark.parametrize("id", ["folder/model", "folder%2Fmodel"])
def test_a_model_is_read_changed_loaded_and_unloaded_by_its_id(front: World, id: str) -> None:
    """The id has a slash, and may come escaped, as the page sends it."""
    path = f"/api/models/{id}"
    assert read(front.ask("GET", path))[1]["id"] == ID
    assert read(front.ask("PATCH", path, {"context": 8192})) == (200, {**front.loop.call(front.supervisor.model, ID)})  # type: ignore[dict-item]
    assert read(front.ask("POST", f"{path}/load"))[1]["id"] == ID
    assert read(front.ask("POST", f"{path}/unload"))[1]["id"] == ID
    assert read(front.ask("POST", f"/api/runners/{id}/kill")) == (200, {"killed": ID})
    assert front.supervisor.patched == [{"context": 8192}]
    assert [note for note in front.notes if ID in note] == [f"load {ID}", f"unload {ID}", f"kill {ID}"]


def test_the_lists_are_read(front: World) -> None:
    """Each under its name."""
    for name in ("models", "runners"):
        assert [row["id"] for row in read(front.ask("GET", f"/api/{name}"))[1][name]] == [ID]  # type: ignore[attr-defined, index]
    assert read(front.ask("GET", "/api/models"))[1]["warning"] == "half of the folder was not looked at"
    assert read(front.ask("GET", "/api/devices"))[1]["devices"] == front.supervisor.devices()
    running = read(front.ask("GET", "/running"))[1]["running"]
    assert isinstance(running, list)
    assert [(row["id"], row["state"]) for row in running] == [(ID, "ready")]


def test_a_bad_setting_is_told_with_its_hint(front: World) -> None:
    """400, the supervisor's own words, and the key that they are about; JSON that is none is told as well."""
    status, told = read(front.ask("PATCH", f"/api/models/{ID}", {"context": "long"}))
    assert status == 400
    error = {"message": "context is no number; write 4096", "type": "invalid_request_error", "param": "context"}
    assert told["error"] == {**error, "code": "invalid_setting"}
    assert read(front.ask("PATCH", f"/api/models/{ID}", [1]))[0] == 400


def test_a_load_that_is_refused_says_why(front: World) -> None:
    """The arithmetic comes back with 503."""
    front.supervisor.refusal = Refused(503, "no_room", "it needs 9 GB, 4 GB are free")
    status, told = read(front.ask("POST", f"/api/models/{ID}/load"))
    assert (status, told["error"]["message"]) == (503, "it needs 9 GB, 4 GB are free")  # type: ignore[index]


def test_a_log_is_read_and_followed(front: World) -> None:
    """The lines so far, then each when it is written; as events for who asks for events."""
    ring = front.supervisor.all[ID].log
    front.loop.call(ring.add, "info: engine: one")
    with front.ask("GET", f"/api/runners/{ID}/log") as answer:
        assert answer.read() == b"info: engine: one\n"
    plain = front.ask("GET", f"/api/runners/{ID}/log?follow=1")
    events = front.ask("GET", f"/api/runners/{ID}/log?follow=1", Accept="text/event-stream")
    assert plain.readline() == b"info: engine: one\n"
    assert events.readline() + events.readline() == b"data: info: engine: one\n\n"
    front.loop.call(ring.add, "info: engine: two")
    assert plain.readline() == b"info: engine: two\n"
    assert events.readline() + events.readline() == b"data: info: engine: two\n\n"
    assert front.ask("GET", "/api/runners/nobody/log").status == 404


def test_events_begin_with_everything_and_go_on_with_what_changes(front: World) -> None:
    """A follower needs no second question; when it leaves, nothing of it stays behind."""
    answer = front.ask("GET", "/api/events")
    first = json.loads(answer.readline().removeprefix(b"data: "))
    assert (first["type"], [model["id"] for model in first["models"]]) == ("snapshot", [ID])
    assert first.keys() == {"type", "models", "warning", "runners", "devices"}
    assert first["warning"] == "half of the folder was not looked at"
    answer.readline()
    front.loop.call(front.supervisor.tell, {"type": "queue", "model": ID, "queue": 1})
    assert json.loads(answer.readline().removeprefix(b"data: ")) == {"type": "queue", "model": ID, "queue": 1}
    answer.close()
    front.hang_up()
    front.wait("unsubscribed")


def test_prometheus_reads_the_counters_of_each_model(front: World) -> None:
    """Its own parser takes the text; requests, tokens, queue, loads, crashes, seconds and statuses are there."""
    front.ask("POST", "/v1/completions", {"model": ID}).close()
    front.wait("done")
    with front.ask("GET", "/metrics") as answer:
        text = answer.read().decode()
    samples = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("model") == ID
    }
    for name in ("requests", "requests_failed", "prompt_tokens", "generated_tokens", "loads", "crashes", "busy_seconds"):
        assert samples[f"spark_{name}_total"] == 7
    assert samples["spark_queue"] == 0
    assert (
        samples["spark_http_responses_total"]
        == samples["spark_request_seconds_count"]
        == samples["spark_first_byte_seconds_count"]
        == 1
    )
    assert samples["spark_runner_memory_bytes"] == 1 << 20


def test_an_address_in_use_is_said(front: World) -> None:
    """With the setting to change, and nothing left open."""
    with pytest.raises(SparkguardError, match=f"127.0.0.1:{front.port} cannot be listened on: Address already in use") as raised:
        front.loop.run(Server(front.supervisor, Options(port=front.port)).start())
    assert "SPARK_PORT" in (raised.value.hint or "")


WRITES = [
    ("POST", "/v1/completions"),
    ("GET", f"/props?model={ID}"),
    ("PATCH", f"/api/models/{ID}"),
    ("POST", f"/api/models/{ID}/load"),
    ("POST", f"/api/models/{ID}/unload"),
    ("POST", f"/api/runners/{ID}/kill"),
]
FOREIGN = [
    {"Host": "attacker.example"},
    {"Host": "attacker.example:8090", "Origin": "http://attacker.example:8090"},
    {"Origin": "http://attacker.example"},
    {"Origin": "null"},
    {"Origin": "http://["},
    {"Origin": "http://localhost:1"},
    {"Sec_Fetch_Site": "cross-site"},
    {"Host": "127.0.0.1.attacker.example"},
]


@pytest.mark.parametrize("headers", FOREIGN, ids=lambda headers: str(sorted(headers.items())))
def test_a_page_of_another_site_changes_nothing(front: World, headers: dict[str, str]) -> None:
    """Neither by a request of its own nor with a name that it points here."""
    for method, path in WRITES:
        answer = front.ask(method, path, {"model": ID} if method != "GET" else None, **headers)
        assert answer.status == 403, (method, path)
        answer.close()
    assert front.notes == []
    assert front.supervisor.patched == []


def test_the_own_page_and_plain_clients_may(front: World) -> None:
    """Same origin, by name or by any address; no Origin, as programs send."""
    host = f"localhost:{front.port}"
    for headers in ({"Host": host, "Origin": f"http://{host}", "Sec_Fetch_Site": "same-origin"}, {}, {"Host": "192.168.7.7:80"}):
        assert front.ask("POST", f"/api/models/{ID}/load", **headers).status == 200


def test_a_name_that_is_pointed_here_reads_nothing(front: World) -> None:
    """DNS rebinding would make another site's page read logs and models; health alone is anybody's."""
    for path in ("/api/models", "/api/events", "/v1/models", "/metrics", f"/api/runners/{ID}/log", "/"):
        assert front.ask("GET", path, Host="attacker.example").status == 403
    assert read(front.ask("GET", "/health", Host="attacker.example")) == (200, {"status": "ok"})


def test_no_answer_is_shared_with_other_sites(front: World) -> None:
    """No CORS header on any answer, and a browser's question beforehand gets none."""
    for method, path in (("OPTIONS", "/v1/completions"), ("GET", "/api/models"), ("GET", "/health")):
        answer = front.ask(method, path, Origin="http://attacker.example")
        assert not [name for name in answer.headers if name.lower().startswith("access-control")]


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path, keys=(b"first", b"second"))
    world.engine(ID, answers(ANSWER))
    yield world
    world.close()


def test_a_key_is_asked_for_where_one_is_set(locked: World) -> None:
    """As OpenAI's clients send it and as Anthropic's do; the page's files and health go without."""
    for path in ("/v1/models", "/api/models", "/api/events", "/metrics", "/running"):
        status, told = read(locked.ask("GET", path))
        assert (status, told["error"]["code"]) == (401, "invalid_api_key"), path  # type: ignore[index]
        assert locked.ask("GET", path, Authorization="Bearer firs").status == 401
        assert locked.ask("GET", path, Authorization="Basic first").status == 401
        assert locked.ask("GET", path, Authorization="Bearer second").status == 200
        assert locked.ask("GET", path, X_Api_Key="first").status == 200
    assert read(locked.ask("POST", "/v1/messages", {"model": ID}))[1]["error"]["type"] == "authentication_error"  # type: ignore[index]
    assert [locked.ask("GET", path).status for path in ("/health", "/")] == [200, 200]


def test_keys_are_read_from_the_file_or_the_credential(tmp_path: Path) -> None:
    """One a line, the file before the credential; none set: none asked for."""
    (tmp_path / CREDENTIAL).write_text("from-systemd\n")
    (tmp_path / "keys").write_text("one\n\n two \n")
    env = {"CREDENTIALS_DIRECTORY": str(tmp_path)}
    assert read_keys(str(tmp_path / "keys"), env) == (b"one", b"two")
    assert read_keys("", env) == (b"from-systemd",)
    assert read_keys("", {}) == ()


@pytest.mark.parametrize("content", [None, "", "\n \n"], ids=["missing", "empty", "blank"])
def test_a_key_that_cannot_be_read_locks_the_door(tmp_path: Path, content: str | None) -> None:
    """A file that was to hold a key and does not is an error, never an open server."""
    if content is not None:
        (tmp_path / "keys").write_text(content)
    with pytest.raises(SparkguardError, match="API key"):
        read_keys(str(tmp_path / "keys"), {})


def test_an_event_has_its_object_whole_under_its_kind(front: World) -> None:
    """A model and a runner as in the lists; one that is gone by its id."""
    answer = front.ask("GET", "/api/events")
    answer.readline()
    for told, sent in (
        ({"type": "runner", "id": ID, "state": "ready"}, {"type": "runner", "runner": {"id": ID, "state": "ready"}}),
        ({"type": "model", "id": ID, "state": "removed"}, {"type": "model", "id": ID, "removed": True}),
        ({"type": "dropped", "events": 3}, {"type": "dropped", "events": 3}),
    ):
        front.loop.call(front.supervisor.tell, told)
        assert answer.readline() == b"\n"
        assert json.loads(answer.readline().removeprefix(b"data: ")) == sent
    answer.close()


def test_every_path_is_documented(front: World) -> None:
    """docs/runners.md names each path that the front has, but for the page's files."""
    text = (Path(__file__).parents[2] / "docs" / "runners.md").read_text()
    assert front.server._runner is not None
    app = front.server._runner.app
    served = {resource.canonical for resource in app.router.resources()} - {route.path for route in page.routes()}
    assert len(served) > 40
    assert [path for path in sorted(served) if not re.search(rf"[` ]{re.escape(path)}[`?]", text)] == []
