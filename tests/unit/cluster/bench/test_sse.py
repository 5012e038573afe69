"""Server-sent events, however the network cuts them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkguard.cluster.bench.sse import Parser, StreamFault

STREAM = (
    'data: {"a": 1}\n\n: a comment\r\n\r\nevent: error\rdata: x\r\rdata: één\ndata: zwei\n\nid: 3\n\ndata:[DONE]\n\n'.encode()
)
EVENTS = [("", '{"a": 1}'), ("error", "x"), ("", "één\nzwei"), ("", "[DONE]")]


@given(st.lists(st.integers(0, len(STREAM)), max_size=40))
def test_it_does_not_matter_how_the_bytes_are_cut(cuts: list[int]) -> None:
    """Any cutting, also within a CR LF or a letter, gives the same events."""
    places = [0, *sorted(cuts), len(STREAM)]
    parser = Parser()
    found = [event for at in range(1, len(places)) for event in parser.feed(STREAM[places[at - 1] : places[at]])]
    assert (found, parser.is_between_events) == (EVENTS, True)


def test_half_an_event_is_seen() -> None:
    """A stream that ends within an event did not end well."""
    parser = Parser()
    assert parser.feed(b'data: {"a"') == []
    assert not parser.is_between_events


def test_a_stream_is_bounded() -> None:
    """A server that never stops, with or without line ends, does not fill our memory."""
    parser = Parser(limit_bytes=1000)
    with pytest.raises(StreamFault) as caught:
        for _ in range(11):
            parser.feed(b"x" * 100)
    assert caught.value.kind == "too_large"


def test_bytes_that_are_no_text_are_a_fault() -> None:
    """Events are UTF-8."""
    with pytest.raises(StreamFault) as caught:
        Parser().feed(b"data: \xff\n\n")
    assert caught.value.kind == "not_utf8"
