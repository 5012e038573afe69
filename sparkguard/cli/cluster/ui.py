"""spark-serve ui: the dashboard."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import threading
import webbrowser
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sparkguard.cli.cluster.options import state_dir
from sparkguard.cli.terminal import epilog, say, show
from sparkguard.errors import CONFIG, INTERRUPTED, NOT_FOUND, OK, SOFTWARE, UNAVAILABLE, USAGE, SparkguardError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from types import ModuleType
    from typing import Any

    from sparkguard.cluster.ui.server import Dashboard

    Start = Callable[[], Coroutine[Any, Any, str]]
    Close = Callable[[], Coroutine[Any, Any, None]]

EXAMPLES = """\
spark-serve ui                    in the browser, on a free port of this machine
spark-serve ui --app              in a window of its own
spark-serve ui --port 8765 --no-browser
"""


@click.command(epilog=epilog(EXAMPLES, OK, USAGE, UNAVAILABLE, CONFIG, NOT_FOUND, INTERRUPTED))
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; leave it at loopback.")
@click.option("--port", default=0, type=click.IntRange(0, 65535), help="Port; 0: a free one.  [default: 0]")
@click.option("--interval", default=2.0, show_default=True, type=click.FloatRange(0.25, 60), help="Seconds between two samples.")
@click.option("--no-browser", is_flag=True, help="Only print the address.")
@click.option("--app", is_flag=True, help="A native window: pip install 'sparkguard[app]'.")
@click.option("--smoke", is_flag=True, help="Only check that page and command line agree. Asks no Spark.")
@click.pass_obj
def command(config: str | None, host: str, port: int, interval: float, no_browser: bool, app: bool, smoke: bool) -> int:
    """Show the cluster in a page: what runs, start and stop, benchmarks.

    The page does what the other verbs do, by running them. Sampling starts with the first viewer and ends with the last.
    """
    try:
        from sparkguard.cluster.ui.server import Dashboard
    except ImportError as error:
        raise SparkguardError(f"{error.name} is missing", "pip install 'sparkguard[cluster]'", NOT_FOUND) from None
    from sparkguard.cluster.ui.children import program

    dashboard = Dashboard(program(config), host, port, interval)
    if smoke:
        return _smoke(config, dashboard, app)
    if app:
        return _in_window(dashboard.start, dashboard.close)
    return asyncio.run(_serve(dashboard.start, dashboard.close, not no_browser))


def _smoke(config: str | None, dashboard: Dashboard, app: bool) -> int:
    from sparkguard.cluster.ui.children import program
    from sparkguard.cluster.ui.smoke import faults

    if app:
        _window()
    found = asyncio.run(faults(program(config), dashboard))
    show("\n".join(found) or "page and command line agree")
    return SOFTWARE if found else OK


async def _serve(start: Start, close: Close, browse: bool) -> int:
    url = await start()
    show(f"the dashboard is at {url}")
    say("Ctrl-C ends it")
    with _leading_to(url) if browse else nullcontext() as page:
        if page is not None:
            threading.Thread(target=webbrowser.open, args=(page,), daemon=True).start()
        ended = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
        await ended.wait()
        await close()
    return OK


@contextmanager
def _leading_to(url: str) -> Iterator[str]:
    """A file of this user's alone that leads to the page. The address itself holds the page's key, and a browser's command
    line can be read by every user of this machine for as long as the browser runs."""
    descriptor, path = tempfile.mkstemp(prefix="dashboard-", suffix=".html", dir=state_dir())
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(f'<!doctype html><meta http-equiv="refresh" content="0; url={url}"><title>Spark Serve</title>\n')
        yield Path(path).as_uri()
    finally:
        os.unlink(path)


def _in_window(start: Start, close: Close) -> int:
    """The window's toolkit needs the main thread; the server has another."""
    webview = _window()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    url = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        webview.create_window("Spark Serve", url, width=1280, height=860)
        webview.start()
    finally:
        asyncio.run_coroutine_threadsafe(close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
    return OK


def _window() -> ModuleType:
    try:
        import webview
    except ImportError:
        raise SparkguardError("--app needs pywebview", "pip install 'sparkguard[app]', or leave --app out", NOT_FOUND) from None
    return webview  # type: ignore[no-any-return]
