"""Models as containers: what `docker create` is told for each rank."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sparkguard.cluster.catalog import derived, recipes
from sparkguard.cluster.catalog import read as catalog
from sparkguard.core.admission import admit
from sparkguard.core.cluster import DISTRIBUTED, SINGLE, YUE, Allocation, Rank
from sparkguard.core.types import Budget, MemoryPool, Wanted

REPOSITORY = Path(__file__).parents[4]
sys.path.insert(0, str(REPOSITORY / "tests" / "tools"))
from golden_argv import GOLDEN, example  # noqa: E402

EXAMPLE = catalog.load(REPOSITORY / "models.example.toml", example=True)
CLUSTER = """\
[cluster]
head = "one"
worker = "two"
master_addr = "10.0.0.1"
worker_addr = "10.0.0.2"
lan_url = "http://10.1.0.1:8000"
worker_lan_url = "http://10.1.0.2:8000"
hf_cache_host = "/cache"
worker_hf_cache_host = "/other"
[cluster.nccl]
NCCL_IB_HCA = "=rocep1s0f1,roceP2p1s0f1"
NCCL_SOCKET_IFNAME = "enp1s0f1np1"
NCCL_DEBUG = "WARN"
"""


def wanted(entry: str, node: str | None = None) -> Allocation:
    found = catalog.parse(CLUSTER + "[models.x]\n" + entry, "models.toml")
    model = found.model("x")
    return recipes.allocation(found, model, found.select(node, model))


def value(rank: Rank, flag: str) -> str:
    return rank.create[rank.create.index(flag) + 1]


def environment(rank: Rank) -> dict[str, str]:
    words = [second for first, second in zip(rank.create, rank.create[1:]) if first == "--env"]
    return dict(word.split("=", 1) for word in words if "=" in word)


@pytest.mark.parametrize("name", sorted(example()))
def test_the_arguments_are_the_golden_ones(name: str) -> None:
    """Each rank of each entry of the example is created with exactly the arguments that are kept in golden/."""
    assert example()[name] == (GOLDEN / name).read_text()


def test_each_entry_and_rank_has_its_golden_file() -> None:
    """No golden file is left over from an entry that is gone."""
    assert sorted(path.name for path in GOLDEN.glob("*.txt")) == sorted(example())
    assert len(example()) == 14


@pytest.mark.parametrize("model", EXAMPLE.models, ids=lambda model: model.name)
def test_the_published_arguments_are_all_there(model: catalog.Model) -> None:
    """What an entry lists reaches the engine of every rank unchanged and in order, before what spark-serve adds."""
    for rank in recipes.allocation(EXAMPLE, model, EXAMPLE.nodes).ranks:
        words = rank.create[rank.create.index(rank.image) + 1 :]
        assert not model.args or any(words[i : i + len(model.args)] == model.args for i in range(4))
        assert model.env == tuple((key, environment(rank)[key]) for key, _ in model.env)


@pytest.mark.parametrize("model", EXAMPLE.models, ids=lambda model: model.name)
def test_a_recipe_is_admitted_on_an_empty_spark_and_on_no_other(model: catalog.Model) -> None:
    """Each entry of the example fits an idle Spark, and is refused with the sum beside a model of half its memory."""
    total = 127_600_748 * 1024  # MemTotal of a GB10
    hold = recipes.sized(recipes.allocation(EXAMPLE, model, EXAMPLE.nodes).ranks[0].holds[0], total)
    budget = Budget(EXAMPLE.budget_share, EXAMPLE.reserve_bytes)
    idle = MemoryPool("ram", "unified", total, 117 << 30)
    assert admit(budget, (idle,), (), Wanted(model.name, (hold,))).admitted
    busy = idle.replace(available_bytes=60 << 30)
    assert admit(budget, (busy,), (), Wanted(model.name, (hold,))).reason == "memory_taken"


def test_ranks_of_a_distributed_vllm() -> None:
    """Rank 0 serves and rank 1 is headless; both meet at the head's fabric address, each under its own."""
    both = wanted('image = "i"\nhf_id = "a/b"\nnnodes = 2\n[models.x.env]\nNCCL_DEBUG = "INFO"\n')
    head, worker = both.ranks
    assert (both.mode, both.url, both.nodes) == (DISTRIBUTED, "http://10.1.0.1:8000", ("head", "worker"))
    assert (head.node, head.port, worker.node, worker.port) == ("head", 8000, "worker", None)
    for rank in both.ranks:
        assert [value(rank, flag) for flag in ("--nnodes", "--node-rank", "--master-addr", "--master-port")] == [
            "2", str(rank.rank), "10.0.0.1", "29501",
        ]  # fmt: skip
        assert value(rank, "--distributed-executor-backend") == "mp"
        assert value(rank, "--tensor-parallel-size") == "2"
        assert environment(rank)["NCCL_DEBUG"] == "INFO"  # the model's own after the cluster's
    assert "--headless" not in head.create and worker.create[-1] == "--headless"
    assert [environment(rank)["VLLM_HOST_IP"] for rank in both.ranks] == ["10.0.0.1", "10.0.0.2"]
    assert head.interfaces == ("enp1s0f1np1",)
    assert head.hcas == ("rocep1s0f1", "roceP2p1s0f1")


def test_each_node_has_its_own_cache() -> None:
    """Mounts and paths follow the node's cache; a relative source lies below it."""
    both = wanted(
        'image = "i"\nhf_id = "a/b"\nnnodes = 2\n[[models.x.mounts]]\ncontainer = "/m"\nsource = "s"\nreadonly = true\n'
    )
    assert "type=bind,source=/other/s,target=/m,readonly" in both.ranks[1].create
    assert both.ranks[0].paths == ("/cache", "/cache/s", "/cache/hub/models--a--b")
    assert both.ranks[1].paths == ("/other", "/other/s", "/other/hub/models--a--b")


def test_a_model_on_one_node_gets_no_transport() -> None:
    """A single node is pinned to no rail, needs none, and meets itself on loopback."""
    alone = wanted('image = "i"\nhf_id = "a/b"\nhermes_provider = "spark"\n', "worker")
    (rank,) = alone.ranks
    assert (alone.mode, alone.url, rank.node, rank.interfaces, rank.hcas) == (SINGLE, "http://10.1.0.2:8000", "worker", (), ())
    assert environment(rank) == {"VLLM_HOST_IP": "127.0.0.1"}
    assert "--nnodes" not in rank.create
    assert alone.client == "spark-worker"


def test_sockets_need_no_rdma_device() -> None:
    """With NCCL_NET=Socket no RoCE device has to be there, and the interfaces still have to be up."""
    both = wanted(
        'image = "i"\nhf_id = "a/b"\nnnodes = 2\n[models.x.env]\n'
        'NCCL_NET = "Socket"\nNCCL_SOCKET_IFNAME = "=enp1s0f1np1,enP2p1s0f1np1"\n'
    )
    assert (both.ranks[0].hcas, both.fabric) == ((), "socket")
    assert both.ranks[0].interfaces == ("enp1s0f1np1", "enP2p1s0f1np1")


@pytest.mark.parametrize(
    ("env", "fabric"),
    [
        ('NCCL_NET = "IB"\n', "ib"),
        ('NCCL_NET = "IB"\nNCCL_IB_DISABLE = "1"\n', "socket"),
        ('NCCL_DEBUG = "INFO"\n', ""),
    ],
    ids=["told", "forbidden", "its own choice"],
)
def test_what_ranks_are_told_to_talk_over(env: str, fabric: str) -> None:
    """Known from the arguments where NCCL has no choice, since its log is silent about it below INFO; alone there is none."""
    entry = f'image = "i"\nhf_id = "a/b"\nnnodes = 2\n[models.x.env]\n{env}'
    assert wanted(entry).fabric == fabric
    assert wanted(entry.replace("nnodes = 2", "nnodes = 1")).fabric == ""


def test_a_container_has_what_rdma_needs_and_no_more() -> None:
    """No rank is privileged unless the catalog says so, one alone has no RDMA device; none restarts or pulls by itself."""
    both = wanted('image = "i"\nhf_id = "a/b"\nnnodes = 2\n').ranks[0]
    assert value(both, "--device") == "/dev/infiniband" and value(both, "--cap-add") == "IPC_LOCK"
    alone = wanted('image = "i"\nhf_id = "a/b"\n').ranks[0]
    free = wanted('image = "i"\nhf_id = "a/b"\nnnodes = 2\nprivileged = true\n').ranks[0]
    assert not {"--device", "--cap-add", "--ulimit"} & set(alone.create)
    assert "--privileged" in free.create and "--device" not in free.create
    for rank in (both, alone):
        assert "--privileged" not in rank.create
        assert value(rank, "--restart") == "no" and value(rank, "--pull") == "never"


def test_a_secret_is_a_name_only() -> None:
    """A secret's variable is passed on without its value, which no argument ever holds."""
    rank = wanted('image = "i"\nhf_id = "a/b"\nsecrets = ["HF_TOKEN"]\n').ranks[0]
    assert rank.secrets == ("HF_TOKEN",)
    assert [word for word in rank.create if "HF_TOKEN" in word] == ["HF_TOKEN"]


def test_the_digest_follows_what_decides_how_it_runs() -> None:
    """The same entry has the same digest on each look; another argument, variable or image has another."""
    entry = 'image = "i"\nhf_id = "a/b"\n'
    first = wanted(entry).ranks[0]
    assert first.digest == wanted(entry + 'notes = "said elsewhere"\n').ranks[0].digest
    assert f"sparkguard.digest={first.digest}" in first.create
    others = [
        wanted(entry + more).ranks[0].digest
        for more in ("max_model_len = 5\n", '[models.x.env]\nA = "1"\n', "privileged = true\n")
    ]
    assert len({first.digest, wanted(entry.replace('"i"', '"j"')).ranks[0].digest, *others}) == 5


def test_the_holds_are_what_the_engine_will_take() -> None:
    """A share comes from the arguments, the entry, or the engine's default; bytes from memory_gib; else it is unknown."""

    def hold(entry: str) -> tuple[int | None, int | None]:
        found = wanted(entry).ranks[0].holds[0]
        return found.share, found.bytes

    vllm = 'image = "i"\nhf_id = "a/b"\n'
    assert hold(vllm) == (920_000_000, None)
    assert hold(vllm + "gpu_memory_utilization = 0.4\n") == (400_000_000, None)
    assert hold(vllm + '[models.x.vllm]\nargs = ["--gpu-memory-utilization=0.3"]\n') == (300_000_000, None)
    llama = 'image = "i"\nwrapper = "llamacpp"\n[models.x.llamacpp]\nfile = "m.gguf"\n'
    assert hold(llama) == (None, None)
    assert hold("memory_gib = 2.5\n" + llama) == (None, 2_684_354_560)


def test_a_nim_learns_from_rank_0_where_to_meet() -> None:
    """Rank 1 of a NIM is created with the address that rank 0 printed, once, whatever colours surround it."""
    model = EXAMPLE.model("glm53")
    head, worker = recipes.allocation(EXAMPLE, model, EXAMPLE.nodes).ranks
    assert (head.learns, worker.learns, worker.learn_seconds) == ("", "NIM_PRIMARY_NODE", 600)
    assert recipes.learned(worker, "starting\n") is None
    assert recipes.learned(worker, "\x1b[32mINFO NIM_PRIMARY_NODE=10.0.0.1\x1b[0m\nNIM_PRIMARY_NODE = '10.0.0.1'\n") == "10.0.0.1"
    ready = recipes.told(worker, "10.0.0.1")
    assert environment(ready)["NIM_PRIMARY_NODE"] == "10.0.0.1" and ready.digest == worker.digest
    for log in ("NIM_PRIMARY_NODE=10.0.0.1\nNIM_PRIMARY_NODE=10.0.0.2\n", "NIM_PRIMARY_NODE=--privileged\n"):
        with pytest.raises(ValueError, match="NIM_PRIMARY_NODE"):
            recipes.learned(worker, log)


def test_sglang_and_llamacpp() -> None:
    """The two engines without an entry in the example get their own flags, and their metrics switched on."""
    both = wanted('image = "i"\nhf_id = "a/b"\nwrapper = "sglang"\nnnodes = 2\n')
    assert both.engine == "sglang"
    words = both.ranks[1].create
    assert words[words.index("i") + 1 :] == (
        "-m", "sglang.launch_server", "--model-path", "a/b", "--served-model-name", "x", "--host", "0.0.0.0", "--port", "8000",
        "--tp-size", "2", "--enable-metrics", "--nnodes", "2", "--node-rank", "1", "--dist-init-addr", "10.0.0.1:29501",
    )  # fmt: skip
    one = wanted(
        'image = "i"\nwrapper = "llamacpp"\nmax_model_len = 4096\n[models.x.llamacpp]\nfile = "g/m.gguf"\nargs = ["-ngl", "99"]\n'
    )
    words = one.ranks[0].create
    assert words[words.index("i") + 1 :] == (
        "--model", "/root/.cache/huggingface/g/m.gguf", "-ngl", "99", "--alias", "x", "--host", "0.0.0.0", "--port", "8000",
        "--ctx-size", "4096", "--metrics",
    )  # fmt: skip
    assert "/cache/g/m.gguf" in one.ranks[0].paths


def test_yue_is_an_allocation_without_containers() -> None:
    """`up yue` means every node, and no container of ours."""
    songs = recipes.allocation(EXAMPLE, EXAMPLE.model("yue"), EXAMPLE.select(None, EXAMPLE.model("yue")))
    assert (songs.mode, songs.nodes, songs.ranks) == (YUE, ("head", "worker"), ())


def test_a_derived_image_is_named_by_its_inputs() -> None:
    """Another input, another name; the start program quotes whatever a command holds."""
    model = EXAMPLE.model("qwen38-dual")
    assert model.build is not None
    name = derived.tag(model.name, model.build)
    assert name.startswith("spark-serve/qwen38-dual:")
    assert derived.tag(model.name, model.build.replace(before=())) != name
    hostile = model.build.replace(before=(("echo", "$(reboot)", "a b"),), serve=("vllm", "serve; reboot"))
    assert derived.entrypoint(hostile) == "#!/bin/sh\nset -e\necho '$(reboot)' 'a b'\nexec vllm 'serve; reboot' \"$@\"\n"
