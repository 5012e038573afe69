"""The GGUF reader under a fuzzer that follows coverage; tests/unit/probe/test_gguf.py has hypothesis's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf_shapes
import pytest

TOOL = Path(__file__).parents[1] / "tools" / "fuzz_gguf.py"
RUNS = 20_000


def test_no_header_that_coverage_leads_to_hurts(tmp_path: Path) -> None:
    """From two whole headers on, each is a model or an error of status 78; always the same ones, so that a fault can be found."""
    pytest.importorskip("atheris", reason="it is not there for this Python or this machine")
    seeds = tmp_path / "seeds"
    seeds.mkdir()
    for name, maker in (
        ("dense", gguf_shapes.dense("llama", 2, 64, 4, 2, 16, 128, 1000, 8192)),
        ("experts", gguf_shapes.sparse("qwen3moe", 2, 64, 4, 2, 16, 8, 2, 32, 1000, 8192)),
    ):
        data, _ = gguf_shapes.header(maker.keys, maker.tensors)
        (seeds / name).write_bytes(data)
    command = [sys.executable, str(TOOL), f"-runs={RUNS}", "-seed=1", "-max_len=8192", str(seeds)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert f"Done {RUNS} runs" in ended.stderr
