"""The dashboard's server, on loopback: who may ask, and what for. It speaks no SSH; it runs spark-serve."""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from sparkguard import look
from sparkguard.cluster.ui import body
from sparkguard.cluster.ui.actions import Actions, BadAction, Busy
from sparkguard.cluster.ui.bench import Bench
from sparkguard.cluster.ui.children import ask
from sparkguard.cluster.ui.feed import Feed
from sparkguard.cluster.ui.sampling import Sampling
from sparkguard.errors import OK, UNAVAILABLE, SparkguardError
from sparkguard.look import gate

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

BODY_LIMIT_BYTES = 64 << 10
BEAT_SECONDS = 10.0  # something is sent at least so often: a page that hears nothing knows that the line is dead
SHUTDOWN_SECONDS = 1.0  # for open streams at Ctrl-C
# plotly draws its charts with styles of its own making; everything else stays as strict as on every page.
POLICY = look.POLICY + "; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:"


class Dashboard:
    """start(), then close()."""

    def __init__(self, program: Sequence[str], host: str, port: int, interval: float = 2.0) -> None:
        self._program = program
        self._host, self._port = host, port
        self._names = gate.own_names(host)
        self._token = secrets.token_urlsafe(32)
        self._feed = Feed()
        self._sampling = Sampling(program, self._feed, interval)
        self._actions = Actions(program, self._feed)
        self._bench = Bench(program, self._feed)
        self._runner: web.AppRunner | None = None

    async def start(self) -> str:
        """The address to open, with the token that only this user knows. Raises SparkguardError when it cannot be bound."""
        app = web.Application(client_max_size=BODY_LIMIT_BYTES, middlewares=[self._gate])
        app.add_routes(look.routes(Path(__file__).parent / "page", POLICY))
        app.add_routes(
            [
                web.get("/charts.js", await asyncio.to_thread(_charts)),
                web.get("/enter", self._enter),
                web.get("/api/state", self._state),
                web.get("/api/live", self._live),
                web.post("/api/actions", self._act),
                web.post("/api/actions/interrupt", self._interrupt),
                web.post("/api/status", self._look),
                web.get("/api/bench", self._bench.runs),
                web.post("/api/bench", self._bench.run),
                web.post("/api/bench/cancel", self._bench.cancel),
                web.get("/api/bench/compare", self._bench.compare),
                web.get("/api/bench/{id}", self._bench.show),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_SECONDS)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port).start()
        except OSError as error:
            await self._runner.cleanup()
            raise SparkguardError(
                f"{self._host}:{self._port} cannot be listened on: {error.strerror}", "choose another with --port", UNAVAILABLE
            ) from None
        self._sampling.start()
        port = self._runner.addresses[0][1]
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{port}/enter?token={self._token}"

    async def close(self) -> None:
        self._feed.close()
        await self._sampling.close()
        await self._bench.close()
        await self._actions.close()
        if self._runner is not None:
            await self._runner.cleanup()

    # ---- who may ask

    @web.middleware
    async def _gate(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if why := gate.foreign_host(self._names, request.headers):
            return _refuse(421, why)
        if request.method not in ("GET", "HEAD"):
            if why := gate.foreign_site(request.headers):
                return _refuse(403, why)
            # A form of another site cannot send this type; a script that could would have to ask first.
            if request.content_type != "application/json":
                return _refuse(415, "a change is asked for with Content-Type: application/json")
        if request.path.startswith("/api/") and not self._known(request):
            return _refuse(401, "open the address that spark-serve ui has printed: it carries the key to this page")
        try:
            return await handler(request)
        except web.HTTPRequestEntityTooLarge:
            return _refuse(413, f"at most {BODY_LIMIT_BYTES} bytes")

    def _known(self, request: web.Request) -> bool:
        return hmac.compare_digest(
            request.cookies.get(self._cookie(request), "").encode("utf-8", "surrogateescape"), self._token.encode()
        )

    def _cookie(self, request: web.Request) -> str:
        """Cookies do not tell ports apart, so the name does: two dashboards do not throw each other out."""
        return f"spark-serve-{request.url.port}"

    async def _enter(self, request: web.Request) -> web.Response:
        """Changes the token of the address for a cookie, so that it stands in no history and no Referer."""
        if not hmac.compare_digest(request.query.get("token", "").encode("utf-8", "surrogateescape"), self._token.encode()):
            return _refuse(401, "this address is of an earlier run; use the one that spark-serve ui has printed now")
        headers = {"Location": "/", "Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}
        response = web.Response(status=303, headers=headers)
        response.set_cookie(self._cookie(request), self._token, httponly=True, samesite="Strict", path="/")
        return response

    # ---- what for

    async def _state(self, request: web.Request) -> web.Response:
        """Everything that a page needs to begin with; the feed has the rest."""
        catalog = await ask(self._program, "list", "--json")
        status = self._actions.status or (await self._actions.look() if catalog["status"] == OK else None)
        return web.json_response(
            {
                "catalog": catalog,
                "status": status,
                "running": self._actions.running,
                "activity": self._actions.activity(),
                "samples": self._sampling.samples(),
                "sampling_error": self._sampling.error,
                "bench": self._bench.running,
            }
        )

    async def _live(self, request: web.Request) -> web.StreamResponse:
        """The feed, one JSON object a line."""
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", "Cache-Control": "no-store"})
        await response.prepare(request)
        with suppress(ConnectionError), self._feed.viewer() as viewer:
            while (message := await viewer.get(BEAT_SECONDS)) is not None:
                await response.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        return response

    async def _act(self, request: web.Request) -> web.Response:
        try:
            self._actions.begin(await _object(request))
        except BadAction as error:
            return _refuse(400, str(error))
        except Busy as error:
            return _refuse(409, str(error))
        return web.json_response({"running": self._actions.running}, status=202)

    async def _interrupt(self, request: web.Request) -> web.Response:
        return web.json_response({"interrupted": self._actions.interrupt()})

    async def _look(self, request: web.Request) -> web.Response:
        return web.json_response(await self._actions.look())


async def _object(request: web.Request) -> dict[str, Any]:
    """The body; raises BadAction when it is no JSON object of plain words."""
    try:
        return body.read(await request.read())
    except ValueError as error:
        raise BadAction(str(error)) from None


def _refuse(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


def _charts() -> Handler:
    """plotly's own file, out of its Python package: no network is needed, and no copy is kept here."""
    body = files("plotly").joinpath("package_data/plotly.min.js").read_bytes()
    return look.sender(body, "text/javascript", POLICY)
