"""The page on the real supervisor, with a real llama-server behind it: what the stand-in says is what is said."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from integration.test_serve import Serve
from playwright.sync_api import Browser, Page, expect


@pytest.fixture
def serve(home: Path) -> Iterator[Serve]:
    serve = Serve(home)
    yield serve
    serve.close()


@pytest.fixture
def shown(browser: Browser, serve: Serve) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(f"http://127.0.0.1:{serve.port}/")
    expect(page.locator("#connection")).to_have_text("Live")
    yield page
    context.close()
    assert faults == []


def test_a_model_from_load_to_unload(shown: Page, serve: Serve) -> None:
    """Load, a request, log, kill, restart and unload, each by the page's own controls and seen on it without a reload."""
    expect(shown.get_by_text("No model is loaded")).to_be_visible()
    shown.get_by_role("link", name="Models", exact=True).first.click()
    shown.get_by_role("link", name="a", exact=True).click()
    expect(shown.get_by_role("region", name="Needs")).to_contain_text(re.compile(r"weights\s*\d+ MB"))
    shown.get_by_role("button", name="Load").click()
    expect(shown.locator(".chip").first).to_have_text("Ready")

    shown.get_by_role("link", name="Runners", exact=True).click()
    row = shown.locator("tbody").first
    expect(row.locator("td[data-label=Requests]")).to_have_text("0")
    serve.json("POST", "/v1/completions", {"model": "a", "prompt": "hi", "max_tokens": 4})
    expect(row.locator("td[data-label=Requests]")).to_have_text("1")
    expect(row.locator("td[data-label=Memory]")).to_contain_text(re.compile(r"\d+ MB\s*est\. \d+ MB"))

    shown.get_by_role("button", name="Log of a").click()
    expect(shown.locator(".entry[data-level=info]").first).to_be_visible()
    shown.keyboard.press("Escape")

    pid = serve.runner()["pid"]
    shown.get_by_role("button", name="Kill the runner of a").click()
    shown.get_by_role("button", name="Kill the process").click()
    expect(row).to_contain_text("1 restart")
    expect(row.locator("td.state")).to_contain_text("Ready")
    assert serve.runner()["pid"] != pid

    shown.get_by_role("button", name="Unload a").click()
    expect(shown.get_by_text("No model is loaded")).to_be_visible()


def test_settings_are_kept_and_refused_in_place(shown: Page, serve: Serve) -> None:
    """A setting is saved to the supervisor and changes the estimate; one that it refuses is told at its field."""
    shown.goto(f"http://127.0.0.1:{serve.port}/#/models/a")
    needs = shown.get_by_role("region", name="Needs")
    shown.get_by_label("Context", exact=True).fill("512")
    shown.get_by_role("button", name="Save").click()
    expect(shown.get_by_text("Saved.")).to_be_visible()
    expect(needs).to_contain_text("for 512 tokens of context")
    shown.get_by_label("Aliases").fill("small")
    shown.get_by_role("button", name="Save").click()
    expect(shown.get_by_role("region", name="On disk")).to_contain_text("small")
    assert serve.json("POST", "/v1/completions", {"model": "small", "prompt": "x", "max_tokens": 1})["model"] == "a"
    file = shown.get_by_label("File", exact=True)
    file.fill("b.gguf")
    shown.get_by_role("button", name="Save").click()
    expect(shown.get_by_role("region", name="On disk")).to_contain_text("/models/b.gguf")
    aliases = shown.get_by_label("Aliases")
    aliases.fill("b")
    shown.get_by_role("button", name="Save").click()
    expect(aliases).to_have_accessible_description(re.compile("'b' is a name of 'b' already"))
    aliases.fill("small")
    arguments = shown.get_by_label("Engine arguments")
    arguments.fill("--port\n1")
    shown.get_by_role("button", name="Save").click()
    expect(arguments).to_have_attribute("aria-invalid", "true")
    expect(arguments).to_have_accessible_description(re.compile("the supervisor decides that itself"))
