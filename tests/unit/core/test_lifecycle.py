"""What an exit leads to, and how long a restart waits."""

from __future__ import annotations

import pytest

from sparkguard.core import lifecycle
from sparkguard.core.events import CAUSES
from sparkguard.core.lifecycle import (
    BACKOFF,
    DRAINING,
    END,
    FAILED,
    GIVE_UP,
    HAS_PROCESS,
    READY,
    REPLACE,
    RESTART,
    STARTING,
    STOPPED,
    STOPPING,
    After,
    after_exit,
    backoff_seconds,
)


@pytest.mark.parametrize(
    ("state", "cause", "expected"),
    [
        (STOPPING, "stopped", After(STOPPED, END)),
        (STOPPING, "crash", After(STOPPED, END)),  # whatever its last words: it was told to go
        (DRAINING, "crash", After(STOPPED, END)),
        (READY, "crash", After(BACKOFF, RESTART)),
        (READY, "hang", After(BACKOFF, RESTART)),
        (READY, "stopped", After(BACKOFF, RESTART)),  # nobody here asked for it
        (READY, "bad_file", After(BACKOFF, RESTART)),  # it was loaded once
        (READY, "out_of_memory", After(BACKOFF, RESTART)),
        (STARTING, "bad_file", After(FAILED, GIVE_UP)),
        (STARTING, "bad_settings", After(FAILED, GIVE_UP)),
        (STARTING, "out_of_memory", After(BACKOFF, GIVE_UP)),
        (STARTING, "crash", After(BACKOFF, RESTART)),
        (STARTING, "hang", After(BACKOFF, RESTART)),
        (STARTING, "stopped", After(BACKOFF, RESTART)),
    ],
)
def test_what_an_exit_leads_to(state: str, cause: str, expected: After) -> None:
    """Only what was not asked for is repaired, and only a start says that a file is bad."""
    assert after_exit(state, cause, killed=False, failed_starts=1, elsewhere=False) == expected


def test_a_kill_by_hand_is_a_crash() -> None:
    """The runner comes again."""
    assert after_exit(STOPPING, "crash", killed=True, failed_starts=0, elsewhere=False) == After(BACKOFF, RESTART)


def test_out_of_memory_moves_to_another_device() -> None:
    """While there is a placement that has not been tried, it is, without a back-off."""
    assert after_exit(STARTING, "out_of_memory", killed=False, failed_starts=1, elsewhere=True) == After(STOPPED, REPLACE)


def test_starts_that_fail_are_given_up() -> None:
    """The third in a row is the last for those who wait."""
    after = [after_exit(STARTING, "crash", killed=False, failed_starts=number, elsewhere=False).then for number in (1, 2, 3, 4)]
    assert after == [RESTART, RESTART, GIVE_UP, GIVE_UP]


@pytest.mark.parametrize("state", [STOPPED, BACKOFF, FAILED])
def test_without_a_process_nothing_exits(state: str) -> None:
    """That would be an event of another runner."""
    with pytest.raises(ValueError, match="no process"):
        after_exit(state, "crash", killed=False, failed_starts=0, elsewhere=False)


@pytest.mark.parametrize("state", sorted(HAS_PROCESS))
@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("elsewhere", [False, True])
def test_each_exit_leads_where_it_may(state: str, cause: str, elsewhere: bool) -> None:
    """Every state after an exit is one that the table of transitions allows."""
    for killed in (False, True):
        assert after_exit(state, cause, killed, 1, elsewhere).state in lifecycle.TRANSITIONS[state] | {BACKOFF}


def test_the_backoff_doubles_from_one_second_to_a_minute() -> None:
    """1, 2, 4, 8, 16, 32, 60, and a minute from then on."""
    assert [backoff_seconds(deaths) for deaths in range(1, 9)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert backoff_seconds(10**9) == 60
