"""`sparkguard serve` as a process, with a real llama-server behind it, from its start to its end."""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import mkgguf
import pytest

from sparkguard.errors import CONFIG, NOT_FOUND, UNAVAILABLE

CACHE = Path(os.environ.get("SPARKGUARD_TEST_CACHE", "/var/cache/sparkguard-tests"))
ENGINE = CACHE / "llama" / "engine" / "llama-server"
SECONDS = 30.0


class Serve:
    """The process, its port, and the socket that stands for systemd's."""

    def __init__(self, home: Path, **settings: str) -> None:
        self.home = home
        (home / "models").mkdir(exist_ok=True)
        for name in ("a", "b"):
            mkgguf.make(home / "models" / f"{name}.gguf")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.notices.bind(str(home / "notify"))
        self.notices.settimeout(SECONDS)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sparkguard", "serve"],
            env={**environment(home), "SPARK_PORT": str(self.port), "NOTIFY_SOCKET": str(home / "notify"), **settings},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.notice("READY=1")
        self._connections: list[http.client.HTTPConnection] = []

    def notice(self, start: str) -> str:
        """Waits for what systemd would be told."""
        while True:
            text = self.notices.recv(4096).decode()
            if start in text:
                return text

    def ask(self, method: str, path: str, body: object = None, **headers: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        self._connections.append(connection)
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        return connection.getresponse()

    def json(self, method: str, path: str, body: object = None, **headers: str) -> dict[str, object]:
        with self.ask(method, path, body, **headers) as answer:
            parsed = json.loads(answer.read())
        assert isinstance(parsed, dict)
        return parsed

    def stream(self, tokens: int, **headers: str) -> http.client.HTTPResponse:
        """A stream whose first line has come."""
        body = {"model": "a", "prompt": "hi", "max_tokens": tokens, "stream": True}
        answer = self.ask("POST", "/v1/completions", body, **headers)
        assert answer.readline().startswith(b"data: ")
        return answer

    def runner(self, model: str = "a") -> dict[str, object]:
        runners = self.json("GET", "/api/runners")["runners"]
        assert isinstance(runners, list)
        return next(runner for runner in runners if runner["model"] == model)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()
        self.notices.close()


def environment(home: Path) -> dict[str, str]:
    return {
        **os.environ,
        "MODELS_DIR": str(home / "models"),
        "SPARK_LLAMA_SERVER": str(ENGINE),
        "SPARK_MEMORY_RESERVE_MB": "64",
        "SPARK_THREADS": "1",
    }


def check(home: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sparkguard", "serve", "--check"]
    env = {**environment(home), **settings}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)


@pytest.fixture
def serve(home: Path) -> Iterator[Serve]:
    serve = Serve(home, SPARK_API_KEY_FILE="")
    yield serve
    serve.close()


def gone(pid: object) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_model_answers_on_demand_and_systemd_is_told(serve: Serve) -> None:
    """The first request loads it; the status line says how many are loaded."""
    answer = serve.json("POST", "/v1/completions", {"model": "a", "prompt": "hi", "max_tokens": 3})
    assert answer["usage"]["completion_tokens"] == 3  # type: ignore[index]
    assert answer["model"] == "a"
    assert "2 models, 1 loaded (a)" in serve.notice("1 loaded")


def test_a_rank_model_ranks(home: Path) -> None:
    """What its header says it is for is what it is started for: each text gets its own score, under each of the paths' names."""
    (home / "models").mkdir()
    mkgguf.make_ranker(home / "models" / "ranker.gguf")
    serve = Serve(home)
    try:
        body = {"model": "ranker", "query": "what is a panda", "documents": ["a bear", "hello", "panda panda", "a bear"]}
        told = [serve.json("POST", path, body) for path in ("/v1/rerank", "/rerank", "/v1/reranking", "/reranking")]
        scores = {row["index"]: row["relevance_score"] for row in told[0]["results"]}  # type: ignore[attr-defined]
        assert sorted(scores) == [0, 1, 2, 3]
        assert scores[0] == pytest.approx(scores[3], abs=1e-4)
        assert len({round(score, 3) for score in scores.values()}) == 3
        assert told[0] == told[1] == told[2] == told[3]
        with serve.ask("POST", "/v1/rerank", {**body, "documents": []}) as answer:
            assert (answer.status, "documents" in json.loads(answer.read())["error"]["message"]) == (400, True)
        assert serve.runner("ranker")["requests"] == 5
    finally:
        serve.close()


def test_the_engines_own_metrics(serve: Serve) -> None:
    """Of the model that is named, and refused to another site's page, since they load it; ours are of all models."""
    with serve.ask("GET", "/metrics?model=a") as answer:
        assert (answer.status, "llamacpp:prompt_tokens_total" in answer.read().decode()) == (200, True)
    assert serve.ask("GET", "/metrics?model=a", Origin="http://elsewhere.example").status == 403
    assert serve.ask("GET", "/metrics?model=nobody").status == 404
    with serve.ask("GET", "/metrics") as answer:
        assert 'spark_requests_total{model="a"}' in answer.read().decode()


def test_a_killed_runner_ends_its_stream_with_one_error_and_the_next_request_works(serve: Serve) -> None:
    """The error says what the supervisor saw; the model is loaded again."""
    stream = serve.stream(1900)
    os.kill(int(str(serve.runner()["pid"])), signal.SIGKILL)
    last = stream.read().decode().rstrip().rpartition("data: ")[2]
    assert "killed (SIGKILL)" in json.loads(last)["error"]["message"]
    answer = serve.json("POST", "/v1/completions", {"model": "a", "prompt": "hi", "max_tokens": 3})
    assert answer["usage"]["completion_tokens"] == 3  # type: ignore[index]


def test_sigterm_lets_a_stream_end_and_leaves_nothing(serve: Serve) -> None:
    """The stream is whole, the status 0, and no runner and no socket stays behind."""
    stream = serve.stream(300)
    pid = serve.runner()["pid"]
    serve.process.send_signal(signal.SIGTERM)
    serve.notice("STOPPING=1")
    assert stream.read().endswith(b"data: [DONE]\n\n")
    assert serve.process.wait(SECONDS) == 0
    assert gone(pid)
    runners = serve.home / "run" / "sparkguard" / "runners"
    assert [path.name for path in runners.iterdir()] == ["lock"]


def test_a_killed_supervisor_takes_its_runners_along(serve: Serve) -> None:
    """No orphan holds memory, and the next supervisor starts."""
    serve.json("POST", "/api/models/a/load")
    pid = serve.runner()["pid"]
    watch = os.pidfd_open(int(str(pid)))
    serve.process.kill()
    serve.process.wait()
    assert select.select([watch], [], [], SECONDS)[0], "the runner lives on"
    os.close(watch)
    serve.notices.close()
    (serve.home / "notify").unlink()
    second = Serve(serve.home)
    try:
        assert second.json("POST", "/v1/completions", {"model": "a", "prompt": "x", "max_tokens": 1})["model"] == "a"
    finally:
        second.close()


def test_sighup_reads_keys_and_models_again_and_drops_no_request(home: Path) -> None:
    """A changed key counts from then on; a stream under the old one ends whole, and a new file is served."""
    key = home / "key"
    key.write_text("old\n")
    serve = Serve(home, SPARK_API_KEY_FILE=str(key))
    try:
        stream = serve.stream(300, Authorization="Bearer old")
        key.write_text("new\n")
        mkgguf.make(home / "models" / "c.gguf")
        serve.process.send_signal(signal.SIGHUP)
        serve.notice("RELOADING=1")
        serve.notice("READY=1")
        assert stream.read().endswith(b"data: [DONE]\n\n")
        assert serve.ask("GET", "/v1/models", Authorization="Bearer old").status == 401
        listed = serve.json("GET", "/v1/models", Authorization="Bearer new")["data"]
        assert [model["id"] for model in listed] == ["a", "b", "c"]  # type: ignore[attr-defined]
    finally:
        serve.close()


def test_a_reload_with_a_bad_setting_changes_nothing(home: Path) -> None:
    """It is logged, and the server goes on as before."""
    key = home / "key"
    key.write_text("good\n")
    serve = Serve(home, SPARK_API_KEY_FILE=str(key))
    try:
        key.write_text("")
        serve.process.send_signal(signal.SIGHUP)
        serve.notice("RELOADING=1")
        serve.notice("READY=1")
        assert serve.ask("GET", "/v1/models", Authorization="Bearer good").status == 200
        assert serve.process.stderr is not None
        assert any(line.startswith("error: serve: not reloaded: there is no API key") for line in serve.process.stderr)
    finally:
        serve.close()


def test_the_watchdog_is_fed(home: Path) -> None:
    """Twice in the time that systemd allows."""
    serve = Serve(home, WATCHDOG_USEC="200000")
    try:
        serve.notice("WATCHDOG=1")
        serve.notice("WATCHDOG=1")
    finally:
        serve.close()


def test_the_prompt_is_in_no_log(home: Path) -> None:
    """Not at the most talkative level, on stderr, in the ring or in a file."""
    canary = "xyzzy canary"
    serve = Serve(home, SPARK_LOG_LEVEL="debug")
    try:
        serve.json("POST", "/v1/completions", {"model": "a", "prompt": canary, "max_tokens": 3})
        serve.ask("POST", "/v1/completions", {"model": canary, "prompt": canary}).close()
        serve.ask("POST", "/v1/chat/completions", {"model": "a", "messages": canary}).close()
        with serve.ask("GET", "/api/runners/a/log") as log:
            ring = log.read().decode()
        assert "model loaded" in ring
        serve.process.send_signal(signal.SIGTERM)
        assert serve.process.stderr is not None
        stderr = serve.process.stderr.read()
        files = "".join(path.read_text() for path in (home / ".local" / "state" / "sparkguard" / "logs").iterdir())
        assert "model loaded" in stderr
        assert "model loaded" in files
        assert "canary" not in ring + stderr + files
    finally:
        serve.close()


def test_what_is_not_fit_is_said_before_anything_starts(home: Path) -> None:
    """Each with its status: settings, key, engine. What is fit is said with the engine's path."""
    assert check(home, SPARK_PORT="0").returncode == CONFIG
    assert check(home, SPARK_API_KEY_FILE=str(home / "nothing")).returncode != 0
    assert check(home, SPARK_LLAMA_SERVER="/nowhere/llama-server").returncode == NOT_FOUND
    fit = check(home)
    assert fit.returncode == 0
    assert str(ENGINE.resolve()) in fit.stderr


def test_a_taken_port_is_said(serve: Serve, home: Path, tmp_path: Path) -> None:
    """69 and the setting to change; nothing of the second supervisor stays behind."""
    (tmp_path / "run").mkdir(mode=0o700)
    env = {**environment(home), "SPARK_PORT": str(serve.port), "XDG_RUNTIME_DIR": str(tmp_path / "run")}
    command = [sys.executable, "-m", "sparkguard", "serve"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == UNAVAILABLE
    assert "cannot be listened on: Address already in use\n  choose others with SPARK_HOST and SPARK_PORT" in done.stderr


def documented_keys(heading: str) -> set[str]:
    """The names in backticks in the first column of the table under a heading of docs/runners.md."""
    text = (Path(__file__).parents[2] / "docs" / "runners.md").read_text()
    rows = text.partition(f"### {heading}\n")[2].partition("\n#")[0].splitlines()
    return {key for row in rows if row.startswith("| `") for key in re.findall(r"`([^`]+)`", row.split("|")[1])}


def documented_parts(heading: str, key: str) -> set[str]:
    """The names in backticks in the row of one key."""
    text = (Path(__file__).parents[2] / "docs" / "runners.md").read_text()
    rows = text.partition(f"### {heading}\n")[2].partition("\n#")[0].splitlines()
    return set(re.findall(r"`([^`]+)`", next(row for row in rows if row.startswith(f"| `{key}`")).split("|")[2]))


def test_every_key_of_the_control_api_is_documented(serve: Serve) -> None:
    """docs/runners.md names the keys that a real supervisor answers with, and no other."""
    loaded = serve.json("POST", "/api/models/a/load")
    assert loaded.keys() == documented_keys("A model")
    assert loaded["needs"].keys() == documented_parts("A model", "needs")  # type: ignore[attr-defined]
    assert loaded["settings"].keys() == documented_parts("A model", "settings")  # type: ignore[attr-defined]
    assert serve.json("GET", "/api/models/a").keys() == loaded.keys()
    assert serve.runner().keys() == documented_keys("A runner")
    for device in serve.json("GET", "/api/devices")["devices"]:  # type: ignore[attr-defined]
        assert device.keys() == documented_keys("A device")


def test_nobody_who_does_not_read_the_log_holds_the_supervisor_up(home: Path) -> None:
    """A pipe takes 64 KB; far more than that is logged, unread, and the last request is answered like the first."""
    serve = Serve(home, SPARK_LOG_LEVEL="debug")
    try:
        for _ in range(15):
            serve.json("POST", "/api/models/a/load")
            serve.json("POST", "/api/models/a/unload")
        serve.process.send_signal(signal.SIGTERM)
        assert serve.process.wait(SECONDS) == 0
        assert serve.process.stderr is not None
        assert 60_000 < len(serve.process.stderr.read()) <= 1 << 16
    finally:
        serve.close()


@pytest.mark.parametrize("seed", range(20))
def test_impatient_clients_cost_the_patient_nothing(crowded: Serve, seed: int) -> None:
    """Three models, one of them loaded at most, six clients of which a third leave early: every patient one is answered, none
    waits longer than all the requests before it with a swap each.
    """
    chance = random.Random(seed)
    work = [[(chance.choice("abc"), chance.random() < 0.35) for _ in range(3)] for _ in range(6)]
    swap = swap_seconds(crowded)
    waits: list[float] = []
    failures: list[object] = []

    def client(requests: list[tuple[str, bool]]) -> None:
        for model, leaves in requests:
            began = time.monotonic()
            connection = http.client.HTTPConnection("127.0.0.1", crowded.port, timeout=0.15 if leaves else SECONDS)
            try:
                connection.request("POST", "/v1/completions", json.dumps({"model": model, "prompt": "x", "max_tokens": 40}))
                answer = connection.getresponse()
                if answer.status != 200:
                    failures.append((answer.status, answer.read()))
                answer.read()
            except OSError as error:
                if not leaves:
                    failures.append(error)
            finally:
                connection.close()
            if not leaves:
                waits.append(time.monotonic() - began)

    clients = [threading.Thread(target=client, args=(requests,)) for requests in work]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    assert failures == []
    assert max(waits) <= len(work) * len(work[0]) * max(swap, 0.25)


def test_the_next_model_starts_while_the_former_ends(crowded: Serve) -> None:
    """There is memory for both of them, so that the place of the one that was told to stop is enough."""

    def ask(model: str) -> None:
        answer = crowded.json("POST", "/v1/completions", {"model": model, "prompt": "x", "max_tokens": 1})
        assert "usage" in answer, answer

    ask("a")
    ask("b")
    with crowded.ask("GET", "/api/events") as events:
        ask("a")
        seen: list[tuple[str, str]] = []
        while ("b", "stopped") not in seen or ("a", "ready") not in seen:
            if (line := events.readline()).startswith(b"data: "):
                event = json.loads(line.removeprefix(b"data: "))
                if event["type"] == "runner":
                    seen.append((event["runner"]["id"], event["runner"]["state"]))
    assert seen.index(("b", "stopping")) < seen.index(("a", "starting")) < seen.index(("b", "stopped"))


def swap_seconds(serve: Serve) -> float:
    """The longest of a few swaps, on this machine, as it is now."""
    times = []
    for model in "abcab":
        began = time.monotonic()
        serve.json("POST", "/v1/completions", {"model": model, "prompt": "x", "max_tokens": 40})
        times.append(time.monotonic() - began)
    return max(times)


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    home = tmp_path_factory.mktemp("crowded")
    (home / "run").mkdir(mode=0o700)
    (home / "models").mkdir()
    mkgguf.make(home / "models" / "c.gguf")
    folders = {"HOME": str(home), "XDG_RUNTIME_DIR": str(home / "run"), "XDG_CONFIG_HOME": "", "XDG_STATE_HOME": ""}
    serve = Serve(home, SPARK_MAX_LOADED_MODELS="1", **folders)
    yield serve
    serve.close()


def test_an_engine_without_sockets_serves_at_a_port(home: Path) -> None:
    """The real one, whose --help says nothing of sockets; a request finds its way there with the start's key."""
    engine = home / "llama-server"
    engine.write_text(f'''#!/bin/sh
[ "$1" = --help ] && {{ "{ENGINE}" --help | grep -v sock; exit; }}
exec "{ENGINE}" "$@"
''')
    engine.chmod(0o755)
    served = Serve(home, SPARK_LLAMA_SERVER=str(engine))
    try:
        answer = served.json("POST", "/v1/completions", {"model": "a", "prompt": "hi", "max_tokens": 2})
        assert answer["usage"]["completion_tokens"] == 2  # type: ignore[index]
        assert not list((home / "run" / "sparkguard" / "runners").glob("*.sock"))
    finally:
        served.close()
