"""A deadline that loses neither a result nor a cancellation."""

from __future__ import annotations

import asyncio

import pytest

from sparkguard.cluster.deadline import within


def test_a_result_in_time() -> None:
    """It is the work's own, and so is its error."""

    async def work(fail: bool) -> int:
        await asyncio.sleep(0)
        if fail:
            raise KeyError("x")
        return 7

    assert asyncio.run(within(5, work(False))) == 7
    assert asyncio.run(within(None, work(False))) == 7
    with pytest.raises(KeyError):
        asyncio.run(within(5, work(True)))


def test_too_late() -> None:
    """The work is cancelled, and has ended when the caller is told."""
    ended = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(within(0.01, work()))
    assert ended == [True]


def test_a_cancellation_in_the_turn_of_the_result_is_not_lost() -> None:
    """The caller is cancelled, although the work was done."""

    async def main() -> bool:
        result = asyncio.get_running_loop().create_future()
        caller = asyncio.create_task(within(5, result))
        await asyncio.sleep(0)
        result.set_result(1)
        caller.cancel()
        await asyncio.wait((caller,))
        return caller.cancelled()

    assert asyncio.run(main())
