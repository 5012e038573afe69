"""What becomes of a start when its containers are looked at."""

from __future__ import annotations

import pytest
from cluster_views import container

from sparkguard.cluster.transition import startup
from sparkguard.cluster.transition.ready import StartFailed
from sparkguard.core.cluster import Container

BEFORE = container("vllm_ds4", started_at="2026-11-30T01:00:00Z")

ENDS: dict[str, tuple[Container | None, str]] = {
    "removed": (None, "is gone: somebody removed it"),
    "exited": (BEFORE.replace(state="exited", exit_code=1), "is exited with status 1"),
    "exited well, which no server does": (BEFORE.replace(state="exited", exit_code=0), "is exited with status 0"),
    "killed for memory": (BEFORE.replace(state="exited", exit_code=137, oom_killed=True), "was killed because memory ran out"),
    "restarting": (BEFORE.replace(state="restarting", exit_code=1), "is restarting"),
    "paused": (BEFORE.replace(state="paused"), "is paused"),
    "dead": (BEFORE.replace(state="dead", exit_code=255), "is dead with status 255"),
    "started again": (BEFORE.replace(started_at="2026-11-30T02:00:00Z"), "was started again by somebody else"),
}


@pytest.mark.parametrize(("now", "words"), ENDS.values(), ids=ENDS)
def test_a_rank_that_will_not_come_ends_the_start(now: Container | None, words: str) -> None:
    """Whatever it is but running as it was started, it is told with node, name and id."""
    with pytest.raises(StartFailed) as caught:
        startup._judge("worker", BEFORE, now)
    assert caught.value.message.startswith(f"worker: vllm_ds4 ({BEFORE.id[:12]}) ")
    assert words in caught.value.message
    assert (caught.value.node, caught.value.status) == ("worker", 1)


def test_a_rank_that_runs_goes_on() -> None:
    """The same container, running since the same moment."""
    startup._judge("worker", BEFORE, BEFORE.replace(exit_code=0))
    assert BEFORE.state == "running"
