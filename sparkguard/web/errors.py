"""Errors in the words of each API: as a body, and as the one event that ends a stream."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from sparkguard.supervisor.protocol import Json, Refused

OPENAI, RESPONSES, ANTHROPIC = "openai", "responses", "anthropic"

_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "unavailable_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """What a client is told: HTTP's status, a sentence, a word for programs, and when to come back, in seconds.

    param: the part of the request that it is about.
    """

    def __init__(self, status: int, message: str, code: str, retry_after: int | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.retry_after = retry_after
        self.param = param

    @classmethod
    def of(cls, refused: Refused) -> ApiError:
        return cls(refused.http_status, refused.message, refused.code, refused.retry_after)


def shape_of(path: str) -> str:
    """Whose words an error on this path is told in."""
    if path.startswith("/v1/messages"):
        return ANTHROPIC
    return RESPONSES if path.startswith("/v1/responses") else OPENAI


def body(shape: str, error: ApiError) -> Json:
    if shape == ANTHROPIC:
        kind = _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": error.message}}
    kind = _OPENAI_TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def response(shape: str, error: ApiError) -> web.Response:
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.json_response(body(shape, error), status=error.status, headers=headers)


def event(shape: str, error: ApiError) -> bytes:
    """The last event of a stream that cannot go on."""
    if shape == RESPONSES:
        told: Json = {"type": "error", "code": error.code, "message": error.message, "param": None, "sequence_number": 0}
    else:
        told = body(shape, error)
    name = b"" if shape == OPENAI else b"event: error\n"
    return name + b"data: " + json.dumps(told).encode() + b"\n\n"


def reworded(shape: str, status: int, answer: bytes) -> bytes:
    """An engine's own error in the API's shape: llama-server words all of them as OpenAI does."""
    if shape != ANTHROPIC:
        return answer
    try:
        told = json.loads(answer)
        message = told["error"]["message"]
    except (ValueError, TypeError, KeyError):
        return answer
    if told.get("type") == "error":
        return answer
    return json.dumps(body(shape, ApiError(status, str(message), "engine"))).encode()
