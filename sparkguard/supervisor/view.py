"""The JSON of models, runners and devices, and the counts since the start. It reads, and decides nothing."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

from sparkguard.core import events, lifecycle, rooms
from sparkguard.core.dispatch import Dispatch
from sparkguard.supervisor.protocol import Effects, Json, Library

_COUNTED = ("requests", "failed", "prompt_tokens", "generated_tokens", "loads", "crashes")


class View:
    """What people and their programs see."""

    def __init__(self, dispatch: Dispatch, library: Library, effects: Effects) -> None:
        self._dispatch = dispatch
        self._library = library
        self._effects = effects
        self._counts: dict[str, Counter[str]] = {}
        self._seconds: dict[str, float] = {}
        self.started: dict[str, float] = {}  # by the wall clock

    def counts(self, model: str) -> Counter[str]:
        return self._counts.setdefault(model, Counter())

    def count_request(self, model: str, ok: bool, seconds: float) -> None:
        counts = self.counts(model)
        counts["requests"] += 1
        counts["failed"] += not ok
        self._seconds[model] = self._seconds.get(model, 0.0) + seconds

    def counters(self) -> list[Json]:
        rows = []
        for model in {**self._dispatch.models, **self._counts}:
            counts = self._counts.get(model, Counter())
            runner = self._dispatch.runners.get(model)
            row: Json = {"model": model, **{name: counts[name] for name in _COUNTED}}
            row["seconds"] = self._seconds.get(model, 0.0)
            row["queue"] = len(runner.queue) if runner is not None else 0
            rows.append(row)
        return rows

    def models(self) -> list[Json]:
        room = self._room()
        return [self._card(id, room) for id in self._dispatch.models]

    def model(self, id: str) -> Json | None:
        return self._card(id, self._room()) if id in self._dispatch.models else None

    def _card(self, id: str, room: rooms.Room | None) -> Json:
        card = dict(self._library.describe(id))
        runner = self._dispatch.runners.get(id)
        fits, reason = self._fits(self._dispatch.models[id], room)
        card.update(state=lifecycle.STOPPED, queue=0, fits=fits, reason=reason)
        card.setdefault("device", None)
        card.setdefault("error", None)
        if runner is not None:
            card.update(state=runner.state, queue=len(runner.queue))
            if runner.state in lifecycle.HAS_PROCESS and runner.placement is not None:
                card["device"] = runner.placement.device
            elif runner.words:
                card["error"] = runner.words
        return card

    def _fits(self, model: events.Model, room: rooms.Room | None) -> tuple[bool | None, str | None]:
        """Whether it would fit if every runner ended; None: nobody has looked yet."""
        if model.problem is not None:
            return False, model.problem.message
        reading = self._dispatch.reading
        if room is None or reading is None or not model.placements:
            return None, None
        never = rooms.never_in(room, rooms.Want(model.id, 0, model.placements))
        if never is None:
            return True, None
        return False, rooms.shortage(model.id, model.placements, never, reading.pools)

    def _room(self) -> rooms.Room | None:
        reading = self._dispatch.reading
        return rooms.empty_room(reading, self._dispatch.holders(0.0)) if reading is not None else None

    def runners(self) -> list[Json]:
        shown = (*lifecycle.HAS_PROCESS, lifecycle.BACKOFF)
        return [self.runner(id) for id, runner in self._dispatch.runners.items() if runner.state in shown]

    def runner(self, id: str) -> Json:
        """Of one that is gone: that it is stopped."""
        runner = self._dispatch.runners.get(id)
        if runner is None:
            return {"id": id, "model": id, "state": lifecycle.STOPPED}
        counts = self.counts(id)
        is_loaded = runner.state in lifecycle.HAS_PROCESS and runner.state != lifecycle.STARTING
        return {
            "id": id,
            "model": id,
            "state": runner.state,
            "device": runner.placement.device if runner.placement is not None else None,
            "pid": runner.pid,
            "generation": runner.generation,
            "memory_bytes": sum(runner.held.values()) if is_loaded else None,
            "estimated_bytes": sum(amount for _, amount in runner.placement.amounts) if runner.placement is not None else None,
            "requests": counts["requests"],
            "tokens": counts["generated_tokens"],
            "queue": len(runner.queue),
            "running": len(runner.leases),
            "started_at": self.started.get(id),
            "restarts": counts["crashes"],
            "last_error": runner.words or None,
            "retry_at": self._retry_at(runner) if runner.state == lifecycle.BACKOFF else None,
            "progress": self._effects.progress(id) if runner.state == lifecycle.STARTING else None,
        }

    @staticmethod
    def _retry_at(runner: lifecycle.Runner) -> float:
        """By the wall clock. To the tenth of a second, so that it stays the same from one look to the next."""
        return round(time.time() + runner.retry_at - asyncio.get_running_loop().time(), 1)

    def devices(self) -> list[Json]:
        pools = {pool.id: pool for pool in self._dispatch.reading.pools} if self._dispatch.reading else {}
        cards = []
        for card in self._library.devices():
            pool = pools.get(card.get("pool", ""))
            cards.append({**card, "available_bytes": pool.available_bytes} if pool is not None else dict(card))
        return cards
