"""When the dashboard paints first, beside a page with nothing on it, and what `spark-serve ui` takes while it is looked at.

    .venv/bin/python bench/cluster_dashboard.py [--rounds N]

A real browser with an empty cache opens the page over a scripted spark-serve that serves a model on two Sparks; the pages take
turns, each in a profile of its own. Prints a table; asserts nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import psutil
from browser import dashboard as world
from browser.conftest import CHROMIUM
from playwright.sync_api import Browser, sync_playwright

PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        served = world.Served(Path(folder))
        served.script.write("status", world.serving())
        served.script.write("watch", *(world.sample(step) for step in range(46)))
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"] if os.getuid() == 0 else [])
        empty, full, figures = [], [], []
        for _ in range(rounds):
            empty.append(paint(browser, "data:text/html,<p>empty</p>", "p")[0])
            first, later = paint(browser, served.entry, ".allocation .figure")
            full.append(first)
            figures.append(later)
        memory = psutil.Process().memory_info().rss - BEFORE
        browser.close()
        served.close()
    bare, whole = statistics.median(empty), statistics.median(full)
    print(f"first paint of an empty page   {bare:6.0f} ms")
    print(f"first paint of the dashboard   {whole:6.0f} ms   {whole / bare:.2f}x")
    print(f"  with the model's figures     {statistics.median(figures):6.0f} ms")
    print(f"memory that serving it adds    {memory / 2**20:6.0f} MB (in this process, browser apart)")


def paint(browser: Browser, address: str, ready: str) -> tuple[float, float]:
    """Milliseconds from the navigation to the first paint, and until what `ready` selects is there."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(address)
    page.locator(ready).first.wait_for()
    page.wait_for_function("() => performance.getEntriesByName('first-contentful-paint').length > 0")
    first, whole = float(page.evaluate(PAINT)), float(page.evaluate("performance.now()"))
    context.close()
    return first, whole


BEFORE = psutil.Process().memory_info().rss

if __name__ == "__main__":
    main()
