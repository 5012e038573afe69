"""What llama-server's own arguments do to the estimate. tests/integration/test_needs.py holds the same against the engine."""

from __future__ import annotations

from pathlib import Path

import llama_server
import pytest
from gguf_shapes import Maker, dense, sparse

from sparkguard.core import engine_args
from sparkguard.core.estimate import Ask, Needs, estimate
from sparkguard.core.ggml import ModelFile
from sparkguard.errors import USAGE, SparkguardError
from sparkguard.probe.gguf import read_model

MIB = 1 << 20


def read(words: str, **changes: object) -> Ask:
    return engine_args.read(words.split(), Ask().replace(**changes))


def model(folder: Path, maker: Maker, name: str = "model.gguf") -> ModelFile:
    maker.write(folder / name)
    return read_model(str(folder / name))


def small() -> Maker:
    return dense("llama", 2, 64, 4, 2, 16, 128, 1000, 8192)


def moe() -> Maker:
    return sparse("qwen3moe", 4, 64, 4, 2, 16, 8, 2, 32, 1000, 8192)


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("-c 8192 -np 2 -b 1024 -ub 256", {"context": 8192, "parallel": 2, "batch": 1024, "ubatch": 256}),
        ("--ctx_size 0 --ubatch_size 64", {"context": 0, "ubatch": 64}),
        ("-ctk q8_0 -ctv q4_0 -fa off", {"key_type": "q8_0", "value_type": "q4_0", "flash_attention": False}),
        ("-fa auto --swa-full -kvu", {"full_window": True, "unified_cache": True}),
        ("--parallel -1", {"parallel": 4, "unified_cache": True}),
        ("-kvu -no-kvu", {}),
        ("-nkvo --no-mmproj-offload", {"cache_on_host": True, "projector_on_host": True}),
        ("-ncmoe 3 --n-cpu-moe 2", {"cpu_moe_layers": 3}),
        ("--cache-ram 512", {"prompt_cache_bytes": 512 * MIB}),
        ("--cache-ram 512 --cache-ram 0", {}),
        ("--embeddings", {"embeddings": True}),
        ("--pooling none", {}),
        ("-ot exps=CPU,output=CUDA0", {"overrides": (("exps", "host"), ("output", "device"))}),
        ("--override-kv a.b=int:3,c=bool:true", {"metadata": (("a.b", 3), ("c", True))}),
        ("-ctkd q8_0 --spec-draft-n-max 8 -ngld 0", {"draft_key_type": "q8_0", "drafted": 8, "draft_on_host": True}),
        ("--temp 0.7 --seed -1 --rope-freq-base 1e6 --mlock --threads 4", {}),
        ("--n-gpu-layers 0", {"on_device": False, "gpu_layers": 0}),
    ],
)
def test_each_reaches_the_question(words: str, changes: dict[str, object]) -> None:
    """Long, short and with underscores, as llama-server reads them; the last one counts where it is said twice."""
    assert read(words) == Ask().replace(**changes)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--ctx-checkpoints 8", "not counted: copies of states that it keeps in host memory (--ctx-checkpoints)"),
        ("--cache-ram -1", "not counted: a cache of prompts without a limit (--cache-ram)"),
        ("--spec-type ngram-mod,draft-mtp", "not counted: a further context (--spec-type draft-mtp)"),
        ("--warp-drive 9", "not counted: nobody knows what it does to memory (--warp-drive)"),
        ("-mv other.gguf", "not counted: a further model (--model-vocoder)"),
    ],
)
def test_what_cannot_be_computed_is_said(words: str, said: str, tmp_path: Path) -> None:
    """Never passed over in silence: it is among the doubts of the estimate."""
    needs = estimate(model(tmp_path, small()), read(words))
    assert needs.doubts == (said,)


@pytest.mark.parametrize("words", ["-ub many", "-ub", "-c -5", "-ot exps", "-ot (=CPU", "--override-kv a", "--cache-ram x"])
def test_what_the_engine_would_refuse(words: str, tmp_path: Path) -> None:
    """Refused before it is started, with the flag."""
    with pytest.raises(SparkguardError, match=r"takes|is no pattern") as refusal:
        estimate(model(tmp_path, small()), read(words, on_device=True))
    assert refusal.value.status == USAGE


@pytest.mark.parametrize("flag", ["-h", "--version", "--list-devices", "-cl", "--completion-bash", "--gpt-oss-20b-default"])
def test_what_serves_nothing(flag: str) -> None:
    """The engine would end with status 0, or take another model."""
    why = engine_args.unusable(["--temp", "1", flag])
    assert why is not None
    assert flag in why
    assert engine_args.unusable(["--temp", "1"]) is None


def moved(before: Needs, after: Needs) -> int:
    """Bytes of weights that went from the device to the host; none may be lost."""
    (host, device), (new_host, new_device) = before.devices, after.devices
    assert host.weights_bytes + device.weights_bytes == new_host.weights_bytes + new_device.weights_bytes
    return new_host.weights_bytes - host.weights_bytes


def test_an_override_moves_the_tensors_that_it_names(tmp_path: Path) -> None:
    """The experts of a layer, as --n-cpu-moe would, and any other tensor, of whose work it is said that it is not counted."""
    file = model(tmp_path, moe())
    plain = estimate(file, read("", on_device=True))
    experts = estimate(file, read(r"-ot blk\.[01]\..*exps=CPU", on_device=True))
    assert experts == estimate(file, read("-ncmoe 2", on_device=True))
    queries = estimate(file, read(r"-ot attn_q\.=CPU", on_device=True))
    assert moved(plain, queries) == sum(stored.bytes for name, stored in file.table.by_name.items() if "attn_q." in name)
    assert queries.doubts == ("not counted: work buffers of the host for 4 tensors that arguments keep there",)
    assert estimate(file, read("-ot exps=CPU")) == estimate(file, read(""))


def test_a_cache_on_the_host(tmp_path: Path) -> None:
    """It moves whole, and that copies of it come back to the device is counted roughly, and said."""
    file = model(tmp_path, small())
    plain, host = (estimate(file, read(words, on_device=True)) for words in ("", "-nkvo"))
    assert [part.kv_cache_bytes for part in host.devices] == [plain.devices[1].kv_cache_bytes, 0]
    assert host.devices[1].compute_bytes > plain.devices[1].compute_bytes
    assert "roughly counted" in host.doubts[0]


def test_a_cache_of_prompts_is_host_memory(tmp_path: Path) -> None:
    """As much as it may grow to."""
    file = model(tmp_path, small())
    plain, cached = (estimate(file, read(words, on_device=True)) for words in ("", "-cram 100"))
    assert [part.prompt_cache_bytes for part in cached.devices] == [100 * MIB, 0]
    assert cached.total_bytes - plain.total_bytes == 100 * MIB


def test_a_draft_model_has_a_cache_of_its_own(tmp_path: Path) -> None:
    """What it would take alone, with f16 whatever the model has, and results of three more tokens at a time for the model."""
    file, draft = model(tmp_path, moe()), model(tmp_path, small(), "draft.gguf")
    ask = read("-ctk q8_0 -ctv q8_0", on_device=True)
    alone, own = estimate(file, ask), estimate(draft, Ask(on_device=True))
    both = estimate(file, ask, draft=draft)
    assert [part.device for part in both.devices] == ["host", "device"]
    for field in ("weights_bytes", "kv_cache_bytes"):
        assert both.sum_of(field) == alone.sum_of(field) + own.sum_of(field)
    assert both.sum_of("output_bytes") == 4 * alone.sum_of("output_bytes") + own.sum_of("output_bytes")
    beside = estimate(file, read("-ctk q8_0 -ctv q8_0 -devd none", on_device=True), draft=draft)
    assert beside.devices[0].kv_cache_bytes == own.sum_of("kv_cache_bytes")


def test_an_adapter_lies_beside_what_it_changes(tmp_path: Path) -> None:
    """Of the embedding on the host, of a layer on the device: measured with both engines."""
    adapter = Maker("llama", 2, 64, 1000, 8192)
    adapter.add("blk.0.attn_q.weight.lora_a.raw", 64, 8, kind="f32")
    adapter.add("token_embd.weight.lora_a.raw", 1000, 8, kind="f32")
    file, lora = model(tmp_path, small()), model(tmp_path, adapter, "lora.gguf")
    plain = estimate(file, read("", on_device=True))
    needs = estimate(file, read("", on_device=True), adapters=(lora,))
    more = [after.weights_bytes - before.weights_bytes for before, after in zip(plain.devices, needs.devices)]
    assert more == [4 * 1000 * 8, 4 * 64 * 8]
    on_host = estimate(file, read("-ot attn_q=CPU", on_device=True), adapters=(lora,))
    assert on_host.devices[1].weights_bytes == estimate(file, read("-ot attn_q=CPU", on_device=True)).devices[1].weights_bytes


def test_metadata_that_is_overridden_counts(tmp_path: Path) -> None:
    """The trained context, here, which a context of 0 asks for."""
    file = model(tmp_path, small())
    assert estimate(file, read("-c 0")).context == 8192
    assert estimate(file, read("-c 0 --override-kv llama.context_length=int:1024")).context == 1024


def test_results_for_every_token(tmp_path: Path) -> None:
    """A server of embeddings keeps the results of a whole batch, logits included (llama_context::output_reserve)."""
    file = read_model(str(llama_server.shape_file(tmp_path, "qwen3-8b")))
    needs = estimate(file, read("--embeddings --pooling last"))
    assert needs.sum_of("output_bytes") == 512 * 4 * (151936 + 4096)
