"""The page's files: sent with the right types and a strict policy, and free of anything from elsewhere."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from aiohttp import ClientResponse, web
from aiohttp.test_utils import TestClient, TestServer

import sparkguard.look
import sparkguard.web.page
from sparkguard.core.estimate import DeviceNeeds

FOLDER = Path(sparkguard.web.page.__file__).parent
SHARED = Path(sparkguard.look.__file__).parent
IMPORTS = r'from "\./([^"]+)"|(?:src|href)="/page/([^"]+)"|(?:from |src=|href=)"/look/([^"]+)"'
SENT = (".js", ".css", ".html", ".svg")
FILES = sorted(path for folder in (FOLDER, SHARED) for path in folder.iterdir() if path.suffix in SENT)


def get(*paths: str, known: str | None = None) -> list[tuple[ClientResponse, bytes]]:
    async def ask() -> list[tuple[ClientResponse, bytes]]:
        app = web.Application()
        app.add_routes(sparkguard.web.page.routes())
        headers = {"If-None-Match": known} if known else {}
        async with TestClient(TestServer(app)) as client:
            return [(answer, await answer.read()) for path in paths for answer in [await client.get(path, headers=headers)]]

    return asyncio.run(ask())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_each_file_is_sent_in_its_type(path: Path) -> None:
    """Every file is served under /page/ or /look/ as it is, in a type that browsers take, under the policy."""
    ((answer, body),) = get(f"/{path.parent.name}/{path.name}")
    types = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
    assert (answer.status, answer.content_type, body) == (200, types[path.suffix], path.read_bytes())
    assert answer.headers["Content-Security-Policy"].startswith("default-src 'self';")
    assert answer.headers["Cache-Control"] == "no-cache"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_the_root_is_the_page() -> None:
    """`/` is index.html."""
    assert get("/")[0][1] == (FOLDER / "index.html").read_bytes()


def test_a_current_copy_is_not_sent_again() -> None:
    """A browser that has the file gets 304 and no body; one with another gets it."""
    ((first, body),) = get("/page/app.js")
    ((again, nothing),) = get("/page/app.js", known=first.headers["ETag"])
    assert (again.status, nothing, again.headers["ETag"]) == (304, b"", first.headers["ETag"])
    assert get("/page/app.js", known='"other"')[0][1] == body


def test_nothing_but_the_files_is_served() -> None:
    """No source, and nothing outside the folder."""
    statuses = [answer.status for answer, _ in get("/page/__init__.py", "/page/../app.py", "/page/%2e%2e/app.py", "/page/")]
    assert statuses == [404] * 4


def test_the_page_needs_nobody_else() -> None:
    """No file names another host, and each module that one imports is there."""
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert set(re.findall(r"https?://[^\s\"'`]+", text)) <= {"http://www.w3.org/2000/svg"}, path.name
        for near, page, shared in re.findall(IMPORTS, text):
            wanted = path.parent / near if near else FOLDER / page if page else SHARED / shared
            assert wanted.exists(), wanted


def test_each_part_of_the_needs_has_a_name_and_a_pattern() -> None:
    """What a model needs is shown in all the parts that are counted, in the order of the text."""
    parts = [field for field in DeviceNeeds._fields if field != "device"]
    assert re.findall(r'\["(\w+_bytes)", "', (FOLDER / "model.js").read_text()) == parts
    shades = [int(number) for number in re.findall(r"^\.shade-(\d+) ", (SHARED / "base.css").read_text(), re.MULTILINE)]
    assert shades == list(range(len(parts)))
