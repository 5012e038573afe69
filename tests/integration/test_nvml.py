"""NVML asked for real: nvidia-ml-py in the bounded child, against a library that stands in for the driver's."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sparkguard.core.types import DISCRETE, RAM, UNIFIED, UNKNOWN, GpuProcess, Machine
from sparkguard.probe import facts, nvml
from sparkguard.probe.nvml import Report

if TYPE_CHECKING:
    from fakes.nvml import FakeNvml

pytest_plugins = ["fakes.nvml"]

GIB = 1 << 30
DATA = Path(__file__).parents[1] / "data"
# Longer than the two seconds of the guard, so that a busy machine does not make a test fail.
AMPLE = 30.0
SHORT = 1.0

GB10 = "name=NVIDIA GB10;uuid=GPU-10;mem=unsupported"
H100 = f"name=NVIDIA H100 80GB HBM3;uuid=GPU-100;mem={80 * GIB}:{70 * GIB}"
L4 = f"name=NVIDIA L4;uuid=GPU-4;mem={23 * GIB}:{22 * GIB}"


@pytest.fixture
def ask(fake_nvml: FakeNvml):  # type: ignore[no-untyped-def]
    def ask(*lines: str, seconds: float = AMPLE) -> Report:
        fake_nvml.says(*lines)
        return nvml.ask(seconds, fake_nvml.env)

    return ask


def test_gb10(fake_nvml: FakeNvml) -> None:
    """A GB10 names no size, and tells what its processes hold."""
    fake_nvml.conf.write_bytes((DATA / "gb10/nvml.conf").read_bytes())
    report = nvml.ask(AMPLE, fake_nvml.env)
    assert (report.driver, report.count, report.error) == ("580.173.02", 1, None)
    (gpu,) = report.gpus
    assert (gpu.name, gpu.error, gpu.total_bytes, gpu.listed) == ("NVIDIA GB10", "NotSupported", None, True)
    assert report.processes == (GpuProcess(4242, "gpu0", 66991423488), GpuProcess(2211, "gpu0", 41943040))


def test_discrete_cards(ask) -> None:  # type: ignore[no-untyped-def]
    """Each card has its name, size, free memory, UUID and processes."""
    report = ask(f"{H100};procs=1:5", f"{L4};procs=1:6,2:7", L4)
    assert [(gpu.device, gpu.uuid, gpu.total_bytes, gpu.free_bytes) for gpu in report.gpus] == [
        ("gpu0", "GPU-100", 80 * GIB, 70 * GIB),
        ("gpu1", "GPU-4", 23 * GIB, 22 * GIB),
        ("gpu2", "GPU-4", 23 * GIB, 22 * GIB),
    ]
    assert report.processes == (GpuProcess(1, "gpu0", 5), GpuProcess(1, "gpu1", 6), GpuProcess(2, "gpu1", 7))


def test_a_process_in_both_lists_counts_once(ask) -> None:  # type: ignore[no-untyped-def]
    """A process that computes and draws is one row with the larger figure; one without a figure is unknown."""
    report = ask(f"{L4};procs=1:5,2:-1,3:-1,4:9;graphics=1:6,3:7,5:8")
    assert {(row.pid, row.used_bytes) for row in report.processes} == {(1, 6), (2, None), (3, 7), (4, 9), (5, 8)}


def test_process_lists_that_cannot_be_read(ask) -> None:  # type: ignore[no-untyped-def]
    """A GPU whose process lists fail is marked, and keeps its memory."""
    (gpu,) = ask(f"{L4};procs_error=3").gpus
    assert (gpu.listed, gpu.total_bytes, gpu.error) == (False, 23 * GIB, None)


def test_mig(ask) -> None:  # type: ignore[no-untyped-def]
    """Each slice follows its GPU with memory, UUID and processes of its own, and what comes after keeps its number."""
    report = ask(
        "name=NVIDIA A100-SXM4-80GB;mem=nopermission;mig=1;procs_error=4",
        f"slice;name=NVIDIA A100-SXM4-80GB MIG 3g.40gb;uuid=MIG-1;mem={40 * GIB}:{39 * GIB};procs=7:5",
        f"slice;name=NVIDIA A100-SXM4-80GB MIG 3g.40gb;uuid=MIG-2;mem={40 * GIB}:{38 * GIB}",
        L4,
    )
    assert [(gpu.device, gpu.mig, gpu.uuid) for gpu in report.gpus][1:] == [
        ("gpu0/mig0", False, "MIG-1"),
        ("gpu0/mig1", False, "MIG-2"),
        ("gpu1", False, "GPU-4"),
    ]
    assert (report.gpus[0].mig, report.gpus[0].error) == (True, "NoPermission")
    assert report.processes == (GpuProcess(7, "gpu0/mig0", 5),)
    machine = facts.classify(report, 80 * GIB)
    assert [(pool.id, pool.kind) for pool in machine.pools] == [
        ("gpu0/mig0", DISCRETE),
        ("gpu0/mig1", DISCRETE),
        ("gpu1", DISCRETE),
        ("ram", RAM),
    ]


def test_a_slice_without_rights_is_unknown_by_itself(ask) -> None:  # type: ignore[no-untyped-def]
    """One slice that may not be read leaves the other."""
    report = ask("name=NVIDIA A30;mem=unsupported;mig=1", "slice;mem=nopermission", f"slice;mem={6 * GIB}:{6 * GIB}")
    machine = facts.classify(report, 80 * GIB)
    assert [pool.kind for pool in machine.pools] == [UNKNOWN, DISCRETE, RAM]
    assert machine.note == "gpu0/mig0: no permission to read its memory"


@pytest.mark.parametrize("broken", ["lost=1", "handle_error=15", "mem=error:15"])
def test_a_lost_gpu_does_not_lose_the_others(ask, broken: str) -> None:  # type: ignore[no-untyped-def]
    """A GPU that fell off the bus is named by its error, whichever call notices; the next one is read."""
    report = ask(L4, f"name=NVIDIA L40S;{broken}", H100)
    assert [gpu.error for gpu in report.gpus] == [None, "GpuIsLost", None]
    assert report.error is None


def test_an_error_that_nvml_has_no_name_for(ask) -> None:  # type: ignore[no-untyped-def]
    """A code of a newer driver is shown by its number."""
    assert [gpu.error for gpu in ask("mem=error:777").gpus] == ["error 777"]


def test_a_size_of_zero_is_none(ask) -> None:  # type: ignore[no-untyped-def]
    """A driver that succeeds with zeros names no size."""
    (gpu,) = ask("name=NVIDIA GB10;mem=0:0").gpus
    assert (gpu.total_bytes, gpu.free_bytes, gpu.error) == (None, None, "NotSupported")


@pytest.mark.parametrize(
    "line, words",
    [("init=9", "the NVIDIA driver is not loaded"), ("init=18", "a reboot ends that"), ("init=999", "NVML says Unknown")],
)
def test_a_driver_that_fails(ask, line: str, words: str) -> None:  # type: ignore[no-untyped-def]
    """Why NVML cannot start is told in words."""
    report = ask(line, L4)
    assert report.gpus == ()
    assert words in (report.error or "")


def test_no_library(tmp_path: Path) -> None:
    """Without libnvidia-ml.so.1 the report says that."""
    report = nvml.ask(AMPLE, {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)})
    assert report == Report(error="libnvidia-ml.so.1 is not there", library=False)


def test_a_driver_that_hangs(ask) -> None:  # type: ignore[no-untyped-def]
    """A driver that never answers costs the time agreed, and the report says so."""
    started = time.monotonic()
    report = ask("hang=1", L4, seconds=SHORT)
    assert report == Report(error="the NVIDIA driver did not answer within 1 s")
    assert time.monotonic() - started < AMPLE


def test_a_killed_guard_leaves_no_hanging_child(fake_nvml: FakeNvml) -> None:
    """A child whose parent is killed while the driver hangs ends by itself."""
    fake_nvml.says("hang=1")
    code = "import sys; sys.path.append(sys.argv[1]); from sparkguard.probe import nvml; print('asks', flush=True); nvml.ask(1.0)"
    root = str(Path(nvml.__file__).parents[2])
    with subprocess.Popen([sys.executable, "-I", "-c", code, root], env=fake_nvml.env, stdout=subprocess.PIPE) as guard:
        assert guard.stdout is not None
        assert guard.stdout.readline() == b"asks\n"
        children = Path(f"/proc/{guard.pid}/task/{guard.pid}/children")
        while not (child := children.read_text().split()):
            assert guard.poll() is None
        watched = os.pidfd_open(int(child[0]))
        guard.kill()
    ended, _, _ = select.select([watched], [], [], AMPLE)
    os.close(watched)
    assert ended


def test_a_driver_that_hangs_midway(ask) -> None:  # type: ignore[no-untyped-def]
    """What was known before the hang is kept, and the rest is owed."""
    report = ask(L4, f"{H100};hang=1", L4, seconds=3)
    assert [gpu.device for gpu in report.gpus] == ["gpu0"]
    assert report.count == 3
    assert report.error == "the NVIDIA driver did not answer within 3 s"
    assert [pool.kind for pool in facts.classify(report, 62 * GIB).pools] == [DISCRETE, UNKNOWN, UNKNOWN, RAM]


def test_a_driver_that_crashes_midway(ask) -> None:  # type: ignore[no-untyped-def]
    """A crash inside the library ends the child only, and is told by its signal."""
    report = ask(L4, "crash=1")
    assert [gpu.device for gpu in report.gpus] == ["gpu0"]
    assert report.error == "NVML died of signal 11"


def test_a_driver_that_fails_first_and_works_later(fake_nvml: FakeNvml) -> None:
    """Two failures of a driver that is still starting are not remembered."""
    fake_nvml.says("init=9", "init_fails=2", L4)
    reports = [nvml.ask(AMPLE, fake_nvml.env) for _ in range(3)]
    assert [report.error is None for report in reports] == [False, False, True]
    assert [gpu.name for gpu in reports[2].gpus] == ["NVIDIA L4"]


def test_the_caller_cannot_be_made_to_import_something_else(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    """A pynvml.py in the working folder or on PYTHONPATH is not what the child imports."""
    (tmp_path / "pynvml.py").write_text("raise SystemExit(66)")
    fake_nvml.says(L4)
    assert nvml.ask(AMPLE, {**fake_nvml.env, "PYTHONPATH": str(tmp_path)}).error is None


class Box:
    """A machine: its /proc and /dev, the driver that is asked, and where facts are kept."""

    def __init__(self, folder: Path, driver: FakeNvml) -> None:
        self.proc, self.dev, self.cache = folder / "proc", folder / "dev", folder / "cache"
        self.driver = driver
        for name in ("sys/kernel/random", "driver/nvidia/gpus/0000:01:00.0"):
            (self.proc / name).mkdir(parents=True)
        self.dev.mkdir()
        (self.proc / "meminfo").write_text("MemTotal: 127600748 kB\nMemAvailable: 118566368 kB\n")
        self.boots("6d8f2a8e-0001")
        self.has_driver("580.95.05")

    def boots(self, boot_id: str) -> None:
        (self.proc / "sys/kernel/random/boot_id").write_text(f"{boot_id}\n")

    def has_driver(self, version: str) -> None:
        text = f"NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  {version}  Release Build\nGCC version: 13.3.0\n"
        (self.proc / "driver/nvidia/version").write_text(text)

    @property
    def facts(self) -> Path:
        return self.cache / "facts"

    def survey(self, pool_setting: str = "auto") -> tuple[Machine, Report | None]:
        roots = str(self.proc), str(self.proc.parent / "no-sys"), str(self.dev)
        return facts.survey(*roots, str(self.cache), pool_setting, self.driver.env)

    def kinds(self, pool_setting: str = "auto") -> list[str]:
        return [pool.kind for pool in self.survey(pool_setting)[0].pools]

    def asked(self) -> bool:
        return self.survey()[1] is not None


@pytest.fixture
def box(tmp_path: Path, fake_nvml: FakeNvml) -> Box:
    (tmp_path / "box").mkdir()
    return Box(tmp_path / "box", fake_nvml)


@pytest.mark.parametrize("lines", [[GB10], [H100, L4]])
def test_positive_facts_are_kept(box: Box, lines: list[str]) -> None:
    """What a working driver said holds for the boot: the second start gets the same pools without asking."""
    box.driver.says(*lines)
    first, report = box.survey()
    assert report is not None
    box.driver.says("hang=1")
    assert box.survey() == (first, None)
    assert [path.name for path in box.cache.iterdir()] == ["facts"]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda box: box.boots("6d8f2a8e-0002"), id="another boot"),
        pytest.param(lambda box: box.has_driver("595.10"), id="another driver"),
        pytest.param(lambda box: (box.proc / "driver/nvidia/gpus/0000:02:00.0").mkdir(), id="another GPU"),
    ],
)
def test_kept_facts_end(box: Box, change) -> None:  # type: ignore[no-untyped-def]
    """Another boot, another driver or another set of GPUs is asked anew."""
    box.driver.says(GB10)
    assert box.kinds() == [UNIFIED]
    change(box)
    box.driver.says(L4)
    assert box.kinds() == [DISCRETE, RAM]


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(["init=9"], id="the driver is not loaded yet"),
        pytest.param([], id="no GPU yet"),
        pytest.param([L4, "lost=1"], id="a lost GPU"),
        pytest.param(["name=NVIDIA A30;mig=1", f"slice;mem={6 * GIB}:{6 * GIB}"], id="MIG"),
        pytest.param(["name=NVIDIA A100-SXM4-80GB;mem=nopermission"], id="no permission"),
        pytest.param([L4, "crash=1"], id="a crash midway"),
        pytest.param([L4, "crash_at_exit=1"], id="a crash after all was said"),
    ],
)
def test_doubtful_facts_are_not_kept(box: Box, lines: list[str]) -> None:
    """Nothing, errors, unknown sizes and MIG are asked for again at each start."""
    box.driver.says(*lines)
    assert box.asked()
    assert not box.facts.exists()
    box.driver.says(GB10)
    assert box.kinds() == [UNIFIED]


def test_a_setting_is_judged_from_the_same_facts(box: Box) -> None:
    """SPARK_MEMORY_POOL changes what is made of the facts, not the facts."""
    box.driver.says(f"name=NVIDIA Graphics Device;mem={121 * GIB}:{100 * GIB}")
    assert box.kinds() == [UNIFIED]
    box.driver.says("hang=1")
    assert box.kinds("discrete") == [DISCRETE, RAM]
    assert box.kinds("unified") == [UNIFIED]
    assert box.kinds("ram") == [RAM]
    assert box.kinds() == [UNIFIED]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 200,
        b"\xff" * 70_000,
        b"sparkguard facts 1\n",
        b"sparkguard facts 0\t6d8f2a8e-0001\nend\n",
    ],
)
def test_a_garbled_file_is_replaced(box: Box, content: bytes) -> None:
    """A file of facts that is not what was written is asked over, and written anew."""
    box.driver.says(GB10)
    assert box.asked()
    good = box.facts.read_bytes()
    box.facts.write_bytes(content)
    assert box.asked()
    assert box.facts.read_bytes() == good
    assert not box.asked()


@pytest.mark.parametrize("cut", [1, 4, 5, 20, 60])
def test_a_file_cut_short_is_replaced(box: Box, cut: int) -> None:
    """A file whose end is missing, as on a full disk, counts for nothing."""
    box.driver.says(GB10)
    assert box.asked()
    good = box.facts.read_bytes()
    box.facts.write_bytes(good[:-cut])
    assert box.asked()
    assert box.facts.read_bytes() == good


@pytest.mark.parametrize("old, new", [(b"\tNotSupported", b""), (b"count\t1", b"count\t2"), (b"gpu0", b"gpu0\textra")])
def test_a_changed_file_is_replaced(box: Box, old: bytes, new: bytes) -> None:
    """Lines that our own writer would not have written, or that contradict each other, count for nothing."""
    box.driver.says(GB10)
    assert box.asked()
    good = box.facts.read_bytes()
    assert old in good
    box.facts.write_bytes(good.replace(old, new))
    machine, report = box.survey()
    assert [pool.kind for pool in machine.pools] == [UNIFIED]
    assert report is not None


def test_a_file_that_others_may_write_is_not_believed(box: Box) -> None:
    """A file of facts that the group or others can write to counts for nothing."""
    box.driver.says(GB10)
    assert box.asked()
    box.facts.chmod(0o666)
    assert box.asked()
    assert box.facts.stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_somebody_elses_file_is_not_believed(box: Box) -> None:
    """A file of facts that belongs to another user counts for nothing."""
    box.driver.says(GB10)
    assert box.asked()
    os.chown(box.facts, 65534, 65534)
    assert box.asked()
    assert box.facts.stat().st_uid == os.geteuid()


def test_a_link_is_not_followed(box: Box, tmp_path: Path) -> None:
    """Neither reading nor writing follows a link in the place of the file."""
    box.driver.says(GB10)
    assert box.asked()
    other = tmp_path / "other"
    box.facts.rename(other)
    box.facts.symlink_to(other)
    before = other.read_bytes()
    assert box.asked()
    assert not box.facts.is_symlink()
    assert other.read_bytes() == before


def test_a_fifo_does_not_block(box: Box) -> None:
    """A fifo in the place of the file is not waited for."""
    box.cache.mkdir()
    os.mkfifo(box.facts)
    box.driver.says(GB10)
    assert box.asked()
    assert not box.asked()


def test_a_folder_that_cannot_be_made_is_no_error(box: Box) -> None:
    """Where facts cannot be kept, each start asks."""
    box.cache.write_text("a file in the way")
    box.driver.says(GB10)
    assert box.asked()
    assert box.asked()


def test_a_killed_guards_draft_is_no_obstacle(box: Box) -> None:
    """A draft left by a killed process of the same pid is cleared away."""
    box.cache.mkdir()
    draft = box.cache / f".facts.{os.getpid()}"
    draft.write_text("half")
    box.driver.says(GB10)
    assert box.asked()
    assert not draft.exists()
    assert box.asked()
    assert not box.asked()


def test_without_a_boot_id_nothing_is_kept(box: Box) -> None:
    """Facts that cannot be tied to a boot are not kept."""
    (box.proc / "sys/kernel/random/boot_id").unlink()
    box.driver.says(GB10)
    assert box.asked()
    assert not box.facts.exists()


def test_without_signs_of_a_driver_nvml_is_not_asked(box: Box) -> None:
    """A machine without an NVIDIA driver pays nothing for NVML, even where its library would hang."""
    (box.proc / "driver/nvidia/version").unlink()
    box.driver.says("hang=1")
    machine, report = box.survey()
    assert ([pool.kind for pool in machine.pools], report) == ([RAM], None)


@pytest.mark.parametrize("name", ["nvidiactl", "nvidia0", "nvmap", "dxg"])
def test_signs_of_a_driver(box: Box, name: str) -> None:
    """Each of the driver's device files is a reason to ask NVML."""
    (box.proc / "driver/nvidia/version").unlink()
    (box.dev / name).touch()
    box.driver.says(GB10)
    assert box.kinds() == [UNIFIED]


@pytest.mark.parametrize(
    "sign, kind",
    [
        pytest.param("dxg", [RAM], id="WSL without NVIDIA"),
        pytest.param("nvmap", [UNIFIED], id="an older Jetson without NVML"),
        pytest.param("nvidia0", [UNKNOWN, RAM], id="a driver without its library"),
    ],
)
def test_without_the_library(box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sign: str, kind: list[str]) -> None:
    """What a missing libnvidia-ml.so.1 means depends on what else is there."""
    (box.proc / "driver/nvidia/version").unlink()
    (box.dev / sign).touch()
    monkeypatch.setattr(box.driver, "folder", tmp_path)
    assert box.kinds() == kind
