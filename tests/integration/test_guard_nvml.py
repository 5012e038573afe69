"""The guard on machines with GPUs: the real nvidia-ml-py asks a stand-in for the driver's library."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from process_tree import ProcessTree

from sparkguard import guard
from sparkguard.settings import load

if TYPE_CHECKING:
    from fakes.nvml import FakeNvml

pytest_plugins = ["fakes.nvml"]

GIB = 1 << 30
GIB_KB = 1 << 20
WHOLE = f"name=NVIDIA A100-SXM4-80GB;mem={80 * GIB}:0"


@pytest.fixture
def roots(tmp_path: Path) -> guard.Roots:
    tree = ProcessTree(tmp_path / "proc", meminfo={"MemTotal": 500 * GIB_KB, "MemAvailable": 480 * GIB_KB})
    driver = tree.root / "driver" / "nvidia"
    driver.mkdir(parents=True)
    (driver / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05\n")
    for name in ("sys", "dev"):
        (tmp_path / name).mkdir()
    return guard.Roots(str(tree.root), str(tmp_path / "sys"), str(tmp_path / "dev"))


def test_a_card_that_mig_has_cut_since(roots: guard.Roots, home: Path, fake_nvml: FakeNvml) -> None:
    """MIG is switched on without a reboot: the kept fact of one whole card is not believed against the driver's word."""
    env = {
        **fake_nvml.env,
        "HOME": str(home),
        "XDG_RUNTIME_DIR": str(home / "run"),
        "VLLM_MEM_WAIT": "0",
        "CUDA_VISIBLE_DEVICES": "0",
    }
    (home / "run").mkdir(exist_ok=True)
    asked = ("--gpu-memory-utilization", "0.50", "--port", "18123")
    fake_nvml.says(WHOLE)
    whole = guard.decide("m", asked, env, roots)
    assert [(total.pool.id, total.wanted_bytes) for total in whole.sums] == [("gpu0", 40 * GIB)]
    fake_nvml.says("name=NVIDIA A100-SXM4-80GB;mem=nopermission;mig=1", f"slice;uuid=MIG-1;mem={40 * GIB}:0")
    cut = guard.decide("m", asked, env, roots)
    assert [(total.pool.id, total.wanted_bytes) for total in cut.sums] == [("gpu0/mig0", 20 * GIB)]


def test_mig_beside_an_amd_card(roots: guard.Roots, home: Path, fake_nvml: FakeNvml) -> None:
    """The slices of one maker's card do not hide the other maker's."""
    device = Path(roots.sys) / "class" / "drm" / "card1" / "device"
    device.mkdir(parents=True)
    facts = {"vendor": "0x1002", "device": "0x744c", "mem_info_vram_total": str(24 * GIB), "mem_info_vram_used": "0"}
    for name, value in {**facts, "mem_info_gtt_total": str(16 * GIB), "mem_info_gtt_used": "0"}.items():
        (device / name).write_text(f"{value}\n")
    fake_nvml.says("name=NVIDIA A100-SXM4-80GB;mem=nopermission;mig=1", f"slice;uuid=MIG-1;mem={40 * GIB}:0")
    env = {**fake_nvml.env, "HOME": str(home), "XDG_RUNTIME_DIR": str(home / "run")}
    view = guard.look(load(env), env, roots)
    assert [(pool.id, pool.total_bytes) for pool in view.pools[:2]] == [("gpu0/mig0", 40 * GIB), ("gpu1", 24 * GIB)]
