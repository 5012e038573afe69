"""A node's readings by the laptop's clock alone: rates, gaps, ages. Rows 16, 17 and 24 of the fault list."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from spark_tree import Tree

from sparkguard.cluster.node.host import Host
from sparkguard.cluster.watch.node_samples import NodeSamples


class World:
    """A node's sampler without its process, and a clock that the test turns."""

    def __init__(self, folder: Path) -> None:
        self.now = 1000.0
        self.steady = 5.0
        self.tree = Tree(folder)
        self.host = Host(str(self.tree.proc), str(self.tree.sys))
        self.samples = NodeSamples("head", 2.0, lambda: self.now)
        self.worked = 0.0

    def hello(self) -> None:
        self.samples.line({"hello": self.host.about()})

    def tick(self, seconds: float = 2.0, **more: Any) -> dict[str, Any]:
        """The node works so long, then its line comes."""
        self.now += seconds
        self.steady += seconds
        self.worked += seconds
        self.tree.count(self.worked)
        told = {"steady_s": self.steady, "gpus": None, "gpu_error": None, "cost": {"own_s": 0.0, "children_s": 0.0}}
        self.samples.line({"tick": {**self.host.quick(), **told, **more}})
        return self.samples.view()


def lan(view: dict[str, Any], name: str = "enP7s7") -> float | None:
    found: float | None = next(it["rx_bytes_s"] for it in view["network"] if it["name"] == name)
    return found


def rdma(view: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(it for it in view["roce"] if it["device"] == "rocep1s0f1")
    return found


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(tmp_path)
    world.hello()
    return world


def test_rates_of_a_node_at_work(world: World) -> None:
    """A core is busy for half of the time, RDMA carries 10 GB/s that the interface does not count."""
    first = world.tick()
    assert (first["cpu_percent"], lan(first), first["disk"]["read_bytes_s"], first["gap"]) == (None, None, None, False)
    view = world.tick()
    assert (view["cores"], view["core_percent"][7], view["cpu_percent"]) == (20, 50, 50)
    assert lan(view) == pytest.approx(1e6)
    assert lan(view, "enp1s0f1np1") == pytest.approx(1e6)
    assert rdma(view)["tx_bytes_s"] == pytest.approx(10e9)
    assert view["disk"]["read_bytes_s"] == pytest.approx(2e6, rel=1e-3)
    assert (view["state"], view["connection"], view["age_s"], view["load1"]) == ("ok", "open", 0.0, 3.2)
    assert view["psi"]["memory_full10"] == 0.0


def test_a_nodes_wall_clock_changes_nothing(world: World) -> None:
    """Nothing that the sampler says bears a time of day: a node that is hours off has the same rates and ages."""
    world.tick()
    view = world.tick(**{"time": 1.0, "date": "1970-01-01"})
    assert lan(view) == pytest.approx(1e6)
    assert view["age_s"] == 0.0


def test_a_laptop_that_slept_has_a_gap_and_no_rate(world: World) -> None:
    """Ten minutes later the values are old first; the next reading has no rates, the one after it has."""
    world.tick()
    world.tick()
    world.now += 600
    asleep = world.samples.view()
    assert (asleep["state"], asleep["age_s"], asleep["gap"], asleep["cpu_percent"]) == ("stale", 600.0, True, None)
    assert asleep["memory"]["total_bytes"] == 127600748 * 1024
    world.worked += 600
    world.steady += 600
    woken = world.tick()
    assert (woken["state"], woken["gap"], woken["reset"]) == ("ok", True, False)
    assert lan(woken) is None
    assert lan(world.tick()) == pytest.approx(1e6)


def test_a_node_that_was_restarted_breaks_the_line(world: World) -> None:
    """Another boot_id is another set of counters, even where they have grown."""
    world.tick()
    world.samples.lost("connection refused", "refused", 1.0)
    world.tree.write(world.tree.proc / "sys/kernel/random/boot_id", "99999999-0000-0000-0000-000000000000\n")
    world.hello()
    view = world.tick()
    assert (view["reset"], view["boots_seen"], view["cpu_percent"]) == (True, 2, None)
    assert world.tick()["reset"] is False


def test_a_lost_node_is_unreachable_and_its_values_have_an_age(world: World) -> None:
    """What was known stays, with its age; rates and containers are unknown, and the next attempt is announced."""
    world.tick()
    world.samples.line({"containers": {"found": [{"id": "a", "state": "running"}], "error": None}})
    assert world.samples.containers() == [{"id": "a", "state": "running"}]
    world.tick()
    world.samples.lost("head: no answer within 15 s", "timeout", 4.0)
    world.now += 1.5
    view = world.samples.view()
    assert (view["state"], view["connection"]) == ("unknown", "lost")
    assert (view["error"], view["cause"]) == ("no answer within 15 s", "timeout")
    assert (view["retry_in_s"], view["age_s"]) == (2.5, 1.5)
    assert (view["cpu_percent"], view["containers"], view["containers_error"]) == (None, None, "no answer within 15 s")
    assert view["memory"]["available_bytes"] > 0


def test_counters_that_fell_break_the_line(world: World) -> None:
    """A driver that was loaded anew begins at 0: no value, and a mark."""
    world.tick()
    world.tick()
    world.worked = -2.0
    view = world.tick()
    assert (view["reset"], rdma(view)["rx_bytes_s"]) == (True, None)


def test_a_look_that_is_missing_twice_is_not_believed(world: World) -> None:
    """A docker that hangs: what it said half a minute ago is not what is."""
    world.samples.line({"containers": {"found": [], "error": None}})
    for _ in range(10):
        view = world.tick()
    assert (view["containers"], view["containers_error"]) == (None, "docker has not answered lately")


def test_what_a_gpu_does_not_say_is_null(world: World) -> None:
    """And the mask of its clocks' limits is spelled out; without an answer all is unknown, not idle."""
    gpu = {"name": "NVIDIA GB10", "utilization_percent": 37.0, "memory_used_bytes": None, "reasons": 0x1 | 0x4 | 0x40}
    seen = world.tick(gpus=[gpu])["gpu"]
    assert (seen["utilization_percent"], seen["memory_used_bytes"], seen["power_w"]) == (37.0, None, None)
    assert seen["throttle"] == ["power_cap", "thermal_hardware"]
    assert world.tick(gpus=[{**gpu, "reasons": None}])["gpu"]["throttle"] is None
    silent = world.tick(gpus=None, gpu_error="nvidia-smi has said nothing for 9 s")
    assert (silent["gpu"], silent["gpus"]) == (None, None)


def test_errors_of_rdma_are_told_per_second(world: World) -> None:
    """They are looked at every 5 s; marks of congestion are no errors, and before the second look nothing is known."""
    folder = world.tree.sys / "class/infiniband/rocep1s0f1/ports/1/hw_counters"
    world.samples.line({"slow": world.host.slow([])})
    assert rdma(world.tick())["errors_s"] is None
    world.tree.write(folder / "out_of_sequence", "17\n")
    world.tree.write(folder / "np_cnp_sent", "999\n")
    world.now += 3.0
    world.samples.line({"slow": world.host.slow([])})
    assert rdma(world.samples.view())["errors_s"] == pytest.approx(10 / 5)
    assert rdma(world.samples.view())["counters"]["np_cnp_sent"] == 999


def test_before_the_first_line_a_node_is_connecting(tmp_path: Path) -> None:
    """It is not idle, and nothing of it is 0."""
    view = NodeSamples("head", 2.0, lambda: 1.0).view()
    assert (view["state"], view["connection"], view["age_s"]) == ("unknown", "connecting", None)
    assert (view["cpu_percent"], view["gpu"], view["cores"], view["disk"]["free_bytes"]) == (None, None, None, None)
    assert set(view["memory"].values()) == {None}


def test_lines_of_a_newer_sampler_are_passed_over(world: World) -> None:
    """What is not understood is no reason to lose the rest."""
    world.samples.line({"weather": {"rain": True}, "tick": "later"})
    assert world.tick()["state"] == "ok"
