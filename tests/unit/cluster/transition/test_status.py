"""The phase that status tells of what runs: the record beside what was seen."""

from __future__ import annotations

import pytest
from cluster_views import owned

from sparkguard.cluster.transition import status
from sparkguard.cluster.transition.state import Placed

RUNS = owned("vllm_ds4", "ds4", 0, generation="g1")
PHASES = {
    "ready": (Placed("ready", generation="g1"), True, "ready"),
    "ready no more": (Placed("ready", generation="g1"), False, "failed"),
    "ready, and nobody can tell": (Placed("ready", generation="g1"), None, "ready"),
    "starting": (Placed("starting", generation="g1"), False, "starting"),
    "starting, and the token came to another": (Placed("starting", generation="g1"), True, "starting"),
    "being drained": (Placed("draining", generation="g2"), True, "draining"),
    "started by another laptop": (Placed(), True, "ready"),
    "being started by another laptop": (Placed("stopped", generation="g0"), False, "starting"),
    "replaced by another laptop": (Placed("ready", generation="g0"), False, "starting"),
    "a stop that failed": (Placed("failed", generation="g2", error="permission denied"), True, "ready"),
    "a start that failed and could not be cleaned up": (Placed("failed", generation="g1"), False, "failed"),
}


@pytest.mark.parametrize(("placed", "is_ready", "phase"), PHASES.values(), ids=PHASES)
def test_the_phase_of_what_runs(placed: Placed, is_ready: bool | None, phase: str) -> None:
    """What is not ready is never told as ready, and what another laptop did is told as it is."""
    assert status._phase(placed, RUNS, is_ready) == phase
