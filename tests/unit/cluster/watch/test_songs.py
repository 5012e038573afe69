"""A song worker by its own /health: what it says is believed for a quarter of a minute."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from stand_in_engine import engine

from sparkguard.cluster.watch.songs import Songs


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({"worker_id": "w1", "accepting": True, "busy": False}, ("ready", "w1", [])),
        ({"worker_id": "w1", "accepting": True, "busy": True, "active_job": {"job_id": "j7"}}, ("busy", "w1", ["j7"])),
        ({"worker_id": "w1", "accepting": False, "busy": False}, ("draining", "w1", [])),
        ({"status": "ok"}, ("unknown", None, [])),  # another server on that port
    ],
)
def test_what_a_worker_says(status: dict[str, Any], expected: tuple[str, str | None, list[str]]) -> None:
    """It takes songs, renders one, or takes none; what says nothing of that is unknown."""

    async def main() -> None:
        async with engine() as served:
            served.health = status
            songs = Songs("head", served.url, lambda: 1.0)
            await songs.look()
            view = songs.view()
        assert (view["state"], view["worker"], view["jobs"]) == expected

    asyncio.run(main())


def test_a_worker_that_falls_silent_is_unknown() -> None:
    """After 15 s, with the reason; a slow answer before that is no news."""

    async def main() -> None:
        clock = [0.0]
        async with engine() as served:
            served.health = {"worker_id": "w1", "accepting": True, "busy": False}
            songs = Songs("head", served.url, lambda: clock[0])
            assert songs.view()["state"] == "unknown"
            await songs.look()
        clock[0] = 10.0
        await songs.look()
        assert (songs.view()["state"], songs.view()["age_s"]) == ("ready", 10.0)
        clock[0] = 16.0
        view = songs.view()
        assert (view["state"], view["accepting"], view["jobs"]) == ("unknown", None, [])
        assert "nothing listens there" in view["error"]

    asyncio.run(main())
