"""What the supervisor must know of llama.cpp's server: its arguments, its reports of memory, and what its ends mean."""

from __future__ import annotations

import re
from collections.abc import Iterable

from sparkguard.core import engine_args
from sparkguard.core.estimate import DEVICE, HOST, Ask
from sparkguard.core.events import BAD_FILE, BAD_SETTINGS, CRASH, OUT_OF_MEMORY
from sparkguard.core.record import Record
from sparkguard.probe.llama_server import LlamaServer

# 4 is the least that prints the sizes of the buffers; 5 prints prompts.
VERBOSITY = "4"
# A worker sleeps until its stream's next ping, and a SIGTERM waits for it: 30 s by default, measured.
PING_SECONDS = "1"
# Passed where the build knows them. One cache for all (--kv-unified) would let a request take the context of the others.
_ALWAYS = (
    "--fit off", "--cache-ram 0", "--no-cache-idle-slots", "--no-kv-unified", "--no-context-shift", "--no-mmproj-auto",
    "--offline", "--metrics", "--slots", f"--sse-ping-interval {PING_SECONDS}", f"--log-verbosity {VERBOSITY}",
    "--log-colors off", "--log-prefix", "--log-timestamps",
)  # fmt: skip


EXPERT_CACHE = "--moe-cache-mib"  # of builds newer than 11434; 11549 has it


class Launch(Record):
    """One model's start, as its settings and its placement say. layers on the device: all or, on the CPU, none."""

    context: int = 4096
    parallel: int = 1
    threads: int = 0  # 0: the engine's own choice, the cores that it may use
    key_type: str = "f16"
    value_type: str = "f16"
    on_gpu: bool = False
    host_expert_layers: int = 0
    expert_cache_mib: int = 0
    projector: str | None = None
    draft: str | None = None
    lora: tuple[str, ...] = ()
    pooling: str = ""  # "embeddings" or "rerank", for a model that does only that
    args: tuple[str, ...] = ()  # the user's own, last, so that they win


def arguments(server: LlamaServer, id: str, launch: Launch) -> list[str]:
    """All but the model, the socket and the device, which spark-runner itself passes; only flags that the build knows.

    The arithmetic is done before the start, so the engine is told not to fit anything itself, and to keep no cache of
    prompts beside the one that was counted (--cache-ram: 8 GiB of host memory by default).
    """
    words = ["--ctx-size", str(launch.context), "--parallel", str(launch.parallel)]
    if not launch.on_gpu:
        # A batch is one step of progress, and 2048 tokens of prompt on a slow CPU are minutes of silence. The work buffers are
        # those of --ubatch-size, 512 as well.
        words += ["--batch-size", "512"]
    words += ["--n-gpu-layers", "999" if launch.on_gpu else "0"]
    if launch.threads:
        words += ["--threads", str(launch.threads)]
    quantised = {launch.key_type, launch.value_type} - {"f16", "f32", "bf16"}
    if launch.key_type != "f16":
        words += ["--cache-type-k", launch.key_type]
    if launch.value_type != "f16":
        words += ["--cache-type-v", launch.value_type]
    if quantised:
        words += ["--flash-attn", "on"]  # a quantised cache of values needs it
    if launch.projector:
        words += ["--mmproj", launch.projector]
    if launch.draft:
        words += ["--model-draft", launch.draft]
    for adapter in launch.lora:
        words += ["--lora", adapter]
    if launch.host_expert_layers:
        words += ["--n-cpu-moe", str(launch.host_expert_layers)]
    if launch.expert_cache_mib:
        words += [EXPERT_CACHE, str(launch.expert_cache_mib)]
    if launch.pooling:
        words.append(f"--{launch.pooling}")
    wanted = (*_ALWAYS, f"--alias {id}")
    for flag, _, value in (each.partition(" ") for each in wanted):
        if server.knows(flag):
            words += [flag, value] if value else [flag]
    no_page = next((flag for flag in ("--no-ui", "--no-webui") if server.knows(flag)), None)
    if no_page:
        words.append(no_page)
    if launch.projector and "--no-mmproj-auto" in words:
        words.remove("--no-mmproj-auto")
    return [*words, *launch.args]


def ask_of(server: LlamaServer, launch: Launch) -> Ask:
    """What the estimate is asked for this start: read from the very arguments that the engine gets."""
    return engine_args.read(arguments(server, "model", launch), Ask(build=server.build))


_BUFFER = re.compile(r"(?P<name>\S+)\s+(?:(?:model|output|KV|RS|compute|LoRA) buffer|MoE cache) size =\s*(?P<mib>[\d.]+) MiB")
_ON_HOST = ("CPU", "AMX", "BLAS")


class Measured:
    """The sum of the buffers that the engine reports while it loads, per device.

    A model with sliding windows reports two caches, a draft and a projector report theirs: all are added.
    """

    def __init__(self) -> None:
        self._mib: dict[str, float] = {}

    def read(self, line: str) -> None:
        if found := _BUFFER.search(line):
            name = found["name"]
            device = HOST if name.startswith(_ON_HOST) or name.endswith("_Host") else DEVICE
            self._mib[device] = self._mib.get(device, 0.0) + float(found["mib"])

    def sizes(self) -> dict[str, int]:
        """Bytes on HOST and on DEVICE; empty when nothing was reported."""
        return {device: round(mib * (1 << 20)) for device, mib in self._mib.items()}


# In the order of what decides: a load that fails for memory ends in 'exiting due to model loading error' as well.
_MEMORY = (
    "insufficient memory", "out of memory", "failed to allocate", "unable to allocate", "cudaMalloc failed", "bad_alloc",
    "unable to fit", "failed to fit params", "cannot allocate memory", "ErrorOutOfDeviceMemory",
)  # fmt: skip
_FILE = (
    "not within the file bounds", "failed to read key-value pairs", "invalid magic", "failed to read magic",
    "failed to open gguf", "failed to load model", "error loading model", "exiting due to model loading error", "missing tensor",
    "unknown model architecture",
    "unsupported model architecture", "gguf_init_from", "wrong shape", "no longer supported", "only supports up to version",
    "unknown pre-tokenizer", "failed to load mmproj", "failed to load clip", "failed to apply lora", "failed to load lora",
)  # fmt: skip
_ARGUMENT = ("error: invalid argument", "error while handling argument", "error: unknown argument")
# Said when the file is read and the context is made of the settings: what fails after that is not the file's fault. An abort
# loses what the engine's log has not written yet, so that the place of the assertion has to tell, too.
_CONTEXT = (
    "llama_context:", "llama_init_from_model:", "sched_reserve:", "warming up the model", "failed to create context",
    "failed to create_context", "failed to create mtp context", "failed to parse grammar",
    "/llama-context.cpp:", "/llama-batch.cpp:", "/common.cpp:",
)  # fmt: skip
_ASSERTION = ("GGML_ASSERT", "what():")
_WRONG = ("fail", "error", "requires", "must be", "cannot", "invalid")
_LAST_LINES = 40  # among which the reason is, where there is no assertion
_SOCKET = ("couldn't bind", "exiting due to http server error")
_SIGNALS = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}


def classify(code: int, serving: bool, last: Iterable[str], killed_for_memory: bool = False) -> tuple[str, str]:
    """(cause, a sentence) of an end that nobody asked for; code as waitpid's, negative for a signal.

    killed_for_memory: the kernel counts an OOM kill in the runner's cgroup.

    An abort while it reads the file is the file's fault: llama.cpp asserts what a hostile header breaks, and would do it again.
    One after that, while it makes its context, is the settings': a context of 1 token cannot take the two of its warm-up.
    """
    lines = list(last)
    if serving:
        lines = lines[-_LAST_LINES:]  # what it said hours ago is not why it ended
    text = "\n".join(lines).lower()
    said = next((line for line in reversed(lines) if any(word.lower() in line.lower() for word in (*_MEMORY, *_FILE))), "")
    said = said or (lines[-1] if lines else "")
    if code == -4:
        return CRASH, "the engine was built for another CPU (SIGILL: an instruction that this one lacks); take another build"
    if ours := next((line for line in lines if line.startswith("sparkguard: ")), None):
        return CRASH, ours.removeprefix("sparkguard: ")  # spark-runner itself, before it became the engine
    if any(word.lower() in text for word in _MEMORY):
        return OUT_OF_MEMORY, _first_of(lines, _MEMORY)
    if any(word in text for word in _ARGUMENT):
        return BAD_SETTINGS, f"the engine refuses its arguments: {_first_of(lines, _ARGUMENT)}"
    if any(word in text for word in _SOCKET):
        return CRASH, f"the engine cannot listen: {_first_of(lines, _SOCKET)}"
    if not serving and code and code not in (-9, -15) and any(word in text for word in _CONTEXT):
        wrong = _first_of(lines, _ASSERTION) or _first_of(lines[-_LAST_LINES:], _WRONG)
        return BAD_SETTINGS, wrong or said or "the engine ended while it made its context"
    if not serving and (code == -6 or any(word in text for word in _FILE)):
        return BAD_FILE, _first_of(lines, _FILE) or said or "the engine aborted while it loaded the file"
    if code == -9:
        if killed_for_memory:
            return OUT_OF_MEMORY, "the kernel killed it for the memory that its cgroup may take"
        return CRASH, "it was killed (SIGKILL)"
    if code < 0:
        name = _SIGNALS.get(-code, f"signal {-code}")
        return CRASH, f"the engine died of {name}" + (f": {said}" if said else "")
    return CRASH, f"the engine ended with status {code}" + (f": {said}" if said else "")


def _first_of(lines: list[str], words: tuple[str, ...]) -> str:
    return next((line for line in lines if any(word.lower() in line.lower() for word in words)), "")
