"""One streamed request as a timeline, and what can be said from it; what cannot be measured is None, with a reason.

Times are seconds on the client's monotonic clock. A chunk is no token: speculative decoding and slow networks put several into
one. Tokens are the server's own count, from the usage that ends the stream; gaps between chunks are gaps between chunks.
"""

from __future__ import annotations

from sparkguard.core.record import Record

# What an event of the stream carries. Only OUTPUT kinds are output; a role alone, and a finish reason alone, are none.
ROLE, REASONING, CONTENT, TOOL, FINISH, USAGE, DONE = "role", "reasoning", "content", "tool", "finish", "usage", "done"
OUTPUT = frozenset((REASONING, CONTENT, TOOL))
VISIBLE = frozenset((CONTENT, TOOL))

# What became of a request. Incomplete: tokens came, but not all of the proof that they are all; kept apart, never averaged in.
OK, INCOMPLETE, FAILED, CANCELLED = "ok", "incomplete", "failed", "cancelled"

# Below these a rate is noise: one token's jitter is more than 6 % of it, or the clock's and the network's are.
LEAST_TOKENS, LEAST_SECONDS = 16, 0.050
SHORTEST = 1e-6  # seconds: what is shorter took no time that anybody measured

# Where a prefill time comes from, best first.
BY_SERVER, BY_CLIENT = "server timings", "client"


class Event(Record):
    """One event of the stream: when it was here, and all that it carries."""

    at: float
    kinds: frozenset[str]


class Usage(Record):
    """The server's count. completion includes reasoning; cached and reasoning are None where it does not say."""

    prompt: int
    completion: int
    total: int
    cached: int | None = None
    reasoning: int | None = None


class Timings(Record):
    """What llama-server says of a request itself; prompt is without what came from its cache."""

    prompt: int
    prompt_seconds: float
    decoded: int
    decode_seconds: float
    cached: int | None = None


class Timeline(Record):
    """A request from its start, on an open connection, to its end. failure: why it failed by itself; cancelled: we ended it."""

    began: float
    ended: float
    connect: float = 0.0  # seconds that the connection took, before `began`
    events: tuple[Event, ...] = ()
    usage: Usage | None = None
    timings: Timings | None = None
    finish: str | None = None
    failure: str | None = None  # class: http_503, error_event, error_body, timeout, refused, ...
    detail: str = ""
    cancelled: bool = False


class Measured(Record):
    """What one request says. Seconds and tokens per second; None: not measured, and `unmeasured` says why."""

    outcome: str
    reason: str = ""
    ttft: float | None = None  # to the first output of any kind
    ttfo: float | None = None  # to the first visible output: content or a tool call
    seconds: float = 0.0  # to the end of the stream
    decode_rate: float | None = None
    decode_seconds: float | None = None
    prefill_rate: float | None = None
    prefill_seconds: float | None = None
    prefill_by: str | None = None
    prefill_client_rate: float | None = None  # by the client's clock, beside the server's own
    gaps: tuple[float, ...] = ()  # between chunks with output
    chunks: int = 0
    prompt: int | None = None
    cached: int | None = None
    completion: int | None = None
    reasoning: int | None = None
    finish: str | None = None
    unmeasured: tuple[tuple[str, str], ...] = ()


def measure(line: Timeline, round_trip: float = 0.0) -> Measured:
    """round_trip: seconds of an empty exchange with this server, which no prefill is part of."""
    output = [event.at for event in line.events if event.kinds & OUTPUT]
    visible = [event.at for event in line.events if event.kinds & VISIBLE]
    outcome, reason = judge(line, len(output))
    usage = line.usage
    known = Measured(
        outcome=outcome,
        reason=reason,
        ttft=output[0] - line.began if output else None,
        ttfo=visible[0] - line.began if visible else None,
        seconds=line.ended - line.began,
        gaps=tuple(output[i] - output[i - 1] for i in range(1, len(output))),
        chunks=len(output),
        prompt=usage.prompt if usage else None,
        cached=_cached(line),
        completion=usage.completion if usage else None,
        reasoning=usage.reasoning if usage else None,
        finish=line.finish,
    )
    if outcome != OK:
        return known
    unmeasured = []
    decode = decode_rate(usage, output)
    if isinstance(decode, str):
        unmeasured.append(("decode_rate", decode))
    else:
        known = known.replace(decode_rate=decode[0], decode_seconds=decode[1])
    prefill = prefill_of(line, output[0], round_trip)
    if isinstance(prefill, str):
        unmeasured.append(("prefill_rate", prefill))
    else:
        known = known.replace(**prefill)
    if not visible:
        unmeasured.append(("ttfo", "nothing visible came"))
    return known.replace(unmeasured=tuple(unmeasured))


def judge(line: Timeline, outputs: int) -> tuple[str, str]:
    """Outcome and reason. OK takes all of: an end that the server announced, its usage, and a sum that is right."""
    if line.cancelled:
        return CANCELLED, "cancelled"
    if line.failure:
        return FAILED, line.failure
    usage = line.usage
    if not outputs and (usage is None or usage.completion == 0):
        return INCOMPLETE, "no_output"
    if not any(DONE in event.kinds for event in line.events):
        return INCOMPLETE, "no_done"
    if usage is None:
        return INCOMPLETE, "no_usage"
    if usage.prompt + usage.completion != usage.total:
        return INCOMPLETE, "usage_sum"
    if not outputs:
        return INCOMPLETE, "no_output"
    return OK, ""


def decode_rate(usage: Usage | None, output: list[float]) -> tuple[float, float] | str:
    """(tokens per second, seconds) from the first token to the last, or why there is none.

    The first token ends the prefill, so what is decoded is one fewer; the usage chunk and [DONE] come after the last token
    and are no part of it.
    """
    if usage is None:
        return "no usage"
    if usage.completion < LEAST_TOKENS:
        return f"{usage.completion} tokens are fewer than {LEAST_TOKENS}"
    seconds = output[-1] - output[0]
    if seconds < LEAST_SECONDS:
        return f"{seconds * 1000:.0f} ms from the first token to the last are fewer than {LEAST_SECONDS * 1000:.0f}"
    return (usage.completion - 1) / seconds, seconds


def prefill_of(line: Timeline, first: float, round_trip: float) -> dict[str, float | str | None] | str:
    """Prompt tokens that were computed, by the time to the first token without the round trip.

    No decode step is taken off: the first token is sampled from the prefill's own last logits (measured on llama-server and
    vLLM: docs/cluster/benchmarks.md). Where the server says its own time of the prefill, that is the rate; ours stands beside.
    """
    usage = line.usage
    if usage is None:
        return "no usage"
    cached = _cached(line)
    computed = usage.prompt - (cached or 0)
    seconds = first - line.began - round_trip
    ours = computed / seconds if computed > 0 and seconds > SHORTEST else None
    timings = line.timings
    if timings and timings.prompt > 0 and timings.prompt_seconds > SHORTEST:
        rate = timings.prompt / timings.prompt_seconds
        return {
            "prefill_rate": rate,
            "prefill_seconds": timings.prompt_seconds,
            "prefill_by": BY_SERVER,
            "prefill_client_rate": ours,
        }
    if ours is None:
        return "all of the prompt came from a cache" if computed <= 0 else "the first token came within a round trip"
    return {"prefill_rate": ours, "prefill_seconds": seconds, "prefill_by": BY_CLIENT, "prefill_client_rate": ours}


def _cached(line: Timeline) -> int | None:
    if line.usage and line.usage.cached is not None:
        return line.usage.cached
    return line.timings.cached if line.timings else None


class Span(Record):
    """A measured request on the batch's time axis."""

    began: float
    ended: float
    completion: int  # tokens; 0 where none may be counted
    prompt: int = 0


def throughput(spans: list[Span]) -> tuple[float, float, float] | None:
    """(generated tokens per second, prompt tokens per second, seconds) of a batch: sums over first start to last end.

    Failed requests belong in it with 0 tokens: they took their time. None: nothing ran, or no time passed.
    """
    if not spans:
        return None
    seconds = max(span.ended for span in spans) - min(span.began for span in spans)
    if seconds <= 0:
        return None
    return sum(span.completion for span in spans) / seconds, sum(span.prompt for span in spans) / seconds, seconds
