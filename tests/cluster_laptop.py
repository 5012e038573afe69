"""A laptop before the rig's nodes: its catalog, its state folder, and spark-serve as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from cluster_rig.rig import Rig

SPARK_SERVE = "import sys; from sparkguard.cli.cluster import main; sys.exit(main())"
IMAGE = "vllm/vllm-openai:v0.30.0"
MODELS = f"""
[models.small]
label = "Small"
image = "{IMAGE}"
wrapper = "vllm"
served_name = "small"
hf_id = "org/small"
nnodes = 1
container = "vllm_small"
ready_timeout = 60
drain_timeout = 5
[models.small.vllm]
args = ["--gpu-memory-utilization", "0.5"]

[models.other]
label = "Other"
image = "{IMAGE}"
wrapper = "vllm"
served_name = "other"
hf_id = "org/small"
nnodes = 1
container = "vllm_other"
ready_timeout = 60
drain_timeout = 5
[models.other.vllm]
args = ["--gpu-memory-utilization", "0.6"]

[models.glm]
label = "GLM"
image = "{IMAGE}"
wrapper = "vllm"
served_name = "glm"
hf_id = "org/ds4"
nnodes = 2
container = "vllm_glm"
ready_timeout = 60
drain_timeout = 5
[models.glm.vllm]
args = ["--gpu-memory-utilization", "0.8"]

[models.ds4]
label = "DS4"
image = "{IMAGE}"
wrapper = "vllm"
served_name = "ds4"
hf_id = "org/ds4"
nnodes = 2
container = "vllm_ds4"
ready_timeout = 60
drain_timeout = 5
[models.ds4.vllm]
args = ["--gpu-memory-utilization", "0.85"]
"""
CLUSTER = """
keep_containers = ["embeddings"]
stop_names = ["old-vllm", "embeddings"]
[cluster.nccl]
NCCL_SOCKET_IFNAME = "enp1s0f1np1"
NCCL_IB_HCA = "rocep1s0f1"
"""


class Laptop:
    """A person's machine: `Laptop(rig, folder).run("up", "ds4", "--json")`. Several of them are several people."""

    def __init__(self, rig: Rig, folder: Path, models: str = MODELS, cluster: str = CLUSTER) -> None:
        self.rig = rig
        self.folder = folder
        self.state = folder / "state"
        folder.mkdir(parents=True, exist_ok=True)
        # OpenSSH takes its own configuration from the home of the user database, whatever $HOME says.
        ssh = folder / "bin" / "ssh"
        ssh.parent.mkdir()
        ssh.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {rig.folder / "ssh_config"} "$@"\n')
        ssh.chmod(0o755)
        self.catalog = rig.catalog(folder / "models.toml", models, cluster)
        lines = self.catalog.read_text().splitlines(keepends=True)
        self.catalog.write_text("".join(line for line in lines if not line.startswith("ssh_opts")))
        for node in rig:
            for name in ("org--small", "org--ds4"):
                (node.folder / "home/hub" / f"models--{name}").mkdir(parents=True, exist_ok=True)
        self.env = {
            **os.environ,
            "PATH": f"{ssh.parent}:{os.environ['PATH']}",
            "HOME": str(folder),
            "SPARK_SERVE_STATE_DIR": str(self.state),
            "SPARK_SERVE_CONFIG": str(self.catalog),
        }

    def start(self, *words: str, program: str = SPARK_SERVE, **more: Any) -> subprocess.Popen[str]:
        given: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | more
        return subprocess.Popen([sys.executable, "-c", program, *words], env=self.env, text=True, start_new_session=True, **given)

    def run(self, *words: str, program: str = SPARK_SERVE) -> subprocess.CompletedProcess[str]:
        child = self.start(*words, program=program)
        out, err = child.communicate(timeout=120)
        return subprocess.CompletedProcess(words, child.returncode, out, err)

    def events(self, *words: str, status: int = 0) -> list[dict[str, Any]]:
        """The events of a verb that ends with this status."""
        done = self.run(*words, "--json")
        assert done.returncode == status, done.stdout + done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    def status(self, status: int = 0) -> dict[str, Any]:
        done = self.run("status", "--json")
        assert done.returncode == status, done.stdout + done.stderr
        told: dict[str, Any] = json.loads(done.stdout)
        return told

    def node(self, name: str) -> dict[str, Any]:
        """A node as `status` tells it, whatever the status of the command."""
        told = json.loads(self.run("status", "--json").stdout)
        found: dict[str, Any] = next(node for node in told["nodes"] if node["node"] == name)
        return found

    def record(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads((self.state / "controller.json").read_text())
        return told
