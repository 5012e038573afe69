"""Processes in a pid namespace of their own, with a /proc that shows nobody else: what else runs on the machine is no claim.

Needs root; anybody else's processes run among all others, and a foreign vLLM would be counted, as it should be.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

_NEW_PID = 0x20000000  # CLONE_NEWPID
_nsenter = shutil.which("nsenter") or "nsenter"  # for processes whose PATH a test takes away
_libc = ctypes.CDLL(None, use_errno=True)


class PidNamespace:
    """`with PidNamespace() as inside: inside.popen(...)`. At its end everything in it is killed."""

    def __enter__(self) -> PidNamespace:
        self._first = None
        if os.getuid() == 0:
            command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", "echo; exec sleep infinity"]
            self._first = subprocess.Popen(command, stdout=subprocess.PIPE)
            assert self._first.stdout is not None
            assert self._first.stdout.readline() == b"\n"
            pid = self._first.pid
            init = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0]
            self._mounts = f"/proc/{init}/ns/mnt"
            self._inside = os.open(f"/proc/{init}/ns/pid", os.O_RDONLY)
            self._home = os.open("/proc/self/ns/pid", os.O_RDONLY)
        self._started: list[subprocess.Popen[Any]] = []
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        for child in self._started:
            child.kill()
        if self._first is not None:
            self._first.kill()
            self._first.communicate()
            os.close(self._inside)
            os.close(self._home)
        for child in self._started:
            child.wait()
            for pipe in (child.stdin, child.stdout, child.stderr):
                if pipe is not None:
                    pipe.close()

    def popen(self, argv: list[str], **how: Any) -> subprocess.Popen[str]:
        """The process itself: nsenter enters the mounts alone, and so needs no process of its own beside it."""
        if self._first is None:
            child = subprocess.Popen(argv, text=True, **how)
        else:
            _enter(self._inside)
            try:
                child = subprocess.Popen([_nsenter, f"--mount={self._mounts}", "--", *argv], text=True, **how)
            finally:
                _enter(self._home)
        self._started.append(child)
        return child

    def run(self, argv: list[str], **how: Any) -> subprocess.CompletedProcess[str]:
        child = self.popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **how)
        out, err = child.communicate(timeout=60)
        return subprocess.CompletedProcess(argv, child.returncode, out, err)


def _enter(namespace: int) -> None:
    """Where the children of this process start from now on."""
    if _libc.setns(namespace, _NEW_PID):
        raise OSError(ctypes.get_errno(), "setns")
