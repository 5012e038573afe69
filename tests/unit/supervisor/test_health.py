"""What tells a long computation from one that stands still."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import time
from pathlib import Path

import pytest

from sparkguard.supervisor import health
from sparkguard.supervisor.door import Door
from sparkguard.supervisor.health import Slots, Watch, read_slots, vital

HANG = 120.0
TICKS = os.sysconf("SC_CLK_TCK")


def slot(task: int, read: int, written: int, working: bool = True) -> dict[str, object]:
    return {
        "id": 0, "id_task": task, "is_processing": working, "n_prompt_tokens_processed": read,
        "next_token": [{"n_decoded": written}],
    }  # fmt: skip


def test_slots_of_llama_server() -> None:
    """The mark moves with each token in or out; idle slots count for nothing."""
    one, two, three = (read_slots(json.dumps([slot(1, *tokens)]).encode()) for tokens in ((512, 0), (1024, 0), (1024, 1)))
    assert one and two and three and one.working and one.mark != two.mark != three.mark
    assert read_slots(json.dumps([slot(1, 5, 5, False)]).encode()) == Slots(False, [])
    assert read_slots(b'{"error": 1}') is None and read_slots(b"nonsense") is None and read_slots(b'[{"id": 0}]') is None


def test_a_long_prefill_lives() -> None:
    """300 s without a token out, but with tokens in."""
    watch = Watch(HANG, 0)
    watch.busy(1, 0)
    for now in range(0, 300, 5):
        watch.answered(now)
        watch.slots(Slots(True, now // 60), now)
        assert watch.verdict(now) is None


def test_a_spinning_runner_dies() -> None:
    """It answers /health, and its slots stand still."""
    watch = Watch(HANG, 0)
    watch.busy(1, 0)
    for now in range(0, 121, 5):
        watch.answered(now)
        watch.slots(Slots(True, "same"), now)
    assert watch.verdict(120) is None and "no token for 121 s" in (watch.verdict(121) or "")


def test_no_answer_of_slots_is_no_progress() -> None:
    """The compute loop answers there itself: silence for the whole time is a hang, although the front of it is well."""
    watch = Watch(HANG, 0)
    watch.busy(1, 0)
    watch.answered(121)
    assert watch.verdict(121) is not None


def test_a_slow_client_kills_nobody() -> None:
    """The engine has nothing to do: the request is ours to end."""
    watch = Watch(HANG, 0)
    watch.busy(1, 0)
    for now in range(0, 600, 5):
        watch.answered(now)
        watch.slots(Slots(False, []), now)
    assert watch.verdict(600) is None


def test_idle_for_hours() -> None:
    """Without a request nothing has to move; /health has to answer."""
    watch = Watch(HANG, 0)
    watch.answered(10_000)
    assert watch.verdict(10_100) is None and "no answer to /health" in (watch.verdict(10_121) or "")


def test_a_new_request_has_its_own_time() -> None:
    """What was before it is not held against it."""
    watch = Watch(HANG, 0)
    watch.answered(1000)
    watch.busy(1, 1000)
    assert watch.verdict(1100) is None


def test_within_a_batch_its_time_is_progress() -> None:
    """300 s of one batch, in which /slots says nothing, on a core that others use as well; then no time goes into it."""
    watch = Watch(HANG, 0)
    watch.busy(1, 0)
    for now in range(0, 300, 5):
        watch.answered(now)
        watch.ticks(now * TICKS // 10, now)
        assert watch.verdict(now) is None
    watch.answered(420)
    assert watch.verdict(414) is None and "no token for 420 s" in (watch.verdict(420) or "")


def test_what_health_costs_is_no_work() -> None:
    """The threads that answer there take time of a CPU too, while the one that computes is stuck."""
    watch = Watch(HANG, 0)
    watch.busy(1, 0)
    for now in range(0, 125, 5):
        watch.answered(now)
        watch.ticks(now * TICKS // 500, now)
    assert watch.verdict(125) is not None


def test_no_batch_takes_for_ever() -> None:
    """An engine that spins within one would live on its CPU time: eight times the time of a hang, and then that."""
    watch = Watch(HANG, 0)
    watch.busy(1, 0)
    for now in range(0, 1081, 5):
        watch.answered(now)
        watch.ticks(now * TICKS, now)
        assert watch.verdict(now) is None
    watch.answered(1085)
    watch.ticks(1085 * TICKS, 1085)
    assert "no token for 1085 s" in (watch.verdict(1085) or "")


@pytest.mark.parametrize(("number", "lives"), [(errno.EMFILE, True), (errno.ECONNREFUSED, False)])
def test_who_cannot_be_asked_for_want_of_a_descriptor_is_not_blamed(
    number: int, lives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else whoever opens a thousand connections to the front would end its runners. One that does not answer is."""

    async def connect(door: Door) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(health, "connect", connect)
    watch = Watch(HANG, time.monotonic() - 2 * HANG)
    asyncio.run(health.look(watch, Door("/no.sock"), os.getpid(), False, 5.0))
    assert (watch.verdict(time.monotonic()) is None) == lives


def test_a_gpus_time_is_progress() -> None:
    """Where the CPU sleeps until the GPU is done."""
    watch = Watch(HANG, 0)
    watch.busy(1, 0)
    watch.worked(100)
    watch.answered(200)
    assert not watch.ticks(5, 195) and not watch.ticks(5, 200)
    assert watch.verdict(200) is None


def test_the_kernels_view(tmp_path: Path) -> None:
    """Our own process has used and read something; one that is not there nothing."""
    ours = vital(os.getpid())
    assert ours.resident_bytes > 1 << 20 and ours.read_bytes > 0
    gone = vital(1, str(tmp_path))
    assert (gone.ticks, gone.resident_bytes, gone.read_bytes) == (0, 0, 0)
