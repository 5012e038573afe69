"""Reservations: one lock, and nothing dead, torn or foreign that blocks a start."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkguard import ledger
from sparkguard.core.types import Hold
from sparkguard.errors import OSERR, SparkguardError
from sparkguard.ledger import Ledger, Reservation
from sparkguard.probe import procfs

BOOT = procfs.boot_id("/proc")
HOLDS = (Hold("gpu0", 400_000_000, 10 << 30), Hold("gpu1", None, None))


@pytest.fixture
def runtime(home: Path) -> Path:
    return home / "run"


@pytest.fixture
def folder(runtime: Path) -> Path:
    return runtime / "sparkguard"


@pytest.fixture
def process() -> Iterator[int]:
    """A process that lives until the test ends it."""
    child = subprocess.Popen([sys.executable, "-I", "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield child.pid
    child.kill()
    child.communicate()


def started(pid: int) -> int:
    stat = procfs.read_stat("/proc", pid)
    assert stat is not None
    return stat.start_time


def reserve(pid: int, /, **changes: object) -> Reservation:
    reservation = Reservation("m", pid, started(pid), BOOT, HOLDS, port=8000)
    return reservation.replace(**changes)


def live(folder: Path) -> tuple[Reservation, ...]:
    with Ledger(str(folder)) as held:
        return held.live()


def keep(folder: Path, reservation: Reservation) -> None:
    with Ledger(str(folder)) as held:
        held.hold(reservation)


DIRECTORIES = {
    "the session's": ({"XDG_RUNTIME_DIR": "{run}", "HOME": "{home}"}, "{run}/sparkguard"),
    "no such runtime folder": ({"XDG_RUNTIME_DIR": "{home}/none", "HOME": "{home}"}, "{home}/.local/state/sparkguard"),
    "a relative one": ({"XDG_RUNTIME_DIR": "run", "HOME": "{home}"}, "{home}/.local/state/sparkguard"),
    "none": ({"HOME": "{home}"}, "{home}/.local/state/sparkguard"),
}


@pytest.mark.parametrize(("env", "path"), DIRECTORIES.values(), ids=DIRECTORIES)
def test_directory(home: Path, monkeypatch: pytest.MonkeyPatch, env: dict[str, str], path: str) -> None:
    """Reservations lie in the runtime folder, which a reboot empties; without one, in the user's own state."""
    monkeypatch.chdir(home)
    monkeypatch.setattr(ledger.os, "getuid", lambda: 4_000_000_000)  # who has no session, and so no /run/user/UID
    names = {"home": str(home), "run": str(home / "run")}
    assert ledger.directory({key: value.format(**names) for key, value in env.items()}) == path.format(**names)


def test_holds_and_reads_back(folder: Path) -> None:
    """A reservation is read as it was written, unknown parts included, and its file is the user's alone."""
    reservation = reserve(os.getpid(), unit=r"vllm-model@a\x2db.service", invocation="0123abcd")
    keep(folder, reservation)
    assert live(folder) == (reservation,)
    assert [oct(path.stat().st_mode & 0o777) for path in (folder, *folder.iterdir())] == ["0o700", "0o600", "0o600"]


def test_one_reservation_a_start(folder: Path) -> None:
    """A second one of the same start replaces the first."""
    keep(folder, reserve(os.getpid()))
    keep(folder, reserve(os.getpid(), name="n"))
    assert [reservation.name for reservation in live(folder)] == ["n"]


STALE = {
    "another boot": {"boot_id": "11111111-1111-1111-1111-111111111111"},
    "the pid is another process now": {"start_time": 1},
    "no such process": {"pid": 2**22 + 1},
}


@pytest.mark.parametrize("changes", STALE.values(), ids=STALE)
def test_stale(folder: Path, process: int, changes: dict[str, object]) -> None:
    """A reservation whose process is gone, reused or of another boot counts for nothing and is removed."""
    keep(folder, reserve(process, **changes))
    assert live(folder) == ()
    assert [path.name for path in folder.iterdir()] == ["lock"]


def test_lives_as_long_as_its_process(folder: Path) -> None:
    """It holds while its process runs, and no longer, however that ends; a zombie is at its end."""
    child = subprocess.Popen([sys.executable, "-I", "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    keep(folder, reserve(child.pid))
    assert [reservation.pid for reservation in live(folder)] == [child.pid]
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet collected
    assert live(folder) == ()
    child.communicate()


def link(runtime: Path, unit: str, invocation: str) -> Path:
    path = runtime / "systemd" / "units" / f"invocation:{unit}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(invocation)
    return path


def test_lives_as_long_as_its_units_start(runtime: Path, folder: Path) -> None:
    """After ExecStartPre= has ended it holds while systemd keeps the link of this very start."""
    unit = r"vllm-model@a\x2db.service"
    keep(folder, reserve(os.getpid(), pid=2**22 + 1, unit=unit, invocation="aaaa"))
    published = link(runtime, unit, "aaaa")
    assert [reservation.invocation for reservation in live(folder)] == ["aaaa"]
    link(runtime, unit, "bbbb")  # the next start of the same unit
    assert live(folder) == ()
    keep(folder, reserve(os.getpid(), pid=2**22 + 1, unit=unit, invocation="aaaa"))
    published.unlink()
    assert live(folder) == ()


def test_release(folder: Path, process: int) -> None:
    """A unit's stop ends its own start's reservation, and a pid's ends that of the pid; others stay."""
    keep(folder, reserve(os.getpid(), invocation="aaaa"))
    keep(folder, reserve(process))
    with Ledger(str(folder)) as held:
        held.release(None)
        held.release("bbbb")
        assert len(held.live()) == 2
        held.release("aaaa")
        assert [reservation.pid for reservation in held.live()] == [process]
        held.release(None, process)
        assert held.live() == ()


def whole(folder: Path) -> tuple[Path, bytes]:
    keep(folder, reserve(os.getpid()))
    (path,) = folder.glob("*.reservation")
    return path, path.read_bytes()


def test_torn(folder: Path) -> None:
    """Cut at any byte, a reservation is none: a cut number must not count as a smaller one."""
    path, raw = whole(folder)
    for end in range(len(raw)):
        path.write_bytes(raw[:end])
        assert live(folder) == (), raw[:end]
        assert not path.exists()
    path.write_bytes(raw)
    assert len(live(folder)) == 1


FOREIGN = {
    "text": b"hello\nend\n",
    "bytes": b"\x00\xff" * 100,
    "a word for a number": b"name=m\npid=x\nstart_time=1\nboot_id=b\nunit=-\ninvocation=-\nport=-\nend\n",
    "a hold of one word": b"name=m\npid=1\nstart_time=1\nboot_id=b\nunit=-\ninvocation=-\nport=-\nhold=gpu0\nend\n",
}


@pytest.mark.parametrize("raw", FOREIGN.values(), ids=FOREIGN)
def test_foreign(folder: Path, raw: bytes) -> None:
    """A file of ours that says something else is no reservation and goes; a file of another name is left alone."""
    keep(folder, reserve(os.getpid()))
    (folder / "x.reservation").write_bytes(raw)
    (folder / "facts").write_bytes(raw)
    assert len(live(folder)) == 1
    assert not (folder / "x.reservation").exists()
    assert (folder / "facts").exists()


def test_what_cannot_be_a_reservation(folder: Path, tmp_path: Path) -> None:
    """A folder, a fifo and a link of that name neither count nor hang nor are followed."""
    target = tmp_path / "target"
    _, raw = whole(folder)
    target.write_bytes(raw)
    (folder / "a.reservation").mkdir()
    os.mkfifo(folder / "b.reservation")
    (folder / "c.reservation").symlink_to(target)
    assert len(live(folder)) == 1
    assert target.read_bytes() == raw


def test_a_killed_guards_draft_goes(folder: Path) -> None:
    """What a guard was writing when it was killed is removed by the next reader."""
    path, raw = whole(folder)
    draft = path.with_name("1-1.reservation.new")
    draft.write_bytes(raw[:20])
    assert len(live(folder)) == 1
    assert not draft.exists()


def test_a_planted_draft_is_not_followed(folder: Path, tmp_path: Path) -> None:
    """A link where the draft will be written leads nowhere: the reservation fails, and the target is as it was."""
    target = tmp_path / "target"
    target.write_text("precious")
    with Ledger(str(folder)) as held:
        (folder / f"{os.getpid()}-{started(os.getpid())}.reservation.new").symlink_to(target)
        with pytest.raises(SparkguardError, match="no reservation can be kept"):
            held.hold(reserve(os.getpid()))
    assert target.read_text() == "precious"


def unusable(folder: Path, reservation: Reservation | None = None) -> SparkguardError:
    with pytest.raises(SparkguardError) as caught:
        keep(folder, reservation or reserve(os.getpid()))
    assert caught.value.status == OSERR
    assert caught.value.message.startswith(f"no reservation can be kept in {folder}: ")
    assert caught.value.hint
    return caught.value


def test_a_link_for_the_folder(folder: Path, tmp_path: Path) -> None:
    """A link in the folder's place is refused: it may lead into somebody else's."""
    folder.symlink_to(tmp_path)
    assert unusable(folder).message.endswith("it is a link")
    assert list(tmp_path.iterdir()) == []


def test_a_link_for_the_lock(folder: Path, tmp_path: Path) -> None:
    """A link in the lock's place is not followed."""
    folder.mkdir()
    (folder / "lock").symlink_to(tmp_path / "made")
    unusable(folder)
    assert not (tmp_path / "made").exists()


def test_a_file_for_the_folder(folder: Path) -> None:
    """A file in the folder's place is 71 as well."""
    folder.write_text("")
    assert unusable(folder).message.endswith("File exists")


def test_somebody_elses_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of another user's is refused, since they could reserve, or take away, in our name."""
    folder.mkdir()
    if os.getuid() == 0:
        os.chown(folder, 4711, 4711)
        uid = 4711
    else:
        uid = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    assert unusable(folder).message.endswith(f"it belongs to somebody else (uid {uid})")


def test_a_folder_that_others_may_write(folder: Path) -> None:
    """A folder left open to others is closed."""
    folder.mkdir()
    folder.chmod(0o777)
    keep(folder, reserve(os.getpid()))
    assert folder.stat().st_mode & 0o777 == 0o700


ERRORS = {
    "full": (errno.ENOSPC, "it is full: free some space there"),
    "quota": (errno.EDQUOT, "your quota there is used up"),
    "read-only": (errno.EROFS, "it is read-only: set XDG_RUNTIME_DIR to a folder that you can write to"),
    "not allowed": (errno.EACCES, "set XDG_RUNTIME_DIR to a folder that you can write to"),
    "a broken disk": (errno.EIO, "without a reservation two starts at once would both be admitted"),
}


@pytest.mark.parametrize("call", ["makedirs", "open", "write", "replace"])
@pytest.mark.parametrize(("number", "hint"), ERRORS.values(), ids=ERRORS)
def test_cannot_be_written(folder: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, hint: str) -> None:
    """Wherever writing fails, the start is refused with 71 and what would help, and nothing is left behind."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    reservation = reserve(os.getpid())
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        assert unusable(folder, reservation).hint == hint
    assert live(folder) == ()
    assert [path.name for path in folder.iterdir()] == ["lock"]


def test_half_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes only the first bytes is a full disk."""
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, raw: write(file, raw[:10]))
        assert unusable(folder).hint == ERRORS["full"][1]
    assert live(folder) == ()


def test_a_full_disk_takes_the_holders_name_and_not_the_lock(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock works without its content."""

    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "pwrite", fail)
    assert live(folder) == ()


def test_the_lock_is_the_kernels(folder: Path) -> None:
    """While one holds it nobody else does, and it ends with the block, an error's too."""

    def is_free() -> bool:
        with open(folder / "lock") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    with Ledger(str(folder)):
        assert not is_free()
    assert is_free()
    with pytest.raises(ZeroDivisionError), Ledger(str(folder)):
        1 / 0  # noqa: B018
    assert is_free()


HOLD_LOCK = """
import sys
from sparkguard.ledger import Ledger
with Ledger(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def lock_holder(folder: Path) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-I", "-c", HOLD_LOCK, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    return child


def test_a_stopped_holder(folder: Path) -> None:
    """A holder that was stopped is named after the bounded time, with how to let it go on; the status is 71."""
    holder = lock_holder(folder)
    holder.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(SparkguardError) as caught, Ledger(str(folder), seconds=0.2):
        pytest.fail("the lock was given to two")
    assert 0.2 <= time.monotonic() - began < 5
    assert caught.value.status == OSERR
    assert caught.value.message == f"the lock {folder / 'lock'} has been held for 0.2 s by pid {holder.pid}"
    assert f"kill -CONT {holder.pid}" in (caught.value.hint or "")
    holder.kill()
    holder.communicate()
    assert live(folder) == ()  # a killed holder leaves no lock


def test_the_bound_is_on_one_holder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time starts anew whenever the lock passes on: a long queue is no stopped process. The clock is monotonic."""
    holder = lock_holder(folder)
    moments = iter(range(0, 1000, 6))  # six seconds pass between two looks
    holders = iter([b"1\n", b"2\n", b"3\n", b"4\n", b"4\n", b"4\n"])
    monkeypatch.setattr(time, "monotonic", lambda: float(next(moments)))
    monkeypatch.setattr(time, "time", lambda: pytest.fail("a clock that jumps"))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr(os, "pread", lambda *_: next(holders))
    with pytest.raises(SparkguardError, match="held for 10 s by pid 4"), Ledger(str(folder), seconds=10):
        pytest.fail("the lock was given to two")
    monkeypatch.undo()
    holder.kill()
    holder.communicate()


def test_waits_for_the_lock(folder: Path) -> None:
    """One that comes while the lock is held gets it as soon as it is given back."""
    holder = lock_holder(folder)
    waiting = subprocess.Popen(
        [sys.executable, "-I", "-c", HOLD_LOCK, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert (folder / "lock").read_text() == f"{holder.pid}\n"
    holder.communicate("")
    assert waiting.stdout is not None
    assert waiting.stdout.readline() == "held\n"
    assert (folder / "lock").read_text() == f"{waiting.pid}\n"
    waiting.communicate("")


def test_the_sessions_folder_without_its_variable(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """A shell whose XDG_RUNTIME_DIR is gone or wrong must meet the starts of the units, which have theirs."""
    real = os.path.isdir
    session = f"/run/user/{os.getuid()}"
    monkeypatch.setattr(ledger.os.path, "isdir", lambda path: path == session or real(path))
    for runtime in ("", "run", str(home / "none")):
        assert ledger.directory({"XDG_RUNTIME_DIR": runtime, "HOME": str(home)}) == f"{session}/sparkguard"


def test_a_lock_that_cannot_be_read(folder: Path, process: int) -> None:
    """A fifo can be locked and not read: its holder is unknown, and that is said after the wait."""
    folder.mkdir(mode=0o700)
    os.mkfifo(folder / "lock")
    other = os.open(folder / "lock", os.O_RDWR)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(SparkguardError, match="by pid unknown") as caught, Ledger(str(folder), seconds=0.05):
        pass
    os.close(other)
    assert caught.value.status == OSERR


def test_a_folder_that_cannot_be_listed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is 71, as one that cannot be written."""
    with Ledger(str(folder)) as held:

        def fail(path: str) -> list[str]:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

        monkeypatch.setattr(ledger.os, "listdir", fail)
        for call in (held.live, lambda: held.release("x")):
            with pytest.raises(SparkguardError, match="Permission denied") as caught:
                call()
            assert caught.value.status == OSERR
