"""The estimate against a real llama-server, asked now: weights and caches to the printed digit, work buffers nearly.

tests/unit/core/test_estimate.py compares with what was recorded; here it is seen that the engine still says so. Where the cache
also has the newest build (tests/tools/llama-server.sh DIR --newest), that is asked too.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import gguf_shapes
import llama_server
import pytest

from sparkguard.core import engine_args
from sparkguard.core.estimate import Ask, estimate
from sparkguard.probe import llama_server as probe

TOOL = Path(__file__).parents[1] / "tools" / "llama-server.sh"
BUILDS = {10068: "engine", 11434: "newest"}
# On the stand-in for a GPU each question takes a server of its own, so a few kinds of model are enough.
ON_DEVICE = ["llama-1b-tied", "qwen3moe-30b", "gemma3-12b", "gpt-oss-20b", "deepseek2-lite", "mamba-2.8b", "gemma3n-e4b"]
SETTINGS = [setting for setting, (_, ask) in llama_server.SETTINGS.items() if not ask.on_device]
CANNOT_LOAD = {10068: {"qwen3next-80b-mtp", "deepseek3-671b-mtp"}}


def cache() -> Path:
    """Where the engines are kept: the tests' cache, or one's own where that may not be written."""
    shared = Path(os.environ.get("SPARKGUARD_TEST_CACHE", "/var/cache/sparkguard-tests"))
    if (shared / "llama" / "stamp").exists() or os.access(shared, os.W_OK):
        return shared / "llama"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser(), "sparkguard-tests", "llama")


CACHE = cache()
AT_HAND = [build for build, folder in BUILDS.items() if build == 10068 or (CACHE / folder / "llama-server").exists()]


@pytest.fixture(scope="module")
def engines() -> dict[int, Path]:
    """The servers by build; makes the environment where it is missing."""
    made = subprocess.run([TOOL, CACHE], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    return {build: CACHE / BUILDS[build] / "llama-server" for build in AT_HAND}


@pytest.mark.parametrize("build", AT_HAND)
@pytest.mark.parametrize("shape", gguf_shapes.SHAPES)
def test_on_the_host(shape: str, build: int, engines: dict[int, Path], tmp_path: Path) -> None:
    """Every architecture with every setting, wholly on the CPU."""
    model = llama_server.shape_file(tmp_path, shape)
    if shape in CANNOT_LOAD.get(build, set()):
        with pytest.raises(RuntimeError, match="no plan"):
            llama_server.ask(engines[build], model, SETTINGS[0])
        return
    wrong = {}
    for setting in SETTINGS:
        plan = llama_server.ask(engines[build], model, setting)
        if found := llama_server.differences(llama_server.estimated(model, setting, build), plan):
            wrong[setting] = found
    assert wrong == {}


@pytest.mark.parametrize("build", AT_HAND)
@pytest.mark.parametrize("shape", ON_DEVICE)
def test_on_a_device(shape: str, build: int, engines: dict[int, Path], tmp_path: Path) -> None:
    """All layers on a device: what is there, and what stays on the host."""
    model = llama_server.shape_file(tmp_path, shape)
    plan = llama_server.ask(engines[build], model, "device")
    assert llama_server.differences(llama_server.estimated(model, "device", build), plan) == []


# Arguments as a person would add them, on a model for which they do something; sequences, contexts and types that the table of
# settings does not have.
ON_HOST_TOO = [
    ("qwen3-8b", "-b 256 -ub 1024"),
    ("qwen3-8b", "-ub 1024"),
    ("qwen3-8b", "--batch_size 2048 --ubatch_size 2048 -c 8192"),
    ("qwen3-8b", "--embeddings --pooling last"),
    ("qwen3-8b", "--rerank -np 4 -c 16384 -ub 1024"),
    ("gpt-oss-20b", "--embeddings"),
    ("qwen3-8b", "-c 8192 -np 4 --kv-unified"),
    ("gemma3-12b", "-c 32768 -np -1"),
    ("gemma3-12b", "-c 32768 --swa-full"),
    ("qwen3-8b", "-ctk q8_0 -ctv q4_0 -fa on"),
    ("qwen3-8b", "-fa off"),
    ("qwen3-8b", "-c 0 --override-kv qwen3.context_length=int:16384"),
    ("qwen3moe-30b", "--cpu-moe"),
    ("qwen3-8b", "-ot ffn=CPU"),
    ("qwen3-8b", "--no-kv-offload --no-op-offload --temp 0.5 --spec-type ngram-mod --cache-ram 64 --threads 1"),
]
# What stays on the host. Whose work happens where differs between this device and CUDA, so that only weights and caches are held.
KEPT_ON_HOST = [
    ("qwen3moe-30b", "--cpu-moe"),
    ("qwen3moe-30b", "-ncmoe 10"),
    ("qwen3moe-30b", r"-ot blk\.(1|2|3)\.ffn_.*_exps.=CPU,attn_q\.=CPU"),
    ("llama-1b-tied", "-ot token_embd=CPU"),
    ("llama-8b", "-nkvo"),
    ("mamba-2.8b", "--no-kv-offload"),
    ("gemma3-12b", "-nkvo -c 32768"),
]


@pytest.mark.parametrize("build", AT_HAND)
@pytest.mark.parametrize(("shape", "words"), ON_HOST_TOO)
def test_further_arguments(shape: str, words: str, build: int, engines: dict[int, Path], tmp_path: Path) -> None:
    """What a person adds under `args` is counted as the engine counts it."""
    model = llama_server.shape_file(tmp_path, shape)
    plan = llama_server.planned(engines[build], model, ["-c", "4096", *words.split()], on_device=False)
    ask = engine_args.read(words.split(), Ask(build=build))
    assert llama_server.differences(estimate(llama_server.header(model), ask), plan) == []


@pytest.mark.parametrize("build", AT_HAND)
@pytest.mark.parametrize(("shape", "words"), KEPT_ON_HOST)
def test_what_arguments_keep_on_the_host(shape: str, words: str, build: int, engines: dict[int, Path], tmp_path: Path) -> None:
    """Weights and caches, on the host and on the device, to the printed digit."""
    model = llama_server.shape_file(tmp_path, shape)
    plan = llama_server.planned(engines[build], model, ["-c", "4096", *words.split()], on_device=True)
    needs = estimate(llama_server.header(model), engine_args.read(words.split(), Ask(build=build, on_device=True)))
    assert {part.device: llama_server.numbers_of(part)[:2] for part in needs.devices} == {
        device: numbers[:2] for device, numbers in plan.items()
    }


@pytest.mark.skipif(11434 not in AT_HAND, reason="only the newest build plans its draft model")
@pytest.mark.parametrize("words", ["", "-np 4 -c 32768 -ctk q8_0 -ctv q8_0 -fa on", "-ctkd q8_0 -ctvd q8_0 -ub 1024"])
def test_a_draft_model(words: str, engines: dict[int, Path], tmp_path: Path) -> None:
    """What it adds is what the engine plans for it: its first plan is the draft's."""
    model, draft = (llama_server.shape_file(tmp_path, shape) for shape in ("llama-8b", "llama-1b-tied"))
    arguments = ["-c", "4096", *words.split(), "-md", str(draft)]
    plan = llama_server.planned(engines[11434], model, arguments, on_device=False)
    ask = engine_args.read(words.split(), Ask())
    both = estimate(llama_server.header(model), ask, draft=llama_server.read_model(str(draft)))
    alone = estimate(llama_server.header(model), ask)
    more = [
        ours - theirs for ours, theirs in zip(llama_server.numbers_of(both.devices[0]), llama_server.numbers_of(alone.devices[0]))
    ]
    assert all(abs(ours - theirs) <= 1 for ours, theirs in zip(more, plan["host"]))  # each is rounded down


@pytest.mark.parametrize("build", AT_HAND)
def test_every_argument_is_known(build: int, engines: dict[int, Path]) -> None:
    """Of each flag in the engine's --help somebody has decided what it does to memory."""
    flags = {flag for flag in probe.ask(str(engines[build]), dict(os.environ)).flags if flag.startswith("-")}
    assert len(flags) > 200
    assert sorted(flag for flag in flags if flag.strip("-") and not engine_args.known(flag)) == []
