"""spark-serve up, as far as it asks no node."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from sparkguard.cli.cluster import main

CATALOG = """
[cluster]
head = "one"
worker = "two"
master_addr = "10.0.0.1"
lan_url = "http://10.1.0.1:8000"
worker_lan_url = "http://10.1.0.2:8000"
hf_cache_host = "/cache"
[models.pair]
image = "i"
hf_id = "a/b"
nnodes = 2
[models.pair.env]
NOTE = "two words"
"""


def test_the_commands_can_be_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """--print-cmd gives one line a rank, as a shell takes it; no node is asked, and no state is made."""
    monkeypatch.setenv("SPARK_SERVE_STATE_DIR", str(tmp_path / "state"))
    catalog = tmp_path / "models.toml"
    catalog.write_text(CATALOG)
    assert main(["--config", str(catalog), "up", "pair", "--print-cmd"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["head", "worker"]
    words = [shlex.split(line.partition(": ")[2]) for line in lines]
    assert all(each[:2] == ["docker", "create"] and "NOTE=two words" in each for each in words)
    assert ["--headless" in each for each in words] == [False, True]
    assert not (tmp_path / "state").exists()
