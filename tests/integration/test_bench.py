"""The measurements run, and say what they are to say. What they measure is nobody's promise here: the machine has other work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import mkgguf

BENCH = Path(__file__).parents[2] / "bench"
ENGINE = Path(os.environ.get("SPARKGUARD_TEST_CACHE", "/var/cache/sparkguard-tests")) / "llama" / "engine" / "llama-server"


def test_the_runners_beside_llama_server_and_its_router(tmp_path: Path) -> None:
    """One table: latency, stream and swap of each model, and how a crowd, many requests and many models are taken."""
    model = mkgguf.make(tmp_path / "second.gguf")
    command = [sys.executable, BENCH / "runners.py", "--small", "--engine", ENGINE, "--model", model]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines()[2:] if not line.startswith("#")]
    for name in ("tokenize, p50", "chat of 1 token, p50", "stream of 200, p50", "swap to first token"):
        figures = [row.split()[-6:] for row in rows if row.startswith(name)]
        assert len(figures) == 2 and all(float(figure) for row in figures for figure in row[:3])
    answered = next(row for row in rows if row.startswith("8 clients, 4 models, 2 loaded: requests answered"))
    assert answered.split()[-1] == "8/8"
    assert [row.split()[-1] for row in rows if row.startswith("20 models, ") and ": with needs" in row] == ["20"] * 3
    assert any(row.startswith("its growth over 40 requests") for row in rows)
