"""sparkguard doctor: each check on a machine made of files, well and unwell."""

from __future__ import annotations

import json
import os
import socket
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from sparkguard.cli import main
from sparkguard.cli.doctor import as_json_object, configuration, describe, examine, machine, runners, session
from sparkguard.core.types import DISCRETE, RAM, Machine, MemoryPool
from sparkguard.guard import Roots

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Place

    from sparkguard.cli.doctor.check import Check


def checks(place: Place, **env: str) -> dict[str, Check]:
    return {check.id: check for check in examine({**place.env, "SPARK_LLAMA_SERVER": "/nowhere", **env}, place.roots)}


def launchers(place: Place, python: str = "/usr/bin/python3") -> None:
    for name in ("vllm_mem_budget.sh", "vllm-serve.sh"):
        place.write(f".local/bin/{name}", f"#!/usr/bin/env bash\npython={python}\n")


def program(place: Place, path: str, text: str = "#!/bin/sh\n") -> Path:
    file = place.write(path, text)
    file.chmod(0o755)
    return file


def test_the_object(place: Place) -> None:
    """One row a check, with unique ids, and a remedy with everything that is bad."""
    answer = as_json_object(examine(place.env, place.roots))
    assert list(answer) == ["schema_version", "checks"]
    rows = answer["checks"]
    assert all(list(row) == ["id", "ok", "message", "remedy"] for row in rows)
    assert len({row["id"] for row in rows}) == len(rows)
    assert all(row["remedy"] for row in rows if row["ok"] is False)
    assert {"interpreter", "settings", "vllm", "reservations", "earlyoom", "swap", "hidepid", "pools", "nvml", "orphans"} <= {
        row["id"] for row in rows
    }


def test_for_people(place: Place) -> None:
    """A word for each result, and the remedy below a bad one."""
    lines = describe(examine(place.env, place.roots)).splitlines()
    bad = next(i for i, line in enumerate(lines) if "interpreter" in line)
    assert "BAD" in lines[bad]
    assert lines[bad + 1].strip() == "./install.sh"


def test_the_status(place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """78 when anything is bad, 0 when nothing is."""
    assert main(["doctor", "--json"]) == 78
    found = json.loads(capsys.readouterr().out)["checks"]
    assert any(row["ok"] is False for row in found)
    monkeypatch.setattr("sparkguard.cli.doctor.examine", lambda env, roots: [])
    assert main(["doctor", "--json"]) == 0


@pytest.mark.parametrize(
    ("python", "ok"),
    [
        ("/usr/bin/python3", True),
        ("python3", False),
        ("/home/u/.pyenv/shims/python3", False),
        ("/nowhere/python3", False),
        ("@PYTHON@", False),
    ],
)
def test_the_interpreter(place: Place, python: str, ok: bool) -> None:
    """The units' programs start one by its own path: no shim, no name that needs a PATH, and it is there."""
    launchers(place, python)
    assert checks(place)["interpreter"].ok is ok


def test_bad_settings(place: Place) -> None:
    """The file is to be edited, and checks that need the settings are left out."""
    conf = place.conf("VLLM_MEM_BUDGET=80%\n")
    found = checks(place)
    assert (found["settings"].ok, found["settings"].remedy) == (False, f"${{EDITOR:-vi}} {conf}")
    assert "write 0.80 for 80%" in found["settings"].message
    assert "vllm" not in found


@pytest.mark.parametrize(
    ("text", "ok", "message"),
    [
        ("VLLM_MODEL=org/m\nVLLM_GPU_MEM_UTIL=0.4\nVLLM_PORT=8002\n", True, "org/m at 0.40 on port 8002"),
        ("VLLM_MODEL=org/m\n", True, "org/m at vLLM's own default on port 8000"),
        ("VLLM_MODEL=\n", None, "no model is set yet"),
        ("VLLM_MODEL=/nowhere\n", False, "does not exist"),
        ("VLLM_MODEL=org/m\nVLLM_EXTRA_ARGS='a\n", False, "is not closed"),
    ],
)
def test_a_spec(place: Place, text: str, ok: bool | None, message: str) -> None:
    """Whether its start would get as far as the guard; one without a model is not set up yet, which is no fault."""
    spec = place.spec("m", text)
    check = checks(place)["spec:m"]
    assert check.ok is ok
    assert message in check.message
    assert check.remedy == (None if ok else f"${{EDITOR:-vi}} {spec}")


def test_vllm_is_found_with_its_version(place: Place) -> None:
    """By its dist-info, without running it."""
    vllm = program(place, "venv/bin/vllm", "#!/usr/bin/python3\n")
    place.write("venv/lib/python3.12/site-packages/vllm-0.32.0.dist-info/METADATA", "")
    place.conf(f"VLLM_BIN={vllm}\n")
    check = checks(place)["vllm"]
    assert (check.ok, check.message) == (True, f"{vllm}, version 0.32.0")


def test_vllm_of_a_venv_that_was_moved(place: Place) -> None:
    """Its first line names an interpreter that is gone."""
    place.conf(f"VLLM_BIN={program(place, 'venv/bin/vllm', '#!/nowhere/bin/python3')}\n")
    check = checks(place)["vllm"]
    assert check.ok is False
    assert "/nowhere/bin/python3, which is not there" in check.message


def test_vllm_is_not_found(place: Place) -> None:
    """Bad, unless every spec runs a container."""
    env = {"VLLM_BIN": "/nowhere/vllm"}
    assert checks(place, **env)["vllm"].ok is False
    place.spec("m", "VLLM_MODEL=org/m\nVLLM_IMAGE=vllm/vllm-openai\n")
    assert checks(place, **env)["vllm"].ok is None
    place.spec("n", "VLLM_MODEL=org/m\n")
    assert checks(place, **env)["vllm"].ok is False


def test_docker_matters_only_for_an_image(place: Place) -> None:
    """Found, its socket there, and open to this user."""
    docker = program(place, "bin/docker")
    place.conf(f"VLLM_DOCKER_BIN={docker}\n")
    assert "docker" not in checks(place)
    place.spec("m", "VLLM_MODEL=org/m\nVLLM_IMAGE=vllm/vllm-openai\n")
    path = place.home / "s"
    assert checks(place, DOCKER_HOST=f"unix://{path}")["docker"].remedy == "sudo systemctl enable --now docker"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        assert checks(place, DOCKER_HOST=f"unix://{path}")["docker"].ok is True
    assert checks(place, DOCKER_HOST="tcp://elsewhere:2375")["docker"].ok is None
    docker.unlink()
    assert checks(place)["docker"].ok is False


@pytest.mark.parametrize(
    ("text", "ok"),
    [
        ('{"memory_budget": 0.80}', True),
        ('{"memory_budget": 0.9}', False),
        ("{}", None),
        ("[", None),
        ("[]", None),
        ("[" * 100_000, None),
        (f'{{"memory_budget": {"9" * 4000}e999}}', None),
    ],
)
def test_the_budget_of_vims(place: Place, text: str, ok: bool | None) -> None:
    """Another one than ours is bad; one that cannot be read is said."""
    place.write(".config/vims/serving.json", text)
    check = checks(place)["vims-budget"]
    assert check.ok is ok
    assert "serving.json" in check.message


@pytest.mark.parametrize("where", [".config/vims/serving.json", ".vims/serving.json", "elsewhere/serving.json"])
def test_where_vims_keeps_it(place: Place, where: str) -> None:
    """Two usual places, and the one that VIMS_CONFIG names; the remedy sets our budget to it."""
    file = place.write(where, '{"memory_budget": "0.70"}')
    check = checks(place, VIMS_CONFIG=str(place.home / "elsewhere"))["vims-budget"]
    assert check.message == f"{file} has memory_budget 0.70, and VLLM_MEM_BUDGET is 0.80 (default)"
    assert check.remedy == f"echo 'VLLM_MEM_BUDGET=\"0.70\"' >>{place.home}/.config/spark/spark.conf"
    assert "vims-budget" not in {check.id for check in configuration.examine({**place.env, "HOME": "/nowhere"}, place.roots)}


ENGINE = """#!/bin/sh
case "$1" in
--version) echo "version: 11434 (abc)" ;;
--help) echo "--host HOST  ip address, or a path that ends in .sock"; echo "--list-devices  print them" ;;
--list-devices) echo "Available devices:"; echo "  @DEVICE@ (8192 MiB, 8000 MiB free)" ;;
esac
"""


def test_the_runners_engine(place: Place) -> None:
    """Bad only where it is named and does not run: who serves with vLLM alone needs none."""
    assert checks(place)["engine"].ok is False
    assert checks(place, SPARK_LLAMA_SERVER="/bin/false")["engine"].ok is False
    engine = program(place, "llama-server", ENGINE)
    check = checks(place, SPARK_LLAMA_SERVER=str(engine))["engine"]
    assert (check.ok, check.message) == (True, f"{engine}, build 11434")


def test_no_engine(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no fault, and the remedy is there."""
    monkeypatch.setattr("sparkguard.probe.llama_server._packaged", lambda: None)
    check = checks(place, SPARK_LLAMA_SERVER="", PATH="/nowhere")["engine"]
    assert (check.ok, check.remedy) == (None, "./install.sh --engine")


@pytest.mark.parametrize(
    ("device", "ok", "message", "remedy"),
    [
        ("CUDA0: NVIDIA RTX", True, "NVIDIA RTX can be used by runners", None),
        ("Vulkan0: NVIDIA RTX", None, "cannot use it: install a llama-server built for CUDA", "-DGGML_CUDA=ON"),
    ],
)
def test_a_gpu_and_the_engines_build(
    place: Place, monkeypatch: pytest.MonkeyPatch, device: str, ok: bool | None, message: str, remedy: str | None
) -> None:
    """A GPU that the engine cannot use is said, with the commands that build one which can."""
    engine = program(place, "llama-server", ENGINE.replace("@DEVICE@", device))
    card = MemoryPool("gpu0", DISCRETE, 8 << 30, name="NVIDIA RTX", uuid="GPU-0")
    seen = SimpleNamespace(machine=Machine((MemoryPool("ram", RAM, 8 << 30), card)))
    monkeypatch.setattr("sparkguard.guard.look", lambda *_, **__: seen)
    found = {check.id: check for check in runners.examine({**place.env, "SPARK_LLAMA_SERVER": str(engine)}, place.roots)}
    check = found["runners:cuda:0"]
    assert check.ok is ok
    assert message in check.message
    assert check.remedy is None if remedy is None else remedy in (check.remedy or "")


def test_reservations(place: Place) -> None:
    """Kept in the runtime folder; elsewhere it is said; where they cannot be kept it is bad."""
    assert checks(place)["reservations"].ok is True
    assert checks(place, XDG_RUNTIME_DIR="/nowhere")["reservations"].ok is None
    (place.home / "run" / "sparkguard" / "lock").unlink()
    (place.home / "run" / "sparkguard").rmdir()
    place.write("run/sparkguard", "")
    assert checks(place)["reservations"].ok is False


@pytest.mark.parametrize(
    ("argv", "budget", "ok"),
    [
        ([], "0.80", True),
        (["-m", "4,2", "-s", "10"], "0.95", True),
        ([], "0.90", False),
        (["-m25"], "0.80", False),
        (["-m", "10", "-m", "20"], "0.80", False),
        (["-M", "2097152"], "0.80", None),
        (["-m", "x"], "0.80", None),
    ],
)
def test_earlyoom(place: Place, argv: list[str], budget: str, ok: bool | None) -> None:
    """It must not kill at an amount of memory that the budget allows to be taken."""
    assert checks(place)["earlyoom"].message == "does not run"
    place.tree.add(50, ["/usr/bin/earlyoom", *argv])
    assert checks(place, VLLM_MEM_BUDGET=budget)["earlyoom"].ok is ok


@pytest.mark.parametrize(
    ("lines", "ok"), [("", None), ("SwapTotal: 100 kB\nSwapFree: 50 kB\n", True), ("SwapTotal: 100 kB\nSwapFree: 9 kB\n", False)]
)
def test_swap(place: Place, lines: str, ok: bool | None) -> None:
    """None at all is a matter of choice; a full one is a sign."""
    with (place.tree.root / "meminfo").open("a") as file:
        file.write(lines)
    assert checks(place)["swap"].ok is ok


@pytest.mark.parametrize(("text", "ok"), [("cpuset cpu io memory pids\n", True), ("pids\n", False), (None, None)])
def test_controllers(place: Place, text: str | None, ok: bool | None) -> None:
    """memory and cpu must be delegated to the user's manager, or caps do nothing."""
    uid = os.getuid()
    if text is not None:
        place.write(f"sys/fs/cgroup/user.slice/user-{uid}.slice/user@{uid}.service/cgroup.controllers", text)
    check = session._controllers(place.roots, None)
    assert check.ok is ok
    assert (check.remedy is not None) is (ok is False)


def test_hidden_processes(place: Place) -> None:
    """hidepid= blinds the guard."""
    assert checks(place)["hidepid"].ok is True
    place.tree.add(50, ["mine"])
    place.tree.remove(1)
    assert checks(place)["hidepid"].ok is False


def test_an_orphan(place: Place) -> None:
    """The remedy ends it."""
    place.tree.add(400, b"VLLM::EngineCore\0\0")
    check = checks(place)["orphans"]
    assert (check.ok, check.remedy) == (False, "kill 400")


def test_pools_and_nvml(place: Place) -> None:
    """Without a driver there is one pool and nobody to ask; with one that does not answer both are bad."""
    found = checks(place)
    assert (found["pools"].ok, found["pools"].message) == (True, "the system RAM, 121.7 GiB")
    assert found["nvml"].ok is None
    (place.home / "dev" / "nvidiactl").touch()
    found = checks(place)
    assert (found["pools"].ok, found["nvml"].ok) == (False, False)


def test_a_machine_that_cannot_be_read(place: Place) -> None:
    """What cannot be looked at is bad, and the rest is looked at all the same."""
    place.tree.remove(1)
    found = checks(place)
    assert "shows no processes" in found["machine"].message
    assert {"settings", "reservations", "session", "machine"} <= set(found)
    assert "pools" not in found


@pytest.mark.parametrize(
    ("unit", "ok", "message"),
    [
        ("vllm-model@m.service", True, "vllm-model@m.service, pid 100"),
        (None, False, "taken by vllm, pid 100; wanted by vllm-model@m.service"),
    ],
)
def test_who_has_a_models_port(place: Place, unit: str | None, ok: bool, message: str) -> None:
    """Its own server is well; anybody else's is in its way."""
    place.spec("m", "VLLM_MODEL=org/m\nVLLM_PORT=8123\n")
    assert checks(place)["port:8123"].message == "free; wanted by vllm-model@m.service"
    place.vllm(100, "m", "--port", "8123", "--gpu-memory-utilization", "0.1", unit=unit)
    check = checks(place)["port:8123"]
    assert (check.ok, check.message) == (ok, message)


def test_a_port_of_something_else(place: Place) -> None:
    """The real listener on a real port is named by its program and pid."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        check = machine._port(port, ["vllm-a.service"], [], Roots())
        assert check.ok is False
        assert f", pid {os.getpid()}" in check.message
        assert check.remedy == f"ss -ltnp 'sport = :{port}'"


@pytest.mark.parametrize(("env", "ok"), [({}, False), ({"RAY_memory_monitor_refresh_ms": "0"}, True)])
def test_ray(place: Place, env: dict[str, str], ok: bool) -> None:
    """Only where it runs: its memory monitor kills a loading worker."""
    assert "ray" not in checks(place)
    place.tree.add(60, ["/opt/ray/core/src/ray/raylet/raylet", "--x"], environ=env)
    assert checks(place)["ray"].ok is ok


def test_files_that_are_none(place: Place) -> None:
    """A fifo, a folder or a bad name among the specs and the units is named, and keeps no check from its answer."""
    models = place.spec("m", "VLLM_MODEL=org/m\n").parent
    launchers(place)
    before = set(checks(place))
    os.mkfifo(models / "fifo.env")
    (models / "folder.env").mkdir()
    for name in (b"\xff.env", b"a b.env"):
        (models / os.fsdecode(name)).write_text("VLLM_MODEL=o/n\n")
    place.unit("x", "")
    os.mkfifo(place.home / ".config" / "systemd" / "user" / "vllm-fifo.service")
    (place.home / ".local" / "bin" / "vllm-serve.sh").unlink()
    os.mkfifo(place.home / ".local" / "bin" / "vllm-serve.sh")
    after = checks(place)
    assert {id for id in after if id not in before} == {"spec:fifo", "spec:folder", "spec:a b", "spec:\udcff"}
    assert all(after[id].ok is False for id in after if id not in before)
