"""The verbs that ask a running supervisor, as processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from stand_in import World

from sparkguard.errors import CONFIG, TEMPFAIL, UNAVAILABLE
from sparkguard.supervisor.protocol import Refused

ID = "folder/model"


@pytest.fixture
def front(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    world.engine(ID)
    yield world
    world.close()


def run(front: World | None, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    port = {"SPARK_PORT": str(front.port)} if front else {}
    return subprocess.run(
        [sys.executable, "-m", "sparkguard", *arguments],
        env={**os.environ, **port, **env},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.parametrize(("verb", "key"), [("models", "models"), ("runners", "runners")])
def test_a_list_is_shown(front: World, verb: str, key: str) -> None:
    """As a table for people, and as the control API's own object for programs."""
    assert ID in run(front, verb).stdout
    assert [row["id"] for row in json.loads(run(front, verb, "--json").stdout)[key]] == [ID]


def test_why_a_list_is_empty_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the supervisor's words, where it has some: its MODELS_DIR may be another than that of who asks."""
    world = World(tmp_path)
    monkeypatch.setattr(world.supervisor, "warning", lambda: "/models cannot be read: No such file or directory")
    try:
        assert run(world, "models").stdout == "/models cannot be read: No such file or directory\n"
    finally:
        world.close()


def test_a_remark_is_made_once(front: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong with a file is also why it does not fit."""
    said = "m.gguf: is no GGUF file"
    broken = {**front.supervisor.models()[0], "error": said, "reason": said, "fits": False}
    monkeypatch.setattr(front.supervisor, "models", lambda: [broken])
    assert run(front, "models").stdout.count("is no GGUF file") == 1


@pytest.mark.parametrize("verb", ["load", "unload"])
def test_a_model_is_loaded_and_unloaded(front: World, verb: str) -> None:
    """By its id, slash and all; the object goes to stdout, the talk to stderr."""
    done = run(front, verb, ID, "--json")
    assert (done.returncode, json.loads(done.stdout)["id"], done.stderr) == (0, ID, "")
    assert f"{verb} {ID}" in front.notes
    assert ID in run(front, verb, ID).stderr


def test_a_refused_load_says_the_arithmetic(front: World) -> None:
    """And its status is the one for later."""
    front.supervisor.refusal = Refused(503, "no_room", "it needs 9 GB, 4 GB are free")
    done = run(front, "load", ID)
    assert (done.returncode, done.stderr) == (TEMPFAIL, "sparkguard: it needs 9 GB, 4 GB are free\n")


def test_a_log_is_shown(front: World) -> None:
    """Line by line, or an object a line."""
    front.loop.call(front.supervisor.all[ID].log.add, "warning: engine: all is: well")
    assert run(front, "logs", ID).stdout == "warning: engine: all is: well\n"
    told = json.loads(run(front, "logs", ID, "--json").stdout)
    assert told == {"level": "warning", "category": "engine", "message": "all is: well"}


def test_a_log_is_followed(front: World) -> None:
    """Each line is there when it is logged."""
    command = [sys.executable, "-m", "sparkguard", "logs", "--follow", ID]
    ring = front.supervisor.all[ID].log
    front.loop.call(ring.add, "info: engine: one")
    with subprocess.Popen(
        command, env={**os.environ, "SPARK_PORT": str(front.port)}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "info: engine: one\n"
        front.loop.call(ring.add, "info: engine: two")
        assert process.stdout.readline() == "info: engine: two\n"
        process.terminate()


@pytest.mark.parametrize("verb", ["load", "unload", "logs"])
def test_an_unknown_model_is_said(front: World, verb: str) -> None:
    """With the status for what will never work."""
    done = run(front, verb, "nobody")
    assert done.returncode == CONFIG
    assert "'nobody'" in done.stderr


def test_no_supervisor_is_said_with_how_to_start_one() -> None:
    """69, and no traceback."""
    done = run(None, "models", SPARK_PORT="1")
    assert done.returncode == UNAVAILABLE
    assert "no supervisor answers on 127.0.0.1:1: Connection refused\n  start it:" in done.stderr


@pytest.mark.parametrize(
    ("setting", "value"),
    [("SPARK_PORT", "many"), ("SPARK_PORT", "-1"), ("SPARK_PORT", ""), ("SPARK_HOST", "a..b"), ("SPARK_HOST", "")],
)
def test_a_setting_that_is_none_is_told(setting: str, value: str) -> None:
    """As `sparkguard serve` tells it."""
    done = run(None, "models", **{setting: value})
    assert done.returncode == CONFIG
    assert done.stderr.startswith(f"sparkguard: {setting}={value!r} in the environment is no ")


@pytest.mark.parametrize(("key", "said"), [(b"", "there is no API key in"), (b"a\0b", "that no request can carry")])
def test_a_key_that_is_none_is_told(key: bytes, said: str, tmp_path: Path) -> None:
    """Before anything is sent."""
    (tmp_path / "key").write_bytes(key)
    done = run(None, "models", SPARK_API_KEY_FILE=str(tmp_path / "key"))
    assert done.returncode == CONFIG and said in done.stderr


def test_a_key_of_any_letters_is_sent(tmp_path: Path) -> None:
    """Byte for byte as it stands in the file."""
    for key in ("schlüssel".encode(), b"\xff\xfe"):
        (tmp_path / "key").write_bytes(key + b"\r\n")
        world = World(tmp_path, keys=(key,))
        try:
            assert run(world, "models", SPARK_API_KEY_FILE=str(tmp_path / "key")).returncode == 0
        finally:
            world.close()


def test_the_key_is_sent(tmp_path: Path) -> None:
    """From the file that the server reads as well; without it the answer says what is missing."""
    world = World(tmp_path, keys=(b"secret",))
    (tmp_path / "key").write_text("secret\n")
    try:
        assert run(world, "models", SPARK_API_KEY_FILE=str(tmp_path / "key")).returncode == 0
        refused = run(world, "models")
        assert refused.returncode == CONFIG
        assert "SPARK_API_KEY_FILE" in refused.stderr
    finally:
        world.close()
