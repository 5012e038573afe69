"""The models with their settings, and the places where each may run."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mkgguf
import pytest

from sparkguard.core.events import Model, Placement
from sparkguard.core.types import DISCRETE, RAM, UNIFIED, Machine, MemoryPool
from sparkguard.errors import SparkguardError
from sparkguard.probe.llama_server import EngineDevice, LlamaServer
from sparkguard.settings import load
from sparkguard.supervisor import devices, headers, library, runner_settings, runners_toml
from sparkguard.supervisor.library import ModelLibrary
from sparkguard.supervisor.runners_toml import ModelSettings

MIB = 1 << 20
RAM_POOL = MemoryPool("ram", RAM, 32 << 30)
CARDS = tuple(MemoryPool(f"gpu{number}", DISCRETE, 8 << 30, name="NVIDIA RTX", uuid=f"GPU-{number}") for number in range(2))
OLD_CARD = MemoryPool("gpu2", DISCRETE, 2 << 30, name="NVIDIA GT 710", uuid="GPU-2")
GB10 = MemoryPool("ram", UNIFIED, 128 << 30, name="NVIDIA GB10", uuid="GPU-x")
FOR_CPU = LlamaServer("/engine", "1", None, frozenset(), ())
FOR_CUDA = FOR_CPU.replace(devices=(EngineDevice("CUDA0", "NVIDIA RTX", 8 << 30, 7 << 30),))
Make = Callable[..., ModelLibrary]


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    mkgguf.make(folder / "a.gguf")
    return folder


@pytest.fixture
def make(models: Path, tmp_path: Path) -> Make:
    def make(
        pools: tuple[MemoryPool, ...] = (RAM_POOL,),
        server: LlamaServer = FOR_CPU,
        clock: Callable[[], float] = time.monotonic,
        **env: str,
    ) -> ModelLibrary:
        def site() -> runner_settings.RunnerSettings:
            return runner_settings.read(load({"HOME": str(tmp_path), "MODELS_DIR": str(models), **env}))

        found = devices.find(Machine(pools), server, site(), {"NVIDIA RTX": "8.9"})
        return ModelLibrary(
            site, str(tmp_path / "runners.toml"), server, lambda: found, clock, str(tmp_path / "kept" / "models.json")
        )

    return make


def scan(library: ModelLibrary) -> dict[str, Model]:
    return {model.id: model for model in asyncio.run(library.scan())}


def places(model: Model) -> list[tuple[str, int, int]]:
    return [(place.device, place.rank, place.host_expert_layers) for place in model.placements]


def test_a_model_on_the_cpu(make: Make) -> None:
    """Its needs in words and in bytes, its settings as they are."""
    found = make()
    model = scan(found)["a"]
    assert places(model) == [("cpu", 0, 0)] and model.problem is None and not model.pinned
    card = found.describe("a")
    assert card["needs"]["total_bytes"] == dict(model.placements[0].amounts)["ram"]
    assert card["needs"]["text"].startswith("7 MB for 4096 tokens of context (weights 1 MB, KV cache 1 MB")
    assert (card["context"], card["settings"]["context"], card["error"], card["warning"]) == (4096, None, None, None)


@pytest.mark.parametrize(
    ("pools", "server", "env", "wanted", "expected"),
    [
        ((*CARDS, RAM_POOL), FOR_CUDA, {}, None, [("cuda:0", 0, 0), ("cuda:1", 0, 0)]),
        ((*CARDS, RAM_POOL), FOR_CUDA, {}, "cuda:1", [("cuda:1", 0, 0)]),
        ((*CARDS, RAM_POOL), FOR_CUDA, {}, "cuda:7", "there is no cuda:7"),
        ((*CARDS, RAM_POOL), FOR_CUDA, {}, "cpu", "SPARK_CPU_RUNNERS is auto"),
        ((*CARDS, RAM_POOL), FOR_CUDA, {"SPARK_CPU_RUNNERS": "true"}, "cpu", [("cpu", 0, 0)]),
        ((*CARDS, RAM_POOL), FOR_CUDA, {"SPARK_CUDA_DEVICES": "1"}, None, [("cuda:1", 0, 0)]),
        ((*CARDS, RAM_POOL), FOR_CUDA, {"SPARK_CUDA_DEVICES": "1"}, "cuda:0", "SPARK_CUDA_DEVICES leaves it out"),
        ((*CARDS, RAM_POOL), FOR_CUDA, {"SPARK_DEVICE": "cuda:0"}, None, [("cuda:0", 0, 0)]),
        ((*CARDS, OLD_CARD, RAM_POOL), FOR_CUDA, {}, None, [("cuda:0", 0, 0), ("cuda:1", 0, 0)]),
        ((*CARDS, OLD_CARD, RAM_POOL), FOR_CUDA, {}, "cuda:2", "/engine --list-devices does not have it"),
        ((*CARDS, RAM_POOL), FOR_CPU, {}, None, [("cpu", 0, 0)]),
        ((*CARDS, RAM_POOL), FOR_CPU, {}, "cuda", "built for CUDA"),
        ((RAM_POOL,), FOR_CPU, {}, "cuda", "there is no CUDA device"),
        ((RAM_POOL,), FOR_CPU, {"SPARK_CPU_RUNNERS": "false"}, None, "SPARK_CPU_RUNNERS is false"),
        ((GB10,), FOR_CUDA, {}, None, [("cuda:0", 0, 0)]),
    ],
)
def test_where_a_model_may_run(
    pools: tuple[MemoryPool, ...],
    server: LlamaServer,
    env: dict[str, str],
    wanted: str | None,
    expected: list[tuple[str, int, int]] | str,
    make: Make,
    tmp_path: Path,
) -> None:
    """By the machine, the engine's build and the settings; where there is no place, it is 503 with the reason."""
    if wanted:
        (tmp_path / "runners.toml").write_text(f'[models.a]\ndevice = "{wanted}"\n')
    model = scan(make(pools, server, **env))["a"]
    if isinstance(expected, str):
        assert model.problem and model.problem.status == 503 and expected in model.problem.message
    else:
        assert places(model) == expected and model.problem is None


def test_a_gpu_that_the_engine_cannot_use_is_told(make: Make) -> None:
    """The model runs on the CPU with a warning; the device shows how to change that."""
    found = make((*CARDS, RAM_POOL), FOR_CPU)
    scan(found)
    assert "runs on the CPU: NVIDIA RTX: /engine cannot use it" in found.describe("a")["warning"]
    cpu, first, _ = found.devices()
    assert cpu["usable"] and not first["usable"] and "SPARK_LLAMA_SERVER" in first["reason"]
    assert (first["id"], first["pool"], first["uuid"], first["compute_capability"]) == ("cuda:0", "gpu0", "GPU-0", "8.9")


def test_unified_memory_is_one_pool(make: Make) -> None:
    """What lies on the device and on the host is taken of the same memory."""
    model = scan(make((GB10,), FOR_CUDA))["a"]
    assert [pool for pool, _ in model.placements[0].amounts] == ["ram"]


def test_experts_move_to_the_host(make: Make, models: Path) -> None:
    """Layer by layer from the first, each a way behind the one before; never on unified memory, nor when told not to."""
    mkgguf.make(models / "moe.gguf", experts=4, layers=3)
    ways = scan(make((CARDS[0], RAM_POOL), FOR_CUDA))["moe"].placements
    assert [(way.rank, way.host_expert_layers) for way in ways] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    on_gpu = [dict(way.amounts)["gpu0"] for way in ways]
    size = 4 * 3 * 128 * 64 * 2  # experts x matrices x hidden x width x f16
    assert [one - two for one, two in itertools.pairwise(on_gpu[1:])] == [size, size] and on_gpu[0] > on_gpu[1]
    assert len(scan(make((GB10,), FOR_CUDA))["moe"].placements) == 1
    assert len(scan(make((CARDS[0], RAM_POOL), FOR_CUDA, SPARK_HOST_EXPERTS="false"))["moe"].placements) == 1


def test_an_engine_with_a_cache_of_experts(make: Make, models: Path) -> None:
    """A share of what is on the host is kept on the GPU as well, counted there and passed; none that is too small to use."""
    mkgguf.make(models / "moe.gguf", experts=4, layers=12, width=256, hidden=512)
    size = 4 * 3 * 512 * 256 * 2  # experts x matrices x hidden x width x f16: 3 MiB a layer
    caching = FOR_CUDA.replace(flags=frozenset({"--moe-cache-mib"}))
    without = scan(make((CARDS[0], RAM_POOL), FOR_CUDA))["moe"].placements
    found = make((CARDS[0], RAM_POOL), caching)
    ways = scan(found)["moe"].placements
    assert [way.expert_cache_mib for way in ways[:8]] == [0, 0, 0, 0, 0, 2, 2, 3]
    assert ways[10].expert_cache_mib == 3 == -(-10 * size // 10 // MIB)
    assert dict(ways[10].amounts)["gpu0"] == dict(without[10].amounts)["gpu0"] + 3 * MIB
    assert dict(ways[10].amounts)["ram"] == dict(without[10].amounts)["ram"]
    words = found.start("moe", ways[10]).arguments
    assert words[words.index("--moe-cache-mib") + 1] == "3"
    assert "--moe-cache-mib" not in found.start("moe", ways[2]).arguments
    none = scan(make((CARDS[0], RAM_POOL), caching, SPARK_EXPERT_CACHE_PERCENT="0"))["moe"].placements
    assert [way.amounts for way in none] == [way.amounts for way in without]


def test_a_tensor_of_a_strange_name_is_no_expert(make: Make, models: Path) -> None:
    """A damaged name stops neither the model nor the list of all of them."""
    file = mkgguf.make(models / "moe.gguf", experts=4)
    file.write_bytes(file.read_bytes().replace(b"blk.0.ffn_gate_exps.weight", b"blk.0_ffn_gate_exps_weight"))
    assert [model.placements != () for model in scan(make((CARDS[0], RAM_POOL), FOR_CUDA)).values()] == [True, True]


def test_what_is_started(make: Make, models: Path) -> None:
    """The model's settings and the placement's, on the GPU by its UUID, counted for its pool."""
    mkgguf.make(models / "moe.gguf", experts=4)
    found = make((CARDS[0], RAM_POOL), FOR_CUDA, SPARK_THREADS="3")
    ways = scan(found)["moe"].placements
    start = found.start("moe", ways[1])
    assert (start.device, start.file, start.engine) == ("cuda:GPU-0", f"{models}/moe.gguf", "/engine")
    assert start.pools == {"host": "ram", "device": "gpu0"}
    words = " ".join(start.arguments)
    assert start.memory_max == dict(ways[1].amounts)["ram"] + (1 << 30)
    assert "--n-cpu-moe 1" in words and "--threads 3" in words and "--n-gpu-layers 999" in words


def test_threads_are_those_of_the_share(make: Make) -> None:
    """llama.cpp itself would count all cores of the machine, those that it may not use too."""
    found = make(VLLM_CPU_SHARE="0.000001")
    start = found.start("a", scan(found)["a"].placements[0])
    assert start.arguments[start.arguments.index("--threads") + 1] == "1"


def test_an_engine_without_a_cache_of_experts(make: Make, models: Path) -> None:
    """It is said where it matters: at a mixture of experts that is larger than the GPU."""
    mkgguf.make(models / "moe.gguf", experts=4)
    small = MemoryPool("gpu0", DISCRETE, MIB, name="NVIDIA RTX", uuid="GPU-0")
    caching = FOR_CUDA.replace(flags=frozenset({"--moe-cache-mib"}))
    for card, server, said in ((small, FOR_CUDA, True), (CARDS[0], FOR_CUDA, False), (small, caching, False)):
        found = make((card, RAM_POOL), server)
        scan(found)
        assert ("SPARK_EXPERT_CACHE_PERCENT" in (found.describe("moe")["warning"] or "")) == said


def test_a_patch(make: Make) -> None:
    """It is written, counted at the next scan, and a bad one changes nothing."""
    found = make()
    before = scan(found)["a"]
    asyncio.run(found.patch("a", {"context": 8192, "aliases": ["x"], "unload_when_idle": False, "parallel": 2}))
    after = scan(found)["a"]
    assert after.pinned and after.parallel == 2 and after.version != before.version
    assert after.placements[0].amounts > before.placements[0].amounts and found.resolve("x") == "a"
    with pytest.raises(SparkguardError):
        asyncio.run(found.patch("a", {"context": "many"}))
    for aliases in (5, [["x"]], {"x": 1}):
        with pytest.raises(SparkguardError, match="aliases of model 'a'"):
            asyncio.run(found.patch("a", {"aliases": aliases}))
    with pytest.raises(SparkguardError):
        asyncio.run(found.patch("none", {"context": 1}))
    assert scan(found)["a"] == after


def test_patches_at_once_are_all_kept(make: Make, models: Path, tmp_path: Path) -> None:
    """Each reads the file and writes it whole: none may write what was there before another."""
    for name in "bcd":
        mkgguf.make(models / f"{name}.gguf")
    found = make()
    scan(found)
    changes = [{"threads": 1}, {"context": 512}, {"parallel": 2}, {"unload_when_idle": False}]

    async def test() -> None:
        await asyncio.gather(*(found.patch(id, change) for change in changes for id in "abcd"))

    asyncio.run(test())
    written = runners_toml.read(str(tmp_path / "runners.toml"))
    wanted = ModelSettings(threads=1, context=512, parallel=2, unload_when_idle=False)
    assert written == dict.fromkeys("abcd", wanted)


def test_scans_at_once_follow_each_other(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier one that ends later would bring back what has changed since."""
    found = make()
    both, met = threading.Barrier(2), []
    read = runners_toml.read

    def reads(path: str) -> dict[str, ModelSettings]:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.2)
            met.append(path)
        return read(path)

    monkeypatch.setattr(runners_toml, "read", reads)

    async def test() -> None:
        await asyncio.gather(found.scan(), found.scan())

    asyncio.run(test())
    assert met == []


def test_a_mistake_is_told_once(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And again only when the file has changed: a watch that found it new each time would fill the log."""
    monkeypatch.setattr(library, "WATCH_SECONDS", 0.02)
    found = make()
    toml = tmp_path / "runners.toml"
    told = 0

    async def test() -> None:
        nonlocal told
        await found.scan()
        toml.write_text("[models.a\n")
        watching = asyncio.create_task(watch())
        while not told:
            await asyncio.sleep(0)
        toml.write_text("[models.a]\ncontext = 512\n")
        await asyncio.wait_for(watching, 20)

    async def watch() -> None:
        nonlocal told
        while True:
            await found.watch()
            try:
                await found.scan()
                return
            except SparkguardError:
                told += 1

    asyncio.run(test())
    assert told == 1 and found.describe("a")["context"] == 512


def test_a_scan_that_nobody_waits_for_any_more_is_made_up_for(make: Make, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client whose change is written, and who then leaves: the change counts all the same."""
    monkeypatch.setattr(library, "WATCH_SECONDS", 0.02)
    found = make()
    reading, go_on = threading.Event(), threading.Event()
    read = runners_toml.read

    def reads(path: str) -> dict[str, ModelSettings]:
        reading.set()
        go_on.wait(20)
        return read(path)

    async def test() -> None:
        await found.scan()
        mkgguf.make(models / "b.gguf")
        monkeypatch.setattr(runners_toml, "read", reads)
        left = asyncio.create_task(found.scan())
        await asyncio.to_thread(reading.wait, 20)
        left.cancel()
        await asyncio.wait({left})
        go_on.set()
        await asyncio.wait_for(found.watch(), 20)
        assert [model.id for model in await found.scan()] == ["a", "b"]

    asyncio.run(test())


@pytest.mark.parametrize("flag", ["--log-file", "--log_file", "--tools", "--chat-template-file"])
def test_arguments_that_reach_files_are_not_taken_from_the_net(make: Make, tmp_path: Path, flag: str) -> None:
    """Whoever reaches the port could write any file of ours; who may write runners.toml can do so anyway."""
    found = make()
    scan(found)
    with pytest.raises(SparkguardError, match=f"args has {flag}, which reaches files or machines"):
        asyncio.run(found.patch("a", {"args": [flag, "x"]}))
    (tmp_path / "runners.toml").write_text(f'[models.a]\nargs = ["{flag}", "x"]\n')
    assert scan(found)["a"].problem is None
    asyncio.run(found.patch("a", {"args": [flag, "x"], "threads": 1}))
    with pytest.raises(SparkguardError, match="reaches files or machines"):
        asyncio.run(found.patch("a", {"args": [flag, "y"]}))
    assert scan(found)["a"].problem is None and found.describe("a")["settings"]["args"] == [flag, "x"]


def test_names(make: Make, models: Path) -> None:
    """An id, an alias, a file's name or stem; not one that could mean two."""
    for folder in ("x", "y"):
        (models / folder).mkdir()
        mkgguf.make(models / folder / "b.gguf")
    mkgguf.make(models / "x" / "c.gguf")
    found = make()
    scan(found)
    names = {name: found.resolve(name) for name in ("a", "a.gguf", "x/b", "b", "c", "c.gguf", "nobody")}
    assert names == {"a": "a", "a.gguf": "a", "x/b": "x/b", "b": None, "c": "x/c", "c.gguf": "x/c", "nobody": None}


def test_what_is_no_model_is_not_listed_and_what_is_damaged_is(make: Make, models: Path) -> None:
    """An adapter belongs to a model; a damaged file has its problem."""
    mkgguf.make_adapter(models / "adapter.gguf")
    (models / "broken.gguf").write_bytes((models / "a.gguf").read_bytes()[:1000])
    (models / "empty.gguf").touch()
    found = make()
    models_now = scan(found)
    assert models_now.keys() == {"a", "broken", "empty"}
    for id in ("broken", "empty"):
        problem = models_now[id].problem
        assert problem and (problem.status, problem.code) == (500, "bad_file") and found.describe(id)["error"] == problem.message


@pytest.mark.parametrize("name", [b"latin \xfc.gguf", b"two\nlines.gguf"])
def test_a_name_that_no_answer_can_carry_is_told(make: Make, models: Path, name: bytes) -> None:
    """The model is listed with what to do; the others are as they were, and names beyond ASCII are fine."""
    os.rename(models / "a.gguf", os.fsencode(models) + b"/" + name)
    mkgguf.make(models / "ü 模 'q'.gguf")
    strange, plain = scan(make()).values()
    assert strange.problem is not None and strange.problem.message.endswith("rename it") and plain.problem is None


def test_an_adapter_is_counted(make: Make, models: Path) -> None:
    """Each takes memory, used or not."""
    mkgguf.make_adapter(models / "adapter.gguf")
    found = make()
    before = scan(found)["a"]
    asyncio.run(found.patch("a", {"lora": ["adapter.gguf"]}))
    after = scan(found)["a"]
    size = 2 * 2 * 4 * 64 * 4  # layers x matrices x rank x width x f32
    assert dict(after.placements[0].amounts)["ram"] == dict(before.placements[0].amounts)["ram"] + size
    assert f"--lora {models}/adapter.gguf" in " ".join(found.start("a", after.placements[0]).arguments)


def test_a_file_elsewhere(make: Make, models: Path, tmp_path: Path) -> None:
    """A table may name a file outside the folder; one that is not there is a problem with its path."""
    mkgguf.make(tmp_path / "far.gguf")
    (tmp_path / "runners.toml").write_text(f'[models.far]\nfile = "{tmp_path}/far.gguf"\n[models.gone]\nfile = "gone.gguf"\n')
    found = scan(make())
    assert found["far"].problem is None and found["gone"].problem and "gone.gguf" in found["gone"].problem.message


@pytest.mark.parametrize("room", [0, 3 * MIB, 5 * MIB, 1 << 40])
def test_the_largest_context(room: int, make: Make) -> None:
    """What is said to fit fits, and one step more does not, or is more than the model was trained for."""
    found = make()
    scan(found)
    largest = found.largest_context("a", [{"ram": 0}, {"ram": room}])
    if room == 0:
        assert largest is None
        return
    assert largest is not None and largest % 256 == 0

    def takes(context: int) -> int:
        asyncio.run(found.patch("a", {"context": context}))
        return dict(scan(found)["a"].placements[0].amounts)["ram"]

    assert takes(largest) <= room and (largest == 2048 or takes(largest + 256) > room)


def test_a_new_file_is_noticed(make: Make, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a removed one; a file that still grows is waited for."""
    monkeypatch.setattr(library, "WATCH_SECONDS", 0.02)
    found = make()

    async def test() -> None:
        await found.scan()
        waiting = asyncio.create_task(found.watch())
        mkgguf.make(models / "b.gguf")
        await asyncio.wait_for(waiting, 20)
        assert [model.id for model in await found.scan()] == ["a", "b"]
        os.unlink(models / "a.gguf")
        await asyncio.wait_for(found.watch(), 20)
        assert [model.id for model in await found.scan()] == ["b"]

    asyncio.run(test())


def test_what_has_not_changed_is_not_read_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library of hundreds of models is looked through every two seconds."""
    found = make()
    first = scan(found)
    read: list[Any] = []
    monkeypatch.setattr(headers, "read_model", read.append)
    assert scan(found) == first and read == []


def test_many_models_are_listed_at_once(make: Make, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose headers are not read yet are there with a problem that passes; who is asked for is read first."""
    mkgguf.make(models / "b.gguf")
    mkgguf.make(models / "c.gguf")
    times = itertools.count()
    monkeypatch.setattr(library, "LIST_SECONDS", 0.5)  # less than a tick of that clock: no time for anybody
    found = make(clock=lambda: next(times))
    first = scan(found)
    assert {model.problem and model.problem.code for model in first.values()} == {"not_read_yet"} and len(first) == 3
    assert found.describe("a")["needs"] is None and found.resolve("a") == "a"
    asyncio.run(found.watch())  # does not wait
    monkeypatch.setattr(library, "LIST_SECONDS", 1.5)  # time for one
    assert [id for id, model in scan(found).items() if model.problem is None] == ["a"]
    monkeypatch.setattr(library, "LIST_SECONDS", 100.0)
    last = scan(found)
    assert all(model.problem is None for model in last.values())
    assert {id: model.version for id, model in last.items()} == {id: model.version for id, model in first.items()}


def test_a_folder_that_is_too_large_is_told(make: Make, models: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In the list, and once in the log, for as long as it is so."""
    deep = models.joinpath(*"123456789")
    deep.mkdir(parents=True)
    found = make()
    scan(found)
    scan(found)
    assert found.warning() == f"folders more than 8 deep were not looked at, as {deep}" == caplog.messages[0]
    assert len(caplog.messages) == 1
    deep.rmdir()
    scan(found)
    assert found.warning() is None


def test_a_folder_that_cannot_be_read_is_told(make: Make, models: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A disk that is not mounted, or a slip of the pen, looks like a folder without models."""
    found = make()
    assert scan(found) and found.warning() is None
    models.rename(models.with_name("gone"))
    assert scan(found) == {}
    assert found.warning() == f"{models} cannot be read: No such file or directory" == caplog.messages[0]
    models.with_name("gone").rename(models)
    assert scan(found) and found.warning() is None


def test_a_start_of_what_cannot_start(make: Make, models: Path) -> None:
    """Raises with the reason, should anybody ask."""
    (models / "empty.gguf").touch()
    found = make()
    scan(found)
    with pytest.raises(SparkguardError, match=r"empty\.gguf"):
        found.start("empty", Placement("cpu", ()))
    with pytest.raises(SparkguardError, match="cuda:0 is there no more"):
        found.start("a", Placement("cuda:0", ()))


@pytest.mark.parametrize("lines", ['kv_type = "q8_0"\nargs = "-fa off"', 'args = "--ubatch-size many"', 'args = "-b 0"'])
def test_settings_that_nobody_can_have_are_told_before_a_start(make: Make, tmp_path: Path, lines: str) -> None:
    """It is not the file that is bad."""
    (tmp_path / "runners.toml").write_text(f"[models.a]\n{lines}\n")
    problem = scan(make())["a"].problem
    assert problem and (problem.status, problem.code) == (500, "bad_settings")


def test_further_arguments_are_in_the_needs(make: Make, tmp_path: Path) -> None:
    """A larger batch takes more, a smaller one less, and what cannot be counted is a warning."""
    found = make()
    usual = amounts(scan(found)["a"])
    (tmp_path / "runners.toml").write_text(
        '[models.a]\nargs = ["--batch-size", "2048", "-ub", "2048", "--ctx-checkpoints", "4"]\n'
    )
    assert amounts(scan(found)["a"]) > usual
    assert "not counted: copies of states that it keeps in host memory (--ctx-checkpoints)" in found.describe("a")["warning"]


def amounts(model: Model) -> int:
    return sum(amount for _, amount in model.placements[0].amounts)
