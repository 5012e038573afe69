"""The engines: how to tell each one's server by its command line, and what that command line reserves.

One more engine is one more row here: a marker that stands in its command line, and a function argv -> Found or None.
"""

from __future__ import annotations

from sparkguard.core.record import Record
from sparkguard.core.share import parse_share
from sparkguard.probe import containers, vllm_argv
from sparkguard.probe.vllm_argv import Declared, flat_yaml

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    ReadFile = Callable[[str], str | None]


class Found(Record):
    """A server recognised by its command line. declared None: it holds memory, and its arguments do not say how much."""

    engine: str
    declared: Declared | None
    port: int | None
    note: str = ""


class Engine(Record):
    """grows: it may still take memory that it does not hold yet, so an unknown size is refused beside."""

    name: str
    marker: bytes
    read: Callable[[Sequence[str], ReadFile], Found | None]
    grows: bool = True


def command(argv: Sequence[str]) -> tuple[str, Sequence[str]]:
    """(program or module, its arguments): looks through a Python interpreter's options and script.

    'python -m a.b x' gives ('a.b', [x]); 'python /opt/bin/vllm serve' gives ('vllm', [serve]); 'python -c ...' gives ('', []).
    """
    program = argv[0].rpartition("/")[2] if argv else ""
    args = list(argv[1:])
    if not program.startswith(("python", "pypy")):
        return program, args
    while args:
        word = args.pop(0)
        if word.startswith("-") and not word.startswith("--") and word.endswith("m"):  # -m, -um, -Im
            return (args[0], args[1:]) if args else ("", [])
        if word.startswith("-m"):
            return word[2:], args
        if word == "-c" or word == "-":
            return "", []
        if word in ("-X", "-W"):
            args[:1] = []
        elif not word.startswith("-"):
            return word.rpartition("/")[2], args
    return "", []


_API_SERVERS = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server")
_CLI = ("vllm", "vllm.entrypoints.cli.main", "vllm.__main__")
# Subcommands that start an engine of their own; bench serve, chat, complete, collect-env and launch do not.
_BENCH = ("latency", "throughput", "startup", "sweep")


def read_vllm(argv: Sequence[str], read_file: ReadFile) -> Found | None:
    name, args = command(argv)
    if name in _API_SERVERS:
        return _vllm(args, read_file)
    if name == "dynamo.vllm" or name.startswith("vllm.entrypoints.launchers."):
        return (
            _vllm(args, read_file)
            if vllm_argv.flags_set(args)
            else Found("vllm", None, None, "the share stands in a file or in code")
        )
    if name not in _CLI or not args:
        return None
    verb, rest = args[0], args[1:]
    if verb == "serve":
        return _vllm(rest, read_file)
    if verb == "run-batch" or (verb == "bench" and rest[:1] and rest[0] in _BENCH):
        found = _vllm(rest[verb == "bench" :], read_file)
        return found and found.replace(port=None)
    if verb == "snapshot" and rest[:1] == ["create"]:
        return _vllm(rest[1:], read_file)
    if (verb == "snapshot" and rest[:1] == ["restore"]) or verb == "preload":
        return Found("vllm", None, None, f"vllm {verb} names no share")
    return None


def _vllm(args: Sequence[str], read_file: ReadFile) -> Found | None:
    declared = vllm_argv.read(args, read_file)
    if declared is None:
        return None
    if "--omni" in args:
        return Found("vllm", None, declared.port, "--omni: each stage's share stands in a stage file")
    if declared.unreadable:
        return Found("vllm", None, declared.port, declared.unreadable)
    return Found("vllm", declared, declared.port)


def read_sglang(argv: Sequence[str], read_file: ReadFile) -> Found | None:
    """--mem-fraction-static is weights + KV of the capacity; without it SGLang works its own out, up to nearly everything."""
    name, args = command(argv)
    if name in ("sglang.launch_server", "sglang.srt.server"):
        pass
    elif name in ("sglang", "sglang.cli.main") and args[:1] == ["serve"]:
        args = args[1:]
    else:
        return None
    if "--help" in args or "-h" in args:
        return None
    config: dict[str, str | None] = {}
    if "--config" in args[:-1]:
        text = read_file(args[list(args).index("--config") + 1])
        if text is None:
            return Found("sglang", None, None, "its --config cannot be read")
        config = {key.replace("_", "-"): value for key, value in flat_yaml(text).items()}
    values = {**config, **_pairs(args)}
    port = _port(values.get("port"), 30000)
    fraction = values.get("mem-fraction-static")
    gpus = _number(values.get("tp-size") or values.get("tensor-parallel-size") or values.get("tp"), 1)
    gpus *= _number(values.get("dp-size") or values.get("data-parallel-size") or values.get("dp"), 1)
    try:
        share = parse_share(fraction) if fraction else None
    except ValueError:
        share = None
    if share is None:
        return Found("sglang", None, port, "no --mem-fraction-static")
    source = "argument" if "mem-fraction-static" in _pairs(args) else "config"
    return Found("sglang", Declared(share=share, port=port, gpus=gpus, source=source), port)


def read_trtllm(argv: Sequence[str], read_file: ReadFile) -> Found | None:
    """Its fraction is of the memory that is free after the weights, not of the total: it cannot be added to vLLM's."""
    name, args = command(argv)
    if name not in ("trtllm-serve", "tensorrt_llm.commands.serve") or "--help" in args:
        return None
    return Found("tensorrt-llm", None, _port(_pairs(args).get("port"), 8000), "its fraction is of what is free after its weights")


def read_llama(argv: Sequence[str], read_file: ReadFile) -> Found | None:
    name, args = command(argv)
    if not name.startswith("llama-server") or any(word in args for word in ("--help", "-h", "--version", "--list-devices")):
        return None
    values = _pairs(args)
    router = not any(word in args for word in ("-m", "--model", "-hf", "--hf-repo"))
    return Found("llama-server", None, _port(values.get("port"), 8080), "router" if router else "")


def read_ollama(argv: Sequence[str], read_file: ReadFile) -> Found | None:
    name, args = command(argv)
    if name != "ollama" or args[:1] not in (["serve"], ["runner"]):
        return None
    return Found("ollama", None, 11434 if args[0] == "serve" else _port(_pairs(args).get("port"), None), "loads models on demand")


ENGINES = (
    Engine("vllm", b"vllm", read_vllm),
    Engine("sglang", b"sglang", read_sglang),
    Engine("tensorrt-llm", b"trtllm", read_trtllm),
    Engine("tensorrt-llm", b"tensorrt_llm", read_trtllm),
    # llama-server takes its memory at the start; Ollama and a router load on demand, but each load is small beside a
    # vLLM, and refusing every start beside an idle Ollama would teach people to set the override: the live check decides.
    Engine("llama-server", b"llama-server", read_llama, grows=False),
    Engine("ollama", b"ollama", read_ollama, grows=False),
)
# Titles that vLLM's children give themselves; the part before '::' is VLLM_PROCESS_NAME_PREFIX.
TITLES = ("EngineCore", "Worker", "APIServer", "DPCoordinator")
MARKERS = tuple(dict.fromkeys([engine.marker for engine in ENGINES] + [b"::" + title.encode() for title in TITLES]))
GROWS = {engine.name: engine.grows for engine in ENGINES}


def recognise(argv: Sequence[str], read_file: ReadFile) -> Found | None:
    """The server that this command line is, if it is one."""
    if not argv or not argv[0]:
        return None
    for engine in ENGINES:
        if found := engine.read(argv, read_file):
            return found
    return None


def recognise_client(argv: Sequence[str], read_file: ReadFile) -> tuple[containers.Container, Found] | None:
    """A container client, and the server that it runs inside.

    vllm/vllm-openai's entrypoint is `vllm serve`, so its arguments are those of serve; older tags' was the api_server module.
    """
    container = containers.read_client(argv)
    if container is None:
        return None
    inner = list(container.command)
    if container.entrypoint:
        inner.insert(0, container.entrypoint)
    if inner[:1] and inner[0].rpartition("/")[2] in ("bash", "sh") and len(inner) > 2 and inner[1] in ("-c", "-lc"):
        inner = inner[2].split()
        while inner and inner[0].rpartition("/")[2] not in ("vllm", "python", "python3", "sglang", "trtllm-serve"):
            inner.pop(0)
    found = recognise(inner, read_file)
    if (
        found is None
        and not container.entrypoint
        and "vllm" in (container.image or "").rpartition("/")[2] + (container.image or "")
    ):
        found = recognise(["vllm", "serve", *inner], read_file) if inner else None
    return (container, found) if found else None


def title_of(argv: Sequence[str]) -> str | None:
    """'EngineCore' for VLLM::EngineCore_DP0: a child that has overwritten its command line with a title."""
    prefix, colons, rest = argv[0].partition("::") if len(argv) == 1 else ("", "", "")
    if not colons or " " in prefix or "/" in prefix:
        return None
    return next((title for title in TITLES if rest.startswith(title)), None)


def _pairs(args: Sequence[str]) -> dict[str, str | None]:
    """--key value and --key=value of a command line whose parser is not vLLM's; the last one wins."""
    pairs: dict[str, str | None] = {}
    for i, word in enumerate(args):
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            pairs[key.replace("_", "-")] = value if equals else (args[i + 1] if i + 1 < len(args) else None)
    return pairs


def _port(text: str | None, default: int | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() else default


def _number(text: str | None, default: int) -> int:
    return int(text) if text and text.isascii() and text.isdigit() else default
