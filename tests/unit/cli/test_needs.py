"""sparkguard needs: its JSON, its words, and its judgement of the machine."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llama_server
import pytest
from gguf_shapes import dense

from sparkguard.cli import main
from sparkguard.cli.needs import FIELDS, collect, describe
from sparkguard.core.estimate import Ask, estimate
from sparkguard.core.placement import best_device, in_words, place
from sparkguard.core.reserve import runner_reserve
from sparkguard.core.types import DISCRETE, RAM, UNIFIED, MemoryPool
from sparkguard.errors import CONFIG, USAGE
from sparkguard.probe.gguf import read_model

if TYPE_CHECKING:
    from conftest import Place

MIB, GIB = 1 << 20, 1 << 30
KEYS = {
    *FIELDS,
    *("schema_version", "file", "architecture", "context", "engine_build", "devices", "fits", "pools"),
    *("estimated", "doubts", "summary"),
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "a model.gguf"
    dense("llama", 2, 256, 4, 2, 64, 512, 1000, 8192).write(path)
    return path


def run(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["needs", *words, "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_one_object(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All keys, and sums that add up over the parts and over the devices."""
    answer = run(capsys, str(model), "--device", "cpu")
    assert set(answer) == KEYS
    assert answer["total_bytes"] == sum(answer[field] for field in FIELDS if field != "total_bytes")
    for field in FIELDS:
        assert answer[field] == sum(part[field] for part in answer["devices"])
    assert (answer["architecture"], answer["context"], answer["fits"], answer["estimated"]) == ("llama", 4096, True, False)


def test_its_options_are_the_engines(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each option reaches the estimate: the same numbers as when it is asked itself."""
    words = "--context 8192 --parallel 2 --kv-type q8_0 --ubatch 1024 --engine-build 10068 --device gpu --cpu-moe-layers 1"
    answer = run(capsys, str(model), *words.split())
    ask = Ask(context=8192, parallel=2, key_type="q8_0", value_type="q8_0", ubatch=1024, build=10068, on_device=True)
    needs = estimate(read_model(str(model)), ask.replace(cpu_moe_layers=1))
    assert [answer[field] for field in FIELDS[:-1]] == [needs.sum_of(field) for field in FIELDS[:-1]]
    off = run(capsys, str(model), "--flash-attn", "off", "--device", "cpu")
    assert off["compute_bytes"] == estimate(read_model(str(model)), Ask(flash_attention=False)).sum_of("compute_bytes")
    words = "--ubatch 1024 --args '-ub 256 --cache-ram 10 --temp 1' --device cpu"
    further = run(capsys, str(model), *shlex.split(words))
    assert further["compute_bytes"] == estimate(read_model(str(model)), Ask(ubatch=256)).sum_of("compute_bytes")
    assert further["prompt_cache_bytes"] == 10 * MIB
    drafted = run(capsys, str(model), "--draft", str(model), "--device", "cpu")
    assert drafted["kv_cache_bytes"] == 2 * off["kv_cache_bytes"]
    adapted = run(capsys, str(model), "--lora", str(model), "--projector", str(model), "--device", "cpu")
    assert adapted["projector_bytes"] > 0
    assert adapted["weights_bytes"] > answer["weights_bytes"] // 2
    assert adapted["doubts"]


def test_in_words(tmp_path: Path) -> None:
    """As on the model page: the sum, the context, and what it is made of, in MB of 2^20 bytes, rounded up."""
    path = llama_server.shape_file(tmp_path, "llama-8b")
    words = in_words(estimate(read_model(str(path)), Ask()))
    assert words == "5208 MB for 4096 tokens of context (weights 4567 MB, KV cache 512 MB, work buffers 129 MB, output 1 MB)"


def test_for_people(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The sentence, each pool's sum, and the judgement."""
    assert main(["needs", str(model), "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "MB for 4096 tokens of context (weights " in lines[0]
    assert lines[1].startswith("ram: wants ")
    assert "and keeps 1024 MB (SPARK_MEMORY_RESERVE_MB)" in lines[1]
    assert lines[-1] == "It fits now."


def test_what_does_not_fit_is_status_0(place: Place, model: Path) -> None:
    """The question is answered, so nothing failed: the answer says how much is too little."""
    answer = collect(str(model), Ask(context=1 << 30), None, (), "auto", place.env, place.roots)
    assert answer["fits"] is False
    pool = answer["pools"][0]
    assert pool["short_bytes"] == pool["wanted_bytes"] + pool["reserve_bytes"] - pool["available_bytes"] > 0
    assert "It does not fit now." in describe(answer)


def test_a_gpu_that_is_not_there_fits_nothing(place: Place, model: Path) -> None:
    """--device gpu on a machine without one still tells what it would take."""
    answer = collect(str(model), Ask(), None, (), "gpu", place.env, place.roots)
    assert [part["device"] for part in answer["devices"]] == ["cpu", "gpu"]
    assert answer["fits"] is False


def test_a_doubt_is_said(place: Place, tmp_path: Path) -> None:
    """An architecture that nobody knows is estimated, and the reason is in the JSON and in the text."""
    path = tmp_path / "new.gguf"
    dense("new-kind", 2, 256, 4, 2, 64, 512, 1000, 8192).write(path)
    answer = collect(str(path), Ask(), None, (), "cpu", place.env, place.roots)
    assert answer["estimated"] is True
    assert "new-kind" in answer["doubts"][0]
    assert "Estimated: the architecture new-kind" in describe(answer)


def test_an_argument_that_is_not_counted_is_said(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And so is a build that nobody here has measured."""
    assert main(["needs", str(model), "--device", "cpu", "--args", "--rpc here:1", "--engine-build", "12000"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "Not counted: memory of other machines (--rpc)." in lines
    assert lines[-1] == "Estimated: build 12000 is not known: estimated as build 11434."


def test_the_engine_that_is_there(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """--engine-build installed asks it."""
    server = tmp_path / "llama-server"
    server.write_text("#!/bin/sh\necho 'version: 10068 (571d0d5)' >&2\n")
    server.chmod(0o755)
    monkeypatch.setenv("SPARK_LLAMA_SERVER", str(server))
    assert run(capsys, str(model), "--engine-build", "installed")["engine_build"] == 10068
    assert run(capsys, str(model))["engine_build"] == 11434


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["none.gguf"], CONFIG),
        ([], USAGE),
        (["MODEL", "--kv-type", "q9"], USAGE),
        (["MODEL", "--context", "-1"], USAGE),
        (["MODEL", "--kv-type", "q8_0", "--flash-attn", "off"], USAGE),
        (["MODEL", "--args", "-ub many"], USAGE),
        (["MODEL", "--args", "--version"], USAGE),
        (["MODEL", "--args", "'"], USAGE),
        (["MODEL", "--engine-build", "new"], USAGE),
    ],
)
def test_what_it_refuses(model: Path, words: list[str], status: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Bad usage and bad files, on stderr, with an empty stdout."""
    assert main(["needs", *(str(model) if word == "MODEL" else word for word in words)]) == status
    out, err = capsys.readouterr()
    assert (out, bool(err)) == ("", True)


def test_reserves() -> None:
    """As the supervisor: the host keeps 1024 MB, however large it is; a GPU the larger of 512 MB and a sixteenth."""
    assert runner_reserve(MemoryPool("ram", RAM, 16 * GIB)) == 1024 * MIB
    assert runner_reserve(MemoryPool("ram", RAM, 400 * GIB)) == 1024 * MIB
    assert runner_reserve(MemoryPool("gpu0", DISCRETE, 80 * GIB), card_bytes=MIB) == MIB
    assert runner_reserve(MemoryPool("ram", UNIFIED, 128 * GIB), 2 * GIB) == 2 * GIB
    assert runner_reserve(MemoryPool("gpu0", DISCRETE, 4 * GIB), 2 * GIB) == 512 * MIB
    assert runner_reserve(MemoryPool("gpu0", DISCRETE, 80 * GIB)) == 5 * GIB


def test_unified_memory_is_one_pool_with_one_reserve(model: Path) -> None:
    """What would be on the GPU and what would be on the host come from the same memory."""
    pool = MemoryPool("ram", UNIFIED, 120 * GIB, 100 * GIB)
    needs = estimate(read_model(str(model)), Ask(on_device=True))
    (placed,) = place(needs, (pool,), best_device((pool,)))
    assert (placed.wanted_bytes, placed.reserve_bytes, placed.short_bytes) == (needs.total_bytes, GIB, 0)


def test_a_model_goes_to_one_gpu_with_the_rest_on_the_host(model: Path) -> None:
    """The card with the most free memory; its pool and the host's are judged each for itself."""
    pools = (
        MemoryPool("gpu0", DISCRETE, 24 * GIB, 2 * GIB),
        MemoryPool("gpu1", DISCRETE, 24 * GIB, 20 * GIB),
        MemoryPool("ram", RAM, 20 * GIB, 10 * MIB),
    )
    needs = estimate(read_model(str(model)), Ask(on_device=True))
    device = best_device(pools)
    assert device is not None
    assert device.id == "gpu1"
    gpu, ram = place(needs, pools, device)
    assert (gpu.pool.id, gpu.short_bytes, ram.pool.id) == ("gpu1", 0, "ram")
    assert ram.short_bytes == needs.devices[0].total_bytes + 1024 * MIB - 10 * MIB
