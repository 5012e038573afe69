"""Arguments for the builds there are, the memory they report, and what their ends mean."""

from __future__ import annotations

import itertools

import pytest

from sparkguard.core.estimate import DEVICE, HOST
from sparkguard.core.events import BAD_FILE, BAD_SETTINGS, CRASH, OUT_OF_MEMORY
from sparkguard.probe.llama_server import LlamaServer
from sparkguard.supervisor.engine import Launch, Measured, arguments, classify

LAST = "srv llama_server: exiting due to model loading error"
OLD = LlamaServer("/x", "", None, frozenset({"--metrics", "--no-webui", "--cache-ram"}), ())
NEW = LlamaServer("/x", "", None, frozenset({"--no-ui", "--no-webui", "--fit", "--no-mmproj-auto", "--sse-ping-interval"}), ())


def test_only_what_the_build_knows() -> None:
    """Flags come and go."""
    words = arguments(OLD, "a", Launch())
    assert "--metrics" in words and "--no-webui" in words and words[words.index("--cache-ram") + 1] == "0"
    assert "--fit" not in words
    words = arguments(NEW, "a", Launch())
    assert "--no-ui" in words and "--no-webui" not in words and "--metrics" not in words


def test_settings_become_arguments() -> None:
    """All of them, and the user's own come last."""
    launch = Launch(
        context=8192, parallel=4, threads=3, key_type="q8_0", value_type="q4_0", on_gpu=True, host_expert_layers=5, projector="p",
        draft="d", lora=("l", "m"), pooling="rerank", args=("--seed", "1"),
    )  # fmt: skip
    words = arguments(NEW, "a", launch)
    pairs = list(itertools.pairwise(words))
    for pair in (
        ("--ctx-size", "8192"), ("--parallel", "4"), ("--threads", "3"), ("--cache-type-k", "q8_0"), ("--cache-type-v", "q4_0"),
        ("--flash-attn", "on"), ("--n-gpu-layers", "999"), ("--n-cpu-moe", "5"), ("--mmproj", "p"), ("--model-draft", "d"),
        ("--lora", "l"), ("--lora", "m"),
    ):  # fmt: skip
        assert pair in pairs
    assert "--rerank" in words and "--no-mmproj-auto" not in words and words[-2:] == ["--seed", "1"]


def test_the_cpu_gets_no_layer_on_a_gpu() -> None:
    """And small steps of the prompt, each of which is progress."""
    words = arguments(NEW, "a", Launch())
    assert words[words.index("--n-gpu-layers") + 1] == "0" and words[words.index("--batch-size") + 1] == "512"
    assert "--threads" not in words and "--flash-attn" not in words


def test_all_buffers_are_added() -> None:
    """Two caches of a model with windows, and a host's buffer that a GPU's backend pins."""
    measured = Measured()
    for line in (
        "0.1 I load_tensors:   CPU_Mapped model buffer size =    92.00 MiB",
        "0.1 I load_tensors:        CUDA0 model buffer size =   100.50 MiB",
        "0.1 I llama_kv_cache:      CUDA0 KV buffer size =    96.00 MiB",
        "0.1 I llama_kv_cache:      CUDA0 KV buffer size =    37.50 MiB",
        "0.1 I llama_memory_recurrent:  CPU RS buffer size =     1.00 MiB",
        "0.1 I llama_context:  CUDA_Host  output buffer size =     0.50 MiB",
        "0.1 I sched_reserve:      CUDA0 compute buffer size =    10.00 MiB",
        "0.1 I sched_reserve: something else = 10.00 MiB",
        "0.1 I llama_moe_cache:      CUDA0 MoE cache size =    16.00 MiB for 160.00 MiB of host experts",
    ):
        measured.read(line)
    assert measured.sizes() == {HOST: int(93.5 * (1 << 20)), DEVICE: 260 << 20}
    assert Measured().sizes() == {}


@pytest.mark.parametrize(
    ("code", "serving", "last", "cause", "said"),
    [
        (1, False, ["llama_model_load: error: data is not within the file bounds", LAST], BAD_FILE, "not within the file"),
        (1, False, ["gguf_init_from_file: invalid magic characters: 'vers', expected 'GGUF'"], BAD_FILE, "invalid magic"),
        (-6, False, ["gguf.cpp:194: GGML_ASSERT(x) failed"], BAD_FILE, "GGML_ASSERT"),
        (-6, False, [], BAD_FILE, "aborted while it loaded"),
        (-6, True, ["ggml.c:1: GGML_ASSERT(x) failed"], CRASH, "SIGABRT"),
        (1, False, ["ggml_aligned_malloc: insufficient memory (43948.12 MB)", LAST], OUT_OF_MEMORY, "43948"),
        (-6, True, ["CUDA error: out of memory"], OUT_OF_MEMORY, "CUDA error"),
        (-4, False, [], CRASH, "built for another CPU"),
        (-11, True, [], CRASH, "SIGSEGV"),
        (-9, True, [], CRASH, "killed"),
        (0, True, [], CRASH, "status 0"),
        (1, False, ["error: invalid argument: --nope"], BAD_SETTINGS, "--nope"),
        (1, False, ['error while handling argument "-ub": stoi', "", "usage:", "run with -h"], BAD_SETTINGS, "-ub"),
        # context = 1, as builds 10068 and 11434 end.
        (-6, False, ["llama_context: n_ctx = 256", "warming up", "x.cpp:1: GGML_ASSERT(n_batch)"], BAD_SETTINGS, "n_batch"),
        (-6, False, ["common_init_: warming up the model", "get_sub_batch: failed to add token"], BAD_SETTINGS, "get_sub"),
        (-6, False, ["print_info: n_ff = 128", "src/llama-context.cpp:1: GGML_ASSERT(x) failed"], BAD_SETTINGS, "GGML_ASSERT"),
        (-6, False, ["src/llama-context.cpp:1: GGML_ASSERT(x) failed", *["llama_context: n"] * 99], BAD_SETTINGS, "GGML_ASSERT"),
        (-6, False, ["print_info: n_ff = 128", "src/llama-model.cpp:1: GGML_ASSERT(x) failed"], BAD_FILE, "GGML_ASSERT"),
        (-11, False, ["V cache quantization requires flash_attn", "failed to create context with"], BAD_SETTINGS, "flash_attn"),
        (1, False, ["failed to initialize the context: must be <= 256", "failed to create_context", LAST], BAD_SETTINGS, "256"),
        (1, False, ["llama_init_from_model: failed to allocate buffer for kv cache", LAST], OUT_OF_MEMORY, "kv cache"),
        (-9, False, ["llama_context: n_ctx = 256"], CRASH, "SIGKILL"),
        (1, False, ["srv start: couldn't bind HTTP server socket, hostname: x"], CRASH, "cannot listen"),
        (127, False, ["sparkguard: /x cannot be started: Gone", "  set SPARK_LLAMA_SERVER"], CRASH, "/x cannot be started"),
    ],
)  # fmt: skip
def test_what_an_end_means(code: int, serving: bool, last: list[str], cause: str, said: str) -> None:
    """By the status and the last words, as the engine was seen to end."""
    found, words = classify(code, serving, last)
    assert found == cause and said in words


def test_the_kernel_is_believed() -> None:
    """An OOM kill in the runner's cgroup is no crash of the engine's own."""
    assert classify(-9, True, [], killed_for_memory=True)[0] == OUT_OF_MEMORY
