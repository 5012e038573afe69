"""The feed: everybody hears, and nobody waits for anybody."""

from __future__ import annotations

import asyncio

from sparkguard.cluster.ui.feed import QUEUE_LIMIT, Feed, Ring


def test_a_slow_viewer_is_cut_off_and_holds_up_nobody() -> None:
    """One that does not read is ended once its messages would not fit; the other gets all of them."""

    async def play() -> tuple[int, object]:
        feed = Feed()
        with feed.viewer() as slow, feed.viewer() as quick:
            heard = 0
            for number in range(QUEUE_LIMIT + 5):
                feed.put({"number": number})
                heard += (await quick.get(1)) == {"number": number}
            return heard, await slow.get(1)

    assert asyncio.run(play()) == (QUEUE_LIMIT + 5, None)


def test_watched_follows_the_viewers() -> None:
    """It is set from the first viewer to the last, even where that one was cut off."""

    async def play() -> list[bool]:
        feed = Feed()
        seen = [feed.watched.is_set()]
        with feed.viewer():
            seen.append(feed.watched.is_set())
            with feed.viewer():
                pass
            seen.append(feed.watched.is_set())
        seen.append(feed.watched.is_set())
        return seen

    assert asyncio.run(play()) == [False, True, True, False]


def test_silence_is_a_beat() -> None:
    """A viewer hears something even when nothing happens, and nothing is lost by it."""

    async def play() -> list[object]:
        feed = Feed()
        with feed.viewer() as viewer:
            first = await viewer.get(0.01)
            feed.put({"type": "busy"})
            return [first, await viewer.get(1)]

    assert asyncio.run(play()) == [{"type": "beat"}, {"type": "busy"}]


def test_a_ring_keeps_the_last() -> None:
    """The oldest go first."""
    ring = Ring(2)
    for number in range(4):
        ring.add({"number": number})
    assert ring.items() == [{"number": 2}, {"number": 3}]


def test_progress_takes_the_place_of_progress() -> None:
    """An hour's download leaves one line a node, and all that was said before it."""
    ring = Ring(3)
    ring.add({"event": "begin"})
    for done in range(10):
        for node in ("head", "worker"):
            ring.supersede({"event": "pull_progress", "node": node, "done": done}, ("event", "node"))
    assert [(item["event"], item.get("node"), item.get("done")) for item in ring.items()] == [
        ("begin", None, None),
        ("pull_progress", "head", 9),
        ("pull_progress", "worker", 9),
    ]
