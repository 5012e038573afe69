"""A home with its settings, and a pid namespace in which guards, launchers and small stand-ins for vLLM really run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from pid_namespace import PidNamespace

# Says on its first line what it was started with, has a child as vLLM has its engine, and holds until SIGTERM. The child ends
# with its parent; at the end of the output both have ended.
SERVER = """\
#!{python} -I
import json, os, signal, sys

def cpus():
    return next(row.split()[1] for row in open("/proc/self/status") if row.startswith("Cpus_allowed_list:"))

def drain(*_):
    os.write(1, b"drained\\n")
    os._exit(0)

signal.signal(signal.SIGTERM, drain)
lifeline, held = os.pipe()
said, to_say = os.pipe()
child = os.fork()
if not child:
    os.close(held)
    os.write(to_say, cpus().encode())
    os.read(lifeline, 1)
    os._exit(0)
print(json.dumps({{
    "pid": os.getpid(),
    "argv": sys.argv[1:],
    "env": dict(os.environ),
    "cpus": cpus(),
    "cpus_of_child": os.read(said, 1000).decode(),
    "oom_score_adj": int(open("/proc/self/oom_score_adj").read()),
}}), flush=True)
while True:
    signal.pause()
"""
# What a program waits for before it starts: the end of its stdin, so that many start at the same instant.
GATE = "sys.stdin.read(); "


class World:
    """Every server has the same spec file, model.env; shares are small, because the memory is this machine's own."""

    def __init__(self, home: Path, inside: PidNamespace) -> None:
        self.home = home
        self.inside = inside
        self.bin = home / "bin"
        self.bin.mkdir()
        self.vllm = self.bin / "vllm"
        self.vllm.write_text(SERVER.format(python=sys.executable))
        self.vllm.chmod(0o755)
        self.config = home / ".config" / "spark"
        (self.config / "models").mkdir(parents=True)
        self.spec("model", "VLLM_MODEL=org/name\n")
        # A pool that needs no driver, and no wait where a test does not want one.
        self.conf(f"VLLM_BIN={self.vllm}\nSPARK_MEMORY_POOL=ram\nVLLM_MEM_WAIT=0\nSPARK_MEMORY_RESERVE_MB=0\n")

    def conf(self, text: str) -> None:
        (self.config / "spark.conf").write_text(text)

    def spec(self, name: str, text: str) -> None:
        (self.config / "models" / f"{name}.env").write_text(text)

    def env(self, more: dict[str, str]) -> dict[str, str]:
        path = f"{self.bin}:/usr/sbin:/usr/bin:/sbin:/bin"
        return {"HOME": str(self.home), "XDG_RUNTIME_DIR": str(self.home / "run"), "PATH": path, **more}

    def start(
        self, module: str, *words: str, gate: str = "", stdin: Any = subprocess.DEVNULL, **env: str
    ) -> subprocess.Popen[str]:
        code = f"import sys; from sparkguard.{module} import main; {gate}sys.exit(main(sys.argv[1:]))"
        pipes = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return self.inside.popen([sys.executable, "-I", "-c", code, *words], env=self.env(env), **pipes)

    def guard(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """The verdict on one start, as ExecStartPre= asks for it."""
        process = self.start("guard", *words, **env)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def launch(self, *words: str, **env: str) -> subprocess.Popen[str]:
        return self.start("launch", *words, **env)

    def serve_by_hand(self, *words: str) -> dict[str, Any]:
        """A vLLM that was started past the guard; what it says of itself."""
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
        facts = serving(self.inside.popen([str(self.vllm), "serve", *words], env=self.env({}), **pipes))
        assert facts is not None
        return facts


def serving(process: subprocess.Popen[str]) -> dict[str, Any] | None:
    """Waits for the server: what it says of itself, or None when the process has ended without one."""
    assert process.stdout is not None
    line = process.stdout.readline()
    return json.loads(line) if line else None
