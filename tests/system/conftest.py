"""The guests, and what is made for them once and kept in the cache."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from guest import CACHE, REPOSITORY, Guest
from system.installed import Installed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOOLS = REPOSITORY / "tests" / "tools"


def started(backend: str) -> Iterator[Guest]:
    # guest.sh removes it after our end, should we not come to it.
    guest = Guest(backend, f"{backend}-{os.getpid()}")
    guest.start()
    yield guest
    guest.stop()


@pytest.fixture(scope="session")
def guest() -> Iterator[Guest]:
    """systemd in namespaces: fast, without enforced caps."""
    yield from started("ns")


@pytest.fixture(scope="session")
def vm() -> Iterator[Guest]:
    """systemd in a small VM: slow, with every controller."""
    yield from started("tcg")


@pytest.fixture
def fresh_guest(guest: Guest) -> Guest:
    """The guest, its user as on the first day."""
    guest.fresh()
    return guest


@pytest.fixture
def fresh_vm(vm: Guest) -> Guest:
    """The VM, its user as on the first day."""
    vm.fresh()
    return vm


@pytest.fixture(scope="session")
def vllm() -> Path:
    """A virtual environment with a real vLLM, the CPU build. Never start it without a size for its KV cache: it takes all RAM."""
    made([str(TOOLS / "vllm-venv.sh"), str(CACHE / "vllm")])
    return CACHE / "vllm"


@pytest.fixture(scope="session")
def tiny_model(vllm: Path) -> Path:
    """A model of 0.7 MB that vLLM serves."""
    maker = TOOLS / "make_tiny_hf.py"
    model = CACHE / f"tiny-llama-{hashlib.sha256(maker.read_bytes()).hexdigest()[:12]}"
    if not model.exists():
        made([str(vllm / "bin" / "python"), str(maker), str(model)])
    return model


@pytest.fixture(scope="session")
def wheels() -> Path:
    """A folder of wheels with which the checkout installs without network: what it needs, what builds it, engine and model."""
    script = (REPOSITORY / "scripts" / "quickstart.sh").read_text()
    model = script.partition("MODEL_WHEEL=")[2].split()[0]
    project = (REPOSITORY / "pyproject.toml").read_text()
    needs = "".join(re.findall(r"^(?:requires|dependencies|runners|engine) = \[.*?\]$", project, re.DOTALL | re.MULTILINE))
    assert needs.count(" = [") == 4
    key = hashlib.sha256((needs + model).encode()).hexdigest()[:12]
    folder = REPOSITORY / "build" / f"wheels-{key}"
    folder.parent.mkdir(exist_ok=True)
    with open(folder.parent / "wheels.lock", "w") as lock:  # two workers may want them at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            make_wheels(folder, model)
    return folder


def make_wheels(folder: Path, model: str) -> None:
    for old in folder.parent.glob("wheels-*"):
        shutil.rmtree(old)  # 70 MB each
    new = folder.with_suffix(".new")
    pip = [sys.executable, "-m", "pip"]
    made([*pip, "wheel", "--quiet", "--wheel-dir", str(new), f"{REPOSITORY}[runners,engine]", "hatchling"])
    made([*pip, "download", "--quiet", "--no-deps", "--dest", str(new), model])
    for wheel in new.glob("sparkguard-*.whl"):
        wheel.unlink()  # it would be stale with the next change: the checkout is what gets installed
    new.rename(folder)


def made(command: list[str]) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: status {done.returncode}\n{done.stdout}{done.stderr}")


@pytest.fixture(scope="session")
def installation(guest: Guest, wheels: Path) -> Installed:
    """Sparkguard in the guest, installed once by install.sh."""
    installation = Installed(guest)
    installation.install(wheels)
    return installation


@pytest.fixture
def installed(installation: Installed) -> Installed:
    """Sparkguard in the guest, as on the day of the install."""
    installation.reset()
    return installation


@pytest.fixture(scope="session")
def vm_installation(vm: Guest, installation: Installed) -> Installed:
    """Sparkguard in the VM."""
    copy = Installed(vm)
    copy.install_copy(installation)
    return copy


@pytest.fixture
def installed_vm(vm_installation: Installed) -> Installed:
    """Sparkguard in the VM, as on the day of the install."""
    vm_installation.reset()
    return vm_installation
