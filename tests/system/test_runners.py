"""spark-runners.service under a real user manager, with a real llama-server: its start, its words, its reload, its end."""

from __future__ import annotations

import json
import shutil
import time
from typing import TYPE_CHECKING, Any

import mkgguf
import pytest
from guest import CACHE
from system.installed import HOME

from sparkguard.web.service import DRAIN_SECONDS

if TYPE_CHECKING:
    from pathlib import Path

    from system.installed import Installed

UNIT = "spark-runners"
ENGINE = CACHE / "llama" / "engine" / "llama-server"
URL = "http://127.0.0.1:8090"
RUNNERS = "pgrep -u spark -f '^spark-runner: '"
CURL = "curl --silent --show-error --max-time 60"
# Begins a stream of so many tokens and returns when its first event has come; the whole of it stands in ~/stream in the end.
STREAM = r"""
{ exec %(curl)s --no-buffer %(url)s/v1/completions \
    -d '{"model": "%(model)s", "prompt": "x", "max_tokens": %(tokens)d, "stream": true}'
} >~/stream 2>&1 </dev/null &
disown
"""


# A unit that has ended is forgotten by its manager at once.
NOTES_ITS_END = "[Service]\nExecStopPost=/bin/sh -c 'echo $(printenv SERVICE_RESULT EXIT_CODE EXIT_STATUS) >>%h/ends'\n"


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    folder.chmod(0o755)  # the guest's user reads it
    for name in ("a", "b"):
        mkgguf.make(folder / f"{name}.gguf")
    return folder


@pytest.fixture
def runners(installed: Installed, models: Path) -> Installed:
    """Two tiny models, and a front on its usual port."""
    shutil.copytree(models, installed.guest.out / "models")
    installed.exec("cp -r $GUEST_OUT/models ~/models", check=True)
    conf(installed)
    return installed


def conf(installed: Installed, **more: str) -> None:
    installed.conf(SPARK_LLAMA_SERVER=str(ENGINE), SPARK_THREADS="1", **more)


def ask(runners: Installed, path: str, body: object = None, method: str = "") -> Any:
    words = ["--data", json.dumps(body)] if body is not None else []
    words += ["--request", method] if method else []
    done = runners.exec([*CURL.split(), *words, URL + path], check=True)
    return json.loads(done.stdout)


def chat(runners: Installed, model: str = "a") -> str:
    answer = ask(
        runners, "/v1/chat/completions", {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    )
    return str(answer["choices"][0]["message"]["content"])


def begin_stream(runners: Installed, tokens: int, model: str = "a") -> None:
    runners.exec(STREAM % {"curl": CURL, "url": URL, "tokens": tokens, "model": model}, check=True)
    runners.until("grep -q ^data: ~/stream")


def pid_of(runners: Installed, model: str = "a") -> int:
    return int(next(runner["pid"] for runner in ask(runners, "/running")["running"] if runner["id"] == model))


def held(runners: Installed) -> list[int]:
    """Bytes that the runners have reserved, as the guard counts them."""
    claims = runners.guard("other", "--gpu-memory-utilization", "0.01")[1]["claims"]
    return [claim["bytes"] for claim in claims if claim["engine"] == "llama-server"]


def test_it_answers_when_its_start_returns(runners: Installed) -> None:
    """`systemctl start` waits until it listens; the status line says what is loaded, and the reservation follows it."""
    assert runners.start(UNIT) == 0
    state = runners.state(UNIT)
    assert (state["Type"], state["ActiveState"]) == ("notify", "active")
    assert state["StatusText"] == f"2 models, 0 loaded, 0 waiting; {URL}/"
    assert held(runners) == []
    assert len(chat(runners)) > 0
    runners.until_state(UNIT, f"StatusText=2 models, 1 loaded (a), 0 waiting; {URL}/")
    (first,) = held(runners)
    assert len(chat(runners, "b")) > 0
    (both,) = held(runners)
    assert 0 < first < both
    for model in ("a", "b"):
        ask(runners, f"/api/models/{model}/unload", method="POST")
    assert held(runners) == []
    assert runners.exec(RUNNERS).stdout == ""


def test_what_is_not_fit_fails_the_start(runners: Installed) -> None:
    """With the check's status and its words, once, and nothing runs."""
    conf(runners, SPARK_PORT="0")
    assert runners.start(UNIT) == 1
    state = runners.state(UNIT)
    assert (state["ActiveState"], state["NRestarts"], state["ExecMainPID"]) == ("failed", "0", "0")
    assert "status=78" in state["ExecStartPre"]


def test_a_reload_drops_nothing(runners: Installed) -> None:
    """A stream goes on to its end, and a file that has come is served."""
    runners.systemctl("start", UNIT)
    begin_stream(runners, 1900)
    runners.exec("cp ~/models/a.gguf ~/models/c.gguf", check=True)
    main = runners.state(UNIT)["MainPID"]
    runners.systemctl("reload", UNIT)
    runners.until("tail -n 2 ~/stream | grep -q '^data: .DONE.$'")
    runners.until_state(UNIT, f"StatusText=3 models, 1 loaded (a), 0 waiting; {URL}/", f"MainPID={main}")
    assert len(chat(runners, "c")) > 0


def test_a_stop_lets_a_stream_end(runners: Installed) -> None:
    """The stream is whole, the unit has ended well, and no runner and no reservation is left."""
    runners.drop_in(UNIT, NOTES_ITS_END)
    runners.systemctl("start", UNIT)
    begin_stream(runners, 1900)
    runners.systemctl("stop", UNIT)
    assert runners.exec("tail -n 2 ~/stream; cat ~/ends").stdout == "data: [DONE]\n\nsuccess exited 0\n"
    assert runners.exec(RUNNERS).stdout == ""
    assert runners.reservations() == []


def test_a_stop_has_one_deadline(runners: Installed) -> None:
    """A runner that hangs under a stream holds it up for the time of the drain and no longer; the stream ends with an error."""
    runners.drop_in(UNIT, NOTES_ITS_END)
    runners.systemctl("start", UNIT)
    begin_stream(runners, 1900)
    runner = pid_of(runners)
    runners.exec(["kill", "-STOP", str(runner)], check=True)
    began = time.monotonic()
    runners.systemctl("stop", UNIT, timeout=DRAIN_SECONDS + 15)
    assert DRAIN_SECONDS <= time.monotonic() - began < DRAIN_SECONDS + 10
    assert runners.exec("cat ~/ends").stdout == "success exited 0\n"
    assert runners.exec(["test", "-e", f"/proc/{runner}"]).returncode == 1
    assert '"error"' in runners.exec("grep ^data: ~/stream | tail -n 1").stdout


def test_killed_it_comes_back_without_orphans(runners: Installed) -> None:
    """Its runners die with it, their reservation with them, and it starts again by itself."""
    runners.drop_in(UNIT, "[Service]\nRestartSec=50ms\n")
    runners.systemctl("start", UNIT)
    chat(runners)
    runner, main = pid_of(runners), runners.state(UNIT)["MainPID"]
    runners.exec(["kill", "-KILL", main], check=True)
    state = runners.until_state(UNIT, "NRestarts=1", "ActiveState=active")
    assert state["MainPID"] != main
    assert runners.exec(["test", "-e", f"/proc/{runner}"]).returncode == 1
    assert held(runners) == []
    assert len(chat(runners)) > 0
    assert len(runners.exec(RUNNERS).stdout.split()) == 1


def test_the_watchdog_ends_what_is_stuck(runners: Installed) -> None:
    """Alive it outlives the watchdog's time many times over; stopped it is killed for it, and started again."""
    runners.drop_in(UNIT, "[Service]\nWatchdogSec=500ms\nRestartSec=50ms\n")
    runners.systemctl("start", UNIT)
    state = runners.state(UNIT)
    later = int(state["WatchdogTimestampMonotonic"]) + 2_000_000
    runners.until(f"[ $(systemctl --user show -P WatchdogTimestampMonotonic {UNIT}) -gt {later} ]")
    assert runners.state(UNIT)["NRestarts"] == "0"
    runners.exec(["kill", "-STOP", state["MainPID"]], check=True)
    again = runners.until_state(UNIT, "NRestarts=1", "ActiveState=active")
    assert again["MainPID"] != state["MainPID"]
    assert len(chat(runners)) > 0


def test_a_start_of_vllm_may_have_idle_models_unloaded(runners: Installed) -> None:
    """Its unit is refused beside them; where it may ask, it starts, and run-model.sh asks as well."""
    runners.spec("embeddings", "0.80", 8001)
    runners.systemctl("start", UNIT)
    chat(runners)
    assert runners.start("vllm-embeddings") == 1
    assert (runners.refusal("vllm-embeddings") or {})["reason"] == "over_budget"
    conf(runners, VLLM_MEM_ASK_RUNNERS="1")
    assert runners.start("vllm-embeddings") == 0, (runners.refusal("vllm-embeddings") or {})["text"]
    assert held(runners) == []
    runners.systemctl("stop", "vllm-embeddings")
    chat(runners)
    done = runners.exec([f"{HOME}/.local/bin/run-model.sh", "vllm-embeddings"])
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("sparkguard: a unloaded by the runners, to make room for embeddings\n")


def test_the_journal_can_be_asked_for_a_model(runners: Installed) -> None:
    """Its lines, ours and its engine's, with priority, category and the runner; no prompt is among all of them."""
    conf(runners, SPARK_LOG_LEVEL="debug")
    runners.systemctl("start", UNIT)
    canary = "xyzzy canary"
    ask(runners, "/v1/completions", {"model": "a", "prompt": canary, "max_tokens": 3})
    chat(runners, "b")
    ours = f"journalctl --user --unit {UNIT} --output json --no-pager _PID={runners.state(UNIT)['MainPID']}"
    runners.systemctl("stop", UNIT)
    runners.until(f"{ours} SPARK_MODEL=a | grep -q 'model loaded'")
    rows = [json.loads(line) for line in runners.exec(f"{ours} SPARK_MODEL=a", check=True).stdout.splitlines()]
    assert {row["SPARK_RUNNER"] for row in rows} == {"a@1"}
    assert {row["SYSLOG_IDENTIFIER"] for row in rows} == {"sparkguard"}
    ours_of_a = next(row for row in rows if row["MESSAGE"] == "info: supervisor: a: starting on cpu")
    assert (ours_of_a["PRIORITY"], ours_of_a["SPARK_CATEGORY"]) == ("6", "supervisor")
    engines = next(row for row in rows if row["MESSAGE"].endswith("model loaded"))
    assert engines["SPARK_CATEGORY"] == engines["MESSAGE"].split(": ")[1] != "supervisor"
    assert "canary" not in runners.exec(ours, check=True).stdout
