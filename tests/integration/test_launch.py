"""The launcher: what a real process finds that it started."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from world import World, serving

from sparkguard.core.affinity import cores_for, format_cpus
from sparkguard.core.share import parse_share
from sparkguard.probe import cores

SMALL = {"VLLM_GPU_MEM_UTIL": "0.001"}
JSON = '{"method": "ngram", "n": [1, "a b"]}'


def test_the_main_process_becomes_the_server(world: World) -> None:
    """After exec the launcher's process is the server: systemd's main pid, with vLLM's own arguments."""
    world.spec("model", f"VLLM_MODEL=org/name\nVLLM_PORT=8001\nVLLM_EXTRA_ARGS=--dtype bfloat16 --speculative-config {JSON}\n")
    start = world.launch("model", "--max-model-len", "128", **SMALL)
    facts = serving(start)
    assert facts is not None
    assert facts["argv"] == [
        "serve", "org/name", "--port", "8001", "--gpu-memory-utilization", "0.001",
        "--dtype", "bfloat16", "--speculative-config", JSON, "--max-model-len", "128",
    ]  # fmt: skip
    with open(f"/proc/{start.pid}/status") as file:
        (numbers,) = (line.split()[1:] for line in file if line.startswith("NSpid:"))
    assert numbers[-1] == str(facts["pid"])


def test_what_the_server_finds_in_its_environment(world: World) -> None:
    """The profile, the spec's other keys and the caller's environment arrive; our settings, VLLM_PORT above all, do not."""
    world.spec("model", "VLLM_MODEL=org/name\nVLLM_PORT=8001\nHF_HUB_OFFLINE=1\nHF_TOKEN=spec\n")
    ours = {"VLLM_PORT": "8002", "VLLM_MEM_BUDGET": "0.5", "VLLM_CPU_SHARE": "0.5", "SPARK_CPUS": "0", "HF_TOKEN": "drop-in"}
    facts = serving(world.launch("model", **SMALL, **ours))
    assert facts is not None
    env = facts["env"]
    assert [key for key in env if key.startswith(("VLLM_", "SPARK_", "MODELS_", "NOTIFY_"))] == []
    assert (env["HF_HUB_OFFLINE"], env["HF_TOKEN"]) == ("1", "drop-in")
    assert (env["CUDA_LAUNCH_BLOCKING"], env["MAX_JOBS"], env["TORCHINDUCTOR_COMPILE_THREADS"]) == ("1", "1", "1")


@pytest.mark.parametrize("share", ["0.01", "0.5", "0.80", "1"])
def test_cores_of_the_server_and_its_children(world: World, share: str) -> None:
    """Server and child run on the share's cores and no others, as the kernel says; 1 is all of them, and that is said."""
    usable = cores.usable()
    chosen = format_cpus(cores_for(parse_share(share), usable))
    start = world.launch("model", VLLM_CPU_SHARE=share, **SMALL)
    facts = serving(start)
    assert facts is not None
    assert (facts["cpus"], facts["cpus_of_child"]) == (chosen, chosen)
    start.terminate()
    _, err = start.communicate(timeout=20)
    assert f"sparkguard: model runs on CPUs {chosen} of {format_cpus(tuple(core.cpu for core in usable))}" in err
    assert ("all of them: VLLM_CPU_SHARE is 1" in err) == (share == "1")


def test_a_share_of_what_is_left(world: World) -> None:
    """The usable cores are those of the present affinity: a launcher on one core starts its server there."""
    one = max(os.sched_getaffinity(0))
    start = world.inside.popen(
        ["taskset", "--cpu-list", str(one), *launcher("model")],
        env=world.env(SMALL), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    facts = serving(start)
    assert facts is not None
    assert facts["cpus_of_child"] == str(one)


def launcher(*words: str) -> list[str]:
    return [sys.executable, "-I", "-c", "import sys; from sparkguard.launch import main; sys.exit(main(sys.argv[1:]))", *words]


def test_the_server_goes_before_the_desktop_does(world: World) -> None:
    """Started by hand, a server has the OOM score of the units."""
    facts = serving(world.launch("model", **SMALL))
    assert facts is not None
    assert facts["oom_score_adj"] == 500


def test_a_refused_launch_starts_nothing(world: World) -> None:
    """Without an ExecStartPre= the launcher asks itself: 78, the text, and no server."""
    start = world.launch("model", VLLM_GPU_MEM_UTIL="0.95")
    out, err = start.communicate(timeout=20)
    assert (start.returncode, out) == (78, "")
    assert err.startswith("FATAL: model wants --gpu-memory-utilization 0.95, which would\n")


def test_a_program_that_is_none(world: World) -> None:
    """A VLLM_BIN that cannot be executed is 127, and its share is free again."""
    world.vllm.write_bytes(b"\x7fELF nonsense")
    start = world.launch("model", VLLM_MEM_BUDGET="0.01", VLLM_GPU_MEM_UTIL="0.01")
    _, err = start.communicate(timeout=20)
    assert start.returncode == 127
    assert err.endswith(
        f"sparkguard: {world.vllm} cannot be started: Exec format error\n"
        "  set VLLM_BIN to a program; a script needs a first line such as #!/bin/sh\n"
    )
    assert world.guard("model", VLLM_MEM_BUDGET="0.01", VLLM_GPU_MEM_UTIL="0.01").returncode == 0


def test_arguments_that_the_kernel_does_not_take(world: World) -> None:
    """More than an execve() may carry is bad configuration, 78, with the setting to change; no reservation is left."""
    words = " ".join(["x" * 1000] * 130)
    world.spec("model", "VLLM_MODEL=org/name\n" + f"A={words}\n" + "".join(f"A{n}=$A\n" for n in range(60)))
    start = world.launch("model", **SMALL)
    _, err = start.communicate(timeout=60)
    assert start.returncode == 78
    assert "cannot be started: Argument list too long\n  one argument may have 128 KiB" in err


def test_a_stop_drains(world: World) -> None:
    """SIGTERM to the main process is SIGTERM to the server."""
    start = world.launch("model", **SMALL)
    assert serving(start) is not None
    start.terminate()
    out, _ = start.communicate(timeout=20)
    assert (start.returncode, out) == (0, "drained\n")
