"""The runners' page: files of this folder, and the look that it shares with the cluster's dashboard.

They ask for no key: the page asks the person for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sparkguard import look

if TYPE_CHECKING:
    from aiohttp import web


def routes() -> list[web.RouteDef]:
    """`/`, `/page/NAME` and `/look/NAME`."""
    return look.routes(Path(__file__).parent)
