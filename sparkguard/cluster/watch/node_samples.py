"""A node as the sampler's lines tell it: the last readings with their ages, and rates by this laptop's clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sparkguard.core.cluster import UNKNOWN
from sparkguard.core.rates import FIRST, GAP, Interval, Reading, between, is_stale

if TYPE_CHECKING:
    from collections.abc import Callable

OK, STALE = "ok", "stale"
CONNECTING, OPEN, LOST = "connecting", "open", "lost"
# What is looked at every 5 s is old when two looks in a row are missing.
SLOW_SECONDS, SLOW_STALE_SECONDS = 5.0, 15.0
_PRESSURES = ("cpu_some10", "memory_some10", "memory_full10", "io_some10", "io_full10")
_ERRORS = (
    "port_rcv_errors",
    "port_xmit_discards",
    "link_downed",
    "out_of_buffer",
    "out_of_sequence",
    "packet_seq_err",
    "local_ack_timeout_err",
)

# nvidia-smi's mask of why the clocks are not higher: nvmlClocksEventReasons in nvml.h. Its 0x1 is an idle GPU.
REASONS = (
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

    def __init__(self, name: str, interval: float, clock: Callable[[], float], host: str | None = None) -> None:
        self.name = name
        self._host = host
        self._interval = interval
        self._clock = clock
        self._hello: dict[str, Any] = {}
        self._tick: dict[str, Any] | None = None
        self._reading: Reading | None = None
        self._step = Interval(None, FIRST, {}, {})
        self._parts: dict[str, tuple[float, Any]] = {}
        self._errors_reading: Reading | None = None
        self._errors = Interval(None, FIRST, {}, {})
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
                if kind == "slow":
                    self._count_errors(at, value)
        self._lost = None
        self._retry_at = None

    def lost(self, error: str, cause: str | None, retry_seconds: float) -> None:
        """The channel is down."""
        self._lost = (error.removeprefix(f"{self.name}: "), cause)  # beside the name it would stand twice
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

    def _count_errors(self, at: float, slow: dict[str, Any]) -> None:
        """What went wrong on RDMA ports; marks of congestion are no errors."""
        counters: dict[str, dict[Any, float]] = {}
        for name, port in (slow.get("roce_ports") or {}).items():
            found = port.get("counters") or {}
            counters[name] = {((counter, ""),): float(value) for counter, value in found.items() if counter in _ERRORS}
        reading = Reading(at, (str(self._hello.get("boot_id")),), counters, {})
        self._errors = between(self._errors_reading, reading, SLOW_SECONDS)
        self._errors_reading = reading

    # ---- what is known

    @property
    def state(self) -> str:
        """OK, STALE, or UNKNOWN for a node that has said nothing yet or cannot be reached."""
        if self._lost is not None or self._reading is None:
            return UNKNOWN
        return STALE if is_stale(self.age, self._interval) else OK

    @property
    def connection(self) -> str:
        return LOST if self._lost is not None else CONNECTING if self._reading is None else OPEN

    @property
    def age(self) -> float | None:
        return None if self._reading is None else max(0.0, self._clock() - self._reading.at)

    def containers(self) -> list[dict[str, Any]] | None:
        """The owned ones as docker told them lately; None: unknown."""
        found = self._part("containers").get("found")
        return found if self.state == OK and isinstance(found, list) else None

    def containers_error(self) -> str | None:
        if self._lost is not None:
            return self._lost[0]
        if self.state != OK:
            return "nothing has come from it yet" if self._reading is None else f"nothing has come from it for {self.age:.0f} s"
        part = self._part("containers")
        return part.get("error") or (None if part else "docker has not answered lately")

    def view(self) -> dict[str, Any]:
        """For JSON. Rates are those up to the last reading, null once that is old; the rest is the last known, with its age."""
        tick = self._tick or {}
        slow, holders = self._part("slow"), self._part("holders")
        step = self._step if self.state == OK else Interval(None, GAP, {}, {})
        gpus = None if tick.get("gpus") is None else [_gpu(gpu) for gpu in tick["gpus"]]
        space = [found for found in (slow.get("filesystems") or {}).values() if found]
        error, cause = self._lost or (None, None)
        return {
            "node": self.name,
            "host": self._host,
            "state": self.state,
            "connection": self.connection,
            "age_s": _rounded(self.age),
            "error": error,
            "cause": cause,
            "retry_in_s": None if self._retry_at is None else _rounded(max(0.0, self._retry_at - self._clock())),
            "gap": step.reason == GAP,
            "reset": step.reset,
            "boot_id": self._hello.get("boot_id"),
            "boots_seen": len(self._boots),
            "kernel": self._hello.get("kernel"),
            "cpu_percent": _share(step.deltas, "cpu"),
            "cores": len(tick["cores"]) if tick.get("cores") else None,
            "core_percent": [_share(step.deltas, f"core{i}") for i in range(len(tick.get("cores") or ()))],
            "core_max_khz": self._hello.get("core_max_khz") or [],
            "load1": (tick.get("load") or [None])[0],
            "memory": _memory(tick.get("memory") or {}),
            "psi": {name: _pressure(tick, *name.split("_")) for name in _PRESSURES},
            "gpu": gpus[0] if gpus else None,
            "gpus": gpus,
            "gpu_error": tick.get("gpu_error"),
            "holders": holders.get("found"),
            "holders_error": holders.get("error"),
            "network": [_interface(name, step.rates, slow) for name in tick.get("net") or ()],
            "roce": [_port(name, step.rates, slow, self._errors) for name in tick.get("roce") or ()],
            "disk": {
                "read_bytes_s": _sum(step.rates, tick, "read_bytes"),
                "write_bytes_s": _sum(step.rates, tick, "written_bytes"),
                "free_bytes": min((found["free_bytes"] for found in space), default=None),
            },
            "thermal": slow.get("thermal"),
            "containers": self.containers(),
            "containers_error": self.containers_error(),
            "sampler_cpu_percent": _cost(step.rates),
        }

    def _part(self, kind: str) -> dict[str, Any]:
        at, value = self._parts.get(kind, (0.0, {}))
        return value if value and self._clock() - at <= SLOW_STALE_SECONDS else {}


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
    """Percent of a processor's time; both numbers are the node's, so that no clock matters."""
    busy, every = deltas.get(f"{name}.busy"), deltas.get(f"{name}.all")
    return None if busy is None or not every else _rounded(100 * min(1.0, max(0.0, busy / every)), 2)


def _pressure(tick: dict[str, Any], resource: str, kind: str) -> float | None:
    """Percent of the last 10 s; kind is some10 or full10."""
    found = (tick.get("pressure") or {}).get(resource) or {}
    value: float | None = (found.get(kind[:-2]) or {}).get("avg10")
    return value


def _interface(name: str, rates: Any, slow: dict[str, Any]) -> dict[str, Any]:
    link = (slow.get("links") or {}).get(name) or {}
    return {
        "name": name,
        "state": link.get("operstate"),
        "speed_mbps": link.get("speed_mbps"),
        "mtu": link.get("mtu"),
        "rx_bytes_s": _rounded(rates.get(f"net.{name}.rx_bytes")),
        "tx_bytes_s": _rounded(rates.get(f"net.{name}.tx_bytes")),
        "errors_s": _rounded(rates.get(f"net.{name}.errors")),
    }


def _port(name: str, rates: Any, slow: dict[str, Any], errors: Interval) -> dict[str, Any]:
    device, _, number = name.partition("/")
    found = (slow.get("roce_ports") or {}).get(name) or {}
    interfaces = found.get("interfaces") or []
    return {
        "device": device,
        "port": int(number or 1),
        "state": found.get("state"),
        "physical": found.get("physical"),
        "rate": found.get("rate"),
        "netdev": interfaces[0] if interfaces else None,
        "rx_bytes_s": _rounded(rates.get(f"roce.{name}.rx_bytes")),
        "tx_bytes_s": _rounded(rates.get(f"roce.{name}.tx_bytes")),
        "errors_s": _rounded(errors.rates.get(name)) if found else None,
        "counters": found.get("counters") or {},
    }


def _sum(rates: Any, tick: dict[str, Any], what: str) -> float | None:
    """Of all disks; None where one is unknown, or there is none."""
    found = [rates.get(f"disk.{name}.{what}") for name in tick.get("disks") or ()]
    known = [rate for rate in found if rate is not None]
    return _rounded(sum(known)) if found and len(known) == len(found) else None


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
    return {
        "name": found.get("name"),
        "utilization_percent": found.get("utilization_percent"),
        "temperature_c": found.get("celsius"),
        "power_w": found.get("watts"),
        "clock_mhz": found.get("sm_mhz"),
        "max_clock_mhz": found.get("max_sm_mhz"),
        "pstate": found.get("pstate"),
        "throttle": None if mask is None else [name for bit, name in REASONS if mask & bit],
        "memory_used_bytes": found.get("memory_used_bytes"),
        "memory_total_bytes": found.get("memory_total_bytes"),
    }


def _cost(rates: Any) -> float | None:
    """Percent of one core, its docker and nvidia-smi of every 5 s included; the nvidia-smi that stays is not."""
    own, children = rates.get("cost.own_s"), rates.get("cost.children_s")
    return None if own is None or children is None else _rounded(100 * (own + children))


def _rounded(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else round(value, digits)
