"""Inference goes before the desktop does, when the kernel's OOM killer has to choose."""

from __future__ import annotations

OOM_SCORE = 500  # as in the units


def offer_to_the_oom_killer() -> None:
    """Outside a unit nothing else raises the score. It may only be raised, and a container may forbid even that."""
    try:
        with open("/proc/self/oom_score_adj", "r+", encoding="ascii") as file:
            if int(file.read()) < OOM_SCORE:
                file.seek(0)
                file.write(str(OOM_SCORE))
    except (OSError, ValueError):
        pass
