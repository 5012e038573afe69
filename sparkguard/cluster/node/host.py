"""What the kernel of a node tells, as raw counters and gauges: the laptop makes rates of them, by its own clock.

Runs on a node: Linux, Python 3.8, the standard library. What cannot be read is None, and a folder that is not there is empty.
Quick readings are taken at each tick. Slow ones may wait for firmware (sensors, counters of network cards) or matter less often.
"""

from __future__ import annotations

import os

from sparkguard.cluster.node.base import read

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SECTOR_BYTES = 512  # /proc/diskstats counts in these, whatever the disk has
OCTETS = 4  # what one unit of port_xmit_data and port_rcv_data is
_NO_DISK = ("loop", "ram", "zram", "dm-", "md", "sr", "fd", "nbd")
_PRESSURES = ("cpu", "memory", "io")
_ERRORS = ("port_rcv_errors", "port_xmit_discards", "link_downed")
_HW_COUNTERS = (
    "out_of_buffer",
    "out_of_sequence",
    "packet_seq_err",
    "local_ack_timeout_err",
    "np_cnp_sent",
    "rp_cnp_handled",
    "np_ecn_marked_roce_packets",
    "rx_icrc_encapsulated",
)


def number(text: str | None) -> int | None:
    try:
        return int(text) if text is not None else None
    except ValueError:
        return None


def _folder(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


class Host:
    """One machine under two roots, which tests replace."""

    def __init__(self, proc: str, sys: str) -> None:
        self._proc = proc
        self._sys = sys
        self._disks: tuple[str, ...] = ()
        self._interfaces: tuple[str, ...] = ()
        self._ports: tuple[tuple[str, str], ...] = ()
        self.find()

    def find(self) -> None:
        """Looks again for what can be plugged in."""
        self._disks = tuple(name for name in _folder(self._sys + "/block") if not name.startswith(_NO_DISK))
        names = [name for name in _folder(self._sys + "/class/net") if name != "lo"]
        # Containers make one virtual interface each: where there are real ones, those tell all.
        real = [name for name in names if os.path.exists(f"{self._sys}/class/net/{name}/device")]
        self._interfaces = tuple(real or names)
        devices = self._sys + "/class/infiniband"
        self._ports = tuple((name, port) for name in _folder(devices) for port in _folder(f"{devices}/{name}/ports"))

    # ---- once

    def about(self) -> dict[str, Any]:
        cores = [name for name in _folder(self._sys + "/devices/system/cpu") if name[:3] == "cpu" and name[3:].isdigit()]
        cores.sort(key=lambda name: int(name[3:]))
        limits = [number(read(f"{self._sys}/devices/system/cpu/{name}/cpufreq/cpuinfo_max_freq")) for name in cores]
        return {
            "boot_id": read(self._proc + "/sys/kernel/random/boot_id"),
            "hostname": read(self._proc + "/sys/kernel/hostname"),
            "kernel": read(self._proc + "/sys/kernel/osrelease"),
            "core_max_khz": limits,  # a GB10 has fast and slow cores, their numbers mixed
        }

    # ---- at each tick

    def quick(self) -> dict[str, Any]:
        total, cores = self._cpu()
        return {
            "cpu": total,
            "cores": cores,
            "load": self._load(),
            "pressure": {name: self._pressure(name) for name in _PRESSURES},
            "memory": self._memory(),
            "net": self._net(),
            "roce": self._roce(),
            "disks": self._diskstats(),
        }

    def _cpu(self) -> tuple[list[int] | None, list[list[int]]]:
        """[busy, all] in clock ticks, of all cores together and of each."""
        total = None
        cores = []
        for line in (read(self._proc + "/stat") or "").split("\n"):
            if not line.startswith("cpu"):
                break
            words = line.split()
            ticks = [int(word) for word in words[1:9]]  # guests' time is in user's already
            every = sum(ticks)
            pair = [every - sum(ticks[3:5]), every]
            if words[0] == "cpu":
                total = pair
            else:
                cores.append(pair)
        return total, cores

    def _load(self) -> list[float] | None:
        words = (read(self._proc + "/loadavg") or "").split()
        return [float(word) for word in words[:3]] if len(words) > 2 else None

    def _pressure(self, name: str) -> dict[str, dict[str, float]] | None:
        """{"some": {"avg10": percent, ..., "total": microseconds}, "full": ...}; None on a kernel without."""
        text = read(f"{self._proc}/pressure/{name}")
        if text is None:
            return None
        lines = [line.split() for line in text.split("\n") if line]
        return {line[0]: {key: float(value) for key, value in (word.split("=") for word in line[1:])} for line in lines}

    def _memory(self) -> dict[str, int | None]:
        found = {}
        for line in (read(self._proc + "/meminfo") or "").split("\n"):
            name, _, rest = line.partition(":")
            words = rest.split()
            if words:
                found[name] = int(words[0]) * 1024
        return {
            "total_bytes": found.get("MemTotal"),
            "available_bytes": found.get("MemAvailable"),
            "cached_bytes": found.get("Cached"),
            "swap_total_bytes": found.get("SwapTotal"),
            "swap_free_bytes": found.get("SwapFree"),
        }

    def _net(self) -> dict[str, dict[str, int]]:
        found = {}
        for line in (read(self._proc + "/net/dev") or "").split("\n")[2:]:
            name, _, rest = line.partition(":")
            if name.strip() in self._interfaces:
                words = rest.split()
                errors = sum(int(words[at]) for at in (2, 3, 10, 11))  # errors and drops, both ways
                found[name.strip()] = {"rx_bytes": int(words[0]), "tx_bytes": int(words[8]), "errors": errors}
        return found

    def _roce(self) -> dict[str, dict[str, int | None]]:
        """Bytes of RDMA: they pass by the counters of the network interface."""
        found = {}
        for device, port in self._ports:
            folder = f"{self._sys}/class/infiniband/{device}/ports/{port}/counters/"
            sent, received = number(read(folder + "port_xmit_data")), number(read(folder + "port_rcv_data"))
            found[_port_name(device, port)] = {
                "rx_bytes": None if received is None else received * OCTETS,
                "tx_bytes": None if sent is None else sent * OCTETS,
            }
        return found

    def _diskstats(self) -> dict[str, dict[str, int]]:
        found = {}
        for line in (read(self._proc + "/diskstats") or "").split("\n"):
            words = line.split()
            if len(words) > 9 and words[2] in self._disks:
                found[words[2]] = {"read_bytes": int(words[5]) * SECTOR_BYTES, "written_bytes": int(words[9]) * SECTOR_BYTES}
        return found

    # ---- now and then

    def slow(self, paths: list[str]) -> dict[str, Any]:
        self.find()
        return {
            "links": {name: self._link(name) for name in self._interfaces},
            "roce_ports": {_port_name(device, port): self._port(device, port) for device, port in self._ports},
            "thermal": self._thermal(),
            "filesystems": {path: _space(path) for path in paths},
        }

    def _link(self, name: str) -> dict[str, Any]:
        folder = f"{self._sys}/class/net/{name}/"
        speed = number(read(folder + "speed"))
        return {
            "operstate": read(folder + "operstate"),
            "speed_mbps": speed if speed is not None and speed > 0 else None,  # -1: no carrier
            "mtu": number(read(folder + "mtu")),
        }

    def _port(self, device: str, port: str) -> dict[str, Any]:
        base = f"{self._sys}/class/infiniband/{device}"
        folder = f"{base}/ports/{port}/"
        counters = {name: number(read(folder + "counters/" + name)) for name in _ERRORS}
        counters.update({name: number(read(folder + "hw_counters/" + name)) for name in _HW_COUNTERS})
        return {
            "state": (read(folder + "state") or "").rpartition(": ")[2] or None,  # "4: ACTIVE"
            "physical": (read(folder + "phys_state") or "").rpartition(": ")[2] or None,
            "rate": read(folder + "rate"),
            "interfaces": _folder(base + "/device/net"),
            "counters": {name: value for name, value in counters.items() if value is not None},
        }

    def _thermal(self) -> list[dict[str, Any]]:
        found = []
        base = self._sys + "/class/thermal"
        for name in _folder(base):
            if name.startswith("thermal_zone"):
                milli = number(read(f"{base}/{name}/temp"))
                if milli is not None:
                    found.append({"name": read(f"{base}/{name}/type") or name, "zone": name, "celsius": milli / 1000})
        return found


def _port_name(device: str, port: str) -> str:
    return device if port == "1" else f"{device}/{port}"


def _space(path: str) -> dict[str, int] | None:
    try:
        found = os.statvfs(os.path.expanduser(path))
    except OSError:
        return None
    return {"total_bytes": found.f_blocks * found.f_frsize, "free_bytes": found.f_bavail * found.f_frsize}
