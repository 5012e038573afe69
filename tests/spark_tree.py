"""The /proc and /sys of a DGX Spark as far as a sampler reads them: shapes and names as reported by owners, figures made up."""

from __future__ import annotations

from pathlib import Path

CORES = 20
RDMA = {"rocep1s0f1": "enp1s0f1np1", "roceP2p1s0f1": "enP2p1s0f1np1"}
MEMINFO = """\
MemTotal:       127600748 kB
MemFree:         5566368 kB
MemAvailable:   118566368 kB
Cached:         90000000 kB
SwapTotal:      16777212 kB
SwapFree:       16777212 kB
HugePages_Total:       0
"""


class Tree:
    """Two folders under one; `count` lets all counters grow, as if work had been done."""

    def __init__(self, folder: Path) -> None:
        self.proc = folder / "proc"
        self.sys = folder / "sys"
        self.write(self.proc / "sys/kernel/random/boot_id", "11111111-2222-3333-4444-555555555555\n")
        self.write(self.proc / "sys/kernel/hostname", "spark-a\n")
        self.write(self.proc / "sys/kernel/osrelease", "6.17.0-1014-nvidia\n")
        self.write(self.proc / "loadavg", "3.20 2.10 1.00 2/900 4242\n")
        self.write(self.proc / "meminfo", MEMINFO)
        for name in ("cpu", "memory", "io"):
            full = "full avg10=0.00 avg60=0.10 avg300=0.00 total=777\n"
            self.write(self.proc / f"pressure/{name}", f"some avg10=1.50 avg60=0.70 avg300=0.10 total=123456\n{full}")
        for core in range(CORES):
            khz = 3_900_000 if core % 10 >= 5 else 2_808_000
            self.write(self.sys / f"devices/system/cpu/cpu{core}/cpufreq/cpuinfo_max_freq", f"{khz}\n")
        for number, celsius in enumerate((51.2, 48.9)):
            self.write(self.sys / f"class/thermal/thermal_zone{number}/type", "acpitz\n")
            self.write(self.sys / f"class/thermal/thermal_zone{number}/temp", f"{int(celsius * 1000)}\n")
        self.write(self.sys / "class/thermal/cooling_device0/type", "Fan\n")
        for disk in ("nvme0n1", "loop3", "dm-0"):
            (self.sys / "block" / disk).mkdir(parents=True)
        self.interface("enP7s7", speed=10000)
        for device, netdev in RDMA.items():
            self.interface(netdev, speed=200000)
            port = self.sys / "class/infiniband" / device / "ports/1"
            (self.sys / "class/infiniband" / device / "device/net" / netdev).mkdir(parents=True)
            self.write(port / "state", "4: ACTIVE\n")
            self.write(port / "phys_state", "5: LinkUp\n")
            self.write(port / "rate", "200 Gb/sec (4X HDR)\n")
            self.write(port / "counters/port_rcv_errors", "0\n")
            self.write(port / "counters/link_downed", "1\n")
            self.write(port / "hw_counters/out_of_sequence", "7\n")
            self.write(port / "hw_counters/np_cnp_sent", "9\n")
        for name in ("lo", "docker0", "vethabc"):
            (self.sys / "class/net" / name).mkdir(parents=True)
        self.count(0)

    def interface(self, name: str, speed: int) -> None:
        folder = self.sys / "class/net" / name
        (folder / "device").mkdir(parents=True)
        self.write(folder / "operstate", "up\n")
        self.write(folder / "speed", f"{speed}\n")
        self.write(folder / "mtu", "9000\n")

    def count(self, seconds: float) -> None:
        """Counters as after so many seconds of: half of the time busy, 1 MB/s by LAN, 10 GB/s by RDMA, 2 MB/s from the disk."""
        ticks = int(seconds * 100)
        line = f" {1000 + ticks // 2} 0 {500} {90000 + ticks - ticks // 2} 400 0 100 0 50 0\n"
        all_ = f"cpu  {20000 + ticks * 10} 0 10000 {1800000 + ticks * 10} 8000 0 2000 0 1000 0\n"
        rest = "intr 12345 0 0\nctxt 987654\n"
        self.write(self.proc / "stat", all_ + "".join(f"cpu{core}{line}" for core in range(CORES)) + rest)
        wire = int(seconds * 1e6)
        names = ("lo", "docker0", "enP7s7", *RDMA.values())
        rows = "".join(f"{name:>8}: {5000 + wire} 10 0 0 0 0 0 0 {7000 + wire} 20 1 2 0 0 0 0\n" for name in names)
        self.write(self.proc / "net/dev", f"Inter-|   Receive\n face |bytes\n{rows}")
        for device in RDMA:
            counters = self.sys / "class/infiniband" / device / "ports/1/counters"
            for name in ("port_xmit_data", "port_rcv_data"):
                self.write(counters / name, f"{1000 + int(seconds * 10e9 / 4)}\n")
        read = 2048 + int(seconds * 2e6 / 512)
        disks = ("nvme0n1", "nvme0n1p1", "loop3", "dm-0")
        text = "".join(f" 259       {i} {name} 10 0 {read} 5 20 0 4096 6 0 7 8\n" for i, name in enumerate(disks))
        self.write(self.proc / "diskstats", text)

    @staticmethod
    def write(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
