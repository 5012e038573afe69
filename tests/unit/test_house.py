"""The rules of the house, as tests: style, types, imports, shell, and documents that match the code."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparkguard import errors, settings

REPOSITORY = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
BUILT = ("build", "dist", "__pycache__")


def files(*suffixes: str) -> list[Path]:
    """The project's own files: no environment, no build output."""
    found = []
    for folder, folders, names in os.walk(REPOSITORY):
        folders[:] = [name for name in folders if name == ".ci" or (name[0] != "." and name not in BUILT)]
        found += [Path(folder, name) for name in names]
    return sorted(path for path in found if not suffixes or path.suffix in suffixes)


def is_shell(path: Path) -> bool:
    with path.open("rb") as file:
        first = file.readline(100)
    return first.startswith(b"#!") and (b"bash" in first or b"/sh" in first)


def check(*command: str | Path) -> None:
    """Fails with the tool's own words."""
    done = subprocess.run(command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"


def test_ruff_finds_nothing() -> None:
    """The sources follow the rules that pyproject.toml chooses."""
    check(BIN / "ruff", "check", ".")


def test_ruff_would_format_nothing() -> None:
    """`make fmt` would change nothing."""
    check(BIN / "ruff", "format", "--check", ".")


def test_types() -> None:
    """mypy --strict is content with the package, read as for the oldest Python that it runs on."""
    check(BIN / "mypy")


def test_imports_go_one_way() -> None:
    """The contracts of docs/architecture.md hold."""
    check(BIN / "lint-imports", "--no-cache")


def test_shellcheck_finds_nothing() -> None:
    """Every shell script, found by its first line, passes shellcheck."""
    scripts = [path for path in files() if is_shell(path)]
    assert len(scripts) > 5
    check("shellcheck", "--external-sources", *scripts)


def test_shell_scripts_can_be_run() -> None:
    """A script with a first line for the kernel is executable."""
    assert [path for path in files() if is_shell(path) and not path.stat().st_mode & 0o111] == []


def test_every_module_says_what_it_is() -> None:
    """Each Python file begins with a docstring."""
    silent = [path for path in files(".py") if path.read_bytes().strip() and not ast.get_docstring(ast.parse(path.read_bytes()))]
    assert silent == []


def test_every_test_states_its_fact() -> None:
    """Each test has a docstring of one sentence."""
    silent = []
    for path in (REPOSITORY / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                text = ast.get_docstring(node) or ""
                if not text.endswith((".", "!", "?")):
                    silent.append(f"{path.relative_to(REPOSITORY)}::{node.name}")
    assert silent == []


def test_no_test_sleeps() -> None:
    """A test waits for an event: a sleep is too short on a busy machine and too long on an idle one."""
    sleepers = []
    for path in (REPOSITORY / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("time.sleep", "sleep"):
                sleepers.append(f"{path.relative_to(REPOSITORY)}:{node.lineno}")
    assert sleepers == []


def table_rows(path: Path, heading: str) -> list[list[str]]:
    """The cells of the rows of the first table under a heading of a Markdown file, without the backticks around them."""
    lines = path.read_text(encoding="utf-8").splitlines()
    start = next((i for i, line in enumerate(lines) if line.lstrip("# ").strip() == heading and line.startswith("#")), None)
    assert start is not None, f"{path.name} has no heading {heading!r}"
    rows = []
    for line in lines[start + 1 :]:
        if line.startswith("#"):
            break
        if line.startswith("|"):
            rows.append([cell.strip().strip("`") for cell in line.strip().strip("|").split("|")])
    return rows[2:]


def test_the_exit_statuses_are_documented() -> None:
    """docs/reference.md has the same statuses as errors.py, under the same names, and no other."""
    rows = table_rows(REPOSITORY / "docs" / "reference.md", "Exit statuses")
    assert {(row[0], row[1]) for row in rows} == {(str(status), name) for status, (name, _) in errors.STATUSES.items()}


@pytest.mark.parametrize("setting", settings.SETTINGS.values(), ids=lambda setting: setting.key)
def test_the_setting_is_documented(setting: settings.Setting) -> None:
    """docs/reference.md has a row for the setting, with its default as a cell of its own ("empty" for none)."""
    lines = (REPOSITORY / "docs" / "reference.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip().strip("`") for cell in line.strip("| ").split("|")] for line in lines if line.startswith("|")]
    row = next((row for row in rows if row[0] == setting.key), None)
    assert row, f"docs/reference.md has no row for {setting.key}"
    assert (setting.default or "empty") in row[1:]


@pytest.mark.parametrize("setting", settings.SETTINGS.values(), ids=lambda setting: setting.key)
def test_the_setting_stands_in_the_example(setting: settings.Setting) -> None:
    """The setting can be found in the file that one would edit for it: spark.conf, or an example of a model."""
    folder = REPOSITORY / "config"
    paths = [folder / "spark.conf"] if setting.scope == settings.SITE else list((folder / "models").iterdir())
    assert any(f"{setting.key}=" in path.read_text(encoding="utf-8") for path in paths)


def test_nothing_names_a_registry() -> None:
    """No file sends pip or apt to a host of its own: where packages come from is the machine's own setting."""
    needles = ("--index" + "-url", "pypi" + ".org", "deb http" + "://", "deb https" + "://")
    named = [path for path in files() for needle in needles if needle.encode() in path.read_bytes()]
    assert named == []
