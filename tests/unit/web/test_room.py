"""The door for the guard: what comes through it, what is answered, and who can open it."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import stat
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import cast

import pytest

from sparkguard.errors import OSERR, SparkguardError
from sparkguard.room import NAME
from sparkguard.supervisor.protocol import Refused, Supervisor
from sparkguard.web.room import Door


class Unloads:
    """The one call of a supervisor that the door makes."""

    def __init__(self, error: SparkguardError | None = None) -> None:
        self.error = error
        self.asked: list[dict[str, int]] = []

    async def make_room(self, amounts: Mapping[str, int]) -> tuple[str, ...]:
        self.asked.append(dict(amounts))
        if self.error:
            raise self.error
        return ("a", "b")


def at_the_door(folder: Path, supervisor: Unloads, test: Callable[[Door], Awaitable[None]]) -> None:
    async def run() -> None:
        door = Door(cast(Supervisor, supervisor), str(folder))
        await door.start()
        await test(door)
        await door.close()

    asyncio.run(run())


async def ask(folder: Path, line: bytes) -> dict[str, object]:
    reader, writer = await asyncio.open_unix_connection(str(folder / NAME))
    writer.write(line)
    writer.write_eof()
    told = json.loads(await reader.read())
    writer.close()
    assert isinstance(told, dict)
    return told


def test_a_wish_is_handed_on(home: Path) -> None:
    """Bytes by pool; the names of what was unloaded come back."""
    supervisor = Unloads()

    async def test(door: Door) -> None:
        told = await ask(home, b'{"for": "embeddings", "pools": {"ram": 1000, "gpu0": 5}}\n')
        assert told == {"unloaded": ["a", "b"], "refused": ""}

    at_the_door(home, supervisor, test)
    assert supervisor.asked == [{"ram": 1000, "gpu0": 5}]


def test_nothing_is_unloaded_for_who_has_gone(home: Path) -> None:
    """A supervisor that was stopped for a while reads what was asked when its asker has been refused long since."""
    supervisor = Unloads()

    async def test(door: Door) -> None:
        with socket.socket(socket.AF_UNIX) as guard:
            guard.connect(str(home / NAME))
            guard.sendall(b'{"for": "gone", "pools": {"ram": 1}}\n')
        await ask(home, b'{"for": "here", "pools": {"ram": 2}}\n')

    at_the_door(home, supervisor, test)
    assert supervisor.asked == [{"ram": 2}]


@pytest.mark.parametrize("error", [Refused(503, "busy", "a is busy"), SparkguardError("the ledger is full", None, OSERR)])
def test_a_refusal_is_told(home: Path, error: SparkguardError) -> None:
    """In the supervisor's words."""

    async def test(door: Door) -> None:
        assert await ask(home, b'{"for": "x", "pools": {"ram": 1}}\n') == {"unloaded": [], "refused": error.message}

    at_the_door(home, Unloads(error), test)


NONSENSE = (
    b"", b"\n", b"hello\n", b"[]\n", b"{}\n", b'{"for": "x"}\n', b'{"pools": {"ram": 1}}\n', b'{"for": "x", "pools": {}}\n',
    b"\xff\n", b'{"for": "x", "pools": {"ram": 1e999}}\n',
    b'{"for": "x", "pools": {"ram": 0}}\n', b'{"for": "x", "pools": {"ram": -5}}\n', b'{"for": "x", "pools": {"ram": null}}\n',
    b'{"for": "x", "pools": [1]}\n', b'{"for": "x", "pools": {"ram": 1}', b"[" * 60_000 + b"\n", b"x" * 100_000,
)  # fmt: skip


@pytest.mark.parametrize("line", NONSENSE, ids=range(len(NONSENSE)))
def test_nonsense_unloads_nothing(home: Path, line: bytes) -> None:
    """It is answered, nothing is asked of the supervisor, and the next one is heard."""
    supervisor = Unloads()

    async def test(door: Door) -> None:
        assert await ask(home, line) == {"unloaded": [], "refused": "what was asked cannot be read"}
        assert not supervisor.asked
        assert (await ask(home, b'{"for": "x", "pools": {"ram": 1}}\n'))["unloaded"] == ["a", "b"]

    at_the_door(home, supervisor, test)


def test_only_its_user_can_open_it_and_it_goes(home: Path) -> None:
    """One of an earlier supervisor is replaced; after the end there is none."""
    path = home / NAME
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))

    async def test(door: Door) -> None:
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert (await ask(home, b'{"for": "x", "pools": {"ram": 1}}\n'))["unloaded"] == ["a", "b"]

    at_the_door(home, Unloads(), test)
    assert not path.exists()


def test_without_a_place_for_it_the_rest_works(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is a warning, and no more: only the guard's wish cannot be heard."""

    async def test(door: Door) -> None:
        await asyncio.sleep(0)

    with caplog.at_level(logging.WARNING):
        at_the_door(home / ("x" * 100), Unloads(), test)
    assert "no start of vLLM can ask for room" in caplog.text
