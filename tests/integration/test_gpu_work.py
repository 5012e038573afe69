"""Who has kept a GPU busy, asked of a library that stands in for the driver's."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from sparkguard.probe.gpu_work import has_worked

if TYPE_CHECKING:
    from fakes.nvml import FakeNvml

pytest_plugins = ["fakes.nvml"]

AMPLE = 30.0


@pytest.mark.parametrize(
    ("lines", "worked"),
    [
        (["name=a;work=11:80,7:3"], True),
        (["name=a", "name=b;work=7:1"], True),
        (["name=a;work=11:80,7:0"], False),
        (["name=a"], False),
        (["name=a;lost=1", "name=b;handle_error=15", "name=c;work=7:50"], True),
        (["init=9"], False),
    ],
)
def test_a_sample_of_the_process_in_which_a_gpu_computed(fake_nvml: FakeNvml, lines: list[str], worked: bool) -> None:
    """On any GPU; one that cannot be asked hides no other, and what nobody can tell is no work."""
    fake_nvml.says(*lines)
    assert has_worked(7, 60, fake_nvml.env, AMPLE) is worked


def test_old_work_does_not_count(fake_nvml: FakeNvml) -> None:
    """The samples of before are still there."""
    fake_nvml.says("name=a;work=7:99")
    assert not has_worked(7, 0, fake_nvml.env, AMPLE)


def test_a_driver_that_hangs_is_not_waited_for(fake_nvml: FakeNvml) -> None:
    """It would hold up the watch on all other runners."""
    fake_nvml.says("hang=1")
    assert not has_worked(os.getpid(), 60, fake_nvml.env, 0.5)
