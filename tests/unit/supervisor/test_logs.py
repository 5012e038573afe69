"""The engine's lines: mapped, cut, bounded, without what may be a request's text."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkguard.supervisor import logs
from sparkguard.supervisor.logs import Capture, LogFile, Ring, read_line


@pytest.mark.parametrize(
    ("line", "read"),
    [
        ("0.00.009.1 W srv          init: --x requires --y", ("warning", "srv init", "--x requires --y")),
        ("0.00.000.9 I srv  llama_server: initializing ...", ("debug", "srv llama_server", "initializing ...")),
        ("I load_tensors: offloaded 3/3 layers to GPU", ("info", "load_tensors", "offloaded 3/3 layers to GPU")),
        ("0.1 E failed to parse grammar", ("error", "engine", "failed to parse grammar")),
        ("libgomp: something", ("debug", "engine", "libgomp: something")),
        (
            "0.0 W srv  llama_server: CORS is set to allow all origins",
            ("debug", "srv llama_server", "CORS is set to allow all origins"),
        ),
    ],
)
def test_a_line_while_loading(line: str, read: tuple[str, str, str]) -> None:
    """Level, category and message; what the engine tells in detail is for whoever looks for it."""
    assert read_line(line, serving=False) == read


@pytest.mark.parametrize(
    "line",
    [
        "root ::= the user's own grammar",
        "0.1 D slot launch_slot_: prompt: secret",
        '  what():  [json.exception] last read: "secret"',
        "You are a helpful assistant",
    ],
)
def test_what_may_be_a_requests_text_is_left_out(line: str) -> None:
    """Once the model is loaded, text without a level is nobody's business."""
    assert read_line(line, serving=True) is None


@pytest.mark.parametrize(
    "line",
    [
        "/src/ggml/src/ggml.c:1234: GGML_ASSERT(x == y) failed",
        "CUDA error: out of memory",
        "terminate called after throwing an instance of 'std::runtime_error'",
    ],
)
def test_last_words_are_kept(line: str) -> None:
    """They have no level either, and are no request's."""
    assert read_line(line, serving=True) == ("error", "engine", line)


def test_a_request_is_not_quoted() -> None:
    """What the parser had read last, or what a template says of it, stays out; status and kind stay in."""
    broken = (
        '0.1 W srv operator(): got exception: {"error":{"code":400,"message":"last read: secret","type":"invalid_request_error"}}'
    )
    assert read_line(broken, True) == ("warning", "srv operator()", "a request failed: 400 invalid_request_error")
    spoken = read_line("0.1 E srv send_error: task id = 1, error: Failed to parse grammar: secret", True)
    assert spoken is not None and "secret" not in spoken[2] and "task id = 1" in spoken[2]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def ring() -> Ring:
    return Ring()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def heard() -> list[str]:
    return []


@pytest.fixture
def capture(ring: Ring, clock: Clock, heard: list[str]) -> Iterator[Capture]:
    async def make() -> Capture:
        return Capture(ring, None, logging.getLogger("test"), heard.append, clock)

    yield asyncio.run(make())


def test_lines_come_in_pieces(capture: Capture, ring: Ring, heard: list[str]) -> None:
    """A pipe knows no lines; the rest at the end is one."""
    for piece in (b"0.1 W a: o", b"ne\n0.1 W b: tw", b"o\n\n0.1 W c: th", b"ree"):
        capture.data_received(piece)
    assert ring.lines() == ["warning: a: one", "warning: b: two"]
    capture.connection_lost(None)
    assert ring.lines()[-1] == "warning: c: three"
    assert len(heard) == 3 and capture.size == 41


def test_an_endless_line_takes_no_memory(capture: Capture, ring: Ring) -> None:
    """It is cut, and how much was cut is said."""
    for _ in range(100):
        capture.data_received(b"W a: " + b"x" * 100_000)
        assert len(capture._rest) <= logs.LINE_BYTES
    capture.data_received(b"\nW b: next\n")
    first, second = ring.lines()
    assert first.endswith(f"({100 * 100_005 - logs.LINE_BYTES} more bytes were cut)") and second == "warning: b: next"


def test_a_flood_is_counted(capture: Capture, ring: Ring, clock: Clock) -> None:
    """What comes too fast is left out, and that is said in its place."""
    capture.data_received(b"W a: b\n" * 5000)
    clock.now += 2
    capture.data_received(b"W a: after\n")
    assert ring.lines()[-2:] == ["warning: log: 3000 lines were left out, they came too fast", "warning: a: after"]


def test_control_characters_are_no_characters(capture: Capture, ring: Ring) -> None:
    """Nobody's terminal obeys a model's metadata; bytes that are no UTF-8 are shown as such."""
    capture.data_received(b"W a: \x1b[31mred\x07 \xff\r\n")
    assert ring.lines() == ["warning: a: ?[31mred? \ufffd"]


def test_a_loaded_model_serves(capture: Capture, ring: Ring, heard: list[str]) -> None:
    """From that line on text without a level is left out, and nobody looks for sizes any more."""
    capture.data_received(b"I srv llama_server: model loaded\nsecret\nE a: b\n")
    assert capture.serving and ring.lines() == ["info: srv llama_server: model loaded", "error: a: b"] and len(heard) == 1


def test_the_server_logs_each_line_at_its_level(capture: Capture, caplog: pytest.LogCaptureFixture) -> None:
    """With its category as a field."""
    caplog.set_level(logging.INFO, "test")
    capture.data_received(b"E a: one\nI a: two\n")
    assert [(record.levelname, record.message, record.__dict__["category"]) for record in caplog.records] == [
        ("ERROR", "one", "a")
    ]


def test_the_ring_is_bounded(ring: Ring) -> None:
    """By lines and by bytes; the newest stay."""
    for number in range(logs.KEPT_LINES + 10):
        ring.add(str(number))
    assert len(ring.lines()) == logs.KEPT_LINES and ring.lines()[-1] == str(logs.KEPT_LINES + 9)
    for _ in range(1000):
        ring.add("x" * 2000)
    assert sum(map(len, ring.lines())) <= logs.KEPT_BYTES


def test_a_slow_reader_loses_lines(ring: Ring) -> None:
    """It is told how many, and does not hold up anybody."""

    async def test() -> None:
        reader = ring.follow()
        for number in range(logs._WAITING_LINES + 5):
            ring.add(str(number))
        assert await anext(reader) == "warning: log: 5 lines were lost, this reader is too slow"
        assert await anext(reader) == "5"
        await reader.aclose()  # type: ignore[attr-defined]
        assert not ring._readers

    asyncio.run(test())


def test_a_file_is_rotated(tmp_path: Path) -> None:
    """Two files, each bounded, private."""
    file = LogFile(str(tmp_path / "logs" / "a.log"))
    for _ in range(40):
        file.write("x" * 99_999 + "\n", 1)
    file.close()
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "logs").iterdir()}
    assert sizes.keys() == {"a.log", "a.log.old"} and max(sizes.values()) <= logs.FILE_BYTES and file.lost == 0
    assert (tmp_path / "logs" / "a.log").stat().st_mode & 0o777 == 0o600


def test_a_full_disk_costs_the_log_alone() -> None:
    """/dev/full takes nothing: the lines are counted as lost."""
    file = LogFile("/dev/full")
    file.write("a\nb\n", 2)
    assert file.lost == 2 and file.error == "No space left on device"
    file.close()


def test_that_a_disk_is_full_is_said(ring: Ring, caplog: pytest.LogCaptureFixture) -> None:
    """Once for a runner, and at its end how many lines are missing; the last ones are in memory all the same."""

    async def test() -> None:
        capture = Capture(ring, LogFile("/dev/full"), logging.getLogger("test"), lambda line: None)
        capture.data_received(b"D a: one\nD a: two\n")
        capture.data_received(b"D a: three\n")
        capture.connection_lost(None)

    asyncio.run(test())
    assert [record.message for record in caplog.records] == [
        "/dev/full cannot be written: No space left on device; the last lines are kept in memory",
        "/dev/full lacks 3 lines of this runner",
    ]
    assert ring.lines() == ["debug: a: one", "debug: a: two", "debug: a: three"]


class Pipe(asyncio.ReadTransport):
    """Of which only one thing is known: whether it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.read = True

    def pause_reading(self) -> None:
        self.read = False

    def resume_reading(self) -> None:
        self.read = True

    def is_closing(self) -> bool:
        return False


def test_a_serving_engine_does_not_wake_us_for_each_line() -> None:
    """Its lines are taken together, some time later, and at once when it has ended; while it loads each one counts."""

    async def test() -> None:
        ring, pipe = Ring(), Pipe()
        capture = Capture(ring, None, logging.getLogger("test"), lambda line: None)
        capture.connection_made(pipe)
        capture.data_received(b"0.1 I a: loading\n")
        assert pipe.read
        capture.data_received(b"0.1 I a: model loaded\n")
        assert not pipe.read
        capture.hurry()
        assert pipe.read
        capture.data_received(b"0.1 W b: one\n")
        assert pipe.read  # on to the end
        capture.data_received(b"0.1 W b: two\n")
        capture.connection_lost(None)
        assert ring.lines()[-2:] == ["warning: b: one", "warning: b: two"]

    asyncio.run(test())
