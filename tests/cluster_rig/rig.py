"""Nodes of a cluster on this machine: a real sshd each, in namespaces of its own, with its own address, home and boot_id.

    with Rig(folder) as rig:
        fleet = Fleet(rig.nodes(), rig.ssh_opts, state_dir)
        rig.node("head").dead_daemon()

docker, nvidia-smi, sudo, systemctl and the song factory are the rig's (bin/, engine.py, yue_factory.py). Needs root. A node
ends with its stdin, which only this process holds: a killed test run leaves nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import secrets
import shutil
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from cluster_rig.relay import Relay
from sparkguard.core.cluster import Node

HERE = Path(__file__).parent
BOOT_SECONDS = 30
_SPACES = {"mount": "mnt", "net": "net", "pid": "pid", "uts": "uts", "ipc": "ipc"}
_numbers = itertools.count()
IMAGES = ("vllm/vllm-openai:v0.30.0", "check:1")


def why_not() -> str | None:
    """Why no rig can be had here; None: it can."""
    if os.getuid() != 0:
        return "the rig's namespaces need root"
    for program in ("/usr/sbin/sshd", shutil.which("ip"), shutil.which("unshare")):
        if not program or not os.path.exists(program):
            return "the rig needs openssh-server and iproute2"
    return None


class RigNode:
    """One machine. Its switches do what their names say; .up() is undone by .thaw(), .revive_daemon() and so on."""

    def __init__(self, rig: Rig, name: str, folder: Path, index: int) -> None:
        self.name = name
        self.folder = folder
        self.index = index
        self.rig = rig
        block = secrets.randbelow(32768) * 4  # other runs have theirs
        self.address, self.gateway = _address(block + 2), _address(block + 1)
        self.reboot_gate = threading.Event()  # cleared: a reboot does not come up before it is set
        self.reboot_gate.set()
        self.is_up = threading.Event()
        self.is_down = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._watcher: threading.Thread | None = None
        self._closing = False
        self._lay_out()
        self.relay = Relay((self.address, 22))

    # ---- what there is on it

    def _lay_out(self) -> None:
        folder = self.folder
        for name in ("home", "docker/containers", "factory", "sys/class/infiniband", "keys"):
            (folder / name).mkdir(parents=True)
        os.chmod(folder / "home", 0o700)
        shutil.copytree(HERE / "bin", folder / "bin")
        shutil.copy(HERE / "engine.py", folder)
        shutil.copy(HERE / "yue_factory.py", folder / "factory")
        (folder / "shadow").write_text("root:*:19000:0:99999:7:::\n")
        (folder / "sys/class/net").symlink_to("/sys/class/net")
        for device in ("rocep1s0f1", "roceP2p1s0f1"):
            self.set_hca(device, "4: ACTIVE")
        self.set_meminfo(total_gib=121, available_gib=110)
        (folder / "boot_id").write_text(f"{uuid.uuid4()}\n")
        self.set_images(dict.fromkeys(IMAGES))
        self.write(
            "units.json", {"yue-icl.service": ["/usr/bin/python3", "-I", str(folder / "factory/yue_factory.py"), "serve", "8011"]}
        )
        key = folder / "keys/host"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        path = f"{folder}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        self.sshd_config = {
            "Port": "22", "HostKey": str(key), "AuthorizedKeysFile": f"{self.rig.key}.pub",
            "PermitRootLogin": "prohibit-password", "PasswordAuthentication": "no", "StrictModes": "no", "UsePAM": "no",
            "PidFile": "none", "UseDNS": "no",
            "PrintMotd": "no", "PrintLastLog": "no", "MaxStartups": "100", "LogLevel": "VERBOSE",
            "SetEnv": f"PATH={path} SPARK_SERVE_SYS={folder}/sys",
        }  # fmt: skip
        self.write_sshd_config()

    def write_sshd_config(self) -> None:
        (self.folder / "sshd_config").write_text("".join(f"{key} {value}\n" for key, value in self.sshd_config.items()))

    def write(self, name: str, value: Any) -> None:
        """A file of the rig's as JSON, whole."""
        path = self.folder / name
        new = path.with_name(path.name + ".new")
        new.write_text(json.dumps(value))
        new.replace(path)

    def set_images(self, images: dict[str, str | None], file: str = "images.json") -> None:
        """Reference -> id; None: one that is the same on every node."""
        told = {reference: {"id": identity or image_id(reference)} for reference, identity in images.items()}
        if "check:1" in told:
            told["check:1"]["run"] = []
        self.write(f"docker/{file}", told)

    def set_meminfo(self, total_gib: float, available_gib: float, swap_free_gib: float = 16) -> None:
        total, available, swap = (int(gib * (1 << 20)) for gib in (total_gib, available_gib, swap_free_gib))
        rows = {
            "MemTotal": total,
            "MemFree": available // 2,
            "MemAvailable": available,
            "Buffers": 1 << 16,
            "Cached": available // 3,
        }
        rows |= {"SwapTotal": 16 << 20, "SwapFree": swap}
        # The same inode: the file is mounted over the kernel's.
        (self.folder / "meminfo").write_text("".join(f"{name + ':':<16}{value:>9} kB\n" for name, value in rows.items()))

    def set_hca(self, device: str, state: str) -> None:
        port = self.folder / "sys/class/infiniband" / device / "ports/1"
        (port / "counters").mkdir(parents=True, exist_ok=True)
        (port / "state").write_text(state + "\n")
        (port / "rate").write_text("200 Gb/sec (2X NDR)\n")
        for counter in ("port_xmit_data", "port_rcv_data", "port_rcv_errors", "port_xmit_discards", "link_downed"):
            (port / "counters" / counter).write_text("0\n")

    def behave(self, container: str = "*", **how: Any) -> None:
        """How engines behave from now on: the keys of engine.py. Without any, as they should."""
        path = self.folder / "docker/behaviour.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        known[container] = how
        self.write("docker/behaviour.json", known)

    def factory(self, **changes: Any) -> None:
        """What the song factory says of itself from now on."""
        path = self.folder / "factory/factory.json"
        self.write("factory/factory.json", {**(json.loads(path.read_text()) if path.exists() else {}), **changes})

    def sudo(self, **rules: Any) -> None:
        """passwordless, password, lecture, tty, nopasswd: see bin/sudo."""
        self.write("sudo.json", rules)

    def docker(self, *words: str) -> str:
        """The node's docker, asked on the node and past every switch but the daemon's death."""
        return self.run(f"{self.folder}/bin/docker", *words).stdout.strip()

    def calls(self) -> list[list[str]]:
        """What docker was asked so far, in order."""
        path = self.folder / "docker/calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def enter(self) -> list[str]:
        """The command that starts another one in the node's namespaces."""
        return ["nsenter", *(f"--{kind}=/proc/{self.init_pid}/ns/{file}" for kind, file in _SPACES.items())]

    def run(self, *argv: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """A program in the node's namespaces."""
        environment = {
            "PATH": f"{self.folder}/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": "/root",
            "SPARK_SERVE_SYS": f"{self.folder}/sys",
        }
        return subprocess.run(
            [*self.enter(), "--", *argv],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=check,
            timeout=60,
        )

    @property
    def state_dir(self) -> Path:
        return self.folder / "home/.local/state/spark-serve"

    @property
    def boot_id(self) -> str:
        return (self.folder / "boot_id").read_text().strip()

    # ---- switches

    def dead_daemon(self) -> None:
        (self.folder / "docker/dead").touch()

    def revive_daemon(self) -> None:
        (self.folder / "docker/dead").unlink(missing_ok=True)

    def slow_docker(self, seconds: float) -> None:
        (self.folder / "docker/slow").write_text(str(seconds))

    def deny(self, *verbs: str) -> None:
        """docker is not permitted these."""
        (self.folder / "docker/deny").write_text(" ".join(verbs))

    def pids(self) -> dict[int, str]:
        """Every process in the node but its first: pid (as this machine counts) -> command line."""
        space = os.readlink(f"/proc/{self.init_pid}/ns/pid")
        found = {}
        for entry in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if entry.isdigit() and int(entry) != self.init_pid and os.readlink(f"/proc/{entry}/ns/pid") == space:
                    found[int(entry)] = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        return found

    def programs(self) -> dict[int, str]:
        """Those of them that are programs of ours, and what they started."""
        return {
            pid: line
            for pid, line in self.pids().items()
            if "sshd" not in line and "engine.py" not in line and "factory" not in line
        }

    def freeze(self) -> None:
        """Nothing on it runs any more, and its kernel still accepts connections."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def new_boot_id(self) -> None:
        """As after a reboot so fast that no connection broke."""
        (self.folder / "boot_id").write_text(f"{uuid.uuid4()}\n")

    def reboot(self) -> None:
        """As if somebody had pressed the button; returns when it is down."""
        self.is_down.clear()
        (self.folder / "power").write_text("reboot")
        os.kill(self.init_pid, signal.SIGUSR1)
        assert self.is_down.wait(BOOT_SECONDS)

    def power_off(self) -> None:
        self.is_down.clear()
        (self.folder / "power").write_text("poweroff")
        os.kill(self.init_pid, signal.SIGUSR1)
        assert self.is_down.wait(BOOT_SECONDS)

    @property
    def is_off(self) -> bool:
        """It went down for good: only boot() brings it up."""
        return not self.is_up.is_set() and self.is_down.is_set() and (self.folder / "power").read_text() == "poweroff"

    def come_up(self) -> str:
        """Waits until it is up; somebody presses the button of one that is off. Returns the boot_id."""
        deadline = time.monotonic() + BOOT_SECONDS
        boot_id = self.boot_id
        while not self.is_up.wait(0.05):
            assert time.monotonic() < deadline, f"{self.name} did not come up"
            if self.is_off:
                self.is_down.clear()
                self.boot()
            boot_id = self.boot_id
        return boot_id

    def restart_sshd(self) -> None:
        """With sshd_config as it is now."""
        self.write_sshd_config()
        self.reboot()
        assert self.is_up.wait(BOOT_SECONDS)

    # ---- from boot to end

    def boot(self) -> None:
        spaces = ("--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child")
        program = ("/usr/bin/python3", "-I", str(HERE / "node_init.py"), str(self.folder), self.name)
        with open(self.folder / "init.log", "ab") as log:
            pipe = subprocess.PIPE
            process = subprocess.Popen(
                ["unshare", *spaces, *program], stdin=pipe, stdout=pipe, stderr=log, text=True, start_new_session=True
            )
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        if process.stdout.readline() != "here\n":
            raise RuntimeError((self.folder / "init.log").read_text())
        self.init_pid = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
        outside = f"sg{os.getpid()}n{next(_numbers)}"[-15:]
        _ip("link", "add", outside, "type", "veth", "peer", "name", "lan0", "netns", str(self.init_pid))
        _ip("addr", "add", f"{self.gateway}/30", "dev", outside)
        _ip("link", "set", outside, "up")
        process.stdin.write(f"{self.address}/30 {self.gateway}\n")
        process.stdin.flush()
        if process.stdout.readline() != "up\n":
            raise RuntimeError((self.folder / "init.log").read_text())
        _until(self._answers, f"{self.name}: sshd", self.folder / "sshd.log")
        self.is_up.set()
        self._watcher = threading.Thread(target=self._watch, args=(process,), daemon=True)
        self._watcher.start()

    def _answers(self) -> bool:
        import socket

        try:
            with socket.create_connection((self.address, 22), 1) as connection:
                return connection.recv(4) == b"SSH-"
        except OSError:
            return False

    def _watch(self, process: subprocess.Popen[str]) -> None:
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        self.is_up.clear()
        if self._closing:
            return
        self.relay.drop()
        order = (self.folder / "power").read_text() if (self.folder / "power").exists() else "poweroff"
        self.new_boot_id()
        self.is_down.set()
        if order == "reboot":
            self.reboot_gate.wait()
            if not self._closing:
                self.boot()

    def close(self) -> None:
        self._closing = True
        self.reboot_gate.set()
        watcher = self._watcher
        if self._process is not None and self._process.poll() is None and self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                self.thaw()
                os.kill(self.init_pid, signal.SIGKILL)
        if watcher is not None:
            watcher.join(BOOT_SECONDS)
        self.relay.close()


class Rig:
    """Some nodes, and the laptop's way to them."""

    def __init__(self, folder: Path, names: Sequence[str] = ("head", "worker")) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.key = folder / "key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.key)], check=True)
        self._nodes = {name: RigNode(self, name, folder / name, index) for index, name in enumerate(names)}
        self._write_ssh_config()

    @property
    def ssh_opts(self) -> tuple[str, ...]:
        return ("-F", str(self.folder / "ssh_config"))

    def nodes(self) -> tuple[Node, ...]:
        return tuple(
            Node(node.name, node.name, f"http://{node.address}:8000", f"10.0.0.{node.index + 1}", f"http://{node.address}:8011")
            for node in self._nodes.values()
        )

    def node(self, name: str) -> RigNode:
        return self._nodes[name]

    def come_up(self) -> list[str]:
        """Every node is up, or has only begun to go down. Returns their boot_ids, for goes_down()."""
        return [node.come_up() for node in self]

    def goes_down(self, boots: list[str]) -> bool:
        """Whether a node ends its boot of then: it has, or it does while this waits."""
        deadline = time.monotonic() + BOOT_SECONDS
        while [node.boot_id for node in self] == boots:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def __iter__(self) -> Iterator[RigNode]:
        return iter(self._nodes.values())

    def catalog(self, path: Path, models: str = "", cluster: str = "") -> Path:
        """A models.toml for these nodes: `cluster` goes into its [cluster] table, `models` after it. The way to them is
        cluster_laptop.Laptop's, since a catalog names no ssh_config."""
        nodes = list(self._nodes.values())
        lines = [
            "[cluster]",
            f'head = "{nodes[0].name}"',
            f'lan_url = "http://{nodes[0].address}:8000"',
            'master_addr = "10.0.0.1"',
        ]
        if len(nodes) > 1:
            lines += [
                f'worker = "{nodes[1].name}"',
                f'worker_lan_url = "http://{nodes[1].address}:8000"',
                'worker_addr = "10.0.0.2"',
            ]
        lines += ['hf_cache_host = "/root"', cluster, "", models]
        path.write_text("\n".join(lines) + "\n")
        return path

    def _write_ssh_config(self) -> None:
        known, config = [], []
        for node in self._nodes.values():
            public = (node.folder / "keys/host.pub").read_text().split()
            known.append(f"[127.0.0.1]:{node.relay.port} {public[0]} {public[1]}\n")
            config.append(f"Host {node.name}\n  HostName 127.0.0.1\n  Port {node.relay.port}\n")
        (self.folder / "known_hosts").write_text("".join(known))
        settings = {
            "User": "root", "IdentityFile": self.key, "IdentitiesOnly": "yes", "IdentityAgent": "none",
            "UserKnownHostsFile": self.folder / "known_hosts", "GlobalKnownHostsFile": "/dev/null",
            "StrictHostKeyChecking": "yes",
        }  # fmt: skip
        config.append("Host *\n" + "".join(f"  {key} {value}\n" for key, value in settings.items()))
        (self.folder / "ssh_config").write_text("".join(config))

    def __enter__(self) -> Rig:
        threads = [threading.Thread(target=node.boot) for node in self._nodes.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if not all(node.is_up.is_set() for node in self._nodes.values()):
            self.__exit__(None, None, None)
            raise RuntimeError(
                "a node of the rig did not come up: " + "".join((node.folder / "init.log").read_text() for node in self)
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        for node in self._nodes.values():
            node.close()


def image_id(reference: str) -> str:
    return "sha256:" + hashlib.sha256(reference.encode()).hexdigest()


def _address(number: int) -> str:
    """Of 198.18.0.0/15, which is kept for such uses (RFC 2544)."""
    return f"198.{18 + (number >> 16)}.{number >> 8 & 255}.{number & 255}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _until(holds: Callable[[], bool], what: str, log: Path) -> None:
    deadline = time.monotonic() + BOOT_SECONDS
    while not holds():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what} did not come up: {log.read_text() if log.exists() else ''}")
        time.sleep(0.02)
