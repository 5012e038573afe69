"""A real Docker daemon on a node of the rig, in place of the rig's own docker.

It lives in the node's namespaces and ends with them. Containers have the host's network (the node's), no image is pulled, and
control groups are version 2's, mounted in the node alone; the kernel keeps their folders no longer than the containers.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from types import TracebackType

from cluster_rig.rig import RigNode

SOCKET = "unix:///run/docker.sock"
IMAGE = "tiny:1"
START_SECONDS = 30
_DAEMON = """
if ! grep -q ' /sys/fs/cgroup cgroup2 ' /proc/mounts; then mount -t cgroup2 none /sys/fs/cgroup; fi
mkdir -p /run/docker
exec dockerd --data-root {data} --exec-root /run/docker --pidfile /run/docker.pid -H {socket} \\
  --iptables=false --ip6tables=false --bridge=none --storage-driver vfs
"""


class EngineDaemon:
    """`with EngineDaemon(node, folder): ...` the node's docker is a real one, with the image "tiny:1" (/bin/wait)."""

    def __init__(self, node: RigNode, unpacked: Path) -> None:
        self._node = node
        self._unpacked = unpacked
        self._data = node.folder / "engine"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> EngineDaemon:
        self._data.mkdir()
        client = self._node.folder / "bin/docker"
        client.write_text(f'#!/bin/sh\nDOCKER_HOST={SOCKET} exec {self._unpacked}/root/usr/bin/docker "$@"\n')
        self.start()
        self.docker("import", "--change", 'ENTRYPOINT ["/bin/wait"]', str(self._unpacked / "image.tar"), IMAGE)
        return self

    def start(self) -> None:
        root = self._unpacked / "root/usr"
        script = _DAEMON.format(data=self._data, socket=SOCKET)
        environment = {"PATH": f"{root}/bin:{root}/sbin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/root"}
        with open(self._node.folder / "dockerd.log", "ab") as log:
            self._process = subprocess.Popen(
                [*self._node.enter(), "--", "sh", "-c", script], env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        deadline = time.monotonic() + START_SECONDS
        while self._node.run("docker", "version", check=False).returncode:
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise RuntimeError((self._node.folder / "dockerd.log").read_text())

    def kill(self) -> None:
        """The daemon is gone, and its containers run on."""
        self._node.run("pkill", "-KILL", "-x", "dockerd")
        assert self._process is not None
        self._process.wait()

    def docker(self, *words: str) -> str:
        return self._node.run("docker", *words).stdout.strip()

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process is not None
        if self._process.poll() is None and (ids := self.docker("ps", "--all", "--quiet").split()):
            self.docker("rm", "--force", *ids)
        self._node.run("rmdir", "/sys/fs/cgroup/docker", check=False)
        os.kill(self._node.init_pid, 9)
        self._process.wait()
