"""One benchmark from its warm-up to its record: calibrate, measure level by level, check, and say what may be believed of it."""

from __future__ import annotations

import asyncio
import os
import platform
import socket
import time
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from sparkguard import __version__
from sparkguard.cluster.bench import checks, counters, history, report
from sparkguard.cluster.bench.load import batch
from sparkguard.cluster.bench.prompts import Prompts
from sparkguard.cluster.bench.request import DECODE, DEFAULT, IGNORE_EOS, MAX_TOKENS, PREFILL, body
from sparkguard.core.measure import OK, REASONING, Measured, Timeline, measure
from sparkguard.core.record import Record
from sparkguard.errors import FAILED, TEMPFAIL, UNAVAILABLE, SparkguardError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from sparkguard.cluster.bench.client import Endpoint
    from sparkguard.cluster.bench.leases import Held
    from sparkguard.cluster.bench.request import Settings
    from sparkguard.cluster.events import Emit

COMPLETED, CANCELLED, REVOKED, STOPPED = "completed", "cancelled", "revoked", "failed"
IDENTITY_SECONDS = 5.0
SETTLE_SECONDS = 2.0  # engines add to their counters when they let a request go, a moment after its last byte
SAVE_SECONDS = 1.0
CALIBRATION_CHARACTERS = 800
FIRST_GUESS = 4.0  # characters of a token, for English


class Target(Record):
    """What is measured, as far as anybody can tell; it is compared between runs."""

    url: str
    model: str
    name: str | None = None  # in the catalog
    nodes: tuple[str, ...] = ()
    digest: str | None = None
    image: str | None = None
    containers: tuple[str, ...] = ()
    generation: str | None = None
    engine: str | None = None
    metrics_paths: tuple[str, ...] = counters.PATHS


class Stop(Exception):
    """The run ends before its time: the status it gets, and why."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class Run:
    """record is what there is to say at any moment; save() is called with it as it grows."""

    def __init__(
        self,
        endpoint: Endpoint,
        target: Target,
        settings: Settings,
        id: str,
        *,
        emit: Emit,
        save: Callable[[dict[str, Any]], None] = lambda record: None,
        held: Held | None = None,
        identity: Callable[[], Awaitable[str | None]] | None = None,
        environment: Callable[[], Awaitable[dict[str, Any]]] | None = None,
        shared: bool = False,
    ) -> None:
        self._endpoint = endpoint
        self._target = target
        self._settings = settings
        self._emit = emit
        self._save = save
        self._held = held
        self._identity = identity or self._served
        self._environment = environment
        self._shared = shared
        self._began = time.perf_counter()
        self._prompts = Prompts(settings.seed, id)
        self._number = 0
        self._length = IGNORE_EOS if settings.fixed_length else MAX_TOKENS
        self._characters: dict[int, int] = {}  # of a prompt, by the tokens that it shall have
        self._round_trip: float | None = None
        self._first: str | None = None  # who answered at the start
        self._begun = False
        self._saw_reasoning = False
        self._levels: list[tuple[int, int, list[report.Request]]] = []
        self._save_after = 0.0
        self._done, self._total = 0, settings.repeats * sum(_count(settings, streams) for _, streams in settings.levels)
        self.record: dict[str, Any] = blank(id, target, settings)

    async def run(self) -> dict[str, Any]:
        """The record, which has been saved. Raises SparkguardError before anything is measured; passes cancellation on."""
        self._emit(
            "bench_start", id=self.record["id"], kind=self._settings.kind, model=self._target.model, text=self._first_words()
        )
        try:
            await self._guarded()
            none_whole = not any(one.measured.outcome == OK for _, _, level in self._levels for one in level)
            self._end(STOPPED if none_whole else COMPLETED, "no request was whole" if none_whole else None)
        except Stop as stop:
            self._end(stop.status, stop.reason)
        except SparkguardError as error:
            self._end(STOPPED, error.message)  # what was refused before anything was sent leaves no record
            raise
        except asyncio.CancelledError:
            self._end(CANCELLED, "interrupted")
            raise
        return self.record

    async def _guarded(self) -> None:
        """The measuring, and beside it those who may end it."""
        work = asyncio.ensure_future(self._measure())
        watchers = [asyncio.ensure_future(self._watch_identity())]
        if self._held is not None:
            watchers.append(asyncio.ensure_future(self._watch_lease(self._held)))
        tasks = [work, *watchers]
        try:
            done, _ = await asyncio.wait(tasks, timeout=self._settings.run_seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if not done:
            raise Stop(STOPPED, f"not through within {self._settings.run_seconds:g} s")
        for task in done:
            task.result()

    async def _watch_lease(self, held: Held) -> None:
        reason = await held.until_revoked()
        raise Stop(CANCELLED if reason == CANCELLED else REVOKED, reason)

    async def _watch_identity(self) -> None:
        """Numbers of two servers must not be in one run. Somebody who cannot be asked for a moment is no other one."""
        while True:
            await asyncio.sleep(IDENTITY_SECONDS)
            await self._look_who()

    async def _look_who(self) -> None:
        """Raises Stop when it is somebody else."""
        now = await self._identity()
        same = self.record["checks"]["same"] = None if now is None or self._first is None else now == self._first
        if same is False:
            raise Stop(STOPPED, "what answers is not what answered at the start")

    async def _note_environment(self, when: str) -> None:
        if self._environment is not None:
            self.record["environment"][when] = await self._environment()

    async def _served(self) -> str | None:
        """Without a catalog: the ids that are served, and when the process began."""
        ids = await self._endpoint.models()
        seen = await counters.look(self._endpoint, self._target.model, self._target.metrics_paths)
        return None if ids is None else f"{' '.join(sorted(ids))} {seen.started if seen else None}"

    async def _measure(self) -> None:
        settings = self._settings
        ids = await self._endpoint.models()
        if ids is None:
            raise SparkguardError(f"{self._target.url} does not answer /v1/models", None, UNAVAILABLE)
        if self._target.model not in ids:
            raise SparkguardError(f"{self._target.url} serves {', '.join(ids)}, not {self._target.model}", None, FAILED)
        before = await self._look()
        busy = (before.running or 0) + (before.waiting or 0) if before else 0
        if busy and not self._shared:
            hint = "wait until they are through; --shared measures beside them, and says so"
            raise SparkguardError(
                f"{self._target.url} works on {busy:g} requests of others: both would be slowed", hint, TEMPFAIL
            )
        self._begun = True
        self._save(self.record)
        self._first = self.record["checks"]["identity"] = await self._identity()
        self._round_trip = await self._endpoint.round_trip()
        self.record["method"]["round_trip_s"] = self._round_trip
        await self._note_environment("before")
        await self._warm_up()
        self.record["method"]["output_length"] = self._length
        before = await self._look()
        cpu, wall = time.process_time(), time.perf_counter()
        for size, streams in settings.levels:
            requests: list[report.Request] = []
            self._levels.append((size, streams, requests))
            for repeat in range(1, settings.repeats + 1):
                await self._batch(size, streams, repeat, requests)
        busy_share = (time.process_time() - cpu) / max(1e-9, time.perf_counter() - wall)
        await self._check(before, busy_share)
        await self._note_environment("after")
        # At the end in any case: a run may be over before the watcher's first look.
        await self._look_who()
        if self.record["checks"]["same"] is None:
            self.record["notes"].append("whether it was the same server throughout is not known")

    async def _batch(self, size: int, streams: int, repeat: int, requests: list[report.Request]) -> None:
        count = _count(self._settings, streams)
        numbers = range(self._number, self._number + count)
        self._number += count

        def done(number: int, line: Timeline) -> None:
            requests.append(self._request(number, repeat, line))
            one = requests[-1].record()
            self._done += 1
            progress = {"done": self._done, "total": self._total, "prompt_tokens_wanted": size, "concurrency": streams}
            self._emit("bench_request", request=one, text=_words(one), **progress)
            self._save_now_and_then()

        await batch(lambda number: self._ask(number, self._characters[size], self._settings.max_tokens), numbers, streams, done)
        self._refresh()
        self._save(self.record)
        made = self.record["levels"][-1]
        self._emit("bench_level", level={**made, "requests": []}, repeat=repeat, text=_level_words(made, repeat))

    def _save_now_and_then(self) -> None:
        """So that a crash leaves what there is; and so seldom that it takes no fiftieth of the time that is measured."""
        began = time.monotonic()
        if began < self._save_after:
            return
        self._refresh(gaps=False)
        self._save(self.record)
        now = time.monotonic()
        self._save_after = now + max(SAVE_SECONDS, 50 * (now - began))

    async def _warm_up(self) -> None:
        """Finds out how the length can be fixed and how many characters a token has; then, for each size, its shape for real.

        Nothing here is measured: the first request of a shape pays for compilation, graphs, and caches.
        """
        per_token, extra = FIRST_GUESS, 0.0
        first = await self._warm(CALIBRATION_CHARACTERS // 4)
        if first.measured.outcome != OK and first.measured.reason in ("http_400", "http_422") and self._length == IGNORE_EOS:
            self._length = MAX_TOKENS  # it refuses fields that it does not know; if it was something else, it refuses again
            first = await self._warm(CALIBRATION_CHARACTERS // 4)
        second = await self._warm(CALIBRATION_CHARACTERS)
        for one in (first, second):
            if one.measured.outcome != OK:
                detail = f": {one.detail}" if one.detail else ""
                raise SparkguardError(
                    f"the warm-up ended as {one.measured.outcome} ({one.measured.reason}){detail}", None, FAILED
                )
        small, large = first.measured.prompt, second.measured.prompt
        if small and large and large > small:
            per_token = (CALIBRATION_CHARACTERS - CALIBRATION_CHARACTERS // 4) / (large - small)
            extra = small - CALIBRATION_CHARACTERS / 4 / per_token  # what the template adds
        for size in self._settings.prompt_tokens:
            self._characters[size] = max(1, round((size - extra) * per_token))
            for _ in range(self._settings.warmup):
                one = await self._warm(self._characters[size], self._settings.max_tokens)
                if one.measured.outcome != OK:
                    detail = f": {one.detail}" if one.detail else ""
                    what = f"a warm-up of {size} prompt tokens ended as {one.measured.outcome} ({one.measured.reason}){detail}"
                    raise SparkguardError(what, None, FAILED)
                if one.measured.prompt:  # a longer prompt tells the length of a token better
                    self._characters[size] = max(1, round(self._characters[size] + (size - one.measured.prompt) * per_token))

    async def _warm(self, characters: int, max_tokens: int = 16) -> report.Request:
        line = await self._ask(self._number, characters, max_tokens)
        self._number += 1
        made = self._request(self._number - 1, 0, line)
        self.record["warmup"].append(made.record())
        self._emit("bench_warmup", request=made.record(), text=f"warm-up: {_words(made.record())}")
        return made

    async def _ask(self, number: int, characters: int, max_tokens: int) -> Timeline:
        make = self._prompts.decode if self._settings.kind == DECODE else self._prompts.prefill
        asked = body(self._target.model, make(number, characters), self._settings, max_tokens, self._length)
        return await self._endpoint.stream(asked, self._settings.request_seconds)

    def _request(self, number: int, repeat: int, line: Timeline) -> report.Request:
        self._saw_reasoning |= any(REASONING in event.kinds for event in line.events)
        measured: Measured = measure(line, self._round_trip or 0.0)
        return report.Request(number, repeat, line.began - self._began, line.connect, line.detail, measured)

    async def _check(self, before: counters.Counters | None, busy_share: float) -> None:
        requests = [one for _, _, level in self._levels for one in level]
        after = await self._settled(before, checks.told_tokens(requests))
        found, notes = checks.made(self._settings, requests, before, after, busy_share, self._saw_reasoning)
        self.record["checks"] |= found
        self.record["notes"] += notes

    async def _settled(self, before: counters.Counters | None, told: int) -> counters.Counters | None:
        last = time.monotonic() + SETTLE_SECONDS
        while True:
            seen = await self._look()
            grown = counters.grown(before, seen, "generated")
            if grown is None or grown >= told or time.monotonic() > last:
                return seen
            await asyncio.sleep(0.1)

    async def _look(self) -> counters.Counters | None:
        return await counters.look(self._endpoint, self._target.model, self._target.metrics_paths)

    def _refresh(self, gaps: bool = True) -> None:
        """The last level anew; those before it are as they were."""
        measured = [one for one in self._levels if one[2]]
        whole = self.record["levels"][: max(0, len(measured) - 1)]
        self.record["levels"] = whole + [report.level(*one, gaps=gaps) for one in measured[len(whole) :]]
        self.record["summary"] = report.summary(self._settings.kind, self.record["levels"])

    def _end(self, status: str, reason: str | None) -> None:
        self._refresh()
        self.record |= {"status": status, "reason": reason, "ended": _now()}
        if self._begun:
            self._save(self.record)
        words = f"{status}{f': {reason}' if reason else ''}"
        self._emit("bench_end", id=self.record["id"], status=status, reason=reason, text=words)

    def _first_words(self) -> str:
        settings = self._settings
        sizes, streams = (", ".join(map(str, values)) for values in (settings.prompt_tokens, settings.concurrency))
        return (
            f"{settings.kind} of {self._target.model}: {settings.requests} requests, prompts of {sizes} tokens, {streams} at once"
        )


def _count(settings: Settings, streams: int) -> int:
    """Requests of a level and repeat: fewer than streams would leave some idle."""
    return max(settings.requests, streams)


def blank(id: str, target: Target, settings: Settings) -> dict[str, Any]:
    shown = {name: list(value) if isinstance(value, tuple) else value for name, value in target.__dict__.items()}
    return {
        "schema_version": history.SCHEMA_VERSION,
        "type": "run",
        "id": id,
        "at": _now(),
        "ended": None,
        "kind": settings.kind,
        "status": history.RUNNING,
        "reason": None,
        "client": {"host": socket.gethostname(), "pid": os.getpid(), "version": __version__, "python": platform.python_version()},
        "target": {name: value for name, value in shown.items() if name != "metrics_paths"},
        "settings": {name: list(value) if isinstance(value, tuple) else value for name, value in settings.__dict__.items()},
        "method": {
            "tokens": "server usage",
            "clock": "client, monotonic, from the request on an open connection",
            "temperature": 0,
            "output_length": None,
            "round_trip_s": None,
            "reasoning": "server default" if settings.reasoning == DEFAULT else "chat_template_kwargs",
        },
        "warmup": [],
        "levels": [],
        "summary": report.summary(settings.kind, []),
        "checks": {},
        "environment": {},
        "notes": [],
    }


def _words(one: dict[str, Any]) -> str:
    if one["outcome"] != OK:
        detail = f", {one['detail']}" if one["detail"] else ""
        return f"{one['outcome']}: {one['reason']}{detail}"
    parts = [f"{one['prompt_tokens']} -> {one['completion_tokens']} tokens", f"first after {one['ttft_s'] * 1000:.1f} ms"]
    if one["decode_tokens_per_s"]:
        parts.append(f"{one['decode_tokens_per_s']:.2f} tokens/s")
    if one["prefill_tokens_per_s"]:
        parts.append(f"prefill {one['prefill_tokens_per_s']:.0f} tokens/s")
    return ", ".join(parts)


def _level_words(made: dict[str, Any], repeat: int) -> str:
    rate = made["repeats"][-1]["generated_tokens_per_s"]
    rate_words = f", {rate:.2f} tokens/s in all" if rate is not None else ""
    where = f"{made['prompt_tokens_wanted']} prompt tokens, {made['concurrency']} at once, repeat {repeat}"
    return f"{where}: {made['ok']} of {made['n']} ok{rate_words}"


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


__all__ = ["CANCELLED", "COMPLETED", "PREFILL", "REVOKED", "STOPPED", "Run", "Stop", "Target", "blank"]
