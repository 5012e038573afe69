"""What the page asks for, as arguments of spark-serve; and one verb at a time."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest

from sparkguard.cluster.ui import bench
from sparkguard.cluster.ui.actions import Actions, BadAction, Busy, command
from sparkguard.cluster.ui.feed import Feed

COMMANDS: dict[str, tuple[dict[str, Any], list[str], str | None]] = {
    "start": ({"verb": "up", "model": "ds4"}, ["up", "--json", "ds4"], None),
    "start on one": (
        {"verb": "up", "model": "q", "node": "worker", "no_hermes": True},
        ["up", "--json", "--node=worker", "--no-hermes", "q"],
        None,
    ),
    "false and null are left out": ({"verb": "stop", "node": None, "cancel_jobs": False}, ["stop", "--json"], None),
    "a password is no argument": ({"verb": "reboot", "password": "x"}, ["reboot", "--json", "--sudo-password-stdin"], "x"),
}


@pytest.mark.parametrize(("asked", "argv", "secret"), COMMANDS.values(), ids=COMMANDS)
def test_a_request_is_a_command_line(asked: dict[str, Any], argv: list[str], secret: str | None) -> None:
    """The arguments, and what goes to standard input."""
    assert command(asked) == (argv, secret)


BAD: dict[str, dict[str, Any]] = {
    "unknown verb": {"verb": "logs"},
    "a verb that is no text": {"verb": ["up"]},
    "an option of another verb": {"verb": "stop", "no_hermes": True},
    "a value that is a flag": {"verb": "up", "model": "--print-cmd"},
    "a number": {"verb": "up", "model": 4},
    "true for a value": {"verb": "up", "model": True},
    "no model": {"verb": "up"},
    "a password for a start": {"verb": "up", "model": "ds4", "password": "x"},
    "two lines for sudo": {"verb": "reboot", "password": "x\nrm"},
}


@pytest.mark.parametrize("asked", BAD.values(), ids=BAD)
def test_what_is_no_request(asked: dict[str, Any]) -> None:
    """What names no verb, or gives it what it does not take, is refused before anything runs."""
    with pytest.raises(BadAction):
        command(asked)


def test_a_benchmark_is_a_command_line() -> None:
    """Every value is bound to its flag, and empty ones are left out."""
    asked = {"node": "both", "kind": "decode", "requests": 3, "concurrency": "1,4", "prompt_tokens": ""}
    assert bench.arguments(asked) == [
        "bench",
        "run",
        "--json",
        "--node=both",
        "--kind=decode",
        "--requests=3",
        "--concurrency=1,4",
    ]


@pytest.mark.parametrize("asked", [[], {"model": "x"}, {"requests": True}, {"requests": "3"}, {"node": "--url"}], ids=repr)
def test_what_is_no_benchmark(asked: object) -> None:
    """Unknown keys, other types and values that begin a flag are refused."""
    with pytest.raises(ValueError):
        bench.arguments(asked)


SPEAKER = """
import json, sys
print(json.dumps({"event": "stopped", "words": "all is stopped"}), flush=True)
print("no JSON", flush=True)
sys.stderr.write("spark-serve: of no use\\n")
sys.exit(75)
"""


def test_a_verb_is_told_to_the_end() -> None:
    """Its events, what it said on stderr, its status, and a look afterwards; a second verb is refused."""

    async def play() -> tuple[list[dict[str, Any]], bool]:
        feed = Feed()
        actions = Actions((sys.executable, "-c", SPEAKER), feed)
        told: list[dict[str, Any]] = []
        refused = False
        with feed.viewer() as viewer:
            actions.begin({"verb": "stop"})
            try:
                actions.begin({"verb": "stop"})
            except Busy:
                refused = True
            while not told or told[-1]["type"] != "status":
                message = await viewer.get(30)
                assert message is not None
                told.append(message)
        await actions.close()
        return told, refused

    told, refused = asyncio.run(play())
    words = [message["line"].get("words") for message in told if message["type"] == "activity"]
    assert refused
    assert words == ["spark-serve stop --json", "all is stopped", "spark-serve: of no use", "stop ended with status 75"]
    assert [message["running"] is None for message in told if message["type"] == "busy"] == [False, True]
    assert "secret" not in json.dumps(told)


def test_a_download_leaves_one_line_of_progress() -> None:
    """What a page that connects later is given: the newest figure of each node, and nothing else was pushed out."""
    lines = [{"event": "pull_progress", "node": node, "text": f"{done} %"} for done in range(50) for node in ("head", "worker")]
    script = f"import json\nfor line in {lines!r}: print(json.dumps(line), flush=True)"

    async def play() -> list[dict[str, Any]]:
        feed = Feed()
        actions = Actions((sys.executable, "-c", script), feed)
        with feed.viewer() as viewer:
            actions.begin({"verb": "pull", "model": "ds4"})
            while (message := await viewer.get(30)) is not None and message["type"] != "status":
                assert message["type"] != "beat"
        await actions.close()
        return actions.activity()

    told = [(line["event"], line.get("text")) for line in asyncio.run(play())]
    assert told == [("begin", None), ("pull_progress", "49 %"), ("pull_progress", "49 %"), ("end", None)]
