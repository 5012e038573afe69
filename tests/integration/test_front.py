"""The front before a real llama-server, asked by the clients that people use."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import anthropic
import mkgguf
import openai
import pytest
from stand_in import SECONDS, World

CACHE = Path(os.environ.get("SPARKGUARD_TEST_CACHE", "/var/cache/sparkguard-tests"))
ASKED = [{"role": "user", "content": "hi"}]


class Engine:
    """A llama-server on a Unix socket."""

    def __init__(self, folder: Path, name: str, *arguments: str) -> None:
        self.socket = str(folder / f"{name}.sock")
        model = mkgguf.make(folder / f"{name}.gguf")
        command = [CACHE / "llama" / "engine" / "llama-server", "-m", model, "--host", self.socket, "--alias", name]
        options = ["-t", "1", "-c", "2048", "-np", "1", "--cache-ram", "0", "--no-warmup", *arguments]
        self.process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        assert any("listening" in line for line in self.process.stderr), "it did not start"
        self._drain = subprocess.Popen(["cat"], stdin=self.process.stderr, stdout=subprocess.DEVNULL)

    def ask(self, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
        """Directly, past the front."""
        return ask(Unix(self.socket), method, path, body)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._drain.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()


class Unix(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=SECONDS)
        self._path = path

    def connect(self) -> None:
        import socket

        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(SECONDS)
        self.sock.connect(self._path)


def ask(connection: http.client.HTTPConnection, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
    connection.request(method, path, body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    read = answer.status, answer.read()
    connection.close()
    return read


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine(tmp_path_factory.mktemp("engine"), "tiny")
    yield engine
    engine.close()


@pytest.fixture
def front(engine: Engine, tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    world.loop.call(world.supervisor.start, "folder/tiny", engine.socket)
    world.loop.call(world.supervisor.aliases.__setitem__, "gpt", "folder/tiny")
    yield world
    world.close()


@pytest.fixture
def gpt(front: World) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def claude(front: World) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=front.url, api_key="none", max_retries=0) as client:
        yield client


def test_a_chat_is_answered_and_its_tokens_are_counted(gpt: openai.OpenAI, front: World) -> None:
    """OpenAI's client gets an answer of the length that it asked for, under a model's alias."""
    answer = gpt.chat.completions.create(model="gpt", messages=ASKED, max_tokens=5)  # type: ignore[arg-type]
    assert answer.choices[0].message.content
    assert answer.usage and answer.usage.completion_tokens == 5
    assert front.tokens == [(answer.usage.prompt_tokens, 5)]


def test_a_streamed_chat_comes_in_pieces(gpt: openai.OpenAI, front: World) -> None:
    """One event a token, and the tokens are counted though the client did not ask for usage."""
    stream = gpt.chat.completions.create(model="folder/tiny", messages=ASKED, max_tokens=6, stream=True)  # type: ignore[arg-type]
    pieces = [chunk.choices[0].delta.content for chunk in stream if chunk.choices[0].delta.content]
    assert len(pieces) == 6
    assert front.tokens[0][1] == 6
    assert front.tokens[0][0] > 0


def test_a_completion_is_answered(gpt: openai.OpenAI) -> None:
    """The older API of OpenAI works as well."""
    answer = gpt.completions.create(model="gpt", prompt="hi", max_tokens=4)
    assert answer.usage and answer.usage.completion_tokens == 4


def test_a_response_is_answered(gpt: openai.OpenAI, front: World) -> None:
    """OpenAI's Responses API, whole and streamed."""
    whole = gpt.responses.create(model="gpt", input="hi", max_output_tokens=4)
    assert whole.usage and whole.usage.output_tokens == 4
    kinds = [event.type for event in gpt.responses.create(model="gpt", input="hi", max_output_tokens=4, stream=True)]
    assert kinds[-1] == "response.completed"
    assert [generated for _, generated in front.tokens] == [4, 4]


def test_anthropics_client_is_answered(claude: anthropic.Anthropic, front: World) -> None:
    """Anthropic's Messages API, whole and streamed, and its count of tokens."""
    whole = claude.messages.create(model="gpt", max_tokens=4, messages=ASKED)  # type: ignore[arg-type]
    assert whole.usage.output_tokens == 4
    with claude.messages.stream(model="gpt", max_tokens=4, messages=ASKED) as stream:  # type: ignore[arg-type]
        assert stream.get_final_message().usage.output_tokens == 4
    assert claude.messages.count_tokens(model="gpt", messages=ASKED).input_tokens > 1  # type: ignore[arg-type]
    assert [generated for _, generated in front.tokens] == [4, 4, 0]
    assert front.tokens[0][0] == front.tokens[1][0] > 1


def test_embeddings_are_answered(front: World, gpt: openai.OpenAI, tmp_path: Path) -> None:
    """A vector for each text."""
    engine = Engine(tmp_path, "vectors", "--embeddings", "--pooling", "mean")
    front.loop.call(front.supervisor.start, "vectors", engine.socket)
    try:
        answer = gpt.embeddings.create(model="vectors", input=["one", "two"], encoding_format="float")
        assert [len(row.embedding) for row in answer.data] == [64, 64]
        assert front.tokens[0][0] == answer.usage.prompt_tokens > 0
    finally:
        engine.close()


def test_the_models_are_listed_for_both_clients(gpt: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    """Each client reads the list in its own API's words; a model whose id has a slash can be asked for alone."""
    assert [model.id for model in gpt.models.list()] == ["folder/tiny"]
    assert gpt.models.retrieve("folder/tiny").id == "folder/tiny"
    assert [model.id for model in claude.models.list()] == ["folder/tiny"]


def test_the_engines_own_paths_are_for_a_named_model(front: World, engine: Engine) -> None:
    """What llama-server answers goes on byte for byte, whether body or query names the model."""
    body = json.dumps({"model": "gpt", "content": "hello"})
    directly = engine.ask("POST", "/tokenize", body)
    assert ask(http.client.HTTPConnection("127.0.0.1", front.port), "POST", "/tokenize", body) == directly
    unnamed = json.dumps({"content": "hello"})
    assert ask(http.client.HTTPConnection("127.0.0.1", front.port), "POST", "/tokenize?model=gpt", unnamed) == directly
    status, props = ask(http.client.HTTPConnection("127.0.0.1", front.port), "GET", "/props?model=gpt")
    assert (status, json.loads(props)["total_slots"]) == (200, 1)


def test_a_stream_is_passed_on_byte_for_byte(front: World, engine: Engine) -> None:
    """But for its ids, times and dates it is what the engine sends."""
    import re

    body = json.dumps({"model": "gpt", "prompt": "hi", "n_predict": 20, "stream": True, "temperature": 0, "cache_prompt": False})
    through = ask(http.client.HTTPConnection("127.0.0.1", front.port), "POST", "/completion", body)
    directly = engine.ask("POST", "/completion", body)
    both = [re.sub(rb'"timings":\{[^}]*\}', b"", raw) for _, raw in (through, directly)]
    assert both[0] == both[1]
    assert both[0].count(b"data: ") > 20


def test_the_hundredth_answer_and_a_stream_between_break_nothing(front: World) -> None:
    """The engine closes a connection after 100 answers, and after each stream whatever it says: no request is lost by it."""
    connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=SECONDS)
    whole = json.dumps({"model": "gpt", "content": "x"})
    streamed = json.dumps({"model": "gpt", "prompt": "x", "n_predict": 1, "stream": True})
    statuses = set()
    for number in range(230):
        path, body = ("/completion", streamed) if number % 50 == 49 else ("/tokenize", whole)
        connection.request("POST", path, body)
        answer = connection.getresponse()
        answer.read()
        statuses.add(answer.status)
    connection.close()
    assert statuses == {200}
    assert "replay" not in front.notes


def test_the_engines_refusal_is_told_in_the_apis_words(gpt: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    """A request that llama-server itself refuses keeps its status and its sentence, in either API's shape."""
    with pytest.raises(openai.BadRequestError) as by_openai:
        gpt.chat.completions.create(model="gpt", messages=[{"role": "nobody"}])  # type: ignore[list-item]
    with pytest.raises(anthropic.BadRequestError) as by_anthropic:
        claude.messages.create(model="gpt", max_tokens=4, messages=[{"role": "user", "content": "x" * 9000}])  # type: ignore[arg-type]
    assert isinstance(by_openai.value.body, dict) and by_openai.value.body["message"]
    assert isinstance(by_anthropic.value.body, dict) and by_anthropic.value.body["type"] == "error"
    assert by_anthropic.value.body["error"]["message"]


def test_a_client_that_leaves_frees_the_engine(front: World, engine: Engine) -> None:
    """The generation ends with its stream, so that the next request does not wait for two thousand tokens."""
    endless = json.dumps({"model": "gpt", "prompt": "hi", "n_predict": 1900, "stream": True})
    connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=SECONDS)
    connection.request("POST", "/completion", endless)
    answer = connection.getresponse()
    answer.read(10)
    answer.close()
    connection.close()
    front.wait("failed")
    status, answered = ask(
        http.client.HTTPConnection("127.0.0.1", front.port),
        "POST",
        "/completion",
        json.dumps({"model": "gpt", "prompt": "x", "n_predict": 1}),
    )
    assert (status, json.loads(answered)["tokens_predicted"]) == (200, 1)


def test_a_killed_runner_ends_its_stream_with_one_error(tmp_path: Path) -> None:
    """OpenAI's client raises what the one error event says; nothing of the answer before it is lost."""
    engine = Engine(tmp_path, "doomed")
    world = World(tmp_path)
    try:
        world.loop.call(world.supervisor.start, "doomed", engine.socket)
        with openai.OpenAI(base_url=f"{world.url}/v1", api_key="none", max_retries=0) as client:
            stream = client.completions.create(model="doomed", prompt="hi", max_tokens=1900, stream=True)
            next(iter(stream))
            engine.process.kill()
            with pytest.raises(openai.APIError, match="the answer ends here"):
                list(stream)
        assert world.notes[-1] == "failed"
    finally:
        engine.close()
        world.close()
