"""Readings of the machine while it renders, as they were read: a line of JSON each. What is not there is null."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from typing import Any

# nvidia-smi's names -> ours. On GB10 some are [N/A], and memory is the machine's own.
GPU = {
    "index": "index",
    "utilization.gpu": "utilization_percent",
    "temperature.gpu": "temperature_c",
    "power.draw": "power_w",
    "clocks.sm": "clock_mhz",
}
SECONDS = 5


class Sampler:
    def __init__(self, proc: str = "/proc") -> None:
        self._proc = proc
        self._smi = shutil.which("nvidia-smi")
        self._cpu: list[int] | None = None

    def read(self) -> dict[str, Any]:
        memory = self._memory()
        total, free = memory.get("SwapTotal"), memory.get("SwapFree")
        return {
            "monotonic": time.monotonic(),
            "time": time.time(),
            "total_bytes": memory.get("MemTotal"),
            "available_bytes": memory.get("MemAvailable"),
            "swap_used_bytes": total - free if total is not None and free is not None else None,
            "cpu_percent": self._cpu_percent(),
            "pressure": self._pressure(),
            "gpus": self._gpus(),
        }

    def _memory(self) -> dict[str, int]:
        found = {}
        for line in self._text("meminfo").splitlines():
            name, _, rest = line.partition(":")
            words = rest.split()
            if len(words) == 2 and words[0].isdigit():
                found[name] = int(words[0]) * 1024
        return found

    def _cpu_percent(self) -> float | None:
        """Since the last reading; None at the first."""
        words = self._text("stat").split("\n", 1)[0].split()
        now = [int(word) for word in words[1:9]] if words[:1] == ["cpu"] else None
        before, self._cpu = self._cpu, now
        if now is None or before is None or len(now) < 5:
            return None
        total = sum(now) - sum(before)
        idle = now[3] + now[4] - before[3] - before[4]
        return round(100.0 * (total - idle) / total, 2) if total > 0 and idle >= 0 else None

    def _pressure(self) -> dict[str, float | None]:
        """Share of the last ten seconds in which all tasks waited for memory; some, for processors."""
        return {"memory_full10": self._avg10("memory", "full"), "cpu_some10": self._avg10("cpu", "some")}

    def _avg10(self, what: str, kind: str) -> float | None:
        for line in self._text(os.path.join("pressure", what)).splitlines():
            if line.startswith(kind):
                for word in line.split():
                    if word.startswith("avg10="):
                        return _number(word[6:])
        return None

    def _gpus(self) -> list[dict[str, float | None]] | None:
        """None: nvidia-smi is not there, or does not answer."""
        if self._smi is None:
            return None
        command = [self._smi, "--query-gpu=" + ",".join(GPU), "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        if done.returncode:
            return None
        rows = [line.split(",") for line in done.stdout.decode("utf-8", "replace").splitlines() if line.strip()]
        return [dict(zip(GPU.values(), map(_number, row))) for row in rows if len(row) == len(GPU)]

    def _text(self, name: str) -> str:
        try:
            with open(os.path.join(self._proc, name), encoding="utf-8", errors="replace") as file:
                return file.read(1 << 20)
        except OSError:
            return ""


def _number(word: str) -> float | None:
    try:
        value = float(word.strip())
    except ValueError:
        return None
    return value if value == value and abs(value) != float("inf") else None


def append(path: str, value: dict[str, Any]) -> None:
    """On disk when it returns: the last lines before a crash are the ones that are wanted."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(value, sort_keys=True) + "\n")
        file.flush()
        os.fsync(file.fileno())


def write(path: str, value: Any) -> None:
    """All of it or nothing."""
    with open(path + ".new", "w", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=1, sort_keys=True) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".new", path)
