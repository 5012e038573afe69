"""Children with a deadline: real processes throughout."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys
import time
from pathlib import Path

import pytest

from sparkguard.probe import bounded

AMPLE = 20.0
SHORT = 0.3


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-I", "-S", "-c", code)


def wait_for_end(pid: int) -> bool:
    """Whether a process that need not be our child ends within seconds."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([watched], [], [], AMPLE)[0])
    finally:
        os.close(watched)


def test_returns_status_and_stdout() -> None:
    """The exit status and all of stdout come back, stderr does not."""
    assert bounded.run(("sh", "-c", "echo out; echo err >&2; exit 7"), AMPLE) == (7, b"out\n")


def test_a_signal_is_a_negative_status() -> None:
    """A child that dies of a signal has its negative number as status."""
    assert bounded.run(("sh", "-c", "kill -SEGV $$"), AMPLE) == (-signal.SIGSEGV, b"")


def test_more_than_a_pipe_holds() -> None:
    """Output larger than a pipe's buffer is read to its end."""
    status, text = bounded.run(python("print('x' * 300_000)"), AMPLE)
    assert (status, len(text)) == (0, 300_001)


def test_a_flood_is_cut() -> None:
    """A child that never stops writing is ended at the most that is read, long before the deadline."""
    started = time.monotonic()
    status, text = bounded.run(("yes",), AMPLE)
    assert status is None
    assert len(text) >= 1 << 20
    assert time.monotonic() - started < AMPLE


def test_the_deadline_holds() -> None:
    """A child that hangs is killed at the deadline, and what it wrote before is kept."""
    started = time.monotonic()
    status, text = bounded.run(("sh", "-c", "echo early; exec sleep 1000"), SHORT)
    assert (status, text) == (None, b"early\n")
    assert SHORT <= time.monotonic() - started < AMPLE


def test_children_of_the_child_die_too(tmp_path: Path) -> None:
    """The kill at the deadline reaches the whole process group."""
    status, text = bounded.run(("sh", "-c", "sleep 1000 & echo $!; wait"), SHORT)
    assert status is None
    assert wait_for_end(int(text))


def test_sigterm_is_no_way_out() -> None:
    """A child that ignores SIGTERM and SIGINT ends at the deadline all the same."""
    status, text = bounded.run(("sh", "-c", "trap '' TERM INT; echo $$; while :; do sleep 1000; done"), SHORT)
    assert status is None
    assert wait_for_end(int(text))


def test_a_closed_stdout_does_not_end_the_wait_early() -> None:
    """The status of a child that closes its stdout and works on is still waited for."""
    assert bounded.run(("sh", "-c", "exec >&-; sleep 0.05; exit 3"), AMPLE) == (3, b"")


def test_a_child_that_cannot_be_killed_is_left_and_reaped_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that outlives SIGKILL, as in an uninterruptible sleep, is not waited for; the next run reaps it."""
    with monkeypatch.context() as patch:
        patch.setattr(bounded, "_kill", lambda pid: None)
        started = time.monotonic()
        status, text = bounded.run(("sh", "-c", "echo $$; exec sleep 1000"), SHORT)
        assert time.monotonic() - started < AMPLE
    assert status is None
    pid = int(text)
    os.kill(pid, signal.SIGKILL)
    assert wait_for_end(pid)
    assert bounded.run(("true",), AMPLE) == (0, b"")
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def test_environment_is_the_callers_or_the_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an environment the caller's is handed on; a given one replaces it."""
    monkeypatch.setenv("SPARK_PROBE", "mine")
    assert bounded.run(("sh", "-c", "echo $SPARK_PROBE"), AMPLE)[1] == b"mine\n"
    assert bounded.run(("sh", "-c", "echo $SPARK_PROBE"), AMPLE, {"SPARK_PROBE": "given"})[1] == b"given\n"


def test_no_descriptor_leaks_into_the_child_or_stays_open() -> None:
    """The child has 0, 1 and 2 only (a held lock would outlive the guard), and the caller keeps none of the pipe."""
    before = set(os.listdir("/proc/self/fd"))
    lock = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 50)
    text = bounded.run(python("import os; print(*os.listdir('/proc/self/fd'))"), AMPLE)[1]
    after = set(os.listdir("/proc/self/fd"))
    handed_on = {fd for fd in after if fd != str(lock) and os.path.exists(f"/proc/self/fd/{fd}") and os.get_inheritable(int(fd))}
    os.close(lock)
    listing = 1  # the folder that the child lists is open in it
    assert str(lock) not in text.decode().split()
    assert len(text.split()) == len(handed_on | {"0", "1", "2"}) + listing
    assert after - {str(lock)} == before


def test_blocked_signals_are_not_handed_on() -> None:
    """A child can be ended by SIGTERM although the caller blocks it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        assert bounded.run(("sh", "-c", "kill -TERM $$; sleep 1000"), AMPLE) == (-signal.SIGTERM, b"")
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def test_ignored_sigchld() -> None:
    """Where the kernel throws the status away (SIGCHLD ignored), the output still comes, with status 0."""
    code = (
        "import signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); sys.path.append(sys.argv[1]);"
        "from sparkguard.probe import bounded; print(bounded.run(('echo', 'hello'), 20))"
    )
    root = Path(bounded.__file__).parents[2]
    assert bounded.run((*python(code), str(root)), AMPLE) == (0, b"(0, b'hello\\n')\n")


def test_closed_standard_descriptors() -> None:
    """A caller without stdin, stdout and stderr, as a daemon may be, gets its answer too."""
    code = (
        "import os, sys; sys.path.append(sys.argv[1]); from sparkguard.probe import bounded; keep = os.dup(1);"
        "[os.close(fd) for fd in (0, 1, 2)]; answer = bounded.run(('echo', 'hello'), 20); os.write(keep, repr(answer).encode())"
    )
    root = Path(bounded.__file__).parents[2]
    assert bounded.run((*python(code), str(root)), AMPLE) == (0, b"(0, b'hello\\n')")


def test_a_missing_program_is_an_oserror() -> None:
    """A program that is not there raises, and leaves no descriptor open."""
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        bounded.run(("no-such-program-here",), AMPLE)
    assert set(os.listdir("/proc/self/fd")) == before


def test_imports_are_cheap() -> None:
    """Importing it brings in no module that costs the guard time."""
    code = "import sys; sys.path.append(sys.argv[1]); import sparkguard.probe.bounded; print(*sys.modules)"
    root = Path(bounded.__file__).parents[2]
    loaded = bounded.run((*python(code), str(root)), AMPLE)[1].decode().split()
    assert not {"subprocess", "signal", "enum", "typing", "dataclasses", "contextlib", "collections"} & set(loaded)
    assert "sparkguard.probe.bounded" in loaded
