"""A cgroup for each runner, where the supervisor's unit may make them (version 2, Delegate=yes): a cap, and a sure kill."""

from __future__ import annotations

import os

from sparkguard.probe import procfs

_OURS = "supervisor"  # a cgroup with processes of its own cannot hand controllers down, so ours moves into a leaf


class Cgroups:
    """reason says why there are none, where there are none."""

    def __init__(self, root: str = "/sys/fs/cgroup", proc_root: str = "/proc") -> None:
        self.reason: str | None = None
        self._base = ""
        path = procfs.cgroup(proc_root, "self") or "/"
        if not os.path.exists(f"{root}/cgroup.controllers"):
            self.reason = "this system has no cgroups of version 2 alone"
        elif procfs.unit_of(path) is None:
            self.reason = "the supervisor does not run in a unit of its own"
        else:
            base = root + path.removesuffix(f"/{_OURS}")
            try:
                self._delegate(base)
                self._base = base
            except OSError as error:
                self.reason = f"{base} is not ours: {error.strerror} (its unit needs Delegate=memory pids)"

    def _delegate(self, base: str) -> None:
        os.makedirs(f"{base}/{_OURS}", exist_ok=True)
        with open(f"{base}/cgroup.procs", encoding="ascii") as file:
            pids = file.read().split()
        for pid in pids:
            _write(f"{base}/{_OURS}/cgroup.procs", pid)
        _write(f"{base}/cgroup.subtree_control", "+memory")

    def make(self, name: str, memory_max: int | None) -> str | None:
        """The path of a new cgroup; None where there can be none."""
        if not self._base:
            return None
        path = f"{self._base}/runner-{name}"
        try:
            os.makedirs(path, exist_ok=True)
            if memory_max is not None:
                _write(f"{path}/memory.max", str(memory_max))
        except OSError as error:
            self.reason = f"{path}: {error.strerror}"
            return None
        return path

    @staticmethod
    def kill(path: str) -> None:
        """All processes in it, those that left the group and the session too."""
        try:
            _write(f"{path}/cgroup.kill", "1")
        except OSError:
            pass  # older than Linux 5.14: the group has been killed, and its children by their mark

    @staticmethod
    def killed_for_memory(path: str) -> bool:
        try:
            with open(f"{path}/memory.events", encoding="ascii") as file:
                return any(int(line.split()[1]) > 0 for line in file if line.startswith("oom_kill "))
        except OSError:
            return False

    @staticmethod
    def remove(path: str) -> None:
        try:
            os.rmdir(path)
        except OSError:
            pass  # a killed process is still on its way out: the next start of the same name takes it over


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)
