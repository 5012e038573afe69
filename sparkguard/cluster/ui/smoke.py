"""Whether the page and the command line still mean the same: no Spark is asked, no request sent, nothing changed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import aiohttp

from sparkguard.cluster.ui import actions, bench
from sparkguard.cluster.ui.children import ask
from sparkguard.errors import OK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sparkguard.cluster.ui.server import Dashboard

MODEL_KEYS = {"id", "label", "sparks", "mode", "context", "wrapper", "notes", "vision"}
NODE_KEYS = {"node", "host", "lan_url"}
# Verbs of the page's, with the flags that it sets.
_FLAGS: dict[tuple[str, ...], set[str]] = {
    **{(verb,): {flag for flag in flags.values() if flag.startswith("--")} | {"--json"} for verb, flags in actions.VERBS.items()},
    **{(verb,): {"--json", "--cancel-jobs", "--sudo-password-stdin"} for verb in actions.SUDO},
    ("list",): {"--json"},
    ("status",): {"--json"},
    ("watch",): {"--json", "--interval"},
    ("bench", "run"): {flag for flag, _ in bench.FLAGS.values()} | {"--json"},
    ("bench", "list"): {"--json"},
    ("bench", "show"): {"--json"},
    ("bench", "compare"): {"--json"},
}


async def faults(program: Sequence[str], dashboard: Dashboard) -> list[str]:
    """What does not hold, one line each."""
    found = [line for lines in await asyncio.gather(*(_flags(program, verb) for verb in _FLAGS)) for line in lines]
    return [*found, *await _catalog(program), *await _pages(dashboard)]


async def _flags(program: Sequence[str], verb: tuple[str, ...]) -> list[str]:
    text, ended = await _text(program, *verb, "--help")
    if ended != OK:
        return [f"spark-serve {' '.join(verb)} --help ended with status {ended}"]
    words = set(text.replace(",", " ").split())
    return [f"spark-serve {' '.join(verb)} has no {flag}" for flag in sorted(_FLAGS[verb]) if flag not in words]


async def _catalog(program: Sequence[str]) -> list[str]:
    catalog = await ask(program, "list", "--json")
    if catalog["status"] != OK:
        return [f"spark-serve list --json: {catalog['error']}"]
    rows = [(row, MODEL_KEYS) for row in catalog["models"]] + [(row, NODE_KEYS) for row in catalog["nodes"]]
    return sorted({f"spark-serve list --json lacks {key}" for row, keys in rows for key in keys - row.keys()})


async def _pages(dashboard: Dashboard) -> list[str]:
    url = await dashboard.start()
    try:
        async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
            wrong = []
            for path in (url, url.partition("/enter")[0] + "/charts.js"):
                async with session.get(path) as answer:
                    if answer.status != 200:
                        wrong.append(f"{answer.url.path} answers {answer.status}")
            return wrong
    finally:
        await dashboard.close()


async def _text(program: Sequence[str], *argv: str) -> tuple[str, int]:
    process = await asyncio.create_subprocess_exec(
        *program, *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    said, _ = await process.communicate()
    return said.decode("utf-8", "replace"), process.returncode or OK
