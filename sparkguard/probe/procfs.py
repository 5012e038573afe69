"""Processes, from /proc: who runs, who started whom, which unit, which ports are listened on.

An entry that vanishes while it is read is a process that has ended: it is left out. An entry that may not be read is
counted in Snapshot.hidden, because a server behind hidepid= is not a server that is gone.
"""

from __future__ import annotations

import errno
import os
import sys

from sparkguard.core.record import Record
from sparkguard.errors import OSERR, SparkguardError

_PAGE = os.sysconf("SC_PAGE_SIZE")
_READ = 1 << 17  # MAX_ARG_STRLEN, the longest single argument the kernel takes; a command line may be longer
_DEPTH = 64  # no sane process tree is deeper; a torn read must not loop


class Process(Record):
    """A running process and its arguments; bytes that are no UTF-8 are kept by surrogateescape."""

    pid: int
    argv: tuple[str, ...]


class Snapshot(Record):
    """The processes whose command line holds a marker, and whether others could not be seen."""

    processes: tuple[Process, ...]
    hidden: bool


def scan(proc_root: str, markers: tuple[bytes, ...]) -> Snapshot:
    """One pass over every process; only a command line with a marker in it is looked at twice."""
    if on_a_mac(proc_root):
        from sparkguard.probe import apple

        # ps joins the arguments by blanks, so a flag inside another argument cannot be told from one of its own.
        rows = ((pid, args) for pid, _, args in apple.processes() if any(os.fsdecode(marker) in args for marker in markers))
        return Snapshot(
            tuple(sorted((Process(pid, tuple(args.split())) for pid, args in rows), key=lambda each: each.pid)), False
        )
    found = []
    hidden = False
    try:
        names = os.listdir(proc_root)
    except OSError as error:
        raise SparkguardError(f"{proc_root} cannot be read: {error.strerror}", status=OSERR) from None
    pids = [name for name in names if name.isdigit()]
    if not pids:
        raise SparkguardError(f"{proc_root} shows no processes", "is /proc mounted?", OSERR)
    for name in pids:
        try:
            file = os.open(f"{proc_root}/{name}/cmdline", os.O_RDONLY)
        except PermissionError:
            hidden = True
            continue
        except OSError as error:
            _check_it_ended(error)
            continue
        try:
            raw = os.read(file, _READ)
            if len(raw) == _READ:
                while more := os.read(file, _READ):
                    raw += more
        except OSError as error:
            _check_it_ended(error)
            continue
        finally:
            os.close(file)
        for marker in markers:
            if marker in raw:
                found.append(Process(int(name), split_argv(raw)))
                break
    # Process 1 always exists and always has a directory, unless hidepid=2 hides other users' processes.
    return Snapshot(tuple(sorted(found, key=lambda process: process.pid)), hidden or "1" not in pids)


def split_argv(raw: bytes) -> tuple[str, ...]:
    """A process title is padded with NULs to the old length, so trailing empty arguments mean nothing."""
    return tuple(os.fsdecode(part) for part in raw.rstrip(b"\0").split(b"\0"))


class Stat(Record):
    """Of /proc/PID/stat: the start time is in clock ticks since boot, and tells a reused pid from the old process."""

    state: str
    ppid: int
    pgrp: int
    session: int
    start_time: int
    exiting: bool = False  # killed, and giving back what it holds


_PF_EXITING = 4  # include/linux/sched.h


def read_stat(proc_root: str, pid: int) -> Stat | None:
    """None: there is no such process (any more)."""
    if on_a_mac(proc_root):
        from sparkguard.probe import apple

        row = apple.process(pid)
        return row and Stat(*row)
    raw = _read(f"{proc_root}/{pid}/stat")
    if raw is None:
        return None
    # The name stands in parentheses and may hold any byte, ')' and blanks too: "1 (foo) Z ) S 1 1 1".
    fields = raw[raw.rfind(b")") + 2 :].split()
    try:
        exiting = fields[0] in b"ZX" or bool(int(fields[6]) & _PF_EXITING)
        return Stat(fields[0].decode(), int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]), exiting)
    except (IndexError, ValueError):
        return None


def ancestors(proc_root: str, pid: int) -> list[int]:
    """Parent, its parent, and so on, without pid 0; short when a process on the way has ended."""
    found = [pid]
    while len(found) < _DEPTH:
        stat = read_stat(proc_root, found[-1])
        # A circle is the torn sight of a pid that was reused on the way.
        if stat is None or stat.ppid <= 0 or stat.ppid in found:
            break
        found.append(stat.ppid)
    return found[1:]


def descendants(proc_root: str, pid: int) -> list[int]:
    """The process and all below it. Without CONFIG_PROC_CHILDREN in the kernel: the process alone."""
    found = [pid]
    for parent in found:
        try:
            tasks = os.listdir(f"{proc_root}/{parent}/task")
        except OSError:
            continue
        for task in tasks:
            raw = _read(f"{proc_root}/{parent}/task/{task}/children")
            found.extend(child for child in map(int, (raw or b"").split()) if child not in found)
    return found


def private_bytes(proc_root: str, pids: list[int]) -> int:
    """Resident memory that is no file's: file pages are shared between processes and the kernel can take them back."""
    total = 0
    for pid in pids:
        fields = (_read(f"{proc_root}/{pid}/statm") or b"").split()
        if len(fields) > 2:
            total += max(0, int(fields[1]) - int(fields[2])) * _PAGE
    return total


def argv_of(proc_root: str, pid: int) -> tuple[str, ...]:
    raw = _read(f"{proc_root}/{pid}/cmdline")
    return split_argv(raw) if raw else ()


def environment(proc_root: str, pid: int) -> dict[str, str] | None:
    """None: another user's, which only root may read."""
    raw = _read(f"{proc_root}/{pid}/environ")
    if raw is None:
        return None
    pairs = (os.fsdecode(entry).partition("=") for entry in raw.split(b"\0") if b"=" in entry)
    return {key: value for key, _, value in pairs}


def cgroup(proc_root: str, pid: int | str) -> str | None:
    """The process's path ('/user.slice/.../vllm-embeddings.service') in the tree of cgroups that systemd keeps.

    That is the v2 tree or, where the host has only v1, the tree named systemd. Where both are mounted, the one that is not
    used has everything at '/'.
    """
    raw = _read(f"{proc_root}/{pid}/cgroup")
    found = None
    for line in (raw or b"").splitlines():
        hierarchy, _, rest = line.partition(b":")
        controllers, _, path = rest.partition(b":")
        if (hierarchy == b"0" or controllers == b"name=systemd") and found in (None, "/"):
            found = os.fsdecode(path)
    return found


# systemd escapes every other one.
_UNIT_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789:-_.\\@")


def unit_of(cgroup_path: str | None) -> str | None:
    """The innermost service, as systemd names it ('vllm-model@my\\x2dmodel.service'); None in a session or a container."""
    for part in reversed((cgroup_path or "").split("/")):
        if part.endswith(".service") and not part.startswith("user@"):
            # Whoever has a part of the tree may name a folder there as he likes, and a name comes to stand in a command.
            return part if _UNIT_CHARACTERS.issuperset(part) else None
        if part.endswith(".scope"):
            return None
    return None


def manager_of(cgroup_path: str | None) -> int | None:
    """The user whose manager keeps the cgroup; None: the system's."""
    for part in (cgroup_path or "").split("/"):
        uid = part[len("user@") : -len(".service")]
        if part.startswith("user@") and uid.isdecimal():
            return int(uid)
    return None


def unescape_unit(name: str) -> str:
    """Undoes systemd's \\xNN, one for each byte (but not '-' for '/', which no model's name holds)."""
    first, *parts = os.fsencode(name).split(b"\\x")
    return os.fsdecode(first + b"".join(_unescape(part[:2]) + part[2:] for part in parts))


def _unescape(digits: bytes) -> bytes:
    if len(digits) == 2 and all(digit in b"0123456789abcdefABCDEF" for digit in digits):
        return bytes((int(digits, 16),))
    return b"\\x" + digits


_RUNTIMES = ("docker-", "libpod-", "nerdctl-")


def in_container(proc_root: str, pid: int) -> bool:
    """Whether the process lives in a pid namespace below ours, or in the cgroup that a container's runtime makes.

    The second tells the containers that share our pid namespace: toolbox and distrobox, docker run --pid=host.
    """
    for line in (_read(f"{proc_root}/{pid}/status") or b"").splitlines():
        if line.startswith(b"NSpid:") and len(line.split()) > 2:
            return True
    parts = (cgroup(proc_root, pid) or "").split("/")
    return "docker" in parts or any(part.startswith(_RUNTIMES) and not part.endswith(".service") for part in parts)


def listening_ports(proc_root: str, pid: int | str = "self") -> set[int]:
    """TCP ports in state LISTEN in the process's network namespace. vLLM listens once it is ready, not before."""
    ports: set[int] = set()
    for name in ("tcp", "tcp6"):
        for line in (_read(f"{proc_root}/{pid}/net/{name}") or b"").splitlines()[1:]:
            fields = line.split()
            if len(fields) > 3 and fields[3] == b"0A":
                ports.add(int(fields[1].rpartition(b":")[2], 16))
    return ports


def boot_id(proc_root: str) -> str:
    return (_read(f"{proc_root}/sys/kernel/random/boot_id") or b"").decode("ascii", "replace").strip()


def _read(path: str) -> bytes | None:
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError as error:
        _check_it_ended(error)
        return None
    try:
        raw = b""
        while more := os.read(file, _READ):
            raw += more
        return raw
    except OSError as error:
        _check_it_ended(error)
        return None
    finally:
        os.close(file)


def _check_it_ended(error: OSError) -> None:
    """Raises SparkguardError when it is we who lack something: a server that cannot be read then is not one that has ended."""
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        raise SparkguardError(f"the processes cannot be read: {error.strerror}", "see: ulimit -n; sysctl fs.file-nr", OSERR)


def on_a_mac(proc_root: str) -> bool:
    """There is no /proc on macOS: ps stands in for the process list, and what it cannot tell stays unknown."""
    return sys.platform == "darwin" and is_here(proc_root)


def is_here(proc_root: str) -> bool:
    """Whether it is this machine's own, so that the kernel can be asked by other means as well."""
    return proc_root == "/proc"
