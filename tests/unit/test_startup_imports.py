"""What the guard loads when it starts, module by module."""

from __future__ import annotations

import subprocess
import sys

# All that it may load beside what Python itself has loaded. A module more is a cost at each start of a server: dataclasses or
# typing cost as much as the guard's whole scan of /proc (docs/adr/0002-start-time.md).
ALLOWED = {
    "__future__",
    "errno",
    "fcntl",
    "select",
    "sparkguard",
    "sparkguard.command",
    "sparkguard.conf_file",
    "sparkguard.core",
    "sparkguard.core.admission",
    "sparkguard.core.explain",
    "sparkguard.core.record",
    "sparkguard.core.relief",
    "sparkguard.core.reserve",
    "sparkguard.core.share",
    "sparkguard.core.types",
    "sparkguard.errors",
    "sparkguard.guard",
    "sparkguard.ledger",
    "sparkguard.probe",
    "sparkguard.probe.amdgpu",
    "sparkguard.probe.bounded",
    "sparkguard.probe.claims",
    "sparkguard.probe.containers",
    "sparkguard.probe.devices",
    "sparkguard.probe.engines",
    "sparkguard.probe.facts",
    "sparkguard.probe.files",
    "sparkguard.probe.nvml",
    "sparkguard.probe.ports",
    "sparkguard.probe.procfs",
    "sparkguard.probe.vllm_argv",
    "sparkguard.probe.vllm_version",
    "sparkguard.settings",
    "sparkguard.streams",
}


def test_the_guard_loads_only_what_it_needs() -> None:
    """The guard's import loads nothing beside the list above."""
    script = "import sys; before = set(sys.modules); import sparkguard.guard; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-I", "-c", script], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "sparkguard.guard" in loaded
    assert sorted(loaded - ALLOWED) == []
