"""Sparkguard as install.sh puts it into a guest; in the one in namespaces, on a machine of 121 GiB that nobody else uses."""

from __future__ import annotations

import json
import shlex
import shutil
from typing import TYPE_CHECKING, Any

from guest import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from guest import Guest

HOME = "/home/spark"
RUNTIME = "/run/user/6666"
STAND_IN = REPOSITORY / "tests" / "fakes" / "vllm"
UNITS = ("vllm-embeddings", "vllm-longcontext", "vllm-vision-agent", "vllm-model@mymodel")
GIB = 1 << 30
# A GB10's total, which is not the power of two on its box.
TOTAL_GIB, AVAILABLE_GIB = 121, 118

KEPT = "/var/lib/installed"
INSTALL = f"""
set -e
cd {REPOSITORY}
PYTHON=/usr/bin/python3 ./install.sh --wheels "$WHEELS"
"""
# How much memory this machine has, and has left, must decide no test of a sum: /proc/meminfo is a file of ours.
MEMORY = r"""
sed -E "s/^(MemTotal: +)[0-9]+/\1$((TOTAL << 20))/; s/^(MemFree|MemAvailable)(: +)[0-9]+/\1\2$((AVAILABLE << 20))/" \
  /proc/meminfo >/run/meminfo.new
cat /run/meminfo.new >/run/meminfo
grep -q ' /proc/meminfo ' /proc/self/mountinfo || mount --bind /run/meminfo /proc/meminfo
"""


class Installed:
    """The guest's user has installed Sparkguard; its vLLM is the stand-in. Names of units go without .service."""

    def __init__(self, guest: Guest) -> None:
        self.guest = guest
        self.exec = guest.exec
        self.until = guest.until

    def install(self, wheels: Path) -> None:
        """Once in a guest; what it leaves in the home is kept aside."""
        self.guest.fresh()
        self.exec(INSTALL, env={"WHEELS": str(wheels)}, timeout=120, check=True)
        self.exec(f"rm -rf {KEPT}; cp -a {HOME} {KEPT}", user="root", check=True)

    def install_copy(self, other: Installed) -> None:
        """The same from another guest: pip would take minutes in the VM."""
        other.exec(f"tar -C {KEPT} -cf $GUEST_OUT/installed.tar .", user="root", check=True)
        shutil.copy(other.guest.out / "installed.tar", self.guest.out)
        self.exec(f"mkdir -p {KEPT} && tar -C {KEPT} -xf $GUEST_OUT/installed.tar", user="root", check=True)

    def reset(self) -> None:
        """Back to the state after the install, except that the stand-in is VLLM_BIN and that starts do not wait for memory."""
        self.guest.fresh()
        self.exec(f"cp -a {KEPT}/. {HOME}/", user="root", check=True)
        if self.guest.backend == "ns":
            self.memory(AVAILABLE_GIB)
        self.conf()
        self.systemctl("daemon-reload")

    def memory(self, available_gib: int, total_gib: int = TOTAL_GIB) -> None:
        self.exec(MEMORY, user="root", env={"TOTAL": str(total_gib), "AVAILABLE": str(available_gib)}, check=True)

    def this_machines_memory(self) -> None:
        """For what takes memory really."""
        self.exec("umount /proc/meminfo", user="root", check=True)

    # ---- what a user edits

    def write(self, path: str, text: str) -> None:
        """path: below the home."""
        quoted = shlex.quote(f"{HOME}/{path}")
        self.exec(f'mkdir -p "$(dirname {quoted})"; cat >{quoted}', stdin=text, check=True)

    def conf(self, **settings: str) -> None:
        """The whole of spark.conf."""
        lines = {"VLLM_BIN": str(STAND_IN), "VLLM_MEM_WAIT": "0", **settings}
        self.write(".config/spark/spark.conf", "".join(f'{key}="{value}"\n' for key, value in lines.items()))

    def spec(self, name: str, share: str | None = None, port: int | None = None, **more: str) -> None:
        """The whole of a model's spec. Each server notes its start in ~/started."""
        lines = {"VLLM_MODEL": f"org/{name}", "STAND_IN_LOG": f"{HOME}/started"}
        lines |= {"VLLM_GPU_MEM_UTIL": share} if share else {}
        lines |= {"VLLM_PORT": str(port)} if port else {}
        self.write(f".config/spark/models/{name}.env", "".join(f"{key}={value}\n" for key, value in (lines | more).items()))

    def drop_in(self, unit: str, text: str, name: str = "test.conf") -> None:
        self.write(f".config/systemd/user/{unit}.service.d/{name}", text)
        self.systemctl("daemon-reload")

    def without_drop_in(self, unit: str, name: str = "test.conf") -> None:
        self.exec(["rm", f"{HOME}/.config/systemd/user/{unit}.service.d/{name}"], check=True)
        self.systemctl("daemon-reload")

    # ---- systemd

    def systemctl(self, *words: str, timeout: float = 60) -> None:
        """Raises when it fails."""
        self.guest.systemctl(*words, timeout=timeout, check=True)

    def start(self, unit: str, timeout: float = 60) -> int:
        """systemctl's status."""
        return self.guest.systemctl("start", unit, timeout=timeout).returncode

    def state(self, unit: str) -> dict[str, str]:
        """All properties of a unit."""
        text = self.guest.systemctl("show", "--", f"{unit}.service", check=True).stdout
        return dict(line.partition("=")[::2] for line in text.splitlines())

    def until_state(self, unit: str, *conditions: str, timeout: float = 30) -> dict[str, str]:
        """Waits until the unit's properties are so: 'ActiveState=failed'. Returns them all."""
        quoted = " ".join(f"-e {shlex.quote(condition)}" for condition in conditions)
        count = f'$(systemctl --user show "{unit}.service" | grep -cxF {quoted})'
        self.until(f"[ {count} = {len(conditions)} ]", timeout)
        return self.state(unit)

    def until_it_serves(self, *ports: int, timeout: float = 30) -> None:
        self.until(" && ".join(f": <>/dev/tcp/127.0.0.1/{port}" for port in ports), timeout)

    # ---- what came of it

    def starts(self) -> list[str]:
        """The command lines of all servers that were started since the reset: 'serve org/x --port ...'."""
        lines = self.exec(["cat", f"{HOME}/started"]).stdout.splitlines()
        return [line.split(" ", 2)[2] for line in lines if line.startswith("start ")]

    def refusal(self, unit: str) -> dict[str, Any] | None:
        """The record of the unit's last refusal."""
        text = self.exec(["cat", f"{RUNTIME}/sparkguard/refused/{unit}.service"]).stdout
        return json.loads(text) if text else None

    def reservations(self) -> list[dict[str, str]]:
        """Those that are written down, dead ones too."""
        script = f"cd {RUNTIME}/sparkguard && for file in *.reservation; do [ ! -e $file ] || {{ cat $file; echo; }}; done"
        blocks = self.exec(script).stdout.split("\n\n")
        return [dict(line.partition("=")[::2] for line in block.splitlines()) for block in blocks if block]

    def guard(self, name: str, *arguments: str, env: Mapping[str, str] | None = None) -> tuple[int, dict[str, Any]]:
        """The guard's verdict in a shell, which is nobody's unit: (status, its JSON). It holds nothing once it has ended."""
        done = self.exec([f"{HOME}/.local/bin/vllm_mem_budget.sh", name, "--json", *arguments], env=env)
        return done.returncode, json.loads(done.stdout) if done.stdout else {}
