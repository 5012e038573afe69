"""Which memory pools a machine has: the rules, apart from the driver that is asked in tests/integration/test_nvml.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sparkguard.core.types import DISCRETE, RAM, UNIFIED, UNKNOWN, GpuProcess, Machine, MemoryPool
from sparkguard.errors import OSERR, SparkguardError
from sparkguard.probe import amdgpu, facts
from sparkguard.probe.nvml import Gpu, Report

DATA = Path(__file__).parents[2] / "data"
GIB = 1 << 30
MIB = 1 << 20
GB10_RAM = 127600748 << 10


def report(*gpus: Gpu, count: int | None = None, error: str | None = None) -> Report:
    return Report("580.95.05", len(gpus) if count is None else count, gpus, error=error)


def gpu(name: str = "", total: int | None = None, error: str | None = None, device: str = "gpu0", mig: bool = False) -> Gpu:
    return Gpu(device, f"GPU-{device}", name, total, total, error, mig)


def kinds(machine: Machine) -> dict[str, str]:
    return {pool.id: pool.kind for pool in machine.pools}


@pytest.mark.parametrize(
    "one, ram",
    [
        pytest.param(gpu("NVIDIA GB10", error="NotSupported"), GB10_RAM, id="GB10, drivers 580 to 595"),
        pytest.param(gpu("NVIDIA-GB10", error="NotSupported"), GB10_RAM, id="GB10 as gpud logs it"),
        pytest.param(gpu("NVIDIA GB10", GB10_RAM), GB10_RAM, id="GB10, claimed in nvitop PR 208"),
        pytest.param(gpu("Orin (nvgpu)", error="NotSupported"), 61 * GIB, id="Jetson Orin"),
        pytest.param(gpu("NVIDIA Thor", error="NotSupported"), 122 * GIB, id="Jetson Thor"),
        pytest.param(gpu("NVIDIA Tegra T234", 8 * GIB), 61 * GIB, id="a Tegra with a number"),
        pytest.param(gpu("NVIDIA RTX Spark", 8128 * MIB), 46477 * MIB, id="RTX Spark carve-out, unsloth PR 11208"),
        pytest.param(gpu("NVIDIA N1X", 8128 * MIB), 46477 * MIB, id="N1X carve-out"),
        pytest.param(gpu("", error="NotSupported"), GB10_RAM, id="silence of a nameless GPU"),
        pytest.param(gpu("NVIDIA Graphics Device", 60 * GIB), 61 * GIB, id="a total near MemTotal"),
        pytest.param(gpu("NVIDIA Graphics Device", 105 * GIB), 100 * GIB, id="105 % of MemTotal"),
        pytest.param(gpu("NVIDIA Graphics Device", 90 * GIB), 100 * GIB, id="90 % of MemTotal"),
    ],
)
def test_unified(one: Gpu, ram: int) -> None:
    """A GPU that shares the RAM makes one pool, the RAM, whatever the GPU says of its size."""
    machine = facts.classify(report(one), ram)
    assert machine.pools == (MemoryPool("ram", UNIFIED, ram, None, one.name, one.uuid),)
    assert machine.note is None
    assert not facts.needs_nvml(machine)


@pytest.mark.parametrize(
    "name, total, ram",
    [
        pytest.param("NVIDIA GeForce RTX 5090", 32607 * MIB, 32 * GIB, id="a 32 GB card in a 32 GB host"),
        pytest.param("NVIDIA GeForce RTX 4060 Ti", 8188 * MIB, 62 * GIB, id="a small card"),
        pytest.param("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 97887 * MIB, 94 * GIB, id="RTX PRO"),
        pytest.param("Quadro P2000", 5 * GIB, 5 * GIB, id="Quadro"),
        pytest.param("Tesla V100-SXM2-16GB", 16 * GIB, 16 * GIB, id="Tesla, without the maker's name"),
        pytest.param("NVIDIA A100-SXM4-80GB", 80 * GIB, 80 * GIB, id="A100"),
        pytest.param("NVIDIA A10G", 23 * GIB, 23 * GIB, id="A10G"),
        pytest.param("NVIDIA H100 80GB HBM3", 81559 * MIB, 80 * GIB, id="H100"),
        pytest.param("NVIDIA H200", 140 * GIB, 128 * GIB, id="H200"),
        pytest.param("NVIDIA B200", 180 * GIB, 180 * GIB, id="B200"),
        pytest.param("NVIDIA L4", 23 * GIB, 23 * GIB, id="L4"),
        pytest.param("NVIDIA L40S", 45 * GIB, 45 * GIB, id="L40S"),
        pytest.param("Tesla T4", 15 * GIB, 15 * GIB, id="T4"),
        pytest.param("NVIDIA GH200 480GB", 97871 * MIB, 96 * GIB, id="GH200 has HBM"),
        pytest.param("NVIDIA GB200", 186 * GIB, 186 * GIB, id="GB200 has HBM"),
        pytest.param("NVIDIA GB300", 280 * GIB, 300 * GIB, id="GB300 has HBM"),
        pytest.param("NVIDIA Graphics Device", 24 * GIB, 62 * GIB, id="an unknown name far from MemTotal"),
        pytest.param("NVIDIA Graphics Device", 89 * GIB, 100 * GIB, id="89 % of MemTotal"),
        pytest.param("NVIDIA Graphics Device", 106 * GIB, 100 * GIB, id="106 % of MemTotal"),
    ],
)
def test_discrete(name: str, total: int, ram: int) -> None:
    """A card with memory of its own is a pool of that size, and the RAM stays one, last."""
    machine = facts.classify(report(gpu(name, total)), ram)
    assert machine.pools == (MemoryPool("gpu0", DISCRETE, total, None, name, "GPU-gpu0"), MemoryPool("ram", RAM, ram))
    assert machine.driver == "580.95.05"
    assert facts.needs_nvml(machine)


@pytest.mark.parametrize(
    "one, word",
    [
        pytest.param(gpu("NVIDIA A100-SXM4-80GB", error="NoPermission"), "permission", id="no permission"),
        pytest.param(gpu("NVIDIA GB10", error="NoPermission"), "permission", id="no permission on a GB10 either"),
        pytest.param(gpu("NVIDIA GeForce RTX 4090", error="NotSupported"), "no memory size", id="a known card without a size"),
        pytest.param(gpu("NVIDIA GH200 480GB", error="NotSupported"), "no memory size", id="a GH200 without a size"),
        pytest.param(gpu(error="GpuIsLost"), "lost", id="lost"),
        pytest.param(gpu(error="Unknown"), "Unknown", id="unknown error"),
        pytest.param(gpu("NVIDIA Fake", error="NotSupported", device="gpu0/mig0"), "no memory size", id="a silent MIG slice"),
    ],
)
def test_unknown(one: Gpu, word: str) -> None:
    """Silence that does not prove unified memory leaves a pool of unknown size, and the note says why."""
    machine = facts.classify(report(one), 62 * GIB)
    assert kinds(machine) == {one.device: UNKNOWN, "ram": RAM}
    assert machine.pools[0].total_bytes is None
    assert machine.note is not None
    assert machine.note.startswith(f"{one.device}: ")
    assert word in machine.note
    assert facts.needs_nvml(machine)


def test_mig_slices_are_pools() -> None:
    """Of a GPU cut by MIG each slice is a pool, and the whole GPU is none."""
    slices = [gpu("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 40 * GIB, device=f"gpu0/mig{i}") for i in (0, 1)]
    whole = gpu("NVIDIA A100-SXM4-80GB", error="NoPermission", mig=True)
    machine = facts.classify(report(whole, *slices, count=1), 80 * GIB)
    assert kinds(machine) == {"gpu0/mig0": DISCRETE, "gpu0/mig1": DISCRETE, "ram": RAM}
    assert machine.note is None


def test_mig_without_a_readable_slice_is_unknown() -> None:
    """A GPU cut by MIG whose slices are not shown is never taken for unified memory."""
    machine = facts.classify(report(gpu("NVIDIA A100-SXM4-80GB", error="NotSupported", mig=True), count=1), 80 * GIB)
    assert machine.pools[0] == MemoryPool("gpu0", UNKNOWN, None, name="NVIDIA A100-SXM4-80GB")
    assert machine.note == "gpu0: it is cut by MIG, and no slice of it can be read"


def test_one_broken_card_does_not_lose_the_others() -> None:
    """A lost card among good ones is unknown by itself."""
    cards = [
        gpu("NVIDIA L40S", 45 * GIB, device="gpu0"),
        gpu(error="GpuIsLost", device="gpu1"),
        gpu("NVIDIA L4", 23 * GIB, device="gpu2"),
    ]
    machine = facts.classify(report(*cards), 503 * GIB)
    assert kinds(machine) == {"gpu0": DISCRETE, "gpu1": UNKNOWN, "gpu2": DISCRETE, "ram": RAM}


def test_a_report_that_broke_off_owes_pools() -> None:
    """GPUs that NVML counted and did not come to describe are unknown, with the reason."""
    machine = facts.classify(report(gpu("NVIDIA L4", 23 * GIB), count=3, error="NVML died of signal 11"), 62 * GIB)
    assert kinds(machine) == {"gpu0": DISCRETE, "gpu1": UNKNOWN, "gpu2": UNKNOWN, "ram": RAM}
    assert machine.note == "gpu1: NVML died of signal 11; gpu2: NVML died of signal 11"


def test_a_driver_that_says_nothing_leaves_one_unknown_pool() -> None:
    """Where a driver is there and NVML fails at once, there is at least one GPU, of unknown size."""
    machine = facts.classify(Report(error="the NVIDIA driver did not answer within 2 s"), GB10_RAM)
    assert kinds(machine) == {"gpu0": UNKNOWN, "ram": RAM}
    assert machine.note == "gpu0: the NVIDIA driver did not answer within 2 s"


def test_no_gpu_counted_is_no_accelerator() -> None:
    """A driver without GPUs leaves the RAM."""
    assert facts.classify(Report("580.95.05", 0), 62 * GIB).pools == (MemoryPool("ram", RAM, 62 * GIB),)


def test_strix_halo() -> None:
    """A Strix Halo's pool is the RAM that GTT lets it use, never VRAM and GTT added up."""
    machine = facts.classify(None, 124 * GIB, amdgpu.cards(str(DATA / "strix-halo")))
    assert [(pool.id, pool.kind, pool.total_bytes, pool.name) for pool in machine.pools] == [
        ("ram", UNIFIED, 96 * GIB, "AMD Strix Halo")
    ]
    assert machine.note is None


def test_gtt_beyond_the_ram_is_cut_to_it() -> None:
    """A GTT of 96 GiB in a container that sees 8 GiB of RAM, or beside a carve-out, gives the RAM."""
    assert facts.classify(None, 8 * GIB, amdgpu.cards(str(DATA / "strix-halo"))).pools[0].total_bytes == 8 * GIB


def test_a_carve_out_is_a_pool_apart() -> None:
    """A carve-out of 64 GiB is a pool of its own beside the RAM that is left, and the note says so."""
    machine = facts.classify(None, 62 * GIB, amdgpu.cards(str(DATA / "strix-halo-carved")))
    assert [(pool.id, pool.kind, pool.total_bytes) for pool in machine.pools] == [
        ("gpu0", DISCRETE, 64 * GIB),
        ("ram", RAM, 62 * GIB),
    ]
    assert machine.note is not None
    assert "carves" in machine.note
    assert not facts.needs_nvml(machine)


def test_a_discrete_radeon() -> None:
    """A Radeon card is a pool whose figures do not need NVML."""
    machine = facts.classify(None, 62 * GIB, amdgpu.cards(str(DATA / "radeon-7900xtx")))
    assert kinds(machine) == {"gpu0": DISCRETE, "ram": RAM}
    assert not facts.needs_nvml(machine)


def test_an_apu_beside_a_card_is_left_out() -> None:
    """A laptop's APU beside a discrete card does not make the machine unified."""
    machine = facts.classify(
        report(gpu("NVIDIA GeForce RTX 4060 Laptop GPU", 8 * GIB)), 31 * GIB, amdgpu.cards(str(DATA / "strix-halo"))
    )
    assert machine.pools[-1] == MemoryPool("ram", RAM, 31 * GIB)
    assert kinds(machine) == {"gpu0": DISCRETE, "ram": RAM}


def test_cards_of_two_makers_are_numbered_on() -> None:
    """AMD cards come after NVIDIA's, and no two pools share an id."""
    machine = facts.classify(report(gpu("NVIDIA L4", 23 * GIB)), 62 * GIB, amdgpu.cards(str(DATA / "radeon-7900xtx")))
    assert [pool.id for pool in machine.pools] == ["gpu0", "gpu1", "ram"]
    assert facts.needs_nvml(machine)


def test_a_unified_gpu_beside_a_card_is_said() -> None:
    """Where one machine has both kinds, the RAM is a pool of its own and the note says what cannot be told."""
    machine = facts.classify(
        report(gpu("NVIDIA Thor", error="NotSupported"), gpu("NVIDIA L4", 23 * GIB, device="gpu1")), 122 * GIB
    )
    assert kinds(machine) == {"gpu1": DISCRETE, "ram": RAM}
    assert machine.note is not None
    assert machine.note.startswith("NVIDIA Thor shares the RAM")


@pytest.mark.parametrize("one", [gpu("NVIDIA GB10", GB10_RAM), gpu("NVIDIA N1X", 8128 * MIB)])
def test_discrete_by_setting(one: Gpu) -> None:
    """SPARK_MEMORY_POOL=discrete takes a GPU's own figure at its word."""
    assert kinds(facts.classify(report(one), GB10_RAM, pool_setting="discrete")) == {"gpu0": DISCRETE, "ram": RAM}


@pytest.mark.parametrize("said", [None, Report("580.95.05", 0), report(gpu("NVIDIA GB10", error="NotSupported"))])
def test_discrete_by_setting_without_a_figure_is_unknown(said: Report | None) -> None:
    """SPARK_MEMORY_POOL=discrete on a machine that shows no such memory is unknown, not the RAM."""
    machine = facts.classify(said, GB10_RAM, pool_setting="discrete")
    assert kinds(machine) == {"gpu0": UNKNOWN, "ram": RAM}
    assert machine.note


def proc(tmp_path: Path, meminfo: str | bytes = "MemTotal: 65011712 kB\nMemAvailable: 33554432 kB\n") -> str:
    folder = tmp_path / "proc"
    folder.mkdir()
    (folder / "meminfo").write_bytes(meminfo if isinstance(meminfo, bytes) else meminfo.encode())
    return str(folder)


@pytest.mark.parametrize("setting, kind", [("unified", UNIFIED), ("ram", RAM), ("auto", RAM)])
def test_a_machine_without_accelerator(tmp_path: Path, setting: str, kind: str) -> None:
    """Without a GPU there is one pool, the RAM, and the setting names its kind."""
    empty = str(tmp_path / "empty")
    machine, report = facts.survey(proc(tmp_path), empty, empty, empty, setting)
    assert machine == Machine((MemoryPool("ram", kind, 65011712 << 10),))
    assert report is None
    assert not Path(empty).exists()


def test_detect_reads_amd_cards(tmp_path: Path) -> None:
    """An AMD machine is read from sysfs afresh each time, and nothing of it is kept."""
    cache = tmp_path / "cache"
    machine = facts.detect(proc(tmp_path), str(DATA / "strix-halo"), str(tmp_path), str(cache))
    assert kinds(machine) == {"ram": UNIFIED}
    assert not cache.exists()


def test_meminfo_of_a_gb10() -> None:
    """kB of /proc/meminfo are KiB."""
    assert facts.read_meminfo(str(DATA / "gb10")) == {
        "MemTotal": 130663165952,
        "MemAvailable": 121411960832,
        "SwapTotal": 17179865088,
        "SwapFree": 17179865088,
    }


def test_meminfo_of_this_machine() -> None:
    """The kernel's own file is read, and no part is larger than its whole."""
    meminfo = facts.read_meminfo()
    assert 0 < meminfo["MemAvailable"] <= meminfo["MemTotal"]
    assert meminfo["SwapFree"] <= meminfo["SwapTotal"]


def test_swapfree_near_2_64_is_cut(tmp_path: Path) -> None:
    """A SwapFree that lxcfs let wrap (earlyoom issue 378) is cut to the swap that there is."""
    text = "MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 2000 kB\nSwapTotal: 300 kB\nSwapFree: 18446744073709551360 kB\n"
    meminfo = facts.read_meminfo(proc(tmp_path, f"{text}HugePages_Free: 3\nAnonPages: 7 kB\n"))
    assert {key: amount >> 10 for key, amount in meminfo.items()} == {
        "MemTotal": 1000,
        "MemFree": 10,
        "MemAvailable": 1000,
        "SwapTotal": 300,
        "SwapFree": 300,
        "AnonPages": 7,
    }


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"MemTotal: 0 kB\nMemAvailable: 0 kB\n",
        b"MemTotal: x kB\nMemAvailable: 5 kB\n",
        b"MemTotal: -5 kB\nMemAvailable: 5 kB\n",
        b"MemTotal: 5\nMemAvailable: 5 kB\n",
        b"MemTotal: 5 kB\n",
        b"MemTotal: 5 kB\nMemAvailable: \xff\xfe kB\n",
        b"\x00" * 4096,
    ],
)
def test_malformed_meminfo(tmp_path: Path, text: bytes) -> None:
    """A meminfo without its two figures is an error with its path and status 71, never a guess."""
    root = proc(tmp_path, text)
    with pytest.raises(SparkguardError) as caught:
        facts.read_meminfo(root)
    assert caught.value.status == OSERR
    assert f"{root}/meminfo" in caught.value.message


def test_missing_meminfo(tmp_path: Path) -> None:
    """An unreadable meminfo is an error with its path and status 71."""
    with pytest.raises(SparkguardError) as caught:
        facts.detect(str(tmp_path))
    assert caught.value.status == OSERR
    assert f"{tmp_path}/meminfo cannot be read" in caught.value.message


MEMINFO = {"MemTotal": 124 * GIB, "MemAvailable": 100 * GIB}


def test_available_on_a_unified_machine() -> None:
    """What is available of a unified pool is MemAvailable; NVML is not needed."""
    machine = facts.classify(report(gpu("NVIDIA GB10", error="NotSupported")), 124 * GIB)
    assert [pool.available_bytes for pool in facts.available(machine, MEMINFO)] == [100 * GIB]


def test_available_on_cards() -> None:
    """Each card has its own free memory, unknown where the report has none; the RAM has MemAvailable."""
    said = report(gpu("NVIDIA L4", 23 * GIB), gpu(error="GpuIsLost", device="gpu1"))
    machine = facts.classify(said, 124 * GIB)
    now = said.replace(gpus=(said.gpus[0].replace(free_bytes=5 * GIB), said.gpus[1]))
    assert [pool.available_bytes for pool in facts.available(machine, MEMINFO, now)] == [5 * GIB, None, 100 * GIB]
    assert [pool.available_bytes for pool in facts.available(machine, MEMINFO)] == [None, None, 100 * GIB]
    failed = Report(error="the NVIDIA driver did not answer within 2 s")
    assert [pool.available_bytes for pool in facts.available(machine, MEMINFO, failed)] == [None, None, 100 * GIB]


@pytest.mark.parametrize(
    "data, memory, expected",
    [
        pytest.param("strix-halo", 100 * GIB, [95 * GIB], id="GTT free is less than MemAvailable"),
        pytest.param("strix-halo", 10 * GIB, [10 * GIB], id="MemAvailable is less than GTT free"),
        pytest.param("strix-halo-carved", 50 * GIB, [56 * GIB, 50 * GIB], id="a carve-out apart"),
        pytest.param("radeon-7900xtx", 50 * GIB, [25753026560 - 25753026560 // 8, 50 * GIB], id="a discrete card"),
    ],
)
def test_available_on_amd(data: str, memory: int, expected: list[int]) -> None:
    """On AMD the driver's files tell what is free, and shared memory is bounded by the RAM as well."""
    sys_root = str(DATA / data)
    machine = facts.classify(None, 62 * GIB, amdgpu.cards(sys_root))
    pools = facts.available(machine, {"MemTotal": 62 * GIB, "MemAvailable": memory}, sys_root=sys_root)
    assert [pool.available_bytes for pool in pools] == expected


def test_processes_of_a_unified_gpu_are_of_the_ram() -> None:
    """On a unified machine the GPU's processes hold RAM."""
    said = report(gpu("NVIDIA GB10", error="NotSupported")).replace(
        processes=(GpuProcess(7, "gpu0", 5), GpuProcess(8, "gpu0", None))
    )
    assert facts.processes(facts.classify(said, GB10_RAM), said) == (GpuProcess(7, "ram", 5), GpuProcess(8, "ram", None))


def test_processes_of_cards_keep_their_card() -> None:
    """A process on two cards is one row for each."""
    said = report(gpu("NVIDIA L4", 23 * GIB), gpu("NVIDIA L4", 23 * GIB, device="gpu1"))
    said = said.replace(processes=(GpuProcess(7, "gpu0", 5), GpuProcess(7, "gpu1", 6)))
    assert facts.processes(facts.classify(said, GB10_RAM), said) == said.processes


def test_processes_of_two_gpus_of_one_pool_add_up() -> None:
    """Where two GPUs share the RAM, a process on both is one row, unknown if one part is."""
    said = report(gpu("NVIDIA Thor", error="NotSupported"), gpu("NVIDIA Thor", error="NotSupported", device="gpu1"))
    rows = (GpuProcess(7, "gpu0", 5), GpuProcess(7, "gpu1", 6), GpuProcess(8, "gpu0", 5), GpuProcess(8, "gpu1", None))
    said = said.replace(processes=rows)
    assert facts.processes(facts.classify(said, GB10_RAM), said) == (GpuProcess(7, "ram", 11), GpuProcess(8, "ram", None))


def test_processes_do_not_count_where_the_ram_is_chosen() -> None:
    """With SPARK_MEMORY_POOL=ram no GPU's memory is of the pool."""
    said = report(gpu("NVIDIA L4", 23 * GIB)).replace(processes=(GpuProcess(7, "gpu0", 5),))
    assert facts.processes(Machine((MemoryPool("ram", RAM, 62 * GIB),)), said) == ()


def test_imports_are_cheap() -> None:
    """The guard's fast path pays for no slow module."""
    code = "import sys; sys.path.append(sys.argv[1]); import sparkguard.probe.facts; print(*sys.modules)"
    root = str(Path(facts.__file__).parents[2])
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code, root], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "sparkguard.probe.facts" in loaded
    slow = "dataclasses typing json argparse pathlib subprocess re enum shlex logging signal contextlib collections functools"
    assert not {*slow.split(), "tempfile", "pynvml"} & loaded
