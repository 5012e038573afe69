"""What a model needs: against what real engines planned, and against what no engine would load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf_shapes
import llama_server
import pytest
from gguf_shapes import Maker, dense, sparse
from hypothesis import given
from hypothesis import strategies as st

from sparkguard.core import compute
from sparkguard.core.estimate import Ask, Needs, estimate
from sparkguard.errors import CONFIG, USAGE, SparkguardError
from sparkguard.probe.gguf import read_model

REPOSITORY = Path(__file__).parents[3]
DATA = REPOSITORY / "tests" / "data" / "gguf"
TOOL = REPOSITORY / "tests" / "tools" / "plans.py"
PLANS = {int(path.stem.removeprefix("plans-")): json.loads(path.read_text()) for path in sorted(DATA.glob("plans-*.json"))}
MIB = 1 << 20
Need = Callable[..., Needs]


@pytest.fixture
def need(tmp_path: Path) -> Need:
    def need(maker: Maker, **changes: object) -> Needs:
        maker.write(tmp_path / "model.gguf")
        return estimate(read_model(str(tmp_path / "model.gguf")), Ask().replace(**changes))

    return need


def small(**keys: object) -> Maker:
    return dense("llama", 2, 64, 4, 2, 16, 128, 1000, 8192, **keys)  # type: ignore[arg-type]


def small_moe(**more: object) -> Maker:
    return sparse("qwen3moe", 4, 64, 4, 2, 16, 8, 2, 32, 1000, 8192, **more)  # type: ignore[arg-type]


def test_both_engines_are_recorded() -> None:
    """The oldest and the newest known build have planned every shape with every setting."""
    assert sorted(PLANS) == [10068, 11434]
    for plans in PLANS.values():
        assert set(plans) == set(gguf_shapes.SHAPES)
        assert all(set(settings) == set(llama_server.SETTINGS) for settings in plans.values())


@pytest.mark.parametrize("build", PLANS)
@pytest.mark.parametrize("shape", gguf_shapes.SHAPES)
def test_it_is_what_the_engine_planned(shape: str, build: int, tmp_path: Path) -> None:
    """Weights and caches as printed, work buffers within 10 % or 24 MB, on each device, with every setting."""
    model = llama_server.shape_file(tmp_path, shape)
    wrong = {}
    for setting, plan in PLANS[build][shape].items():
        if plan is not None:
            found = llama_server.differences(
                llama_server.estimated(model, setting, build), {k: tuple(v) for k, v in plan.items()}
            )
            if found:
                wrong[setting] = found
    assert wrong == {}


def test_the_tables_of_the_docs_are_current() -> None:
    """docs/needs.md ends with what the tool prints."""
    printed = subprocess.run([sys.executable, TOOL, "table"], capture_output=True, text=True, check=True).stdout
    assert (REPOSITORY / "docs" / "needs.md").read_text().endswith(f"\n{printed.strip()}\n")


@pytest.mark.parametrize("shape", gguf_shapes.SHAPES)
def test_layers_that_are_left_out_change_nothing(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What few layers tell of all of them is what all of them tell, to the byte."""
    model = read_model(str(llama_server.shape_file(tmp_path, shape)))
    asks = [
        Ask(),
        Ask(context=32768, flash_attention=False, parallel=4),
        Ask(build=10068, ubatch=2048, key_type="q8_0", value_type="q8_0"),
        Ask(on_device=True, cpu_moe_layers=3),
        Ask(on_device=True, build=10068, cpu_moe_layers=100),
    ]
    few = [estimate(model, ask) for ask in asks]
    monkeypatch.setattr(compute, "_CHOICES", (compute._all,))
    assert few == [estimate(model, ask) for ask in asks]


@given(st.data())
def test_layers_in_any_order_are_laid_out_rightly(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """However layers of several kinds follow each other, those that are left out change nothing."""
    kinds = st.sampled_from(["plain", "unnormed", "wide"])
    begin, period, end = (data.draw(st.lists(kinds, min_size=1, max_size=most)) for most in (6, 5, 6))
    row = [*begin, *period * 40][: 40 - len(end)] + end
    maker = sparse("qwen3moe", 40, 64, 4, 2, 16, 8, 2, 32, 1000, 8192)
    tensors = []
    for name, shape, kind in maker.tensors:
        layer = row[int(name.split(".")[1])] if name.startswith("blk.") else ""
        if layer == "wide" and "_exps" in name:
            shape = tuple(96 if extent == 32 else extent for extent in shape)
        if not (layer == "unnormed" and "_norm" in name and "ffn" not in name):
            tensors.append((name, shape, kind))
    maker.tensors = tensors
    path = tmp_path_factory.getbasetemp() / f"row-{os.getpid()}.gguf"
    maker.write(path)
    model = read_model(str(path))
    device, flash, on_host = data.draw(st.booleans()), data.draw(st.booleans()), data.draw(st.integers(0, 9))
    ask = Ask(on_device=device, flash_attention=flash, cpu_moe_layers=on_host)
    few = estimate(model, ask)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compute, "_CHOICES", (compute._all,))
        assert few == estimate(model, ask)


@pytest.mark.parametrize("shape", gguf_shapes.SHAPES)
def test_a_graph_that_is_too_large_is_nearly_right(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of each kind stand for all: work buffers differ by 16 MB or 4 % at most, the rest not at all."""
    model = read_model(str(llama_server.shape_file(tmp_path, shape)))
    for ask in (Ask(), Ask(context=32768, flash_attention=False), Ask(context=32768, ubatch=2048)):
        whole = estimate(model, ask)
        with monkeypatch.context() as patch:
            patch.setattr(compute, "_CHOICES", (compute._two_of_each,))
            nearly = estimate(model, ask)
        assert abs(whole.total_bytes - nearly.total_bytes) <= max(16 * MIB, 0.04 * whole.sum_of("compute_bytes"))
        assert whole.sum_of("weights_bytes") == nearly.sum_of("weights_bytes")
        assert whole.sum_of("kv_cache_bytes") == nearly.sum_of("kv_cache_bytes")


def test_few_plans_are_missing() -> None:
    """A build that cannot load a shape, or not on a stand-in for a GPU, is an exception: else nothing would be compared."""
    missing = [plan for plans in PLANS.values() for settings in plans.values() for plan in settings.values() if plan is None]
    total = sum(len(settings) for plans in PLANS.values() for settings in plans.values())
    assert len(missing) <= 0.05 * total


def test_the_worked_example() -> None:
    """KV cache of a Llama 8B: 32 layers, keys and values of 8 heads of 128 halves, for each token."""
    plan = PLANS[11434]["llama-8b"]["32768"]["host"]
    assert plan[1] * MIB == 32 * 2 * 8 * 128 * 2 * 32768


@pytest.mark.parametrize(
    ("shape", "changes", "mib"),
    [
        ("llama-8b", {"context": 131072}, 16384),
        ("llama-8b", {"context": 32768, "key_type": "q4_0", "value_type": "q4_0"}, 1152),
        ("llama-8b", {"context": 32768, "parallel": 4, "unified_cache": True}, 4096),
        ("llama-70b", {"context": 131072}, 40960),
        ("gemma3-12b", {"context": 131072}, 8672),
        ("gemma3-12b", {"context": 32768, "parallel": 4}, 3968),
        ("gemma3-12b", {"context": 32768, "ubatch": 2048}, 3008),
        ("gpt-oss-20b", {"context": 32768, "parallel": 4}, 840),
        ("deepseek2-lite", {"context": 32768}, 972),
        ("deepseek2-lite-old", {"context": 32768}, 8640),
    ],
)
def test_caches_that_were_measured_with_yet_another_build(
    shape: str, changes: dict[str, object], mib: int, tmp_path: Path
) -> None:
    """What build 10092 printed, in MB: contexts and types beside those that are recorded."""
    needs = estimate(read_model(str(llama_server.shape_file(tmp_path, shape))), Ask().replace(**changes))
    assert needs.sum_of("kv_cache_bytes") // MIB == mib


def test_context_0_is_the_models_own(need: Need) -> None:
    """As --ctx-size 0 is for the engine."""
    assert need(small(), context=0).context == 8192


def test_a_context_is_rounded_as_the_engine_does(need: Need) -> None:
    """To 256 tokens for each sequence."""
    assert need(small(), context=1000).context == 1024
    assert need(small(), context=1000, parallel=3).context == 3 * 512
    assert need(small(), context=1000, parallel=3, unified_cache=True).context == 1024


def test_a_tied_output_is_there_twice_only_on_a_device(need: Need) -> None:
    """The embedding stays on the host, and the device has a copy as its output."""
    embedding = 64 * 1000 // 32 * 34
    tied, own = small(tied=True), small()
    assert need(own).sum_of("weights_bytes") - need(tied).sum_of("weights_bytes") == embedding
    on_device = need(tied, on_device=True)
    assert on_device.sum_of("weights_bytes") - need(tied).sum_of("weights_bytes") == embedding
    assert [part.weights_bytes for part in on_device.devices if part.device == "host"] == [embedding]


def test_experts_of_the_first_layers_stay_on_the_host(need: Need) -> None:
    """Their bytes, and no others, move from the device to the host."""
    all_there = need(small_moe(), on_device=True)
    two_here = need(small_moe(), on_device=True, cpu_moe_layers=2)
    experts = 2 * 3 * 8 * (64 * 32 // 32 * 34)
    host, device = two_here.devices
    assert host.weights_bytes - all_there.devices[0].weights_bytes == experts
    assert all_there.devices[1].weights_bytes - device.weights_bytes == experts


def test_experts_on_the_host_come_to_the_device_to_work(tmp_path: Path) -> None:
    """One tensor of them at a time: build 10068's Vulkan device had 88 MB of work buffer without, and 172 MB with them."""
    model = read_model(str(llama_server.shape_file(tmp_path, "qwen3moe-30b")))
    without, some, all_layers = (estimate(model, Ask(on_device=True, cpu_moe_layers=count)).devices[1] for count in (0, 8, 48))
    assert some.compute_bytes - without.compute_bytes == (172 - 88) * MIB
    assert all_layers.compute_bytes == some.compute_bytes


def test_layers_for_predicting_are_not_loaded(need: Need) -> None:
    """A file with one more layer, which predicts further tokens, needs what it would without."""
    assert need(small_moe(predicted=1)).total_bytes == need(small_moe()).total_bytes


def test_state_does_not_grow_with_the_context(tmp_path: Path) -> None:
    """Mamba keeps a state for each sequence, whatever the context."""
    model = read_model(str(llama_server.shape_file(tmp_path, "mamba-2.8b")))
    one, long, four = (estimate(model, ask) for ask in (Ask(), Ask(context=65536), Ask(parallel=4)))
    assert one.sum_of("state_bytes") == long.sum_of("state_bytes") == four.sum_of("state_bytes") // 4 > 0
    assert one.sum_of("kv_cache_bytes") == 0


def test_a_projector_and_adapters_are_added(tmp_path: Path) -> None:
    """Their tensors' bytes; that a projector also works is said, since that is not counted."""
    small().write(tmp_path / "model.gguf")
    small_moe().write(tmp_path / "other.gguf")
    model, other = (read_model(str(tmp_path / name)) for name in ("model.gguf", "other.gguf"))
    bytes_of = sum(-(-stored.bytes // 32) * 32 for stored in other.table.by_name.values())
    plain, seeing, adapted = estimate(model, Ask()), estimate(model, Ask(), other), estimate(model, Ask(), None, (other, other))
    assert seeing.total_bytes - plain.total_bytes == seeing.sum_of("projector_bytes") == bytes_of
    assert adapted.sum_of("weights_bytes") - plain.sum_of("weights_bytes") == 2 * bytes_of
    assert (plain.doubts, len(seeing.doubts)) == ((), 1)


def test_an_unknown_architecture_is_said(need: Need) -> None:
    """It is estimated by the general rule: here as the llama that it is but for its name."""
    known, unknown = small(), dense("unheard-of", 2, 64, 4, 2, 16, 128, 1000, 8192)
    needs = need(unknown)
    assert needs.total_bytes == need(known).total_bytes
    assert "unheard-of" in needs.doubts[0]


def test_an_unknown_part_is_said(need: Need) -> None:
    """Where a layer lacks what its kind has, the work buffers are a guess, and said to be."""
    maker = small()
    maker.tensors = [tensor for tensor in maker.tensors if "ffn_down" not in tensor[0]]
    needs = need(maker)
    assert needs.sum_of("compute_bytes") > 0
    assert "ffn_down" in needs.doubts[0]


@pytest.mark.parametrize("used", [None, [2, 0, 2, 2]])
def test_experts_of_which_none_is_used(need: Need, used: list[int] | None) -> None:
    """As where the keys that count them are damaged: a guess that is said, and no exception."""
    maker = small_moe()
    if used is None:
        del maker.keys["qwen3moe.expert_count"], maker.keys["qwen3moe.expert_used_count"]
    else:
        maker.set(expert_used_count=used)
    assert any("no expert_used_count" in doubt for doubt in need(maker).doubts)


@pytest.mark.parametrize("build", [9000, 11000, 12000])
def test_another_build_is_taken_for_a_known_one(need: Need, build: int) -> None:
    """It is taken for the nearest known one before it."""
    needs = need(small(), build=build)
    assert needs.build == (11434 if build > 11434 else 10068)
    assert needs.total_bytes == need(small(), build=11434 if build > 11434 else 10068).total_bytes


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel": 0},
        {"parallel": 257},
        {"context": -1},
        {"ubatch": 0},
        {"key_type": "q2_k"},
        {"value_type": "f8"},
        {"value_type": "q8_0", "flash_attention": False},
    ],
)
def test_settings_that_the_engine_refuses(need: Need, changes: dict[str, object]) -> None:
    """Asking for what cannot be is bad usage, not an estimate."""
    with pytest.raises(SparkguardError) as caught:
        need(small(), **changes)
    assert caught.value.status == USAGE


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_count", 0),
        ("block_count", 513),
        ("block_count", (1 << 32) - 1),
        ("block_count", "2"),
        ("embedding_length", 0),
        ("embedding_length", (1 << 32) - 1),
        ("expert_count", (1 << 32) - 1),
        ("expert_used_count", 9),
        ("expert_used_count", 0),
        ("nextn_predict_layers", 4),
        ("attention.head_count_kv", [1, 2]),
        ("attention.head_count", "4"),
    ],
)
def test_keys_on_which_engines_abort(need: Need, key: str, value: object) -> None:
    """They name the key under status 78: llama.cpp ends with an assertion on most of them."""
    maker = small_moe()
    maker.set(**{key: value})
    with pytest.raises(SparkguardError) as caught:
        need(maker)
    assert caught.value.status == CONFIG
    assert key in caught.value.message


def test_files_that_are_no_models(need: Need) -> None:
    """A projector by itself and a file without an architecture are refused with what they are."""
    for name, words in (("clip", "projector"), ("", "general.architecture")):
        maker = small()
        maker.keys["general.architecture"] = name
        with pytest.raises(SparkguardError, match=words):
            need(maker)


ARCHITECTURES = ["qwen3moe", "qwen35moe", "deepseek2", "mamba", "rwkv7", "gemma3n", "lfm2", "falcon-h1", "x"]
KEYS = [
    *(key.removeprefix("qwen3moe.") for key in small_moe().keys if key.startswith("qwen3moe.")),
    *("ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "attention.sliding_window", "wkv.head_size", "kda.head_dim"),
    *("shortconv.l_cache", "attention.key_length_mla", "attention.value_length_mla", "expert_group_count"),
]
NUMBERS = st.one_of(st.integers(0, 70), st.sampled_from([256, 1 << 16, (1 << 32) - 1]), st.lists(st.integers(0, 3), max_size=6))
PARTS = ["ssm_in", "ssm_x", "attn_kv_a_mqa", "shortconv.in_proj", "time_mix_w1", "attn_qkv", "ffn_gate_up_exps"]
SIZES = ("weights_bytes", "kv_cache_bytes", "state_bytes", "compute_bytes", "output_bytes")


@given(st.data())
def test_no_keys_or_shapes_hurt(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Whatever the keys and the tensors say, there is an estimate or an error of status 78."""
    maker = small_moe()
    architecture = data.draw(st.sampled_from(ARCHITECTURES))
    maker.keys = {key.replace("qwen3moe.", f"{architecture}."): value for key, value in maker.keys.items()}
    maker.keys["general.architecture"] = maker.architecture = architecture
    for key in data.draw(st.lists(st.sampled_from(KEYS), max_size=4)):
        maker.set(**{key: data.draw(NUMBERS)})
    for at in data.draw(st.lists(st.integers(0, len(maker.tensors) - 1), max_size=3, unique=True)):
        name, shape, _ = maker.tensors[at]
        name = data.draw(st.sampled_from([name, *(f"blk.{at % 4}.{part}.weight" for part in PARTS)]))
        maker.tensors[at] = (name, data.draw(st.sampled_from([shape, (32,), (32, 5)])), "f32")
    path = tmp_path_factory.getbasetemp() / f"shape-{os.getpid()}.gguf"
    maker.write(path)
    ask = Ask(on_device=data.draw(st.booleans()), flash_attention=data.draw(st.booleans()))
    try:
        needs = estimate(read_model(str(path)), ask)
        assert all(getattr(part, size) >= 0 for part in needs.devices for size in SIZES)
    except SparkguardError as error:
        assert error.status == CONFIG
