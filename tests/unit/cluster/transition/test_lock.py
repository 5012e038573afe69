"""The controller's lock: refused at once, with who holds it, and gone with its holder."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from sparkguard.cluster.transition import lock
from sparkguard.cluster.transition.lock import Locked
from sparkguard.errors import TEMPFAIL

HOLD = """
import sys
from pathlib import Path
from sparkguard.cluster.transition import lock
with lock.held(Path(sys.argv[1]), lock.myself("up ds4", "g1")):
    print("held", flush=True)
    sys.stdin.read()
"""


def holding(state_dir: Path) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(state_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "held\n"
    return child


def test_a_second_transition_is_refused_with_the_holder(tmp_path: Path) -> None:
    """The refusal (75) names verb, host, pid and since when."""
    child = holding(tmp_path)
    with child, pytest.raises(Locked) as caught, lock.held(tmp_path, lock.myself("stop")):
        pass
    assert caught.value.status == TEMPFAIL
    assert caught.value.holder is not None
    assert (caught.value.holder.pid, caught.value.holder.verb) == (child.pid, "up ds4")
    assert f"`up ds4` by {lock.myself('').user} on {os.uname().nodename}, pid {child.pid}, since" in caught.value.message


def test_a_killed_holder_leaves_no_lock(tmp_path: Path) -> None:
    """After kill -9 the lock is free, although the file still has the dead holder's name."""
    child = holding(tmp_path)
    child.kill()
    child.communicate()
    assert '"up ds4"' in (tmp_path / lock.FILE).read_text()
    assert lock.holder_of(tmp_path) is None
    with lock.held(tmp_path, lock.myself("stop")):
        seen = lock.holder_of(tmp_path)
    assert seen is not None and seen.verb == "stop"


def test_nobody_holds_a_lock_that_was_given_back(tmp_path: Path) -> None:
    """The file stays, empty; who asks hears that nobody is at work."""
    with lock.held(tmp_path, lock.myself("stop")):
        pass
    assert lock.holder_of(tmp_path) is None
    assert (tmp_path / lock.FILE).read_text() == ""


def test_a_full_disk_keeps_no_lock_from_being_taken(tmp_path: Path) -> None:
    """What the file says is for people alone; the lock is the kernel's, and somebody has it all the same."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # every byte written to a file is one too many
    try:
        with lock.held(tmp_path, lock.myself("stop")):
            assert lock.holder_of(tmp_path) is not None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert lock.holder_of(tmp_path) is None
