"""A newcomer's first command, as a user with nothing but a checkout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from guest import REPOSITORY

if TYPE_CHECKING:
    from pathlib import Path

    from guest import Guest

# Without what was built in it.
CHECKOUT = f"""
mkdir ~/spark
tar -C {REPOSITORY} --exclude=./.git --exclude=./.venv --exclude='./.*_cache' --exclude=./build -cf - . | tar -C ~/spark -xf -
"""


def test_the_quickstart(fresh_guest: Guest, wheels: Path) -> None:
    """It sets itself up, the guard admits and refuses, a real model answers, and nothing is left outside the checkout."""
    fresh_guest.exec(CHECKOUT, check=True)
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "VLLM_MEM_WAIT": "0"}
    done = fresh_guest.exec("~/spark/scripts/quickstart.sh", env=offline, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "embeddings is admitted at 0.10" in done.stdout
    assert "FATAL: longcontext wants --gpu-memory-utilization 0.95, which would" in done.stdout
    assert "take the GPU-memory total to 1.05, over the 0.80 budget." in done.stdout
    assert "FATAL: vision-agent wants --gpu-memory-utilization 0.75, which would" in done.stdout
    assert "MB for 4096 tokens of context (weights 93 MB, KV cache 90 MB," in done.stdout
    answer = done.stdout.partition("Why is the sky blue?\n")[2]
    assert "scatter" in answer.partition("$ .venv/bin/sparkguard runners")[0]
    assert "SmolLM2-135M-Instruct.Q4_1  ready  cpu" in answer
    left = fresh_guest.exec("pgrep -u spark -f 'demo/vllm|sparkguard|runner'; ls -A ~; ls -A /tmp /run/user/6666 | grep spark")
    assert left.stdout == "spark\n"
