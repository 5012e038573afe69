"""The model APIs: finds the model that a request names, waits for a runner, and passes the engine's answer on byte for byte."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from aiohttp import web

from sparkguard.supervisor.protocol import Refused
from sparkguard.web import bodies, errors, forms, half_open, stream
from sparkguard.web.bodies import Bodies
from sparkguard.web.errors import ApiError
from sparkguard.web.upstream import Upstreams, WhileAlive
from sparkguard.web.wire import Lost, Wire

if TYPE_CHECKING:
    from sparkguard.supervisor.protocol import Json, Lease, Supervisor
    from sparkguard.web.metrics import Metrics

# llama-server's paths that are about one model, in all spellings. What configures the engine itself is not among them.
GET_PATHS = ("/props", "/slots", "/lora-adapters")
POST_PATHS = (
    *("/v1/chat/completions", "/chat/completions", "/v1/completions", "/completions", "/completion", "/infill"),
    *("/v1/embeddings", "/embeddings", "/embedding", "/v1/rerank", "/v1/reranking", "/rerank", "/reranking"),
    *("/v1/responses", "/responses", "/v1/messages", "/v1/messages/count_tokens"),
    *("/v1/chat/completions/input_tokens", "/chat/completions/input_tokens", "/v1/responses/input_tokens"),
    *("/tokenize", "/detokenize", "/apply-template"),
    *("/v1/audio/transcriptions", "/audio/transcriptions"),
)
_FORM_PATHS = ("/v1/audio/transcriptions", "/audio/transcriptions")
_FORM = "multipart/form-data"
# All that an engine reads of a request's headers. Keys and cookies are the front's own affair.
_PASSED_ON = ("Content-Type", "Accept")
# Of the engine's headers these go on; its CORS headers would let any page read the answers.
_PASSED_BACK = ("Content-Type", "Cache-Control", "X-Accel-Buffering")
REASON_SECONDS = 1.0
_AT_ONCE_BYTES = 32 << 10  # asyncio buffers twice as much before it makes a writer wait


class Front:
    def __init__(self, supervisor: Supervisor, metrics: Metrics, body_limit_bytes: int) -> None:
        self._supervisor = supervisor
        self._metrics = metrics
        self._bodies = Bodies(body_limit_bytes)
        self._upstreams = Upstreams()

    def close(self) -> None:
        self._upstreams.close()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        began = time.monotonic()
        model = ""
        connection = half_open.of(request)
        try:
            with self._bodies.one() as held:
                body = await held.read(request)
                if connection is not None:
                    connection.begin(request)
                model, streams = self._asked(request, body)
                answer = await self._answer(request, model, body, streams, began)
        except (ApiError, Refused) as error:
            told = error if isinstance(error, ApiError) else ApiError.of(error)
            answer = errors.response(errors.shape_of(request.path), told)
        finally:
            if connection is not None:
                connection.end()
        # Once aiohttp has sent it: nobody shall wait for the counting.
        asyncio.get_running_loop().call_soon(self._count, model, answer.status, time.monotonic() - began)
        return answer

    def _count(self, model: str, status: int, seconds: float) -> None:
        self._metrics.answers.labels(model, str(status)).inc()
        if model:
            self._metrics.seconds.labels(model).observe(seconds)

    def _asked(self, request: web.Request, body: bytes) -> tuple[str, bool]:
        """The id of the model that the body or the query names, and whether the answer is to be a stream."""
        name = request.query.get("model")
        streams = False
        if request.content_type == _FORM or request.path in _FORM_PATHS:
            name, streams = _of_form(request, body, name)
        elif body:
            asked = bodies.parse(body)
            name = asked.get("model", name)
            streams = bool(asked.get("stream"))
        elif request.method == "POST":
            raise ApiError(400, "the body is empty; a JSON object is needed", "invalid_json")
        if not isinstance(name, str) or not name:
            raise ApiError(400, 'no model is named: "model" in the body or ?model= is needed', "model_missing")
        model = self._supervisor.resolve(name)
        if model is None:
            raise ApiError(404, f"there is no model {name[:200]!r}; GET /v1/models lists them", "model_not_found")
        return model, streams

    async def _answer(self, request: web.Request, model: str, body: bytes, streams: bool, began: float) -> web.StreamResponse:
        async with await self._supervisor.lease(model) as lease:
            while True:
                passing = await self._try(request, lease, body, streams)
                if passing.response is not None:
                    break
                if request.transport is None:  # left as the runner died; WhileAlive sees only one of the two before Python 3.11
                    raise asyncio.CancelledError
                await lease.replay()
            if passing.lost is not None:
                lease.failed()
                passing.lost = await _reason(lease, passing.lost)
        self._metrics.first_byte.labels(model).observe(passing.first_byte - began)
        if passing.lost is not None:
            await passing.end(passing.response, passing.lost)
        return passing.response

    async def _try(self, request: web.Request, lease: Lease, body: bytes, streams: bool) -> _Passing:
        """One runner's answer: whole, lost before anything of it was sent, or lost after that."""
        passing = _Passing(request, lease)
        try:
            with WhileAlive(lease):
                headers = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
                upstream = self._upstreams.of(lease)
                async with upstream.ask(request.method, request.rel_url.raw_path_qs, headers, body, keep=not streams) as wire:
                    await passing.on(wire)
        except Lost as lost:
            passing.lost = lost
        return passing


class _Passing:
    """One answer on its way from the engine to the client."""

    def __init__(self, request: web.Request, lease: Lease) -> None:
        self._request = request
        self._lease = lease
        self._events = stream.Events()
        self.response: web.StreamResponse | None = None  # whole, or a stream whose beginning has been sent
        self.first_byte = 0.0
        self.lost: Lost | None = None

    async def on(self, wire: Wire) -> None:
        """Raises Lost."""
        if wire.streams:
            await self._on_events(wire)
            return
        body = wire.body()
        self._first_byte()
        told = body if wire.status < 400 else errors.reworded(errors.shape_of(self._request.path), wire.status, body)
        self.response = web.Response(status=wire.status, body=told, headers=_passed_back(wire))
        if self._takes_at_once(told):
            # What is left to do takes 0.2 ms, and nobody shall wait for it.
            await self.response.prepare(self._request)
            await self.response.write_eof()
        head = body[: stream.WINDOW] if len(body) > stream.WINDOW else b""
        self._lease.tokens(*stream.count_tokens(head, body[-stream.WINDOW :]))

    def _takes_at_once(self, body: bytes) -> bool:
        """Whether sending it waits for nobody: a client that does not read shall not hold a runner meanwhile."""
        transport = self._request.transport
        if transport is None or transport.is_closing():
            return False
        return len(body) <= _AT_ONCE_BYTES and not transport.get_write_buffer_size()

    async def _on_events(self, wire: Wire) -> None:
        head = before = last = b""
        try:
            while chunk := await wire.piece():
                if data := self._events.feed(chunk):
                    await self._write(wire, data)
                    head = head or data[: stream.WINDOW]
                    before, last = last, data
        finally:
            self._lease.tokens(*stream.count_tokens(head, (before + last)[-stream.WINDOW :]))
        await self._write(wire, self._events.rest())

    async def _write(self, wire: Wire, data: bytes) -> None:
        if self.response is None:
            self._first_byte()
            stream.let_read_slowly(self._request)
            response = web.StreamResponse(status=wire.status, headers=_passed_back(wire))
            await response.prepare(self._request)
            self.response = response
            if (connection := half_open.of(self._request)) is not None:
                connection.streams()
        await self.response.write(data)

    def _first_byte(self) -> None:
        self._lease.first_byte()
        self.first_byte = time.monotonic()

    async def end(self, response: web.StreamResponse, lost: Lost) -> None:
        """Ends the stream with one error event; the half of an event that has not been sent is dropped.

        The runner is given back by then: a client may read this slowly.
        """
        error = ApiError(500, f"the answer ends here, the runner was lost: {lost.message}", "runner_died")
        start = b"\n\n" if self._events.broken else b""
        await response.write(start + errors.event(errors.shape_of(self._request.path), error))


async def _reason(lease: Lease, lost: Lost) -> Lost:
    """The supervisor's words for it: it sees a process end a moment after its connections break."""
    done, _ = await asyncio.wait({lease.death}, timeout=REASON_SECONDS)
    return Lost(done.pop().result()) if done else lost


def _of_form(request: web.Request, body: bytes, name: str | None) -> tuple[str | None, bool]:
    if request.path not in _FORM_PATHS:
        raise ApiError(400, f"{request.path} takes a JSON object, not a form", "invalid_body")
    read = forms.fields(request.headers.get("Content-Type", ""), body) if request.content_type == _FORM else None
    if read is None:
        raise ApiError(400, f"{request.path} takes a form ({_FORM}) with the fields file and model", "invalid_body")
    return read.get("model", name), read.get("stream", "").lower() in ("true", "1")


def _passed_back(wire: Wire) -> dict[str, str]:
    return {name: wire.headers[name.lower()] for name in _PASSED_BACK if name.lower() in wire.headers}


def list_models(supervisor: Supervisor, request: web.Request) -> Json:
    """In Anthropic's words for its clients, which send their API's version, else in OpenAI's."""
    models = supervisor.models()
    if "anthropic-version" in request.headers:
        listed = [_anthropic_model(model) for model in models]
        ids = [model["id"] for model in listed]
        return {"data": listed, "has_more": False, "first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}
    return {"object": "list", "data": [_openai_model(model) for model in models]}


def one_model(supervisor: Supervisor, request: web.Request) -> Json:
    name = request.match_info["id"]
    id = supervisor.resolve(name)
    model = supervisor.model(id) if id is not None else None
    if model is None:
        raise ApiError(404, f"there is no model {name[:200]!r}", "model_not_found")
    return _anthropic_model(model) if "anthropic-version" in request.headers else _openai_model(model)


def _openai_model(model: Json) -> Json:
    return {
        "id": model["id"],
        "object": "model",
        "created": 0,  # a file's date says nothing about the model's
        "owned_by": "sparkguard",
        "aliases": model["aliases"],
        "state": model["state"],
    }


def _anthropic_model(model: Json) -> Json:
    return {"type": "model", "id": model["id"], "display_name": model["id"], "created_at": "1970-01-01T00:00:00Z"}
