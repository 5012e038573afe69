"""The estimate against a real llama-server, asked now: weights and caches to the printed digit, work buffers nearly.

tests/unit/core/test_estimate.py compares with what was recorded; here it is seen that the engine still says so. Where the cache
also has the newest build (tests/tools/llama-server.sh DIR --newest), that is asked too.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import gguf_shapes
import llama_server
import pytest

TOOL = Path(__file__).parents[1] / "tools" / "llama-server.sh"
BUILDS = {10068: "engine", 11434: "newest"}
# On the stand-in for a GPU each question takes a server of its own, so a few kinds of model are enough.
ON_DEVICE = ["llama-1b-tied", "qwen3moe-30b", "gemma3-12b", "gpt-oss-20b", "deepseek2-lite", "mamba-2.8b", "gemma3n-e4b"]
SETTINGS = [setting for setting, (_, ask) in llama_server.SETTINGS.items() if not ask.on_device]
CANNOT_LOAD = {10068: {"qwen3next-80b-mtp", "deepseek3-671b-mtp"}}


def cache() -> Path:
    """Where the engines are kept: the tests' cache, or one's own where that may not be written."""
    shared = Path(os.environ.get("SPARKGUARD_TEST_CACHE", "/var/cache/sparkguard-tests"))
    if (shared / "llama" / "stamp").exists() or os.access(shared, os.W_OK):
        return shared / "llama"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser(), "sparkguard-tests", "llama")


CACHE = cache()
AT_HAND = [build for build, folder in BUILDS.items() if build == 10068 or (CACHE / folder / "llama-server").exists()]


@pytest.fixture(scope="module")
def engines() -> dict[int, Path]:
    """The servers by build; makes the environment where it is missing."""
    made = subprocess.run([TOOL, CACHE], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    return {build: CACHE / BUILDS[build] / "llama-server" for build in AT_HAND}


@pytest.mark.parametrize("build", AT_HAND)
@pytest.mark.parametrize("shape", gguf_shapes.SHAPES)
def test_on_the_host(shape: str, build: int, engines: dict[int, Path], tmp_path: Path) -> None:
    """Every architecture with every setting, wholly on the CPU."""
    model = llama_server.shape_file(tmp_path, shape)
    if shape in CANNOT_LOAD.get(build, set()):
        with pytest.raises(RuntimeError, match="no plan"):
            llama_server.ask(engines[build], model, SETTINGS[0])
        return
    wrong = {}
    for setting in SETTINGS:
        plan = llama_server.ask(engines[build], model, setting)
        if found := llama_server.differences(llama_server.estimated(model, setting, build), plan):
            wrong[setting] = found
    assert wrong == {}


@pytest.mark.parametrize("build", AT_HAND)
@pytest.mark.parametrize("shape", ON_DEVICE)
def test_on_a_device(shape: str, build: int, engines: dict[int, Path], tmp_path: Path) -> None:
    """All layers on a device: what is there, and what stays on the host."""
    model = llama_server.shape_file(tmp_path, shape)
    plan = llama_server.ask(engines[build], model, "device")
    assert llama_server.differences(llama_server.estimated(model, "device", build), plan) == []
