"""Flags in an engine's arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# What differs between the ranks, or what a catalog may not decide.
CLUSTERS_OWN = (
    "--nnodes", "--node-rank", "--master-addr", "--master-port", "--headless", "--distributed-executor-backend",
    "--dist-init-addr", "--api-key",
)  # fmt: skip


def flag_values(args: Sequence[str]) -> dict[str, str]:
    """Flag -> what follows it, as engines read it: `--flag value` or `--flag=value`, the last one counts, _ for - as well."""
    found = {}
    for position, word in enumerate(args):
        if not word.startswith("--"):
            continue
        flag, equals, value = word.partition("=")
        after = args[position + 1] if position + 1 < len(args) else ""
        found[flag.replace("_", "-")] = value if equals else "" if after.startswith("--") else after
    return found
