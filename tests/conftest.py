"""What holds for all tests: tiers by folder, the installed package kept current, a home of their own, a summary by tier."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import sysconfig
from collections import Counter
from pathlib import Path

import hypothesis
import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGES = ("sparkguard", "spark_bench")
TIERS = ("unit", "integration", "system", "browser")
# The same examples in each run, so that a failure is the change's; no deadline, since other work may share the processors.
hypothesis.settings.register_profile("same", derandomize=True, deadline=None, database=None)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=2000)
hypothesis.settings.load_profile("same")


def tier_of(path: Path) -> str | None:
    folder = path.relative_to(REPOSITORY / "tests").parts[0]
    return folder if folder in TIERS else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test's folder is its marker; one that has nodes is a cluster's."""
    for item in items:
        if "rig" in getattr(item, "fixturenames", ()):
            item.add_marker("cluster")
        if tier := tier_of(item.path):
            item.add_marker(tier)
    # The longest first: several at once, they would else be what all others wait for at the end.
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_configure() -> None:
    install_current_sources()


def install_current_sources() -> None:
    """Reinstalls the package if the sources differ from it. Tests see what a user gets, and nobody has to remember this."""
    if sys.prefix == sys.base_prefix:
        raise pytest.UsageError("these tests install the package, so they want a virtual environment: run scripts/test.sh")
    site = Path(sysconfig.get_path("purelib"))
    with open(site / "sparkguard.lock", "w") as lock:  # two runs may begin at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if any(contents(REPOSITORY / package) != contents(site / package) for package in PACKAGES):
            pip_install(str(REPOSITORY))


def pip_install(source: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*command, "--force-reinstall", source], capture_output=True, text=True, check=False)
    if done.returncode:
        raise pytest.UsageError(f"sparkguard cannot be installed:\n{done.stdout}{done.stderr}")


def contents(package: Path) -> dict[str, bytes]:
    files = (path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(package)): path.read_bytes() for path in files}


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home and runtime folder: no test reads or writes the developer's own, or sees their settings."""
    home = tmp_path_factory.mktemp("home")
    runtime = home / "run"
    runtime.mkdir(mode=0o700)
    for name in os.environ:
        if name.startswith(("VLLM_", "SPARK_", "XDG_", "CUDA_", "NVIDIA_")) or name in (
            "INVOCATION_ID", "NOTIFY_SOCKET", "MODELS_DIR", "GPU_MEMORY_UTILIZATION"
        ):  # fmt: skip
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    return home


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line a tier; what did not run is said."""
    counts: dict[str, Counter[str]] = {}
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.getreports(outcome):
            if isinstance(report, pytest.TestReport) and (tier := tier_of(REPOSITORY / report.nodeid.partition("::")[0])):
                counts.setdefault(tier, Counter())[outcome] += 1
    terminalreporter.section("tiers")
    for tier in TIERS:
        if tier in counts:
            terminalreporter.line(f"{tier:12} " + ", ".join(f"{number} {outcome}" for outcome, number in counts[tier].items()))
    if reason := os.environ.get("SPARKGUARD_NOT_RUN"):
        terminalreporter.line(f"{reason}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Under scripts/test.sh a skipped test counts as one that did not run, and that is a failure."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter else []
    if "SPARKGUARD_NO_SKIPS" in os.environ and skipped and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
