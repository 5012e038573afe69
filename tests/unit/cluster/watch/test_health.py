"""Ready only when all of it was seen to be so; unknown is neither ready nor broken."""

from __future__ import annotations

import pytest

from sparkguard.cluster.watch.health import EndpointSeen, RankSeen, TokenSeen, judge

HEAD = RankSeen("head", 0, "a" * 64, "running")
WORKER = RankSeen("worker", 1, "b" * 64, "running")
ANSWERS, TOKEN = EndpointSeen(True, None, "m"), TokenSeen(True, 3.0)


def test_ready() -> None:
    """Both ranks run, the right id is served, and a token came."""
    assert judge("ready", [HEAD, WORKER], ANSWERS, TOKEN) == ("ready", None)


@pytest.mark.parametrize(
    ("worker", "reason"),
    [
        (
            WORKER.replace(state="exited", exit_code=137, oom_killed=True),
            "worker: rank 1 is exited with status 137, out of memory",
        ),
        (WORKER.replace(state="gone", container=None), "worker: rank 1 is gone"),
        (WORKER.replace(state="restarting"), "worker: rank 1 is restarting"),
        (WORKER.replace(state="paused"), "worker: rank 1 is paused"),
    ],
)
def test_a_dead_rank_is_not_ready_although_the_head_answers(worker: RankSeen, reason: str) -> None:
    """A vLLM that lost its worker answers /v1/models as before."""
    assert judge("ready", [HEAD, worker], ANSWERS, TOKEN) == ("dead", reason)


def test_a_node_that_cannot_be_asked_is_unknown() -> None:
    """Neither ready nor stopped; what is known to be broken comes first."""
    lost = WORKER.replace(state="unknown", container=None, error="no route to host")
    assert judge("ready", [HEAD, lost], ANSWERS, TOKEN) == ("unknown", "worker cannot be asked: no route to host")
    dead = HEAD.replace(state="exited", exit_code=1)
    assert judge("ready", [dead, lost], ANSWERS, TOKEN)[0] == "dead"


def test_an_endpoint_that_does_not_answer_is_not_ready() -> None:
    """Nor one where another model answers, nor one that makes no token; each with its reason."""
    assert judge("ready", [HEAD], EndpointSeen(False, "refused"), TOKEN) == ("dead", "refused")
    assert judge("ready", [HEAD], ANSWERS, TokenSeen(False, 1.0, "no token within 30 s")) == ("dead", "no token within 30 s")


def test_what_was_not_seen_yet_is_unknown() -> None:
    """Until the first token nothing is green."""
    assert judge("ready", [HEAD], EndpointSeen(None), TokenSeen(None))[0] == "unknown"
    assert judge("ready", [HEAD], ANSWERS, TokenSeen(None)) == ("unknown", "no token has been seen yet")


def test_while_it_starts_a_missing_rank_is_no_news_and_a_dead_one_is() -> None:
    """A rank that is yet to be created is not gone."""
    waiting = WORKER.replace(state="gone", container=None)
    assert judge("starting", [HEAD, waiting], EndpointSeen(None), TokenSeen(None)) == ("starting", None)
    dead = WORKER.replace(state="exited", exit_code=1)
    assert "rank 1 is exited" in str(judge("starting", [HEAD, dead], EndpointSeen(None), TokenSeen(None))[1])
