"""From a stream's events to its numbers, or to the reason why there are none."""

from __future__ import annotations

import pytest

from sparkguard.core.measure import (
    BY_CLIENT,
    BY_SERVER,
    CANCELLED,
    CONTENT,
    DONE,
    FAILED,
    FINISH,
    INCOMPLETE,
    OK,
    REASONING,
    ROLE,
    TOOL,
    USAGE,
    Event,
    Span,
    Timeline,
    Timings,
    Usage,
    measure,
    throughput,
)

USAGE_121 = Usage(100, 21, 121)


def line(*events: tuple[float, str], usage: Usage | None = USAGE_121, **more: object) -> Timeline:
    """Began at 10; events at 10 + seconds; ended at 20."""
    made = tuple(Event(10 + at, frozenset(kinds.split("+"))) for at, kinds in events)
    return Timeline(**{"began": 10.0, "ended": 20.0, "events": made, "usage": usage, **more})


WHOLE = ((0.1, ROLE), (1.0, CONTENT), (2.0, CONTENT), (3.0, CONTENT), (3.5, FINISH), (3.9, USAGE), (4.0, DONE))


def test_the_first_token_is_no_role() -> None:
    """A chunk that only names the role is not output, so time to first token is to the first that is."""
    assert measure(line(*WHOLE)).ttft == pytest.approx(1.0)


def test_the_decode_rate_is_from_first_token_to_last() -> None:
    """The first token belongs to the prefill, and neither finish, usage nor [DONE] to the decoding: 20 tokens in 2 s."""
    found = measure(line(*WHOLE))
    assert (found.decode_rate, found.decode_seconds) == (pytest.approx(10.0), pytest.approx(2.0))


def test_a_chunk_is_no_token() -> None:
    """Three chunks of 21 tokens are gaps between chunks, and the rate is by the server's count."""
    found = measure(line(*WHOLE))
    assert (found.chunks, found.completion, found.gaps) == (3, 21, pytest.approx((1.0, 1.0)))


def test_reasoning_is_output_and_not_visible() -> None:
    """Time to first token counts what a model thinks; time to first visible output does not."""
    found = measure(line((0.5, REASONING), (2.0, CONTENT), (3.0, DONE)))
    assert (found.ttft, found.ttfo) == (pytest.approx(0.5), pytest.approx(2.0))


def test_a_tool_call_is_visible() -> None:
    """Who waits for a tool call waits no longer once it begins."""
    assert measure(line((0.5, REASONING), (1.5, TOOL), (2.5, DONE))).ttfo == pytest.approx(1.5)


def test_one_event_may_carry_both() -> None:
    """The last thought and the first word in one chunk are one moment, and one chunk."""
    found = measure(line((0.5, REASONING), (1.5, f"{REASONING}+{CONTENT}"), (2.5, DONE)))
    assert (found.chunks, found.ttfo) == (2, pytest.approx(1.5))


def test_reasoning_alone_has_no_visible_output() -> None:
    """It is whole, its decode rate is measured, and why it has no time to visible output is said."""
    found = measure(line((0.5, REASONING), (1.5, REASONING), (2.5, DONE)))
    assert (found.outcome, found.ttfo, dict(found.unmeasured)) == (OK, None, {"ttfo": "nothing visible came"})


INCOMPLETES = {
    "no_done": line((1.0, CONTENT), (2.0, USAGE)),
    "no_usage": line((1.0, CONTENT), (2.0, DONE), usage=None),
    "usage_sum": line((1.0, CONTENT), (2.0, DONE), usage=Usage(100, 21, 120)),
    "no_output": line((1.0, ROLE), (2.0, DONE), usage=Usage(100, 0, 100)),
}


@pytest.mark.parametrize("reason", INCOMPLETES)
def test_what_is_not_proved_whole_is_incomplete(reason: str) -> None:
    """It has no rate, whatever tokens came."""
    found = measure(INCOMPLETES[reason])
    assert (found.outcome, found.reason, found.decode_rate, found.prefill_rate) == (INCOMPLETE, reason, None, None)


def test_tokens_that_do_not_show_are_incomplete() -> None:
    """A count without a chunk of output has no moment of its first token."""
    assert measure(line((1.0, ROLE), (2.0, DONE))).reason == "no_output"


def test_a_failure_keeps_its_class() -> None:
    """An error in the middle of a stream fails the request, although tokens came before it."""
    found = measure(line((1.0, CONTENT), failure="error_event"))
    assert (found.outcome, found.reason, found.ttft) == (FAILED, "error_event", pytest.approx(1.0))


def test_what_we_ended_did_not_fail() -> None:
    """A cancelled request is its own class."""
    assert measure(line((1.0, CONTENT), cancelled=True, failure="connection")).outcome == CANCELLED


@pytest.mark.parametrize(
    ("tokens", "last", "why"),
    [(15, 2.0, "15 tokens are fewer than 16"), (21, 1.04, "40 ms from the first token to the last are fewer than 50")],
    ids=["few tokens", "short time"],
)
def test_a_rate_of_next_to_nothing_is_not_measured(tokens: int, last: float, why: str) -> None:
    """Fewer than 16 tokens or 50 ms give no rate, and say so."""
    found = measure(line((1.0, CONTENT), (last, CONTENT), (3.0, DONE), usage=Usage(100, tokens, 100 + tokens)))
    assert (found.outcome, found.decode_rate, dict(found.unmeasured)["decode_rate"]) == (OK, None, why)


def test_a_single_chunk_has_no_rate() -> None:
    """A server that sends all at once lets nobody see how fast it decodes."""
    assert measure(line((1.0, CONTENT), (3.0, DONE))).decode_rate is None


def test_the_prefill_rate_leaves_out_what_was_cached() -> None:
    """100 tokens of which 20 were cached in 1 s, less a round trip of 0.2 s: 80 tokens in 0.8 s."""
    found = measure(line(*WHOLE, usage=Usage(100, 21, 121, 20)), 0.2)
    assert (found.prefill_rate, found.prefill_by) == (pytest.approx(100.0), BY_CLIENT)


def test_the_servers_own_prefill_time_goes_first() -> None:
    """Where a server says how long its prefill took, that is the rate, and by our clock it stands beside."""
    found = measure(line(*WHOLE, timings=Timings(100, 0.5, 21, 2.0, 0)))
    assert (found.prefill_rate, found.prefill_by, found.prefill_client_rate) == (200.0, BY_SERVER, pytest.approx(100.0))


def test_a_prompt_out_of_the_cache_has_no_prefill_rate() -> None:
    """Nothing was computed, so no rate of computing is known."""
    found = measure(line(*WHOLE, usage=Usage(100, 21, 121, 100)))
    assert (found.prefill_rate, dict(found.unmeasured)["prefill_rate"]) == (None, "all of the prompt came from a cache")


def test_throughput_is_over_the_whole_batch() -> None:
    """All tokens over first start to last end, with the time of a request that failed and none of its tokens."""
    assert throughput([Span(0.0, 4.0, 40, 10), Span(1.0, 5.0, 40, 10), Span(2.0, 10.0, 0)]) == pytest.approx((8.0, 2.0, 10.0))


def test_nothing_has_no_throughput() -> None:
    """No request, no rate: never 0."""
    assert throughput([]) is None
