"""The folder of the runners' sockets, one supervisor's alone; and the end of what an earlier one left behind.

Runners die with their supervisor. What is left are processes that a runner started itself, and runners on a system that
cannot link their lives (macOS). A runner is known by its pid and start time, its children by the variable MARK, which no
change of group, session or parent takes from them.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal

from sparkguard.core.record import Record
from sparkguard.errors import OSERR, TEMPFAIL, SparkguardError
from sparkguard.probe import procfs
from sparkguard.runner import MARK

_SECONDS = 5.0  # for a killed process to be gone: one of 100 GB takes seconds to give its memory back


class Left(Record):
    """A runner of an earlier supervisor, ended by the sweep."""

    model: str
    pid: int


class Folder:
    """$XDG_RUNTIME_DIR/sparkguard/runners, locked as long as this object lives."""

    def __init__(self, path: str, proc_root: str = "/proc") -> None:
        self.path = path
        self._proc = proc_root
        self._boot = procfs.boot_id(proc_root)
        try:
            os.makedirs(path, mode=0o700, exist_ok=True)
            os.chmod(path, 0o700)
            self._lock = os.open(f"{path}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SparkguardError(f"{path}: {error.strerror}", status=OSERR) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            other = os.read(self._lock, 20).decode("ascii", "replace").strip() or "unknown"
            os.close(self._lock)
            raise SparkguardError(
                f"another supervisor runs already (pid {other})", "sparkguard runners shows what it runs", TEMPFAIL
            ) from None
        try:
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        except OSError:
            pass  # a full disk takes the name of the holder, not the lock

    def close(self) -> None:
        os.close(self._lock)

    def remember(self, name: str, model: str, pid: int) -> None:
        """Raises SparkguardError where that cannot be written."""
        stat = procfs.read_stat(self._proc, pid)
        record = {"model": model, "pid": pid, "start_time": stat.start_time if stat else 0, "boot_id": self._boot}
        try:
            with open(f"{self.path}/{name}.json", "w", encoding="utf-8") as file:
                json.dump(record, file)
        except OSError as error:
            raise SparkguardError(f"{self.path} cannot be written: {error.strerror}", status=OSERR) from None

    def forget(self, name: str) -> None:
        for suffix in (".json", ".sock"):
            try:
                os.unlink(f"{self.path}/{name}{suffix}")
            except OSError:
                pass

    def sweep(self) -> list[Left]:
        """Ends every runner and every runner's child of an earlier supervisor, and removes their files."""
        left = []
        for name in sorted(os.listdir(self.path)):
            stem, suffix = os.path.splitext(name)
            if suffix == ".json":
                found = self._read(f"{self.path}/{name}")
                if found is not None and kill_group(found.pid):
                    left.append(found)
            if suffix in (".json", ".sock"):
                self.forget(stem)
        pids = [found.pid for found in left]
        for pid in marked(self._proc, self.path + "/"):
            left.append(Left("a child of a runner", pid))
            _kill(pid)
            pids.append(pid)
        wait_for(pids, _SECONDS)
        return left

    def _read(self, path: str) -> Left | None:
        """None: it is gone, or its pid is somebody else's by now."""
        try:
            with open(path, encoding="utf-8") as file:
                record = json.load(file)
            found = Left(str(record["model"]), int(record["pid"]))
            start_time, boot = int(record["start_time"]), record["boot_id"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        stat = procfs.read_stat(self._proc, found.pid)
        return found if stat and boot == self._boot and stat.start_time == start_time and not stat.exiting else None


def marked(proc_root: str, prefix: str) -> list[int]:
    """Processes whose MARK begins so: runners, and whatever they have started."""
    wanted = f"{MARK}={prefix}".encode()
    found = []
    for name in os.listdir(proc_root):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"{proc_root}/{name}/environ", "rb") as file:
                raw = file.read()
        except OSError:  # gone, or not ours
            continue
        if raw.startswith(wanted) or b"\0" + wanted in raw:
            found.append(int(name))
    return found


def kill_group(pid: int) -> bool:
    """The process and its group. False: there is none."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except PermissionError:
        return _kill(pid)
    except ProcessLookupError:
        return _kill(pid)
    return True


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        return False
    return True


def wait_for(pids: list[int], seconds: float) -> None:
    """Until they are gone, or the time is over."""
    if not hasattr(os, "pidfd_open"):
        return
    poller = select.poll()
    open_fds = set()
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            continue
        open_fds.add(fd)
        poller.register(fd, select.POLLIN)
    try:
        import time

        deadline = time.monotonic() + seconds
        waiting = set(open_fds)
        while waiting and (rest := deadline - time.monotonic()) > 0:
            for fd, _ in poller.poll(rest * 1000):
                poller.unregister(fd)
                waiting.discard(fd)
    finally:
        for fd in open_fds:
            os.close(fd)
