"""What the guard asks of the runners, and what it makes of their answers; the other side is a thread with the real socket."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sparkguard import room
from sparkguard.core.admission import admit
from sparkguard.core.types import DISCRETE, RAM, Budget, Claim, Hold, MemoryPool, Verdict, Wanted

GIB = 1 << 30
SHARE = 10_000_000  # one hundredth; of a pool of 100 GiB one GiB


def hold(pool: str, hundredths: int, taken: int = 0) -> Hold:
    return Hold(pool, hundredths * SHARE, hundredths * GIB, taken * GIB)


def runners(*holds: Hold) -> Claim:
    return Claim(77, "llama-server", holds, "reservation")


def server(*holds: Hold) -> Claim:
    return Claim(88, "vllm", holds, "argument")


def verdict(wanted: int, *claims: Claim, available: int = 95, pools: tuple[str, ...] = ("ram",)) -> Verdict:
    """On pools of 100 GiB each, under a budget of 0.80 and with 5 GiB in reserve."""
    kinds = {"ram": RAM, "cuda:0": DISCRETE, "cuda:1": DISCRETE}
    there = tuple(MemoryPool(pool, kinds[pool], 100 * GIB, available * GIB) for pool in pools)
    holds = tuple(hold(pool, wanted) for pool in pools)
    return admit(Budget(80 * SHARE, 5 * GIB), there, claims, Wanted("m", holds))


LACKING = {
    "nothing, it fits": (verdict(40, runners(hold("ram", 30))), None),
    "what is over the budget": (verdict(40, runners(hold("ram", 50, 50))), {"ram": 10 * GIB}),
    "what is not there": (verdict(40, runners(hold("ram", 20, 20)), available=30), {"ram": 15 * GIB}),
    "the larger of both": (verdict(40, runners(hold("ram", 50, 50)), available=30), {"ram": 15 * GIB}),
    "more than they hold": (verdict(70, server(hold("ram", 40)), runners(hold("ram", 20))), None),
    "what is not theirs": (verdict(70, server(hold("ram", 40))), None),
    "on another device": (verdict(70, runners(hold("cuda:1", 30)), server(hold("cuda:0", 30)), pools=("cuda:0",)), None),
    "on each device": (
        verdict(60, runners(hold("cuda:0", 30, 30), hold("cuda:1", 25, 25)), pools=("cuda:0", "cuda:1")),
        {"cuda:0": 10 * GIB, "cuda:1": 5 * GIB},
    ),
    "nothing, it can never fit": (verdict(90, runners(hold("ram", 30))), None),
    "nothing beside an orphan": (
        verdict(60, runners(hold("ram", 30)), Claim(9, "vllm", (hold("ram", 1),), "argument", orphan=True)),
        None,
    ),
}


@pytest.mark.parametrize(("refused", "amounts"), LACKING.values(), ids=LACKING)
def test_what_has_to_go(refused: Verdict, amounts: dict[str, int] | None) -> None:
    """Only a refusal that the end of runners turns is worth asking for, and then for no more than it lacks."""
    assert room.lacking(refused) == amounts


@pytest.mark.parametrize(("share", "held"), [(333_333_333, 70 * GIB + 1), (80 * SHARE, 50_000_001), (799_999_999, 200)])
def test_when_it_has_gone_the_start_fits(share: int, held: int) -> None:
    """Exactly what was asked for, let go, turns the verdict, with shares that no byte divides; be it all that they hold."""
    pool = MemoryPool("ram", RAM, 130_663_124_992, 120 * GIB)
    budget = Budget(80 * SHARE, 5 * GIB)
    wanted = Wanted("m", (Hold("ram", share, share * pool.total_bytes // 1_000_000_000),))

    def judged(amount: int) -> Verdict:
        claim = runners(Hold("ram", -(-amount * 1_000_000_000 // pool.total_bytes), amount, amount))
        return admit(budget, (pool,), (claim,), wanted)

    amounts = room.lacking(judged(held))
    assert amounts is not None
    assert judged(held - amounts["ram"]).admitted
    assert not judged(held - amounts["ram"] + 200).admitted


REFUSED = verdict(40, runners(hold("ram", 50, 50)))


@pytest.fixture
def answering(home: Path) -> Iterator[Callable[[bytes | None], list[bytes]]]:
    """Listens, answers one asker with these bytes (None: never), and returns what was asked."""
    asked: list[bytes] = []
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(home / room.NAME))
    listener.listen()
    kept: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def serve(answer: bytes | None) -> None:
        link, _ = listener.accept()
        kept.append(link)
        asked.append(link.recv(1 << 16))
        if answer is not None:
            link.sendall(answer)
            link.close()

    def begin(answer: bytes | None) -> list[bytes]:
        threads.append(threading.Thread(target=serve, args=(answer,)))
        threads[-1].start()
        return asked

    yield begin
    for thread in threads:
        thread.join()
    for link in (*kept, listener):
        link.close()


def test_the_runners_are_asked(answering: Callable[[bytes | None], list[bytes]], home: Path) -> None:
    """For whom, how much of which pool; the answer's names come back."""
    asked = answering(b'{"unloaded": ["a", "b"], "refused": ""}\n')
    assert room.ask(REFUSED, str(home)) == room.Answer(("a", "b"))
    assert json.loads(asked[0]) == {"for": "m", "pools": {"ram": 10 * GIB}}


ANSWERS = {
    "a refusal": (b'{"unloaded": [], "refused": "a is busy"}\n', "the runners were asked to make room: a is busy"),
    "an empty one": (b"", "did not answer: its answer cannot be read"),
    "half of one": (b'{"unloaded": ["a"', "did not answer: its answer cannot be read"),
    "no object": (b"[]\n", "did not answer: its answer cannot be read"),
    "without a key": (b"{}\n", "did not answer: its answer cannot be read"),
    "none at all": (None, "did not answer: timed out"),
}


@pytest.mark.parametrize(("answer", "complaint"), ANSWERS.values(), ids=ANSWERS)
def test_an_answer_that_makes_no_room(
    answering: Callable[[bytes | None], list[bytes]], home: Path, answer: bytes | None, complaint: str
) -> None:
    """Nothing was unloaded, and it is said why."""
    answering(answer)
    given = room.ask(REFUSED, str(home), seconds=0.2 if answer is None else 20)
    assert given.unloaded == ()
    assert given.complaint.endswith(complaint)


def test_no_supervisor(home: Path) -> None:
    """A reservation whose supervisor listens nowhere, and no reservation at all, are told apart."""
    assert room.ask(REFUSED, str(home)).complaint.endswith("did not answer: No such file or directory")
    assert "no runners hold memory" in room.ask(verdict(70, server(hold("ram", 40))), str(home)).complaint
    assert "would not be enough" in room.ask(verdict(70, server(hold("ram", 40)), runners(hold("ram", 5))), str(home)).complaint
