"""On which pools a server counts, and how much it takes of each."""

from __future__ import annotations

import pytest

from sparkguard.core.share import parse_share
from sparkguard.core.types import DISCRETE, RAM, UNIFIED, UNKNOWN, Hold, Machine, MemoryPool
from sparkguard.probe import devices
from sparkguard.probe.vllm_argv import Declared
from sparkguard.probe.vllm_version import DEFAULT

GIB = 1 << 30
RAM_POOL = MemoryPool("ram", RAM, 256 * GIB)


def card(index: int, name: str = "NVIDIA H100", kind: str = DISCRETE, suffix: str = "") -> MemoryPool:
    return MemoryPool(f"gpu{index}{suffix}", kind, 80 * GIB, name=name, uuid=f"GPU-{index}{index}")


ALIKE = Machine((card(0), card(1), card(2), card(3), RAM_POOL))
MIXED = Machine((card(0, "NVIDIA RTX 3060"), card(1, "NVIDIA RTX 4090"), RAM_POOL))
SLICES = Machine(
    (
        card(0),
        MemoryPool("gpu1/mig0", DISCRETE, 40 * GIB, name="MIG 3g.40gb", uuid="MIG-aa"),
        MemoryPool("gpu1/mig1", DISCRETE, 40 * GIB, name="MIG 3g.40gb", uuid="MIG-bb"),
        RAM_POOL,
    )
)
UNIFIED_MACHINE = Machine((MemoryPool("ram", UNIFIED, 128 * GIB),))
EVERY = "devices not known, counted on all"
BUS = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def pools(machine: Machine, env: dict[str, str] | None, ids: str | None = None, gpus: int | None = None) -> tuple[str, str]:
    chosen, note = devices.pools_of(machine, env, ids, gpus)
    return " ".join(pool.id for pool in chosen), note


@pytest.mark.parametrize(
    "env, ids, gpus, expected",
    [
        ({}, None, None, "gpu0 gpu1 gpu2 gpu3"),
        ({}, None, 1, "gpu0"),
        ({}, None, 2, "gpu0 gpu1"),
        ({}, None, 8, "gpu0 gpu1 gpu2 gpu3"),
        ({"CUDA_VISIBLE_DEVICES": "2"}, None, 1, "gpu2"),
        ({"CUDA_VISIBLE_DEVICES": "3,1"}, None, 1, "gpu3"),
        ({"CUDA_VISIBLE_DEVICES": "3, 1"}, None, 2, "gpu3 gpu1"),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, None, None, "gpu0"),
        ({"CUDA_VISIBLE_DEVICES": ""}, None, 1, "ram"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, None, 1, "ram"),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, None, 1, "ram"),
        ({"NVIDIA_VISIBLE_DEVICES": "none"}, None, 1, "ram"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-22"}, None, 1, "gpu2"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-2,GPU-11"}, None, 2, "gpu2 gpu1"),
        ({"CUDA_VISIBLE_DEVICES": "2,3"}, "1", 1, "gpu3"),
        ({"CUDA_VISIBLE_DEVICES": "2,3"}, "1, 0", 2, "gpu3 gpu2"),
        ({}, "1,3", 1, "gpu1"),
        ({}, "1,3", 2, "gpu1 gpu3"),
        ({}, "GPU-33", 1, "gpu3"),
        ({"HIP_VISIBLE_DEVICES": "1"}, None, 1, "gpu1"),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}, None, 1, "gpu3"),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, None, 1, "gpu0"),
        ({"NVIDIA_VISIBLE_DEVICES": "void"}, None, 1, "gpu0"),
        ({"NVIDIA_VISIBLE_DEVICES": "2,3"}, None, 1, "gpu2"),
        ({"NVIDIA_VISIBLE_DEVICES": "2,3", "CUDA_VISIBLE_DEVICES": "1"}, None, 1, "gpu3"),
        ({"NVIDIA_VISIBLE_DEVICES": "GPU-33", "CUDA_VISIBLE_DEVICES": "0"}, None, 1, "gpu3"),
    ],
)
def test_alike_cards(env: dict[str, str], ids: str | None, gpus: int | None, expected: str) -> None:
    """Cards of one kind count in one order, whoever counts them; lists compose."""
    assert pools(ALIKE, env, ids, gpus) == (expected, "")


@pytest.mark.parametrize(
    "machine, env, ids, gpus",
    [
        (ALIKE, None, None, 1),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "7"}, None, 1),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "first"}, None, 1),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "MIG-GPU-xx/1/0"}, None, 1),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "2,3"}, "2", 1),
        (ALIKE, {"CUDA_VISIBLE_DEVICES": "GPU-22"}, "GPU-33", 1),
        (ALIKE, {}, "x", 1),
        (ALIKE, {}, ",", 1),
        (MIXED, {}, None, 1),
        (MIXED, {"CUDA_VISIBLE_DEVICES": "0"}, None, 1),
        (MIXED, {}, "0", 1),
    ],
)
def test_what_cannot_be_known(machine: Machine, env: dict[str, str] | None, ids: str | None, gpus: int) -> None:
    """It is counted on every card, and said: also where CUDA would count mixed cards by their speed."""
    every = " ".join(pool.id for pool in machine.pools if pool.kind != RAM)
    assert pools(machine, env, ids, gpus) == (every, EVERY)


@pytest.mark.parametrize(
    "env, ids, gpus, expected",
    [
        (BUS, None, 1, "gpu0"),
        ({**BUS, "CUDA_VISIBLE_DEVICES": "1"}, None, 1, "gpu1"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-11"}, None, 1, "gpu1"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-11,GPU-00"}, None, 1, "gpu1"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-11,GPU-00"}, "1", 1, "gpu0"),
        ({}, None, 2, "gpu0 gpu1"),
        ({}, None, None, "gpu0 gpu1"),
        ({"NVIDIA_VISIBLE_DEVICES": "1"}, None, 1, "gpu1"),
        ({"NVIDIA_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0"}, None, 1, "gpu1"),
    ],
)
def test_mixed_cards(env: dict[str, str], ids: str | None, gpus: int | None, expected: str) -> None:
    """Where the order is told, or does not matter, mixed cards are known as well."""
    assert pools(MIXED, env, ids, gpus) == (expected, "")


@pytest.mark.parametrize(
    "visible, expected",
    [("MIG-bb", "gpu1/mig1"), ("MIG-aa,MIG-bb", "gpu1/mig0 gpu1/mig1"), ("GPU-00", "gpu0")],
)
def test_slices(visible: str, expected: str) -> None:
    """A MIG slice is a pool of its own, named by its UUID."""
    assert pools(SLICES, {"CUDA_VISIBLE_DEVICES": visible}) == (expected, "")


def test_the_index_of_a_sliced_card() -> None:
    """CUDA takes one of a sliced card's slices, and does not say which: all of them count."""
    assert pools(SLICES, {**BUS, "CUDA_VISIBLE_DEVICES": "1"}) == ("gpu1/mig0 gpu1/mig1", "")


@pytest.mark.parametrize("env", [None, {}, {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "3"}])
def test_one_pool(env: dict[str, str] | None) -> None:
    """Where everybody shares one pool nobody has to be asked which."""
    assert pools(UNIFIED_MACHINE, env, "5", 2) == ("ram", "")


def test_a_card_of_unknown_size() -> None:
    """It is a pool like another."""
    machine = Machine((MemoryPool("gpu0", UNKNOWN, None), RAM_POOL))
    assert pools(machine, {}, None, 1) == ("gpu0", "")


def test_no_card_visible_and_no_ram_pool() -> None:
    """Then nothing but the cards is left to count on."""
    assert pools(Machine((card(0),)), {"CUDA_VISIBLE_DEVICES": ""}) == ("gpu0", "")


GPU = card(0)
CPU = MemoryPool("ram", RAM, 100 * GIB)


@pytest.mark.parametrize(
    "declared, pool, kv_gib, share, amount",
    [
        (Declared(share=parse_share("0.5")), GPU, None, "0.5", 40 * GIB),
        (Declared(), GPU, None, "0.92", -(-80 * GIB * 92 // 100)),
        (Declared(share=parse_share("0.5"), kv_bytes=8 * GIB), GPU, None, "0.5", 40 * GIB),
        (Declared(share=parse_share("0.05"), kv_bytes=8 * GIB), GPU, None, "0.1", 8 * GIB),
        (Declared(kv_bytes=8 * GIB), GPU, None, "0.92", -(-80 * GIB * 92 // 100)),
        (Declared(total_bytes=20 * GIB), GPU, None, "0.25", 20 * GIB),
        (Declared(total_bytes=20 * GIB, kv_bytes=40 * GIB), GPU, None, "0.5", 40 * GIB),
        (Declared(), GPU, "40", "0.92", -(-80 * GIB * 92 // 100)),
        (Declared(), CPU, "25", "0.25", 25 * GIB),
        (Declared(), CPU, "0", "0.92", 92 * GIB),
        (Declared(), CPU, "", "0.92", 92 * GIB),
        (Declared(), CPU, "four", "0.92", 92 * GIB),
        (Declared(kv_bytes=25 * GIB), CPU, None, "0.25", 25 * GIB),
        (Declared(kv_bytes=25 * GIB), CPU, "50", "0.5", 50 * GIB),
        (Declared(kv_bytes=25 * GIB, gpus=2), CPU, None, "0.5", 50 * GIB),
        (Declared(share=parse_share("0.3")), CPU, "25", "0.3", 30 * GIB),
    ],
)
def test_hold(declared: Declared, pool: MemoryPool, kv_gib: str | None, share: str, amount: int) -> None:
    """A server takes its fraction, or its absolute figure, and never less than its KV cache."""
    assert devices.hold(declared, pool, DEFAULT, kv_gib) == Hold(pool.id, parse_share(share), amount)


def test_hold_of_a_pool_of_unknown_size() -> None:
    """The share is known and the bytes are not."""
    pool = MemoryPool("gpu0", UNKNOWN, None)
    assert devices.hold(Declared(share=parse_share("0.5")), pool, DEFAULT, None) == Hold("gpu0", parse_share("0.5"), None)
    assert devices.hold(Declared(total_bytes=GIB), pool, DEFAULT, None) == Hold("gpu0", None, GIB)
