"""A /proc made of files: the processes that a test describes, for the code that takes proc_root.

With the real names and formats (proc_pid_stat(5) and its kin), as far as they are read.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

PAGE = 4096
TICKS = 100  # of start times in a second, on every Linux that serves models
DATA = Path(__file__).parent / "data" / "processes"
USER = f"/user.slice/user-{os.getuid()}.slice/user@{os.getuid()}.service/app.slice"
_EXITING = 4


class ProcessTree:
    """`tree.root` is the folder. Process 1 is there from the start; hide it with remove(1) for hidepid=2."""

    def __init__(self, root: Path, uptime: float = 100_000.0, meminfo: Mapping[str, int] | None = None) -> None:
        self.root = root
        self._parents: dict[int, int] = {}
        (root / "sys" / "kernel" / "random").mkdir(parents=True)
        (root / "sys" / "kernel" / "random" / "boot_id").write_text("11111111-2222-3333-4444-555555555555\n")
        (root / "uptime").write_text(f"{uptime:.2f} {uptime:.2f}\n")
        memory = meminfo or {"MemTotal": 127600748, "MemFree": 118000000, "MemAvailable": 118566368}
        (root / "meminfo").write_text("".join(f"{key}: {value:>12} kB\n" for key, value in memory.items()))
        self.listen("self")
        self.add(1, ["/sbin/init"], ppid=0, starttime=1, cgroup="/init.scope")

    def add(
        self,
        pid: int,
        argv: Sequence[str] | bytes,
        *,
        ppid: int = 1,
        comm: str | bytes = "",
        state: str = "S",
        pgrp: int | None = None,
        session: int | None = None,
        starttime: int = 1_000,
        environ: Mapping[str, str] | None = None,
        readable: bool = True,
        cgroup: str = USER + "/app-terminal.scope",
        nspid: Sequence[int] = (),
        anonymous_bytes: int = 4 << 20,
        file_bytes: int = 8 << 20,
        listens: Iterable[int] | None = None,
        cwd: Path | None = None,
        root: Path | None = None,
        exiting: bool = False,
    ) -> int:
        """argv as bytes is the file's content as it is. The group is a process's own unless it has its parent's.

        readable False: another user's, whose environ only root may read. listens: ports in a network namespace of its
        own; None: it has the machine's.
        """
        folder = self.root / str(pid)
        folder.mkdir()
        raw = argv if isinstance(argv, bytes) else b"".join(word.encode("utf-8", "surrogateescape") + b"\0" for word in argv)
        (folder / "cmdline").write_bytes(raw)
        name = comm if isinstance(comm, bytes) else (comm or raw.split(b"\0")[0].decode("utf-8", "replace")[-15:]).encode()
        group = pid if pgrp is None else pgrp
        flags = _EXITING if exiting else 0
        numbers = [ppid, group, group if session is None else session, 0, -1, flags, *[0] * 12, starttime, *[0] * 30]
        (folder / "stat").write_bytes(b"%d (%s) %s %s\n" % (pid, name, state.encode(), " ".join(map(str, numbers)).encode()))
        spaces = "\t".join(map(str, [pid, *nspid]))
        (folder / "status").write_bytes(b"Name:\t%s\nNSpid:\t%s\n" % (name.replace(b"\n", b"\\n"), spaces.encode()))
        if readable:
            pairs = (f"{key}={value}\0" for key, value in (environ or {}).items())
            (folder / "environ").write_bytes("".join(pairs).encode("utf-8", "surrogateescape"))
        else:
            (folder / "environ").mkdir()  # cannot be read, not even by root, who runs the tests
        (folder / "cgroup").write_text(f"0::{cgroup}\n")
        resident, shared = (anonymous_bytes + file_bytes) // PAGE, file_bytes // PAGE
        (folder / "statm").write_text(f"{resident * 4} {resident} {shared} 1 0 {resident} 0\n")
        if listens is not None:
            self.listen(str(pid), *listens)
        else:
            (folder / "net").symlink_to(self.root / "self" / "net")
        for link, target in (("cwd", cwd), ("root", root)):
            if target is not None:
                (folder / link).symlink_to(target)
        self._parents[pid] = ppid
        self._write_children()
        return pid

    def remove(self, *pids: int) -> None:
        """They end; whom they leave behind is process 1's."""
        for pid in pids:
            shutil.rmtree(self.root / str(pid))
            del self._parents[pid]
        for child, parent in self._parents.items():
            if parent in pids:
                self.adopt(child, 1)
        self._write_children()

    def adopt(self, pid: int, ppid: int) -> None:
        path = self.root / str(pid) / "stat"
        head, _, tail = path.read_bytes().rpartition(b")")
        state, _, *rest = tail.split()
        path.write_bytes(head + b") " + b" ".join([state, str(ppid).encode(), *rest]) + b"\n")
        self._parents[pid] = ppid
        self._write_children()

    def listen(self, pid: str, *ports: int) -> None:
        folder = self.root / pid / "net"
        folder.mkdir(parents=True, exist_ok=True)
        rows = (f"   {i}: 0100007F:{port:04X} 00000000:0000 0A 00000000:00000000\n" for i, port in enumerate(ports))
        connected = "  99: 0100007F:1F41 0100007F:C350 01 00000000:00000000\n"
        (folder / "tcp").write_text("  sl  local_address rem_address   st\n" + "".join(rows) + connected)

    def _write_children(self) -> None:
        for pid in self._parents:
            task = self.root / str(pid) / "task" / str(pid)
            task.mkdir(parents=True, exist_ok=True)
            children = sorted(child for child, parent in self._parents.items() if parent == pid)
            (task / "children").write_text("".join(f"{child} " for child in children))

    def add_recorded(self, name: str, **changes: Any) -> list[int]:
        """The processes of tests/data/processes/NAME.json, the server first."""
        return [self.add(**{**process, **changes}) for process in recorded(name)]


def recorded(name: str) -> list[dict[str, Any]]:
    """What add() takes for each process of a tree that was recorded from a real server."""
    return [_decoded(process) for process in json.loads((DATA / f"{name}.json").read_text())["processes"]]


def _decoded(process: dict[str, Any]) -> dict[str, Any]:
    # A title is padded with NULs to the length of the command line that it has overwritten.
    raw = b"".join(word.encode() + b"\0" for word in process["argv"]).ljust(process["cmdline_bytes"], b"\0")
    return {key: value for key, value in process.items() if key != "cmdline_bytes"} | {"argv": raw}
