"""The node's GPUs, by one nvidia-smi that stays: starting one for each sample would cost more than all else together.

Runs on a node: Linux, Python 3.8, the standard library. [N/A], as GB10 says of its memory, is None.
"""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import threading
import time

from sparkguard.cluster.node.base import at_end

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_FIELDS = (
    ("index", "index"),
    ("name", "name"),
    ("utilization.gpu", "utilization_percent"),
    ("temperature.gpu", "celsius"),
    ("power.draw", "watts"),
    ("clocks.sm", "sm_mhz"),
    ("clocks.max.sm", "max_sm_mhz"),
    ("memory.used", "memory_used_mib"),
    ("memory.total", "memory_total_mib"),
    ("pstate", "pstate"),
)
# Newer drivers' name for why the clocks are not higher, and the older one. An unknown field ends nvidia-smi at once.
_REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
MIB = 1 << 20


class Gpus:
    """The last answer for each GPU; error says why there is none."""

    def __init__(self, interval: float, program: str = "nvidia-smi") -> None:
        self._interval = max(1.0, interval)  # its values are no newer than that, and asking costs more than all else here
        self._program = program
        self._rows: dict[int, dict[str, Any]] = {}
        self._heard = 0.0
        self._child: subprocess.Popen[bytes] | None = None
        self.error: str | None = f"{program} has not answered yet"
        at_end(self.close)
        threading.Thread(target=self._keep, daemon=True).start()

    def now(self) -> list[dict[str, Any]] | None:
        """None: unknown, for what is older than two samples says nothing about now."""
        if self.error is None and time.monotonic() - self._heard > 2 * self._interval + 2:
            self.error = f"{self._program} has said nothing for {time.monotonic() - self._heard:.0f} s"
        return None if self.error is not None else [self._rows[index] for index in sorted(self._rows)]

    def close(self) -> None:
        if self._child is not None:
            try:
                os.killpg(self._child.pid, signal.SIGKILL)
            except OSError:
                pass

    def _keep(self) -> None:
        """Starts it again when it ends; sooner where it did answer."""
        pause = 1.0
        reason = 0
        while True:
            try:
                answered = self._listen(_REASONS[reason])
            except OSError as error:
                answered = False
                self.error = f"{self._program} cannot be run: {error.strerror}"
            if answered:
                pause = self._interval
            else:
                reason = 1 - reason
                pause = min(30.0, pause * 2)
            time.sleep(pause if answered or reason == 0 else 0.0)

    def _listen(self, reason: str) -> bool:
        """Reads until it ends. Through a terminal: into a pipe it might keep its lines until there are 4 KiB of them."""
        names = ",".join([name for name, _ in _FIELDS] + [reason])
        millis = int(self._interval * 1000)
        argv = [self._program, "--query-gpu=" + names, "--format=csv,noheader,nounits", f"--loop-ms={millis}"]
        ours, its = pty.openpty()
        try:
            child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=its, stderr=its, start_new_session=True)
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(its)
        self._child = child
        answered = False
        last = ""
        try:
            with os.fdopen(ours, "rb", buffering=0) as file:
                for line in _lines(file):
                    row = _row(line)
                    if row is None:
                        last = line
                    else:
                        answered = True
                        self._heard = time.monotonic()
                        self._rows[row.pop("index")] = row
                        self.error = None
        finally:
            self.close()
            child.wait()
            self._child = None
        self._rows = {}
        self.error = f"{self._program} ended with status {child.returncode}: {last[:200]}"
        return answered


def _lines(file: Any) -> Any:
    kept = b""
    while True:
        try:
            data = file.read(65536)
        except OSError:  # EIO: nobody has the other end any more
            data = b""
        if not data:
            return
        kept += data
        *whole, kept = kept.split(b"\n")
        kept = kept[-65536:]
        for line in whole:
            yield line.decode("utf-8", "replace").strip()


def _row(line: str) -> dict[str, Any] | None:
    words = [word.strip() for word in line.split(",")]
    if len(words) != len(_FIELDS) + 1 or not words[0].isdigit():
        return None
    row: dict[str, Any] = {name: _number(word) for (_, name), word in zip(_FIELDS, words)}
    row["index"], row["name"] = int(words[0]), words[1]
    row["pstate"] = words[-2] if words[-2][:1] == "P" else None
    for name in ("used", "total"):
        mib = row.pop(f"memory_{name}_mib")
        row[f"memory_{name}_bytes"] = None if mib is None else int(mib * MIB)
    row["reasons"] = int(words[-1], 16) if words[-1].startswith("0x") else None
    return row


def _number(word: str) -> float | None:
    try:
        value = float(word)
    except ValueError:
        return None
    return value if value - value == 0 else None
