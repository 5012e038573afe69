"""What a Spark's kernel tells, in the units that are promised; and what is not there."""

from __future__ import annotations

from pathlib import Path

import pytest
from spark_tree import CORES, RDMA, Tree

from sparkguard.cluster.node.host import Host


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


@pytest.fixture
def host(tree: Tree) -> Host:
    return Host(str(tree.proc), str(tree.sys))


def test_about(host: Host) -> None:
    """Who the machine is, and which of its cores are the fast ones."""
    about = host.about()
    assert about["boot_id"] == "11111111-2222-3333-4444-555555555555"
    assert (about["hostname"], about["kernel"]) == ("spark-a", "6.17.0-1014-nvidia")
    assert [khz > 3_000_000 for khz in about["core_max_khz"]] == [core % 10 >= 5 for core in range(CORES)]


def test_processor_time_is_busy_and_all(tree: Tree, host: Host) -> None:
    """Waiting for a disk is idle; the guests' time is not counted twice; each core has its own pair."""
    before = host.quick()
    assert before["cpu"] == [20000 + 10000 + 2000, 20000 + 10000 + 1800000 + 8000 + 2000]
    tree.count(2.0)
    now = host.quick()
    assert len(now["cores"]) == CORES
    assert [now["cores"][3][i] - before["cores"][3][i] for i in (0, 1)] == [100, 200]


def test_memory_is_in_bytes(host: Host) -> None:
    """As the kernel names it: what is available is not what is free."""
    assert host.quick()["memory"] == {
        "total_bytes": 127600748 * 1024,
        "available_bytes": 118566368 * 1024,
        "cached_bytes": 90000000 * 1024,
        "swap_total_bytes": 16777212 * 1024,
        "swap_free_bytes": 16777212 * 1024,
    }


def test_load_and_pressure(host: Host) -> None:
    """Averages in percent, totals in microseconds."""
    quick = host.quick()
    assert quick["load"] == [3.2, 2.1, 1.0]
    assert quick["pressure"]["memory"]["full"] == {"avg10": 0.0, "avg60": 0.1, "avg300": 0.0, "total": 777.0}


def test_only_interfaces_of_hardware_are_counted(tree: Tree, host: Host) -> None:
    """Bridges and the ends of containers' cables carry what has been counted already."""
    tree.count(1.0)
    assert set(host.quick()["net"]) == {"enP7s7", *RDMA.values()}
    assert host.quick()["net"]["enP7s7"] == {"rx_bytes": 1005000, "tx_bytes": 1007000, "errors": 3}


def test_without_hardware_all_interfaces_are_counted(tmp_path: Path) -> None:
    """As in a network namespace, where every interface is virtual."""
    tree = Tree(tmp_path)
    for name in ("enP7s7", *RDMA.values()):
        (tree.sys / "class/net" / name / "device").rmdir()
    assert set(Host(str(tree.proc), str(tree.sys)).quick()["net"]) == {"enP7s7", "docker0", *RDMA.values()}


def test_roce_counts_in_units_of_four_octets(tree: Tree, host: Host) -> None:
    """port_xmit_data and port_rcv_data are given as bytes."""
    before = host.quick()["roce"]
    assert before == {device: {"rx_bytes": 4000, "tx_bytes": 4000} for device in RDMA}
    tree.count(1.0)
    assert host.quick()["roce"]["rocep1s0f1"]["rx_bytes"] == 4000 + 10**10


def test_only_whole_disks_are_counted(host: Host) -> None:
    """Partitions, loops and mappers hold the same bytes again; sectors are of 512 bytes."""
    assert host.quick()["disks"] == {"nvme0n1": {"read_bytes": 2048 * 512, "written_bytes": 4096 * 512}}


def test_slow_readings(host: Host, tmp_path: Path) -> None:
    """Links, ports with their error counters, sensors, and room on disks."""
    slow = host.slow([str(tmp_path), "/nonexistent/x"])
    assert slow["links"]["enP7s7"] == {"operstate": "up", "speed_mbps": 10000, "mtu": 9000}
    port = slow["roce_ports"]["rocep1s0f1"]
    assert (port["state"], port["physical"], port["interfaces"]) == ("ACTIVE", "LinkUp", ["enp1s0f1np1"])
    assert port["counters"] == {"port_rcv_errors": 0, "link_downed": 1, "out_of_sequence": 7, "np_cnp_sent": 9}
    assert [(it["name"], it["celsius"]) for it in slow["thermal"]] == [("acpitz", 51.2), ("acpitz", 48.9)]
    assert slow["filesystems"][str(tmp_path)]["free_bytes"] > 0
    assert slow["filesystems"]["/nonexistent/x"] is None


def test_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    """Nothing of it is 0."""
    host = Host(str(tmp_path / "a"), str(tmp_path / "b"))
    quick = host.quick()
    assert (quick["cpu"], quick["cores"], quick["load"]) == (None, [], None)
    assert set(quick["memory"].values()) == {None}
    assert set(quick["pressure"].values()) == {None}
    assert (quick["net"], quick["roce"], quick["disks"]) == ({}, {}, {})
    assert host.about() == {"boot_id": None, "hostname": None, "kernel": None, "core_max_khz": []}
