"""Asks a real llama-server what a model takes: it plans with tensors that hold no data, and prints its plan before it loads.

Weights need not be there, so a file of a few kilobytes with a hole behind its header stands for a model of any size
(tests/gguf_shapes.py). A GPU's part is played by llama.cpp's own RPC server on this machine: to the scheduler it is a device
like any other, and it takes every operation.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import gguf_shapes

from sparkguard.core.estimate import Ask, DeviceNeeds, Needs, estimate
from sparkguard.core.ggml import ModelFile
from sparkguard.probe.gguf import read_model

_ROW = re.compile(r"\|\s+- (?P<device>[^|]+?)\s*\|(?P<numbers>[\d\s=+()-]*?)\|")
MIB = 1 << 20
_SECONDS = 20  # a plan takes a twentieth of one
# Half a megabyte per device is lost where the engine prints whole megabytes; then the margin that was asked for.
LEAST_MARGIN_MIB, MARGIN = 24, 0.10

HOST, DEVICE = "host", "device"
Numbers = tuple[int, int, int]  # MiB of weights, of caches and states, of work buffers: what the engine prints

# How an engine is started, and how the same is asked of the estimate.
SETTINGS: dict[str, tuple[list[str], Ask]] = {
    "4096": (["-c", "4096"], Ask()),
    "32768": (["-c", "32768"], Ask(context=32768)),
    "parallel 4": (["-c", "32768", "-np", "4"], Ask(context=32768, parallel=4)),
    "one cache of 4": (["-c", "16384", "-np", "4", "-kvu"], Ask(context=16384, parallel=4, unified_cache=True)),
    "q8_0": (["-c", "32768", "-ctk", "q8_0", "-ctv", "q8_0"], Ask(context=32768, key_type="q8_0", value_type="q8_0")),
    "ubatch 2048": (["-c", "32768", "-ub", "2048"], Ask(context=32768, ubatch=2048)),
    "no flash attention": (["-c", "32768", "-fa", "off"], Ask(context=32768, flash_attention=False)),
    "full window": (["-c", "32768", "--swa-full"], Ask(context=32768, full_window=True)),
    "odd": (["-c", "5000", "-np", "3", "-ub", "300"], Ask(context=5000, parallel=3, ubatch=300)),
    "device": (["-c", "4096", "-ngl", "99"], Ask(on_device=True)),
    "device, parallel 4": (["-c", "32768", "-np", "4", "-ngl", "99"], Ask(context=32768, parallel=4, on_device=True)),
}


def ask(server: Path, model: Path, setting: str) -> dict[str, Numbers]:
    """The engine's plan for each device. Raises RuntimeError with what it printed where it makes none."""
    arguments, wanted = SETTINGS[setting]
    return planned(server, model, arguments, wanted.on_device)


def planned(server: Path, model: Path, arguments: list[str], on_device: bool) -> dict[str, Numbers]:
    """The engine's plan with any arguments."""
    if not on_device:
        return _ask(server, model, [*arguments, "--device", "none"])
    with rpc_server(server.parent / "ggml-rpc-server") as address:
        return _ask(server, model, ["-ngl", "99", *arguments, "--rpc", address, "--device", "RPC0"])


def _ask(server: Path, model: Path, arguments: list[str]) -> dict[str, Numbers]:
    command = [server, "-m", model, "-fit", "on", "-lv", "4", "-np", "1", "--no-warmup", "--no-repack", "--port", "0", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_")}
    plan: dict[str, Numbers] = {}
    lines = []
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
    ) as process:
        assert process.stdout
        end = threading.Timer(_SECONDS, process.kill)
        end.start()
        try:
            for line in process.stdout:
                lines.append(line)
                if "common_memory_breakdown_print" in line and (row := _ROW.search(line)):
                    numbers = [int(number) for number in re.findall(r"\d+", row["numbers"])]
                    # A device's row begins with its total and its free memory.
                    own = numbers[1:4] if row["device"] == "Host" else numbers[3:6]
                    plan[HOST if row["device"] == "Host" else DEVICE] = (own[0], own[1], own[2])
                if "fitting params to" in line and "took" in line:
                    break  # from here on it would load
        finally:
            end.cancel()
            process.kill()
    if not plan:
        raise RuntimeError(f"{model.name} {' '.join(arguments)}: no plan\n{''.join(lines)[-3000:]}")
    return plan


@contextmanager
def rpc_server(program: Path) -> Iterator[str]:
    """One for each question: it ends with a client that ends in the middle of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["stdbuf", "-oL", program, "-H", "127.0.0.1", "-p", str(port)]
    environment = {**os.environ, "GGML_VK_VISIBLE_DEVICES": ""}
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
    ) as process:
        try:
            assert process.stdout
            if not any(b"transport" in line for line in process.stdout):  # its last line before it listens
                raise RuntimeError(f"{program} ended")
            while process.poll() is None and not listens(port):
                pass  # a matter of microseconds; a connection would be taken for the client
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()


def listens(port: int) -> bool:
    """Whether somebody listens on a port, by the kernel's table: state 0A."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return any(fields[1].endswith(f":{port:04X}") and fields[3] == "0A" for fields in map(str.split, lines))


def shape_file(folder: Path, name: str) -> Path:
    path = folder / f"{name}.gguf"
    if not path.exists():
        gguf_shapes.SHAPES[name]().write(path)
    return path


def estimated(model: Path, setting: str, build: int) -> Needs:
    return estimate(header(model), SETTINGS[setting][1].replace(build=build))


@lru_cache(maxsize=1)  # all settings of one shape follow each other
def header(model: Path) -> ModelFile:
    return read_model(str(model))


def numbers_of(part: DeviceNeeds) -> Numbers:
    return (
        part.weights_bytes // MIB,
        (part.kv_cache_bytes + part.state_bytes) // MIB,
        part.compute_bytes // MIB,
    )


def differences(needs: Needs, plan: dict[str, Numbers]) -> list[str]:
    """What is not as it was promised: weights and caches to the printed digit, work buffers within the margin."""
    wrong = []
    for part in needs.devices:
        ours, theirs = numbers_of(part), plan.get(part.device)
        if theirs is None:
            wrong.append(f"{part.device}: the engine has none")
            continue
        margin = max(LEAST_MARGIN_MIB, MARGIN * theirs[2])
        if ours[:2] != theirs[:2] or abs(ours[2] - theirs[2]) > margin:
            wrong.append(f"{part.device}: {ours}, the engine has {theirs}")
    if set(plan) - {part.device for part in needs.devices}:
        wrong.append(f"the engine also uses {sorted(plan)}")
    return wrong
