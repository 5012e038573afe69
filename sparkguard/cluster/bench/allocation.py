"""What serves on a node of the catalog, as a target: the allocation, and who it is while it is measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkguard.cluster.bench.run import Target
from sparkguard.errors import FAILED, SparkguardError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from sparkguard.cluster.bench.start import Asked
    from sparkguard.cluster.catalog import Catalog


async def at_node(catalog: Catalog, asked: Asked, state_dir: Path) -> tuple[Target, Callable[[], Awaitable[str | None]]]:
    """Raises SparkguardError where nothing that is ready serves there."""
    raise SparkguardError("nothing serves there", None, FAILED)
