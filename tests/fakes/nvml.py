"""A libnvidia-ml.so.1 for tests: compiled from fakenvml.c once, then it says what each test writes for it.

The real nvidia-ml-py loads it, found by LD_LIBRARY_PATH as the real library would be. A test module gets the fixtures by
pytest_plugins = ["fakes.nvml"].
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

_NAME = "libnvidia-ml.so.1"
_SOURCE = Path(__file__).with_name("fakenvml.c")


class FakeNvml:
    """The library's folder and its configuration file."""

    def __init__(self, folder: Path, conf: Path) -> None:
        self.folder = folder
        self.conf = conf

    def says(self, *lines: str) -> None:
        """What the driver says from now on; the lines are explained in fakenvml.c."""
        self.conf.write_text("".join(f"{line}\n" for line in lines))

    @property
    def env(self) -> dict[str, str]:
        """The environment of a program that finds this library."""
        return {**os.environ, "LD_LIBRARY_PATH": str(self.folder), "FAKE_NVML_CONF": str(self.conf)}


@pytest.fixture(scope="session")
def fake_nvml_folder(request: pytest.FixtureRequest) -> Path:
    """The folder of the compiled library, kept between runs for as long as its source stays the same."""
    compiler = shutil.which("cc") or shutil.which("gcc") or pytest.fail("the fake NVML needs a C compiler")
    digest = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]
    folder = Path(request.config.cache.mkdir(f"fakenvml-{digest}"))
    if not (folder / _NAME).exists():
        draft = folder / f"{_NAME}.{os.getpid()}"
        flags = ["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-Wl,-soname,{_NAME}"]
        subprocess.run([compiler, *flags, "-o", draft, _SOURCE], check=True)
        draft.replace(folder / _NAME)
    return folder


@pytest.fixture
def fake_nvml(fake_nvml_folder: Path, tmp_path: Path) -> FakeNvml:
    """A driver that says nothing yet: without a configuration it is not loaded."""
    return FakeNvml(fake_nvml_folder, tmp_path / "nvml.conf")


@pytest.fixture
def fake_nvml_in_env(fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """The same, found by every child of this process."""
    for key in ("LD_LIBRARY_PATH", "FAKE_NVML_CONF"):
        monkeypatch.setenv(key, fake_nvml.env[key])
    return fake_nvml
