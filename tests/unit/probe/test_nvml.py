"""The lines between the child that asks NVML and its parent; tests/integration/test_nvml.py runs the child."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkguard.core.types import GpuProcess
from sparkguard.probe import nvml
from sparkguard.probe.nvml import Gpu, Report

LINES = [
    "driver\t580.95.05",
    "count\t2",
    "gpu\tgpu0\tGPU-1\tNVIDIA H100 80GB HBM3\t85520809984\t85000000000\t\t\tlisted",
    "process\tgpu0\t4242\t1024",
    "process\tgpu0\t4343\t",
    "gpu\tgpu1\t\t\t\t\tGpuIsLost\t\t",
    "error\tLibRmVersionMismatch",
]


def test_a_report_is_read_line_by_line() -> None:
    """Every kind of line has its place in the report."""
    assert nvml.parse(LINES) == Report(
        driver="580.95.05",
        count=2,
        gpus=(
            Gpu("gpu0", "GPU-1", "NVIDIA H100 80GB HBM3", 85520809984, 85000000000),
            Gpu("gpu1", error="GpuIsLost", listed=False),
        ),
        processes=(GpuProcess(4242, "gpu0", 1024), GpuProcess(4343, "gpu0", None)),
        error="the NVIDIA driver and its library are of two versions; a reboot ends that",
    )


@pytest.mark.parametrize("cut", range(1, len(LINES[2])))
def test_a_line_cut_short_is_passed_over(cut: int) -> None:
    """A child that dies within a line does not make a GPU of half a line, unless only its last mark is missing."""
    report = nvml.parse([*LINES[:2], LINES[2][:cut]])
    assert report.count == 2
    assert report.gpus in ((), (Gpu("gpu0", "GPU-1", "NVIDIA H100 80GB HBM3", 85520809984, 85000000000, listed=False),))


@given(st.lists(st.text().filter(lambda text: "\t" not in text)))
def test_noise_is_passed_over(noise: list[str]) -> None:
    """What a library prints between our lines changes nothing."""
    assert nvml.parse([*noise, *LINES, *noise]) == nvml.parse(LINES)


@given(st.from_regex(r"\A(driver|count|gpu|process|error)(\t[^\n]{0,8}){0,9}\Z"))
def test_any_fields_are_read_without_failing(line: str) -> None:
    """Whatever stands in the fields, sizes are whole numbers or unknown."""
    report = nvml.parse([line])
    sizes = [size for gpu in report.gpus for size in (gpu.total_bytes, gpu.free_bytes)]
    assert all(size is None or size >= 0 for size in (*sizes, *(row.used_bytes for row in report.processes)))


def test_lasting_lines_lead_back_to_the_lasting_facts() -> None:
    """What is kept of a report has no free memory, no processes and no error, and reads back as it was."""
    report = nvml.parse(LINES)
    kept = nvml.parse(nvml.lines(report))
    assert kept.gpus == (report.gpus[0].replace(free_bytes=None), report.gpus[1])
    assert (kept.driver, kept.count, kept.processes, kept.error) == ("580.95.05", 2, (), None)
    assert nvml.lines(kept) == nvml.lines(report)


def test_errors_in_words() -> None:
    """Known errors have plain words, others keep the driver's name for them."""
    assert nvml.in_words("NoPermission") == "no permission to read its memory"
    assert nvml.in_words("CorruptedInforom") == "NVML says CorruptedInforom"
