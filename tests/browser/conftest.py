"""A real browser, and the supervisor that its pages talk to."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from browser.fake_supervisor import FakeSupervisor
from playwright.sync_api import Browser, Page, expect, sync_playwright

# The distribution's, since Playwright's own is a download that not every machine may make.
CHROMIUM = os.environ.get("SPARKGUARD_TEST_CHROMIUM", "/usr/bin/chromium")
WAIT_MILLISECONDS = 30_000  # on a busy machine; nothing waits longer than it has to
Open = Callable[..., Page]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One for a file's tests. It ends with them: Playwright's event loop runs in this thread, and other tests start theirs."""
    flags = ["--disable-background-networking", "--disable-component-update", "--no-first-run"]
    if os.getuid() == 0:
        flags.append("--no-sandbox")  # Chromium refuses root otherwise
    expect.set_options(timeout=WAIT_MILLISECONDS)
    with sync_playwright() as playwright:
        # A home of its own: it keeps settings and reports of crashes there, whatever its profile is.
        folders = {"HOME": str(tmp_path_factory.mktemp("chromium")), "XDG_CONFIG_HOME": "", "XDG_CACHE_HOME": ""}
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags, env={**os.environ, **folders})
        yield browser
        browser.close()


@pytest.fixture
def supervisor() -> Iterator[FakeSupervisor]:
    fake = FakeSupervisor()
    yield fake
    fake.close()


@pytest.fixture
def page(browser: Browser, supervisor: FakeSupervisor) -> Iterator[Open]:
    """Opens the page at a view, live; with scheme, width, height, and with wait="" before it is live. Faults fail the test."""
    faults: list[str] = []
    contexts = []

    def open_page(view: str = "runners", width: int = 1280, height: int = 800, scheme: str = "light", wait: str = "Live") -> Page:
        context = browser.new_context(
            color_scheme="dark" if scheme == "dark" else "light",
            viewport={"width": width, "height": height},
            reduced_motion="reduce",
        )
        contexts.append(context)
        shown = context.new_page()
        shown.set_default_timeout(WAIT_MILLISECONDS)
        shown.on("pageerror", lambda error: faults.append(str(error)))
        # What the policy forbids, or the page reports itself; "Failed to load resource" tells of an answer that a test asked for.
        shown.on(
            "console",
            lambda said: faults.append(said.text) if said.type == "error" and "Failed to load" not in said.text else None,
        )
        shown.goto(f"{supervisor.url}/#/{view}")
        if wait:
            shown.locator("#connection").get_by_text(wait, exact=True).wait_for()
        return shown

    yield open_page
    for context in contexts:
        context.close()
    assert faults == []
