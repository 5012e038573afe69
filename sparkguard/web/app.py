"""The application: every path, the gate before all of them, and the server with its drain."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from aiohttp import web

from sparkguard.core.record import Record
from sparkguard.errors import UNAVAILABLE, SparkguardError
from sparkguard.look import gate
from sparkguard.supervisor.protocol import Refused
from sparkguard.web import aiohttp_log, auth, connections, errors, front, half_open, metrics, page
from sparkguard.web.control import Control
from sparkguard.web.errors import ApiError
from sparkguard.web.half_open import HalfOpen

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from sparkguard.supervisor.protocol import Supervisor

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# Images come within the JSON, as base64.
BODY_LIMIT_BYTES = 64 << 20
# OPEN: anybody. PAGE_READ: by our name. READ: and with the key. WRITE: and from no page of another site.
OPEN, PAGE_READ, READ, WRITE = "open", "page", "read", "write"


class Options(Record):
    """How the front is reached; keys is empty when none is asked for."""

    host: str = "127.0.0.1"
    port: int = 8090
    keys: tuple[bytes, ...] = ()
    body_limit_bytes: int = BODY_LIMIT_BYTES
    drain_seconds: float = 30.0
    most_connections: int | None = None  # None: as many as there are descriptors for


class Server:
    """start(), then close(), which lets running requests end within a deadline."""

    def __init__(self, supervisor: Supervisor, options: Options) -> None:
        self._supervisor = supervisor
        self._options = options
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self._names = gate.own_names(options.host)
        self._draining = False
        most = options.most_connections
        self._connections = connections.Connections(connections.most() if most is None else most)

    async def start(self) -> str:
        """The address to tell people. Raises SparkguardError when it cannot be bound."""
        # A handler whose client is gone is cancelled: that gives the place in the queue, or the runner, to the next.
        self._runner = web.AppRunner(
            self._app(),
            access_log=None,
            logger=aiohttp_log.log,
            handler_cancellation=True,
            shutdown_timeout=self._options.drain_seconds,
        )
        await self._runner.setup()
        host, port = self._options.host, self._options.port
        try:
            # Not by TCPSite, which leaves no place between a connection and aiohttp.
            server = self._runner.server
            assert server is not None
            loop = asyncio.get_running_loop()
            self._listener = await loop.create_server(
                lambda: HalfOpen(server(), self._connections), host, port, backlog=connections.most_waiting()
            )
        except OSError as error:
            await self._runner.cleanup()
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
            raise SparkguardError(
                f"{host}:{port} cannot be listened on: {reason}", "choose others with SPARK_HOST and SPARK_PORT", UNAVAILABLE
            ) from None
        return self.url

    @property
    def url(self) -> str:
        assert self._listener is not None
        host, port = self._listener.sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def set_keys(self, keys: tuple[bytes, ...]) -> None:
        self._options = self._options.replace(keys=keys)

    async def close(self) -> None:
        """No new request from now on; what runs has the options' drain_seconds to end, and is then cut off."""
        if self._runner is None:
            return
        self._draining = True
        self._control.close()
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()
        self._front.close()

    def _app(self) -> web.Application:
        supervisor = self._supervisor
        counted = metrics.Metrics(supervisor)
        self._front = front.Front(supervisor, counted, self._options.body_limit_bytes)
        self._control = control = Control(supervisor)

        async def health(request: web.Request) -> web.Response:
            return web.json_response({"status": "draining" if self._draining else "ok"})

        async def scrape(request: web.Request) -> web.StreamResponse:
            if "model" in request.query:  # the engine's own, as for llama-server's router
                auth.check_site(request)  # it may load the model
                return await self._front.handle(request)
            return web.Response(body=counted.text(), headers={"Content-Type": metrics.CONTENT_TYPE})

        async def models(request: web.Request) -> web.Response:
            return web.json_response(front.list_models(supervisor, request))

        async def model(request: web.Request) -> web.Response:
            return web.json_response(front.one_model(supervisor, request))

        app = web.Application(middlewares=[_word_errors], client_max_size=self._options.body_limit_bytes)

        def add(access: str, method: str, path: str, handler: Handler) -> None:
            async def checked(request: web.Request) -> web.StreamResponse:
                self._check(access, request)
                return await handler(request)

            app.router.add_route(method, path, checked)

        for path in front.POST_PATHS:
            add(WRITE, "POST", path, self._front.handle)
        for path in front.GET_PATHS:
            add(WRITE, "GET", path, self._front.handle)  # it may load the model
        add(READ, "GET", "/v1/models", models)
        add(READ, "GET", "/models", models)
        add(READ, "GET", "/v1/models/{id:.+}", model)
        add(OPEN, "GET", "/health", health)
        add(OPEN, "GET", "/v1/health", health)
        add(READ, "GET", "/metrics", scrape)
        add(READ, "GET", "/running", control.running)
        add(READ, "GET", "/api/models", control.models)
        add(WRITE, "POST", "/api/models/{id:.+}/load", control.load)
        add(WRITE, "POST", "/api/models/{id:.+}/unload", control.unload)
        add(READ, "GET", "/api/models/{id:.+}", control.model)
        add(WRITE, "PATCH", "/api/models/{id:.+}", control.patch)
        add(READ, "GET", "/api/runners", control.runners)
        add(WRITE, "POST", "/api/runners/{id:.+}/kill", control.kill)
        add(READ, "GET", "/api/runners/{id:.+}/log", control.log)
        add(READ, "GET", "/api/devices", control.devices)
        add(READ, "GET", "/api/events", control.events)
        for route in page.routes():
            add(PAGE_READ, route.method, route.path, route.handler)
        return app

    def _check(self, access: str, request: web.Request) -> None:
        """Raises ApiError for who may not ask."""
        if access == OPEN:
            return
        auth.check_host(self._names, request)
        if access == WRITE:
            auth.check_site(request)
        if access != PAGE_READ:
            auth.check_key(self._options.keys, request)
        if self._draining:
            raise ApiError(503, "the server is stopping", "shutting_down", retry_after=10)


@web.middleware
async def _word_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors leave in the words of the API that the path belongs to."""
    if (connection := half_open.of(request)) is not None:
        connection.asked()
    try:
        return await handler(request)
    except ApiError as error:
        told = error
    except Refused as refused:
        told = ApiError.of(refused)
    except web.HTTPRequestEntityTooLarge:
        told = ApiError(413, "the body is too large", "body_too_large")
    except web.RequestPayloadError:
        told = ApiError(400, "the body cannot be read: it ends early, or is not what its Content-Encoding says", "invalid_body")
    except web.HTTPNotFound:
        told = ApiError(404, f"there is nothing at {request.path[:200]}", "not_found")
    except web.HTTPMethodNotAllowed as error:
        told = ApiError(405, f"{request.path[:200]} takes {', '.join(sorted(error.allowed_methods))}", "method_not_allowed")
    return errors.response(errors.shape_of(request.path), told)
