"""What is read of a path that anybody may have chosen."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from sparkguard.probe.files import read_file


def test_a_file(tmp_path: Path) -> None:
    """A regular file is read whole, up to the very limit."""
    (tmp_path / "a").write_bytes(b"x" * 3000)
    assert read_file(str(tmp_path / "a"), 3000) == b"x" * 3000


def refused(path: Path | str, most: int = 1 << 20) -> int | None:
    with pytest.raises(OSError) as caught:
        read_file(str(path), most)
    return caught.value.errno


def test_what_is_no_file(tmp_path: Path) -> None:
    """A fifo without a writer, an endless device and a folder are refused at once; so is a link to one."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("fifo")
    assert [refused(tmp_path / "fifo"), refused(tmp_path / "link"), refused("/dev/zero")] == [errno.EINVAL] * 3
    assert refused(tmp_path) == errno.EISDIR


def test_a_file_that_is_too_large(tmp_path: Path) -> None:
    """More than the limit is refused, not cut: half a configuration is another configuration."""
    with open(tmp_path / "big", "wb") as file:
        file.truncate(1 << 30)
    assert refused(tmp_path / "big") == errno.EFBIG
