"""llama-server's own arguments, read into what the estimate is asked: what each does to memory.

The estimate is made of the very arguments that the engine is started with, so that the two cannot differ. What an argument does
that cannot be computed is said, and so is an argument that nobody here knows; tests hold the lists against --help.
"""

from __future__ import annotations

from sparkguard.core.estimate import DEVICE, HOST, Ask
from sparkguard.core.ggml import MIB
from sparkguard.errors import USAGE, SparkguardError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_LONG = {
    "-c": "--ctx-size", "-np": "--parallel", "-b": "--batch-size", "-ub": "--ubatch-size", "-ctk": "--cache-type-k",
    "-ctv": "--cache-type-v", "-fa": "--flash-attn", "-kvu": "--kv-unified", "-no-kvu": "--no-kv-unified",
    "-kvo": "--kv-offload", "-nkvo": "--no-kv-offload", "-ot": "--override-tensor", "-cmoe": "--cpu-moe",
    "-ncmoe": "--n-cpu-moe", "-ncffn": "--n-cpu-ffn", "-ngl": "--n-gpu-layers", "--gpu-layers": "--n-gpu-layers",
    "-cram": "--cache-ram", "--embedding": "--embeddings", "--reranking": "--rerank", "-ctxcp": "--ctx-checkpoints",
    "--swa-checkpoints": "--ctx-checkpoints", "-bs": "--backend-sampling", "-mv": "--model-vocoder",
    "-hfv": "--model-vocoder", "-hfrv": "--model-vocoder", "--hf-repo-v": "--model-vocoder",
    "-lcs": "--lookup-cache-static", "-lcd": "--lookup-cache-dynamic", "-mmdev": "--mmproj-device",
    "-ctkd": "--spec-draft-type-k", "--cache-type-k-draft": "--spec-draft-type-k",
    "-ctvd": "--spec-draft-type-v", "--cache-type-v-draft": "--spec-draft-type-v",
    "-ncmoed": "--spec-draft-n-cpu-moe", "--n-cpu-moe-draft": "--spec-draft-n-cpu-moe",
    "--spec-draft-ncmoe": "--spec-draft-n-cpu-moe", "-cmoed": "--spec-draft-cpu-moe", "--cpu-moe-draft": "--spec-draft-cpu-moe",
    "-otd": "--spec-draft-override-tensor", "--override-tensor-draft": "--spec-draft-override-tensor",
    "-ngld": "--spec-draft-ngl", "--gpu-layers-draft": "--spec-draft-ngl", "--n-gpu-layers-draft": "--spec-draft-ngl",
    "-devd": "--spec-draft-device", "--device-draft": "--spec-draft-device",
}  # fmt: skip
_NUMBERS = {
    "--ctx-size": "context", "--parallel": "parallel", "--batch-size": "batch", "--ubatch-size": "ubatch",
    "--n-cpu-moe": "cpu_moe_layers", "--n-cpu-ffn": "cpu_ffn_layers", "--spec-draft-n-cpu-moe": "draft_cpu_moe_layers",
    "--spec-draft-n-max": "drafted",
}  # fmt: skip
_TYPES = {
    "--cache-type-k": "key_type", "--cache-type-v": "value_type",
    "--spec-draft-type-k": "draft_key_type", "--spec-draft-type-v": "draft_value_type",
}  # fmt: skip
_ALL_LAYERS = 1 << 16
_SWITCHES: dict[str, dict[str, object]] = {
    "--swa-full": {"full_window": True},
    "--kv-unified": {"unified_cache": True},
    "--no-kv-unified": {"unified_cache": False},
    "--kv-offload": {"cache_on_host": False},
    "--no-kv-offload": {"cache_on_host": True},
    "--mmproj-offload": {"projector_on_host": False},
    "--no-mmproj-offload": {"projector_on_host": True},
    "--cpu-moe": {"cpu_moe_layers": _ALL_LAYERS},
    "--spec-draft-cpu-moe": {"draft_cpu_moe_layers": _ALL_LAYERS},
    "--embeddings": {"embeddings": True},
    "--rerank": {"embeddings": True},
}
_OVERRIDES = {"--override-tensor": "overrides", "--spec-draft-override-tensor": "draft_overrides"}
_OTHERS = frozenset(
    ("--flash-attn", "--n-gpu-layers", "--cache-ram", "--override-kv", "--pooling", "--spec-draft-ngl", "--spec-draft-device",
     "--mmproj-device", "--spec-type")
)  # fmt: skip
_NOT_COUNTED = {
    "--ctx-checkpoints": "copies of states that it keeps in host memory",
    "--checkpoint-min-step": "copies of states that it keeps in host memory",
    "--backend-sampling": "the buffers in which the device chooses tokens",
    "--moe-cache-mib": "the experts that the device caches",
    "--no-op-offload": "work on the host instead of the device",
    "--model-vocoder": "a further model",
    "--hf-file-v": "a further model",
    "-hffv": "a further model",
    "--control-vector": "its vectors",
    "--control-vector-scaled": "its vectors",
    "--lookup-cache-static": "the table that it reads",
    "--lookup-cache-dynamic": "the table that it reads",
    "--image-min-tokens": "the work buffers of the projector",
    "--image-max-tokens": "the work buffers of the projector",
    "--mtmd-batch-max-tokens": "the work buffers of the projector",
    "--rpc": "memory of other machines",
    "--no-host": "buffers that the driver makes beside the host's",
}
# A second context on the model itself, or a model of a kind that is built otherwise.
_DRAFTING = ("draft-mtp", "draft-eagle3", "draft-dflash", "draft-dspark")
# Those that change no buffer: words, threads, sampling, logs, the network; or what the supervisor decides (model, device).
_HARMLESS = frozenset(
    """
    --adaptive-decay --adaptive-target --agent --alias --api-key --api-key-file --api-prefix --cache-idle-slots --cache-prompt
    --cache-reuse --check-tensors --cont-batching --context-shift --control-vector-layer-range --defrag-thold --device
    --direct-io --docker-repo --draft --draft-max --draft-min --draft-n --draft-n-min --embd-normalize --escape --fit --fit-ctx
    --fit-target --frequency-penalty --grammar --grammar-file --hf-file --hf-repo --hf-repo-draft --hf-token --host --ignore-eos
    --jinja --json-schema --json-schema-file --keep --kv-unified-per-slot --lazy-mode --load-mode --logit-bias --lora
    --lora-init-without-apply --lora-scaled --main-gpu --media-path --metrics --min-p --mlock --mmap --mmproj --mmproj-auto
    --mmproj-url --model --model-draft --model-url --n-predict --no-agent --no-cache-idle-slots --no-cache-prompt
    --no-cont-batching --no-context-shift --no-cors-credentials --no-direct-io --no-escape --no-jinja --no-log-jsonl
    --no-log-prefix --no-log-timestamps --no-mmap --no-mmproj --no-mmproj-auto --no-models-autoload --no-perf
    --no-prefill-assistant --no-reasoning-preserve --no-repack --no-skip-chat-parsing --no-slots
    --no-spec-draft-backend-sampling --no-ui --no-ui-mcp-proxy --no-warmup --no-webui --no-webui-mcp-proxy --numa --offline
    --op-offload --path --perf --port --predict --prefill-assistant --presence-penalty --props --repack --repeat-last-n
    --repeat-penalty --reuse-port --reverse-prompt --sampler-seq --samplers --sampling-seq --seed --skip-chat-parsing
    --sleep-idle-seconds --slot-prompt-similarity --slot-save-path --slots --spec-default --special --split-mode --spm-infill
    --sse-ping-interval --ssl-cert-file --ssl-key-file --tags --temp --temperature --tensor-split --timeout --tools
    --tools-runtime --top-k --top-n-sigma --top-nsigma --top-p --tts-use-guide-tokens --typical --typical-p --ui --verbose
    --verbosity --warmup --webui
    -C -Cb -Cbd -Cd -Cr -Crb -Crd -a -ag -cb -cms -dev -dio -dr -dt -e -fit -fitc -fitt -hf -hfd -hff -hfr -hfrd -hft -j -jf -l
    -lm -lv -lzm -m -md -mg -mm -mmu -mu -n -ndio -no-ag -nocb -nr -r -rea -s -sm -sp -sps -t -tb -tbd -td -to -ts -v
    """.split()
)
_HARMLESS_KINDS = (
    "--chat-template", "--cors-", "--cpu-mask", "--cpu-range", "--cpu-strict", "--draft-p-", "--dry-", "--dynatemp-", "--log-",
    "--mcp-", "--mirostat", "--models-", "--poll", "--prio", "--reasoning", "--rope-", "--spec-draft-backend-sampling",
    "--spec-draft-cpu-mask", "--spec-draft-cpu-range", "--spec-draft-cpu-strict", "--spec-draft-hf", "--spec-draft-model",
    "--spec-draft-n-min", "--spec-draft-p-", "--spec-draft-poll", "--spec-draft-prio", "--spec-draft-sampling",
    "--spec-draft-threads", "--spec-ngram-", "--spec-synth-", "--threads", "--ui-", "--video-", "--webui-", "--xtc-", "--yarn-",
)  # fmt: skip
_READERS: dict[str, Callable[[str], object]] = {"int": int, "float": float, "bool": "true".__eq__, "str": str}
# They make llama-server print something and end with status 0, or run another model than the one that was counted.
PRINTS = frozenset("-h --help --usage --version -cl --cache-list --completion-bash --list-devices --license".split())
_OTHER_MODEL = ("--embd-gemma-default", "--fim-qwen-", "--gpt-oss-", "--vision-gemma-")


def unusable(args: Iterable[str]) -> str | None:
    """Why a model cannot be served with these, for those with which the engine would not even say so; None: it can."""
    for flag in map(spelled, args):
        if flag in PRINTS:
            return f"{flag} makes llama-server print something and end"
        if flag.startswith(_OTHER_MODEL):
            return f"{flag} makes llama-server take another model, with settings of its own"
    return None


def places_tensors(args: Iterable[str]) -> bool:
    """Whether they say themselves which tensors stay on the host."""
    return any(_LONG.get(flag, flag) in (*_OVERRIDES, "--cpu-moe", "--n-cpu-moe", "--n-cpu-ffn") for flag in map(spelled, args))


def read(args: Iterable[str], ask: Ask) -> Ask:
    """The question, with what these arguments change. Raises SparkguardError for a value that the engine refuses."""
    for flag, value in _pairs(args):
        ask = _take(flag, value, ask)
    return ask


def known(flag: str) -> bool:
    """Whether it is known what a flag does to memory."""
    flag = _LONG.get(flag, flag)
    tables = (_NUMBERS, _TYPES, _SWITCHES, _OVERRIDES, _OTHERS, _NOT_COUNTED, _HARMLESS, PRINTS)
    return any(flag in table for table in tables) or flag.startswith((*_HARMLESS_KINDS, *_OTHER_MODEL))


def spelled(word: str) -> str:
    """As llama-server reads a flag: --ctx_size is --ctx-size."""
    return word.replace("_", "-") if word.startswith("--") else word


def _pairs(args: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Each flag, and the word after it, which may be its value. A word that no flag begins is a value: -1, or a name."""
    words = tuple(args)
    for at, word in enumerate(words):
        if word.startswith("-") and not word[1:2].isdigit() and len(word) > 1:
            flag = spelled(word)
            yield _LONG.get(flag, flag), words[at + 1] if at + 1 < len(words) else ""


def _take(flag: str, value: str, ask: Ask) -> Ask:
    if flag in _NUMBERS:
        return _number(flag, value, ask)
    if flag in _TYPES:
        return ask.replace(**{_TYPES[flag]: value})
    if flag in _SWITCHES:
        return ask.replace(**_SWITCHES[flag])
    if flag in _OVERRIDES:
        return _override(flag, value, ask)
    if flag == "--flash-attn":  # auto: on wherever there is a kernel for it
        return ask.replace(flash_attention=value not in ("off", "disabled", "false", "0"))
    if flag == "--n-gpu-layers":
        layers = _ALL_LAYERS if value in ("auto", "all", "-1") else _whole(flag, value)
        return ask.replace(on_device=bool(layers), gpu_layers=layers)
    if flag == "--spec-draft-ngl":
        layers = _ALL_LAYERS if value in ("auto", "all", "-1") else _whole(flag, value)
        return ask.replace(draft_on_host=not layers)
    if flag == "--spec-draft-device":
        return ask.replace(draft_on_host=True) if value == "none" else ask
    if flag == "--mmproj-device":
        return ask.replace(projector_on_host=value == "none")
    if flag == "--cache-ram":
        size = _whole(flag, value, -1)
        if size < 0:
            return _unsaid(ask.replace(prompt_cache_bytes=0), flag, "a cache of prompts without a limit")
        return ask.replace(prompt_cache_bytes=size * MIB)
    if flag == "--override-kv":
        return ask.replace(metadata=(*ask.metadata, *(_metadata(flag, each) for each in value.split(","))))
    if flag == "--pooling":
        return ask.replace(embeddings=ask.embeddings or value != "none")
    if flag == "--spec-type":
        kinds = [kind for kind in value.split(",") if kind in _DRAFTING]
        return _unsaid(ask, f"--spec-type {kinds[0]}", "a further context") if kinds else ask
    if flag in _NOT_COUNTED:
        return _unsaid(ask, flag, _NOT_COUNTED[flag])
    return ask if known(flag) else _unsaid(ask, flag, "nobody knows what it does to memory")


def _number(flag: str, value: str, ask: Ask) -> Ask:
    field = _NUMBERS[flag]
    number = _whole(flag, value, -1 if field == "parallel" else 0)
    if field == "parallel" and number < 1:  # auto: four, with one cache for all
        return ask.replace(parallel=4, unified_cache=True)
    if field.endswith("_layers"):  # each time it is said, it adds to what stays on the host
        number = max(number, getattr(ask, field))
    return ask.replace(**{field: number})


def _override(flag: str, value: str, ask: Ask) -> Ask:
    """'exps=CPU,blk.0.ffn=CUDA0': a pattern that is looked for in names of tensors, and the memory that they go to."""
    field = _OVERRIDES[flag]
    found = []
    for each in value.split(","):
        pattern, equals, memory = each.rpartition("=")
        if not equals or not pattern:
            raise SparkguardError(f"{flag} takes PATTERN=BUFFER, not {each!r}", status=USAGE)
        found.append((pattern, HOST if memory == "CPU" or memory.endswith("_Host") else DEVICE))
    return ask.replace(**{field: (*getattr(ask, field), *found)})


def _metadata(flag: str, text: str) -> tuple[str, object]:
    key, _, typed = text.partition("=")
    kind, _, value = typed.partition(":")
    try:
        return key, _READERS[kind](value)
    except (KeyError, ValueError):
        raise SparkguardError(f"{flag} takes KEY=TYPE:VALUE, not {text!r}", status=USAGE) from None


def _whole(flag: str, value: str, least: int = 0) -> int:
    digits = value.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) < 11 and int(value) >= least):
        raise SparkguardError(f"{flag} takes a number of at least {least}, not {value!r}", status=USAGE)
    return int(value)


def _unsaid(ask: Ask, flag: str, what: str) -> Ask:
    said = f"not counted: {what} ({flag})"
    return ask if said in ask.not_counted else ask.replace(not_counted=(*ask.not_counted, said))
