"""A machine made of files, and a home with units and specs, for the verbs' own functions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from process_tree import USER, ProcessTree

from sparkguard.guard import Roots

REPOSITORY = Path(__file__).parents[3]


class Place:
    """home, env and roots of one test. No user manager answers here: tests/system/test_cli.py has one."""

    def __init__(self, home: Path, tree: ProcessTree) -> None:
        self.home = home
        self.tree = tree
        self.env = {"HOME": str(home), "XDG_RUNTIME_DIR": str(home / "run"), "PATH": os.environ["PATH"]}
        (home / "sys").mkdir()
        (home / "dev").mkdir()
        self.roots = Roots(str(tree.root), str(home / "sys"), str(home / "dev"))

    def write(self, path: str, text: str) -> Path:
        """path: below the home."""
        file = self.home / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def conf(self, text: str) -> Path:
        return self.write(".config/spark/spark.conf", text)

    def spec(self, name: str, text: str) -> Path:
        return self.write(f".config/spark/models/{name}.env", text)

    def unit(self, name: str, text: str) -> Path:
        return self.write(f".config/systemd/user/{name}", text)

    def shipped_units(self) -> None:
        for file in (REPOSITORY / "systemd" / "user").iterdir():
            self.unit(file.name, file.read_text())

    def vllm(self, pid: int, *arguments: str, unit: str | None = None, python: str = "/usr/bin/python3") -> int:
        """A vLLM server in the process tree."""
        more = {"cgroup": f"{USER}/{unit}"} if unit else {}
        return self.tree.add(pid, [python, "/opt/venv/bin/vllm", "serve", *arguments], **more)


@pytest.fixture
def place(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.delenv("DBUS_SESSION_BUS_ADDRESS", raising=False)
    proc = tmp_path / "proc"
    proc.mkdir()
    return Place(home, ProcessTree(proc))
