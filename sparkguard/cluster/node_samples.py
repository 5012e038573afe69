"""A node as the sampler's lines tell it: the last readings with their ages, and rates by this laptop's clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sparkguard.core.rates import FIRST, GAP, Interval, Reading, between, is_stale

if TYPE_CHECKING:
    from collections.abc import Callable

CONNECTING, FRESH, STALE, UNREACHABLE = "connecting", "fresh", "stale", "unreachable"
# What is looked at every 5 s is old when two looks in a row are missing.
SLOW_STALE_SECONDS = 15.0

# nvidia-smi's mask of why the clocks are not higher: nvmlClocksEventReasons in nvml.h.
REASONS = (
    (0x1, "idle"),
    (0x2, "applications_clocks"),
    (0x4, "power_cap"),
    (0x8, "hardware_slowdown"),
    (0x10, "sync_boost"),
    (0x20, "thermal_software"),
    (0x40, "thermal_hardware"),
    (0x80, "power_brake"),
    (0x100, "display_clocks"),
)


class NodeSamples:
    """One node. Everything that arrives is stamped with the clock given here; no time of the node's is believed."""

    def __init__(self, name: str, interval: float, clock: Callable[[], float]) -> None:
        self.name = name
        self._interval = interval
        self._clock = clock
        self._hello: dict[str, Any] = {}
        self._tick: dict[str, Any] | None = None
        self._reading: Reading | None = None
        self._step = Interval(None, FIRST, {}, {})
        self._parts: dict[str, tuple[float, Any]] = {}
        self._lost: tuple[str, str | None] | None = None
        self._retry_at: float | None = None
        self._boots: list[str] = []

    def line(self, line: dict[str, Any]) -> None:
        """One of the sampler's. What is not understood is left out: a newer sampler may say more."""
        at = self._clock()
        for kind, value in line.items():
            if not isinstance(value, dict):
                continue
            if kind == "hello":
                self._begin(value)
            elif kind == "tick":
                self._ticked(at, value)
            elif kind in ("slow", "containers", "holders"):
                self._parts[kind] = (at, value)
        self._lost = None
        self._retry_at = None

    def lost(self, error: str, cause: str | None, retry_seconds: float) -> None:
        """The channel is down."""
        self._lost = (error, cause)
        self._retry_at = self._clock() + retry_seconds
        self._step = Interval(None, GAP, {}, {})

    def _begin(self, hello: dict[str, Any]) -> None:
        boot = hello.get("boot_id")
        if boot and boot not in self._boots[-1:]:
            self._boots.append(boot)
        self._hello = hello

    def _ticked(self, at: float, tick: dict[str, Any]) -> None:
        reading = Reading(at, (str(self._hello.get("boot_id")),), _counters(tick), {}, tick.get("steady_s"))
        self._step = between(self._reading, reading, self._interval)
        self._reading = reading
        self._tick = tick

    # ---- what is known

    @property
    def state(self) -> str:
        if self._lost is not None:
            return UNREACHABLE
        if self._reading is None:
            return CONNECTING
        return STALE if is_stale(self.age, self._interval) else FRESH

    @property
    def age(self) -> float | None:
        return None if self._reading is None else max(0.0, self._clock() - self._reading.at)

    def containers(self) -> list[dict[str, Any]] | None:
        """The owned ones as docker told them lately; None: unknown."""
        found = self._part("containers").get("found")
        return found if self.state == FRESH and isinstance(found, list) else None

    def containers_error(self) -> str | None:
        if self._lost is not None:
            return self._lost[0]
        if self.state != FRESH:
            return "nothing has come from it yet" if self._reading is None else f"nothing has come from it for {self.age:.0f} s"
        part = self._part("containers")
        return part.get("error") or (None if part else "docker has not answered lately")

    def view(self) -> dict[str, Any]:
        """For JSON. Rates are those up to the last reading, null once that is old; the rest is the last known, with its age."""
        tick = self._tick or {}
        slow, holders = self._part("slow"), self._part("holders")
        fresh = self.state == FRESH
        step = self._step if fresh else Interval(None, GAP, {}, {})
        rates, deltas = step.rates, step.deltas
        error, cause = self._lost or (None, None)
        return {
            "node": self.name,
            "state": self.state,
            "age_s": _rounded(self.age),
            "error": error,
            "cause": cause,
            "retry_in_s": None if self._retry_at is None else _rounded(max(0.0, self._retry_at - self._clock())),
            "gap": step.reason == GAP,
            "reset": step.reset,
            "boot_id": self._hello.get("boot_id"),
            "boots_seen": len(self._boots),
            "hostname": self._hello.get("hostname"),
            "kernel": self._hello.get("kernel"),
            "cpu": {
                "use": _share(deltas, "cpu"),
                "cores": [_share(deltas, f"core{i}") for i in range(len(tick.get("cores") or ()))],
                "core_max_khz": self._hello.get("core_max_khz") or [],
                "load": tick.get("load"),
            },
            "pressure": {name: _pressure(found) for name, found in (tick.get("pressure") or {}).items()},
            "memory": _memory(tick.get("memory") or {}),
            "gpus": None if tick.get("gpus") is None else [_gpu(gpu) for gpu in tick["gpus"]],
            "gpu_error": tick.get("gpu_error"),
            "holders": holders.get("found"),
            "holders_error": holders.get("error"),
            "net": {
                name: {
                    "rx_bytes_per_s": rates.get(f"net.{name}.rx_bytes"),
                    "tx_bytes_per_s": rates.get(f"net.{name}.tx_bytes"),
                    "errors_per_s": rates.get(f"net.{name}.errors"),
                    **((slow.get("links") or {}).get(name) or {"operstate": None, "speed_mbps": None, "mtu": None}),
                }
                for name in tick.get("net") or {}
            },
            "roce": {
                name: {
                    "rx_bytes_per_s": rates.get(f"roce.{name}.rx_bytes"),
                    "tx_bytes_per_s": rates.get(f"roce.{name}.tx_bytes"),
                    **((slow.get("roce_ports") or {}).get(name) or _NO_PORT),
                }
                for name in tick.get("roce") or {}
            },
            "disks": {
                name: {
                    "read_bytes_per_s": rates.get(f"disk.{name}.read_bytes"),
                    "written_bytes_per_s": rates.get(f"disk.{name}.written_bytes"),
                }
                for name in tick.get("disks") or {}
            },
            "filesystems": slow.get("filesystems") or {},
            "thermal": slow.get("thermal"),
            "containers": self.containers(),
            "containers_error": self.containers_error(),
            "sampler_cpu": _cost(rates),
        }

    def _part(self, kind: str) -> dict[str, Any]:
        at, value = self._parts.get(kind, (0.0, {}))
        return value if value and self._clock() - at <= SLOW_STALE_SECONDS else {}


_NO_PORT: dict[str, Any] = {"state": None, "physical": None, "rate": None, "interfaces": [], "counters": {}}


def _counters(tick: dict[str, Any]) -> dict[str, dict[Any, float]]:
    found: dict[str, float] = {}
    pairs = [("cpu", tick.get("cpu"))] + [(f"core{i}", pair) for i, pair in enumerate(tick.get("cores") or ())]
    for name, pair in pairs:
        if pair:
            found[f"{name}.busy"], found[f"{name}.all"] = pair
    for kind, name in (("net", "net"), ("roce", "roce"), ("disks", "disk")):
        for device, counts in (tick.get(kind) or {}).items():
            found |= {f"{name}.{device}.{key}": value for key, value in counts.items() if value is not None}
    found |= {f"cost.{key}": value for key, value in (tick.get("cost") or {}).items()}
    return {name: {(): float(value)} for name, value in found.items()}


def _share(deltas: Any, name: str) -> float | None:
    """Of a processor's time; both numbers are the node's, so that no clock matters."""
    busy, every = deltas.get(f"{name}.busy"), deltas.get(f"{name}.all")
    return None if busy is None or not every else _rounded(min(1.0, max(0.0, busy / every)), 4)


def _pressure(found: dict[str, Any] | None) -> dict[str, float | None]:
    some, full = (found or {}).get("some") or {}, (found or {}).get("full") or {}
    return {
        "some_avg10": some.get("avg10"),
        "some_avg60": some.get("avg60"),
        "full_avg10": full.get("avg10"),
        "full_avg60": full.get("avg60"),
    }


def _memory(found: dict[str, Any]) -> dict[str, int | None]:
    total, available = found.get("total_bytes"), found.get("available_bytes")
    swap, free = found.get("swap_total_bytes"), found.get("swap_free_bytes")
    return {
        "total_bytes": total,
        "available_bytes": available,
        "used_bytes": None if total is None or available is None else total - available,
        "cached_bytes": found.get("cached_bytes"),
        "swap_total_bytes": swap,
        "swap_used_bytes": None if swap is None or free is None else swap - free,
    }


def _gpu(found: dict[str, Any]) -> dict[str, Any]:
    mask = found.get("reasons")
    reasons = None if mask is None else [name for bit, name in REASONS if mask & bit]
    return {**found, "reasons": reasons}


def _cost(rates: Any) -> float | None:
    """Of one core, its docker and nvidia-smi of every 5 s included; the nvidia-smi that stays is not."""
    own, children = rates.get("cost.own_s"), rates.get("cost.children_s")
    return None if own is None or children is None else _rounded(own + children, 4)


def _rounded(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else round(value, digits)
