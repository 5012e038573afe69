"""Reservations of starts under way: admitted, not yet visible as a server in /proc.

One file per reservation, in a folder of the user's runtime directory, under one kernel lock (flock), which ends with its
holder however it dies. A reservation lives as long as its process (pid and start time) or as its unit's start (the
INVOCATION_ID that systemd publishes while a unit is active); a dead one is dropped by the next reader.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time

from sparkguard.core.record import Record
from sparkguard.core.types import Hold
from sparkguard.errors import OSERR, SparkguardError
from sparkguard.probe import procfs
from sparkguard.settings import home_folder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

# A holder has the lock for the milliseconds of one scan, or some seconds where a driver hangs. Longer means that it is
# stopped (SIGSTOP, a debugger). It bounds one holder, not the queue: twenty starts at once each wait for the others.
LOCK_SECONDS = 10.0
_SUFFIX = ".reservation"
_DRAFT = ".new"


class Reservation(Record):
    """pid: the process that holds it (a guard, then the server it becomes); invocation: the unit's start.

    unit is named as systemd names it, with its \\xNN escapes. asked: what was judged, in one line (command.asked()).
    engine: "vllm" for a start under way; the supervisor's is "llama-server", and lasts as long as it does.
    """

    name: str
    pid: int
    start_time: int
    boot_id: str
    holds: tuple[Hold, ...]
    unit: str | None = None
    invocation: str | None = None
    port: int | None = None
    asked: str = ""
    engine: str = "vllm"


def directory(env: Mapping[str, str]) -> str:
    """$XDG_RUNTIME_DIR/sparkguard; without a login session, the same user's folder below ~/.local/state."""
    # A relative path would be another folder for each start, and so another lock; the XDG specification has it ignored.
    for runtime in (env.get("XDG_RUNTIME_DIR", ""), f"/run/user/{os.getuid()}"):
        if os.path.isabs(runtime) and os.path.isdir(runtime):
            return os.path.join(runtime, "sparkguard")
    return os.path.join(home_folder(env), ".local", "state", "sparkguard")


class Ledger:
    """`with Ledger(folder, proc_root, runtime) as ledger:` holds the lock."""

    def __init__(self, folder: str, proc_root: str = "/proc", seconds: float = LOCK_SECONDS) -> None:
        self.folder = folder
        self._proc_root = proc_root
        self._seconds = seconds
        self._lock = -1

    def __enter__(self) -> Ledger:
        path = os.path.join(self.folder, "lock")
        try:
            os.makedirs(self.folder, 0o700, exist_ok=True)
            self._check_owner()
            self._lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise _unusable(self.folder, error) from None
        try:
            self._acquire(path)
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def _acquire(self, path: str) -> None:
        holder, deadline = "", 0.0
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES, errno.EINTR):
                    raise _unusable(self.folder, error) from None
            present = self._holder()
            if present != holder:
                holder, deadline = present, time.monotonic() + self._seconds
            elif time.monotonic() > deadline:
                raise SparkguardError(
                    f"the lock {path} has been held for {self._seconds:g} s by pid {holder}",
                    f"look at it with: ps -fp {holder}; a stopped one goes on with: kill -CONT {holder}",
                    OSERR,
                )
            time.sleep(0.01)
        try:
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, b"%d\n" % os.getpid(), 0)
        except OSError:
            pass  # A full disk takes the name of the holder, not the lock.

    def _holder(self) -> str:
        try:
            return os.pread(self._lock, 32, 0).decode("ascii", "replace").strip() or "unknown"
        except OSError:
            return "unknown"

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self._lock)

    def _check_owner(self) -> None:
        info = os.lstat(self.folder)
        if stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid():
            if info.st_mode & 0o022:
                os.chmod(self.folder, 0o700)  # Else anybody could reserve in this user's name, or take a reservation away.
            return
        what = "is a link" if stat.S_ISLNK(info.st_mode) else f"belongs to somebody else (uid {info.st_uid})"
        raise SparkguardError(
            f"no reservation can be kept in {self.folder}: it {what}",
            "remove it, or set XDG_RUNTIME_DIR to your own folder",
            OSERR,
        )

    def live(self) -> tuple[Reservation, ...]:
        """The reservations in force; dead and unreadable ones are removed."""
        found = []
        boot = procfs.boot_id(self._proc_root)
        for name in self._names():
            path = os.path.join(self.folder, name)
            if name.endswith(_SUFFIX + _DRAFT):
                _remove(path)  # Of a guard that was killed: whoever writes one holds the lock, as we do now.
            if not name.endswith(_SUFFIX):
                continue
            reservation = _read(path)
            if reservation is not None and self._is_live(reservation, boot):
                found.append(reservation)
            else:
                _remove(path)
        return tuple(found)

    def _is_live(self, reservation: Reservation, boot: str) -> bool:
        if reservation.boot_id != boot:
            return False
        process = procfs.read_stat(self._proc_root, reservation.pid)
        if process is not None and process.start_time == reservation.start_time and process.state not in "ZX":
            return True
        return bool(reservation.invocation) and current_invocation(self.folder, reservation.unit) == reservation.invocation

    def _names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.folder))
        except OSError as error:
            raise _unusable(self.folder, error) from None

    def hold(self, reservation: Reservation) -> None:
        """Writes it, whole or not at all. Raises SparkguardError when it cannot be kept."""
        path = os.path.join(self.folder, (reservation.invocation or f"{reservation.pid}-{reservation.start_time}") + _SUFFIX)
        draft = path + _DRAFT
        try:
            file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                raw = _write(reservation)
                if os.write(file, raw) != len(raw):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(file)
            os.replace(draft, path)
        except OSError as error:
            _remove(draft)
            raise _unusable(self.folder, error) from None

    def release(self, invocation: str | None, pid: int | None = None) -> None:
        """Ends the reservation of a unit's start, or of a process. None held is no error."""
        for name in self._names():
            if name.endswith(_SUFFIX) and (name == f"{invocation}{_SUFFIX}" or (pid is not None and name.startswith(f"{pid}-"))):
                _remove(os.path.join(self.folder, name))


def current_invocation(folder: str, unit: str | None) -> str | None:
    """The INVOCATION_ID of the unit's present start: systemd keeps it as the target of a link while the unit is active."""
    for runtime in (os.path.dirname(folder), "/run"):  # a user's manager, the system's
        try:
            return os.readlink(os.path.join(runtime, "systemd", "units", f"invocation:{unit}"))
        except OSError:
            continue
    return None


def _unusable(folder: str, error: OSError) -> SparkguardError:
    remedies = {
        errno.ENOSPC: "it is full: free some space there",
        errno.EDQUOT: "your quota there is used up",
        errno.EROFS: "it is read-only: set XDG_RUNTIME_DIR to a folder that you can write to",
        errno.EACCES: "set XDG_RUNTIME_DIR to a folder that you can write to",
    }
    hint = remedies.get(error.errno or 0, "without a reservation two starts at once would both be admitted")
    return SparkguardError(f"no reservation can be kept in {folder}: {error.strerror}", hint, OSERR)


_NONE = "-"
_END = "end"  # A number that is cut short is a number all the same; only the last line shows that nothing is missing.
_MOST_BYTES = 1 << 16


def _write(reservation: Reservation) -> bytes:
    lines = [f"{name}={_NONE if value is None else value}" for name, value in reservation.__dict__.items() if name != "holds"]
    for hold in reservation.holds:
        lines.append(
            f"hold={hold.pool} {_NONE if hold.share is None else hold.share} {_NONE if hold.bytes is None else hold.bytes}"
        )
    return "\n".join([*lines, _END, ""]).encode("utf-8", "surrogateescape")


def _read(path: str) -> Reservation | None:
    """None for what is no reservation: torn, foreign or tampered with."""
    try:
        # A link or a fifo of somebody else's must neither be followed nor waited for.
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            lines = os.read(file, _MOST_BYTES).decode("utf-8", "surrogateescape").split("\n")
        finally:
            os.close(file)
        if lines[-2:] != [_END, ""]:
            return None
        pairs = [line.partition("=")[::2] for line in lines[:-2]]
        fields = {key: None if value == _NONE else value for key, value in pairs if key != "hold"}
        holds = tuple(
            Hold(pool, _int(share), _int(amount))
            for key, value in pairs
            if key == "hold"
            for pool, share, amount in [value.split(" ")]
        )
        return Reservation(
            name=fields["name"] or "",
            pid=int(fields["pid"] or ""),
            start_time=int(fields["start_time"] or ""),
            boot_id=fields["boot_id"] or "",
            holds=holds,
            unit=fields["unit"],
            invocation=fields["invocation"],
            port=_int(fields["port"] or _NONE),
            asked=fields.get("asked") or "",
            engine=fields["engine"] or "",
        )
    except (OSError, ValueError, KeyError):
        return None


def _int(text: str) -> int | None:
    return None if text == _NONE else int(text)


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass  # Gone already, or on a read-only disk, where nothing new can be reserved either.
