"""The dashboard over the real spark-serve and real nodes: a model is started, watched, measured and stopped from the page."""

from __future__ import annotations

import asyncio
import signal
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser.conftest import WAIT_MILLISECONDS
from cluster_laptop import Laptop
from cluster_rig.fixture import rig  # noqa: F401
from cluster_rig.rig import Rig
from playwright.sync_api import Browser, Page, expect

from sparkguard.cluster.ui.children import program
from sparkguard.cluster.ui.server import Dashboard


@pytest.fixture
def laptop(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Laptop:  # noqa: F811
    laptop = Laptop(rig, tmp_path / "laptop")
    for name, value in laptop.env.items():
        monkeypatch.setenv(name, value)
    return laptop


@pytest.fixture
def shown(browser: Browser, laptop: Laptop) -> Iterator[Page]:
    """The page, live, with what it says of itself in the console held against it."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    dashboard = Dashboard(program(str(laptop.catalog)), "127.0.0.1", 0, interval=0.5)
    entry = asyncio.run_coroutine_threadsafe(dashboard.start(), loop).result(30)
    context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    page = context.new_page()
    page.set_default_timeout(WAIT_MILLISECONDS)
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(entry)
    page.locator("#connection").get_by_text("Live", exact=True).wait_for()
    yield page
    context.close()
    asyncio.run_coroutine_threadsafe(dashboard.close(), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    assert faults == []


def test_a_model_from_start_to_stop(shown: Page, laptop: Laptop) -> None:
    """Start on both Sparks, see it ready with its ranks and figures, run a benchmark against it, stop it: all from the page."""
    shown.goto(shown.url.partition("#")[0] + "#/models")
    card = shown.locator(".model").filter(has=shown.get_by_role("heading", name="DS4"))
    card.get_by_role("checkbox").uncheck()
    card.get_by_role("button", name="Start").click()
    expect(shown.locator("#busy")).to_contain_text("Starting ds4")
    expect(shown.locator("#busy")).to_be_hidden(timeout=3 * WAIT_MILLISECONDS)
    expect(shown.locator("#activity")).to_contain_text("up is done")
    assert {node["served"] for node in laptop.status()["nodes"]} == {"ds4"}

    shown.get_by_role("link", name="Overview").click()
    allocation = shown.locator(".allocation")
    expect(allocation.locator("header .chip")).to_have_text("Ready")
    expect(allocation.locator(".topology li")).to_have_count(2)
    expect(allocation).to_contain_text("0 running, 0 waiting")
    expect(shown.locator(".spark .meter").first).to_be_visible()

    shown.get_by_role("link", name="Benchmarks").click()
    shown.get_by_label("Requests").fill("2")
    shown.get_by_label("Output tokens").fill("32")
    shown.get_by_label("Prompt tokens").fill("64")
    shown.get_by_role("button", name="Run", exact=True).click()
    run = shown.get_by_role("region", name="Saved runs").locator("tbody tr")
    expect(run).to_have_count(1, timeout=3 * WAIT_MILLISECONDS)
    expect(run).to_contain_text("Completed")

    shown.get_by_role("link", name="Overview").click()
    shown.get_by_role("button", name="Stop", exact=True).click()
    expect(shown.locator("#activity")).to_contain_text("stop is done", timeout=3 * WAIT_MILLISECONDS)
    expect(shown.get_by_role("heading", name="Nothing is served")).to_be_visible()
    assert {node["state"] for node in laptop.status()["nodes"]} == {"gone"}


def test_a_node_that_freezes_is_unknown(shown: Page, laptop: Laptop) -> None:
    """A Spark that answers nothing any more is never shown as idle, and the other one goes on."""
    expect(shown.locator(".spark").filter(has_text="worker").locator("header .chip")).to_have_text("Reachable")
    laptop.rig.node("worker").freeze()
    expect(shown.locator(".spark").filter(has_text="worker").locator("header .chip")).to_have_text("Unknown")
    expect(shown.locator(".spark").filter(has_text="head").locator("header .chip")).to_have_text("Reachable")
    laptop.rig.node("worker").thaw()
    expect(shown.locator(".spark").filter(has_text="worker").locator("header .chip")).to_have_text("Reachable")


def test_the_real_verbs_have_the_page_s_flags(laptop: Laptop) -> None:
    """The smoke test finds no fault with this spark-serve."""
    done = laptop.run("ui", "--smoke")
    assert (done.returncode, done.stdout) == (0, "page and command line agree\n"), done.stderr


def test_the_address_and_the_end(laptop: Laptop) -> None:
    """spark-serve ui prints its address first, and Ctrl-C ends it although a page's stream is open."""
    with laptop.start("ui", "--no-browser") as child:
        assert child.stdout is not None
        url = child.stdout.readline().split()[-1]
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        opener.open(url, timeout=30).close()
        with opener.open(url.partition("/enter")[0] + "/api/live", timeout=30):
            child.send_signal(signal.SIGINT)
            assert child.wait(15) == 0
