"""Is it ready? All ranks alive, the right id served at the address that clients use, and one token that was really generated.

A health route answers 200 while an engine or another rank is dead (vllm issues 11996, 16259, 39863, 53157, 32136), so the
containers are looked at before and after, and the token is the proof.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from sparkguard.cluster import http
from sparkguard.cluster.http import Answer, Unanswered
from sparkguard.cluster.watch import engine_metrics
from sparkguard.core.cluster import RUNNING, Allocation
from sparkguard.core.ownership import rank_states
from sparkguard.core.record import Record
from sparkguard.errors import SparkguardError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sparkguard.cluster.watch.engine_metrics import EngineMetrics
    from sparkguard.core.cluster import NodeView

PROBE_SECONDS = 3.0
# The first token of a cold engine compiles kernels; one of a warm engine comes within a second.
FIRST_TOKEN_SECONDS = 300.0
TOKEN_SECONDS = 5.0
_SHOWN_CHARS = 200  # of what /v1/models says, which anybody on the network may answer


class Readiness(Record):
    """ready: None when nobody can tell. reason: why it is not ready, for people. served: what /v1/models says."""

    ready: bool | None
    reason: str = ""
    served: str | None = None
    seconds: float | None = None  # that the token took


def alive(views: Mapping[str, NodeView], wanted: Allocation) -> Readiness | None:
    """None when every rank runs, and all are of one start."""
    generations = set()
    for rank, state, container in rank_states(views, wanted):
        where = f"rank {rank.rank} on {rank.node}"
        if state != RUNNING or container is None:
            view = views.get(rank.node)
            if state == "unknown":
                why = (view.error or view.daemon_error) if view is not None else None
                return Readiness(None, f"{where} is unknown: {why or 'it was not asked'}")
            return Readiness(False, f"{where} is {container.state if container is not None else 'gone'}")
        generations.add(container.generation)
    return None if len(generations) == 1 else Readiness(False, "its ranks are of different starts")


async def probe(wanted: Allocation, *, canary: bool, token_seconds: float = TOKEN_SECONDS) -> Readiness:
    """Asks the endpoint as a client would. The ranks are not looked at here."""
    if wanted.url is None:
        return Readiness(False, "it has no endpoint")
    try:
        if wanted.health_path:
            health = await _get(wanted.url + wanted.health_path)
            if health.status != 200:
                return Readiness(False, f"{wanted.health_path} answers {health.status}")
        answer = await _get(wanted.url + "/v1/models")
        served = _ids(answer)
        if wanted.served not in served:
            said = ", ".join(served)[:_SHOWN_CHARS] or f"status {answer.status}"
            what = "is misrouted: another model answers" if served else "is not up yet"
            return Readiness(
                False, f"{wanted.url} {what} ({said}, not {wanted.served})", served[0][:_SHOWN_CHARS] if served else None
            )
        if not canary:
            return Readiness(True, served=wanted.served)
        return await _token(wanted, token_seconds)
    except Unanswered as error:
        return Readiness(False, error.message)


async def metrics(wanted: Allocation) -> EngineMetrics | None:
    """None: the engine tells nothing of itself now."""
    if wanted.url is None:
        return None
    for path in wanted.metrics_paths:
        try:
            answer = await _get(wanted.url + path)
        except Unanswered:
            return None
        if answer.status == 200:
            body = answer.body.decode("utf-8", "replace")
            return engine_metrics.read(wanted.engine, body, wanted.served, time.monotonic())
    return None


def in_flight(found: EngineMetrics | None) -> int | None:
    """Requests that run or wait; None: nobody knows."""
    if found is None or found.running is None:
        return None
    return int(found.running + (found.waiting or 0))


async def _token(wanted: Allocation, seconds: float) -> Readiness:
    """One token, by the chat route, or by the plain one where the model has no chat template."""
    chat = {"model": wanted.served, "messages": [{"role": "user", "content": "1"}], "max_tokens": 1, "temperature": 0}
    plain = {"model": wanted.served, "prompt": "1", "max_tokens": 1, "temperature": 0}
    begin = time.monotonic()
    answer = await http.ask(wanted.url + "/v1/chat/completions" if wanted.url else "", chat, seconds=seconds, headers=_key())
    if answer.status in (400, 404, 405, 501):
        answer = await http.ask(f"{wanted.url}/v1/completions", plain, seconds=seconds, headers=_key())
    took = time.monotonic() - begin
    value: Any = answer.json()
    if answer.status != 200 or not isinstance(value, dict) or value.get("error"):
        return Readiness(False, f"a request for one token is answered with {answer.status}: {_words(answer)}", wanted.served)
    usage, choices = value.get("usage"), value.get("choices")
    generated = usage.get("completion_tokens") if isinstance(usage, dict) else None
    if not isinstance(choices, list) or not choices or generated == 0:
        return Readiness(False, "a request for one token is answered without one", wanted.served)
    return Readiness(True, served=wanted.served, seconds=took)


async def _get(url: str) -> Answer:
    return await http.ask(url, seconds=PROBE_SECONDS, headers=_key())


def _key() -> dict[str, str]:
    """The key that servers with --api-key want; from the environment alone, never from the catalog."""
    key = os.environ.get("SPARK_SERVE_API_KEY") or os.environ.get("VLLM_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _ids(answer: Answer) -> list[str]:
    value = answer.json() if answer.status == 200 else None
    data = value.get("data") if isinstance(value, dict) else None
    return [str(entry["id"]) for entry in data if isinstance(entry, dict) and "id" in entry] if isinstance(data, list) else []


def _words(answer: Answer) -> str:
    return " ".join(answer.body[:300].decode("utf-8", "replace").split())


class StartFailed(SparkguardError):
    """A start that will not come to an end by waiting. node: where."""

    code = "start_failed"

    def __init__(self, message: str, node: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint, 1)
        self.node = node
