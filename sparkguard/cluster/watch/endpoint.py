"""One model's endpoint, watched from this laptop's own path: its metrics at each tick, its id, and now and then one token."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from sparkguard.cluster.http import Unanswered, ask
from sparkguard.cluster.transition import ready
from sparkguard.cluster.watch import clock, engine_metrics
from sparkguard.cluster.watch.health import EndpointSeen, TokenSeen
from sparkguard.cluster.watch.node_samples import OK, STALE
from sparkguard.core.rates import FIRST, GAP, Interval, Window, between, is_stale

if TYPE_CHECKING:
    from collections.abc import Callable

    from sparkguard.cluster.watch.engine_metrics import EngineMetrics
    from sparkguard.core.cluster import Allocation

SCRAPE_SECONDS = 3.0
WINDOW_SECONDS = 60.0  # what percentiles are of
MODELS_SECONDS = 5.0
CANARY_SECONDS = 30.0
CANARY_DEADLINE_SECONDS = 30.0
TOKEN_LOOK_SECONDS = 1.0  # how often it is looked whether one is due
_LATENCIES = ("ttft", "itl", "e2e", "queue", "prefill")
_TOTALS = ("prompt_tokens", "generation_tokens", "cached_tokens", "finished", "preemptions")


class Endpoint:
    """One allocation of one generation."""

    def __init__(self, allocation: Allocation, interval: float, clock: Callable[[], float]) -> None:
        self._allocation = allocation
        self._interval = interval
        self._clock = clock
        self._base = (allocation.url or "").rstrip("/").removesuffix("/v1")
        self._path: str | None = None
        self._metrics: EngineMetrics | None = None
        self._error: str | None = None
        self._step = Interval(None, FIRST, {}, {})
        self._window = Window(WINDOW_SECONDS)
        self._models_at: float | None = None
        self._asked_at: float | None = None
        self._token_seconds: float | None = None
        self._token: tuple[float, bool, str | None] | None = None
        self._stuck_since: float | None = None
        self.seen = EndpointSeen(None)

    async def watch(self, identity: Callable[[], tuple[str, ...]], may_ask: Callable[[], bool]) -> None:
        """For ever. identity: of the containers behind it, so far as known; may_ask: that no benchmark runs."""
        await asyncio.gather(self._keep_looking(identity), self._keep_asking(may_ask))

    async def _keep_looking(self, identity: Callable[[], tuple[str, ...]]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self.scrape(identity())
            if self._models_at is None or self._clock() - self._models_at >= MODELS_SECONDS:
                await self.ask_models()
            # Half an interval off the ticks, so that each tick has one new reading: none is shown twice, and none is missed.
            await asyncio.sleep(clock.pause(loop.time(), self._interval, 0.5))

    async def _keep_asking(self, may_ask: Callable[[], bool]) -> None:
        """Beside the metrics: an engine that hangs is asked for its token for half a minute, and is seen all the while."""
        while True:
            await self.ask_token(may_ask)
            await asyncio.sleep(TOKEN_LOOK_SECONDS)

    # ---- metrics

    async def scrape(self, identity: tuple[str, ...]) -> None:
        try:
            body = await self._get_metrics()
        except Unanswered as error:
            self._error = error.message
            self._step = Interval(None, GAP, {}, {})
            return
        if body is None:
            return
        metrics = engine_metrics.read(self._allocation.engine, body, self._allocation.served, self._clock(), identity)
        before = None if self._metrics is None else self._metrics.reading
        self._step = between(before, metrics.reading, self._interval)
        self._window.add(metrics.reading, self._step.reason)
        self._metrics = metrics
        self._error = None
        made = self._step.deltas.get("generation_tokens")
        if made:
            self._token = (self._clock(), True, None)
        if made is None or made > 0 or not metrics.running:
            self._stuck_since = None
        elif self._stuck_since is None:
            self._stuck_since = self._clock()

    async def _get_metrics(self) -> str | None:
        """From the path that answered before, else the first that is not 404: nothing else is a reason to try the next."""
        paths = [self._path] if self._path else list(self._allocation.metrics_paths)
        for path in paths:
            answer = await ask(self._base + path, seconds=SCRAPE_SECONDS)
            if answer.status == 200:
                self._path = path
                return answer.body.decode("utf-8", "replace")
            self._path = None
            self._error = f"{self._base}{path} answers {answer.status}"
            if answer.status != 404:
                break
        self._step = Interval(None, GAP, {}, {})
        return None

    @property
    def is_idle(self) -> bool:
        """Surely: an engine that does not say is not idle."""
        metrics = self._metrics
        if metrics is None or self._error is not None or is_stale(self._clock() - metrics.reading.at, self._interval):
            return False
        return metrics.running == 0 and not metrics.waiting

    # ---- the id, and a token

    async def ask_models(self) -> None:
        """Whether the right id is served there."""
        self._models_at = self._clock()
        found = await ready.probe(self._allocation, canary=False)
        self.seen = EndpointSeen(found.ready, found.reason or None, found.served)

    def _token_due(self) -> bool:
        """Tokens that others were given prove as much."""
        if self._token is not None and self._token[1] and self._clock() - self._token[0] < CANARY_SECONDS:
            return False
        return self._asked_at is None or self._clock() - self._asked_at >= CANARY_SECONDS

    async def ask_token(self, may_ask: Callable[[], bool]) -> None:
        """Where it is due, and disturbs nobody."""
        if not (self._token_due() and self.is_idle and self.seen.answers and may_ask()):
            return
        self._asked_at = self._clock()
        found = await ready.probe(self._allocation, canary=True, token_seconds=CANARY_DEADLINE_SECONDS)
        self._token_seconds = found.seconds
        self._token = (self._clock(), bool(found.ready), found.reason or None)

    @property
    def token(self) -> TokenSeen:
        if self._token is None:
            return TokenSeen(None)
        at, came, error = self._token
        return TokenSeen(came, self._clock() - at, error)

    # ---- for JSON

    def view(self) -> dict[str, Any]:
        metrics, step, window = self._metrics, self._step, self._window
        age = None if metrics is None else max(0.0, self._clock() - metrics.reading.at)
        if is_stale(age, self._interval):
            step, window = Interval(None, GAP, {}, {}), Window(WINDOW_SECONDS)
        counters = {} if metrics is None else metrics.reading.counters
        drafts, drafted, accepted = (window.delta(name) for name in ("drafts", "draft_tokens", "accepted_tokens"))
        acceptance = _ratio(accepted, drafted)
        return {
            "state": STALE if is_stale(age, self._interval) else OK,
            "age_s": _rounded(age, 3),
            "error": self._error,
            "path": self._path,
            "gap": step.reason == GAP,
            "reset": step.reset,
            "foreign_models": [] if metrics is None else list(metrics.foreign),
            "running": None if metrics is None else metrics.running,
            "waiting": None if metrics is None else metrics.waiting,
            "kv_usage": None if metrics is None else _rounded(metrics.kv_used, 6),
            "prompt_tokens_s": _rounded(step.rates.get("prompt_tokens")),
            "generation_tokens_s": _rounded(step.rates.get("generation_tokens")),
            "requests_s": _rounded(step.rates.get("finished")),
            "totals": {name: sum(counters[name].values()) if name in counters else None for name in _TOTALS},
            "finished": {} if metrics is None else dict(metrics.finished),
            "window_s": _rounded(window.span[1].at - window.span[0].at if window.span else None),
            "cached_ratio": _first(
                _ratio(window.delta("cached_tokens"), window.delta("prompt_tokens")),
                _ratio(window.delta("prefix_hits"), window.delta("prefix_queries")),
            ),
            "accepted_ratio": acceptance if acceptance is not None else _rounded(metrics.acceptance if metrics else None),
            "accepted_per_draft": _ratio(accepted, drafts),
            "no_token_for_s": None if self._stuck_since is None else _rounded(self._clock() - self._stuck_since),
            **{f"{name}_s": _latency(window, name) for name in _LATENCIES},
        }

    def canary_view(self) -> dict[str, Any] | None:
        """The last token that was seen, or the last time that none came; None: neither yet."""
        token = self.token
        if token.came is None:
            return None
        seconds = _rounded(self._token_seconds)
        return {"ok": token.came, "age_s": _rounded(token.age, 3), "seconds": seconds, "error": token.error}


def _latency(window: Window, name: str) -> dict[str, float | None]:
    return {
        "mean": _rounded(window.mean(name), 6),
        "p50": _rounded(window.quantile(0.50, name), 6),
        "p95": _rounded(window.quantile(0.95, name), 6),
        "p99": _rounded(window.quantile(0.99, name), 6),
        "n": window.events(name),
    }


def _ratio(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else _rounded(part / whole)


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def _rounded(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(value, digits)
