"""A node's answer in the words of the core."""

from __future__ import annotations

import pytest

from sparkguard.cluster.observe import holder_of, pools_of, view_of, yue_view
from sparkguard.core.cluster import UNKNOWN

ANSWER = {
    "containers": [], "gpu": [], "images": [], "yue": None, "boot_id": "b", "meminfo": {"MemTotal": 8, "MemAvailable": 4},
    "missing": [], "interfaces": [], "hcas": [], "listeners": [], "lock": None, "generation": "g",
}  # fmt: skip


def test_what_cannot_be_told_is_none() -> None:
    """A dead daemon hides its containers, and a driver that is silent who computes; neither is "nothing"."""
    view = view_of("head", {**ANSWER, "containers": None, "containers_error": "dead", "gpu": None, "gpu_error": "silent"})
    assert (view.daemon, view.containers, view.daemon_error) == (UNKNOWN, None, "dead")
    assert (view.gpu, view.gpu_error, view.error) == (None, "silent", None)


def test_a_damaged_record_is_an_error_of_the_node() -> None:
    """Who owns what is unknown then, so that nothing may be planned."""
    view = view_of("head", {**ANSWER, "state_error": "node.json is damaged"})
    assert (view.error, view.cause) == ("node.json is damaged", "state")


@pytest.mark.parametrize("since", [0.0, 1.7e9, 9.9e12])
def test_a_clock_that_is_off_is_only_told(since: float) -> None:
    """The holder's own clock says when; nothing is reckoned with it."""
    holder = holder_of({"host": "h", "pid": 1, "since": since, "verb": "up m", "user": "u", "generation": "g"})
    assert holder is not None and holder.since == since


@pytest.mark.parametrize("said", [{}, {"pid": "x", "since": "y", "host": None}])
def test_a_lock_that_does_not_say_whose_it_is(said: dict[str, object]) -> None:
    """It is held nonetheless."""
    holder = holder_of(said)
    assert holder is not None and (holder.pid, holder.since) == (0, 0.0)


def test_memory_that_nobody_tells_is_no_pool() -> None:
    """Never a pool of zero bytes."""
    assert pools_of({}) == ()
    assert pools_of({"MemTotal": 8})[0].available_bytes is None


def test_a_factory_is_believed_only_what_it_says_in_the_right_type() -> None:
    """ "true" is no true, and a job without an id is none."""
    view = yue_view({"cuda": "true", "accepting": 1, "worker_id": 7, "active_job": {}, "api_version": 2}, True)
    assert (view.cuda, view.accepting, view.worker, view.jobs, view.api_version) == (None, None, None, (), 2)
