"""./spark-serve of a checkout, and `spark-serve list`, as processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
LAUNCHER = REPOSITORY / "spark-serve"


def run(*words: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(cwd), **env}
    return subprocess.run(
        [str(LAUNCHER), *words], cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "models.toml").write_bytes((REPOSITORY / "models.example.toml").read_bytes())
    return tmp_path


def test_the_named_python_runs_it(here: Path) -> None:
    """SPARK_SERVE_PYTHON is taken without a question, from whatever folder the launcher is called."""
    done = run("list", cwd=here, SPARK_SERVE_PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    rows = done.stdout.splitlines()
    assert rows[0].split() == ["MODEL", "LABEL", "SPARKS", "CONTEXT", "ENGINE", "RECIPE", "ALIASES"]
    assert [row.split()[0] for row in rows[1:]] == [
        "ds4", "ds41-exl3", "qwen38-dual", "glm53", "glm53-exl3", "glm53-tensorfold", "mimo26", "yue",
    ]  # fmt: skip
    assert done.stderr == ""


def test_an_installed_environment_is_found(here: Path) -> None:
    """An environment of the installer's serves, when no other is there; a link to the launcher finds its checkout."""
    installed = here / ".local" / "share" / "sparkguard" / "venv" / "bin"
    installed.mkdir(parents=True)
    (installed / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (installed / "python").chmod(0o755)
    link = here / "spark-serve"
    link.symlink_to(LAUNCHER)
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(here)}
    done = subprocess.run([str(link), "list", "--json"], cwd=here, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["schema_version"], told["catalog"]) == (1, str(here / "models.toml"))
    assert {model["id"]: model["sparks"] for model in told["models"]}["glm53"] == 2


def test_without_a_python_it_says_what_is_missing(here: Path) -> None:
    """Where no Python is recent enough the launcher ends with 127 and names the variable."""
    folder = here / "bin"
    folder.mkdir()
    for program in ("bash", "dirname", "readlink"):
        (folder / program).symlink_to(f"/usr/bin/{program}" if Path(f"/usr/bin/{program}").exists() else f"/bin/{program}")
    for name in ("python3", "python3.10", "python3.11", "python3.12", "python3.13", "python3.14"):
        (folder / name).write_text("#!/bin/bash\nexit 1\n")
        (folder / name).chmod(0o755)
    alone = here / "spark-serve"  # a checkout that never had an environment
    alone.write_bytes(LAUNCHER.read_bytes())
    alone.chmod(0o755)
    environment = {"PATH": str(folder), "HOME": str(here)}
    done = subprocess.run([str(alone), "list"], cwd=here, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 127 and "SPARK_SERVE_PYTHON" in done.stderr


def test_a_bad_catalog_ends_with_its_own_status(here: Path) -> None:
    """A catalog with faults ends with 78, and all of them."""
    (here / "models.toml").write_text("[cluster]\nhaed = 1\n")
    done = run("list", cwd=here, SPARK_SERVE_PYTHON=sys.executable)
    assert done.returncode == 78
    assert "[cluster] haed: is unknown; did you mean head?" in done.stderr and "[cluster] lan_url: is missing" in done.stderr


def test_the_launcher_asks_for_what_the_cluster_needs() -> None:
    """A Python is taken when it has every library of the `cluster` extra, and click."""
    import re

    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    extra = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]["cluster"]
    wanted = {re.split(r"[<>=;\s]", line)[0].replace("-", "_").replace("pyyaml", "yaml") for line in extra}
    listed = re.search(r"find_spec, \(([^)]*)\)", LAUNCHER.read_text())
    assert listed is not None
    assert set(re.findall(r'"(\w+)"', listed[1])) == wanted | {"click", "sparkguard"}
