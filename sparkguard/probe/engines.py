"""The engines: how to tell each one's server by its command line, and what that command line reserves.

One more engine is one more row here: a marker that stands in its command line, and a function argv -> Found or None.
"""

from __future__ import annotations

from sparkguard.core.record import Record
from sparkguard.core.share import WHOLE, format_share, parse_share
from sparkguard.probe import containers, vllm_argv
from sparkguard.probe.vllm_argv import Declared, flat_yaml, shorten

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    ReadFile = Callable[[str], str | None]


class Found(Record):
    """A server recognised by its command line. declared None: it holds memory, and its arguments do not say how much."""

    engine: str
    declared: Declared | None
    port: int | None
    note: str = ""
    starts_others: bool = False  # holds nothing itself: its claim is that of the server that it will start


class Engine(Record):
    """grows: it may still take memory that it does not hold yet, so an unknown size is refused beside.

    runs: the engines whose servers below it are its own children, beside its own kind.
    """

    name: str
    marker: bytes
    read: Callable[[Sequence[str], ReadFile], Found | None]
    grows: bool = True
    runs: tuple[str, ...] = ()


_PACKAGES = ("vllm", "sglang", "tensorrt_llm")
_MOST_GPUS = 1024  # of one machine; more would only take time to write down


def command(argv: Sequence[str]) -> tuple[str, Sequence[str]]:
    """(program or module, its arguments): looks through a Python interpreter's options and script.

    'python -m a.b x' gives ('a.b', [x]); 'python /opt/bin/vllm serve' gives ('vllm', [serve]); 'python -c ...' gives ('', []);
    'python /src/vllm/a/b.py x', a file of a package that is a module as well, gives ('vllm.a.b', [x]).
    """
    program = argv[0].rpartition("/")[2] if argv else ""
    args = list(argv[1:])
    if not program.startswith(("python", "pypy")):
        return program, args
    while args:
        word = args.pop(0)
        if word == "-" or not word.startswith("-"):
            return _script(word), args
        if word == "--check-hash-based-pycs":
            args[:1] = []
        if word.startswith("--"):
            continue
        # Short options may be run together, and the last one's value too: -Im MODULE, -mMODULE, -Xdev.
        letter = next((letter for letter in word[1:] if letter in "mcXW"), "")
        rest = word.partition(letter)[2] if letter else ""
        if letter == "c":
            return "", []
        if letter == "m":
            return (rest, args) if rest else (args[0], args[1:]) if args else ("", [])
        if letter and not rest:
            args[:1] = []
    return "", []


def _script(path: str) -> str:
    for package in _PACKAGES:
        _, found, inside = path.rpartition(f"/{package}/")
        if found and inside.endswith(".py"):
            return f"{package}.{inside[:-3].replace('/', '.')}"
    return "" if path == "-" else path.rpartition("/")[2]


_API_SERVERS = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server")
_CLI = ("vllm", "vllm.entrypoints.cli.main", "vllm.__main__")
# Subcommands that start an engine of their own; bench serve, chat, complete, collect-env and launch do not.
_BENCH = ("latency", "throughput", "startup", "mm-processor")


def read_vllm(argv: Sequence[str], read_file: ReadFile) -> Found | None:
    name, args = command(argv)
    if name in _API_SERVERS:
        return _vllm(args, read_file)
    # Dynamo, NIM, and what vLLM's own launchers are called where they are started as modules.
    if name == "dynamo.vllm" or name.startswith(("vllm_nvext.entrypoints.", "vllm.entrypoints.launchers.")):
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
    if verb == "bench" and rest[:1] == ["sweep"]:
        return _sweep(rest, read_file)
    if verb == "snapshot" and rest[:1] == ["create"]:
        return _vllm(rest[1:], read_file)
    if verb == "snapshot" and rest[:1] == ["restore"] and not _asks_for_help(rest):
        return Found("vllm", None, _port(_pairs(rest).get("port"), 8000), "vllm snapshot restore names no share")
    if verb == "preload" and not _asks_for_help(rest):
        return Found("vllm", None, None, "vllm preload names no share")
    return None


def _sweep(args: Sequence[str], read_file: ReadFile) -> Found | None:
    """It starts one server after another. Between two of them nothing else tells that the next one comes."""
    pairs = _pairs(args)
    text = pairs.get("serve-cmd") or pairs.get("startup-cmd")
    found = None if not text or _asks_for_help(args) else recognise(_shell_words(text), read_file)
    return found and found.replace(starts_others=True)


def _vllm(args: Sequence[str], read_file: ReadFile) -> Found | None:
    declared = vllm_argv.read(args, read_file)
    if declared is None:
        return None
    if "--omni" in args:
        return Found("vllm", None, declared.port, "--omni: each stage's share stands in a stage file")
    if declared.unreadable:
        return Found("vllm", None, declared.port, declared.unreadable)
    if declared.share is not None and not 0 < declared.share <= WHOLE:
        return Found("vllm", None, declared.port, f"a fraction of {format_share(declared.share)}, which vLLM does not take")
    if min(declared.total_bytes or 0, declared.kv_bytes or 0) < 0:
        return Found("vllm", None, declared.port, "a size below 0, which vLLM does not take")
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
    if _asks_for_help(args):
        return None
    given = _pairs(args)
    config: dict[str, str | None] = {}
    if given.get("config"):
        try:
            config = {key.replace("_", "-"): value for key, value in flat_yaml(read_file(given["config"] or "") or "").items()}
        except ValueError:
            config = {}
        if not config:
            return Found("sglang", None, None, "its --config cannot be read")
    values = {**config, **given}
    port = _port(values.get("port"), 30000)
    fraction = _static_fraction(given) or _static_fraction(config)
    gpus = _number(values, ("tp-size", "tensor-parallel-size", "tp")) * _number(values, ("pp-size", "pipeline-parallel-size"))
    if "enable-dp-attention" not in values:  # there the data parallel ranks share the tensor parallel GPUs
        gpus *= _number(values, ("dp-size", "data-parallel-size", "dp"))
    first, step = _number(values, ("base-gpu-id",), 0), _number(values, ("gpu-id-step",))
    devices = ",".join(str(first + step * rank) for rank in range(min(gpus, _MOST_GPUS))) if first or step > 1 else None
    try:
        share = parse_share(fraction or "")
    except ValueError:
        return Found("sglang", None, port, "no --mem-fraction-static")
    if not 0 < share <= WHOLE:
        return Found("sglang", None, port, f"--mem-fraction-static {shorten(fraction or '')}, which SGLang does not take")
    source = "argument" if _static_fraction(given) else "config"
    return Found("sglang", Declared(share=share, port=port, gpus=gpus, device_ids=devices, source=source), port)


def _static_fraction(values: Mapping[str, str | None]) -> str | None:
    """argparse takes unique prefixes here, too: no sibling begins with 'mem-f'."""
    return next((value for key, value in values.items() if len(key) > 4 and "mem-fraction-static".startswith(key)), None)


def read_trtllm(argv: Sequence[str], read_file: ReadFile) -> Found | None:
    """Its fraction is of the memory that is free after the weights, not of the total: it cannot be added to vLLM's."""
    name, args = command(argv)
    if name not in ("trtllm-serve", "tensorrt_llm.commands.serve") or _asks_for_help(args):
        return None
    return Found("tensorrt-llm", None, _port(_pairs(args).get("port"), 8000), "its fraction is of what is free after its weights")


def read_llama(argv: Sequence[str], read_file: ReadFile) -> Found | None:
    name, args = command(argv)
    if not name.startswith("llama-server") or any(word in args for word in ("--help", "-h", "--version", "--list-devices")):
        return None
    values = _pairs(args)
    router = not any(word in args for word in ("-m", "--model", "-hf", "--hf-repo"))
    return Found("llama-server", None, _port(values.get("port"), 8080), "router" if router else "")


def read_runner(argv: Sequence[str], read_file: ReadFile) -> Found | None:
    """The process of a loaded model: sparkguard/runner.py starts llama-server under this name."""
    title, colon, model = argv[0].partition(": ")
    if title != "spark-runner" or not colon:
        return None
    return Found("llama-server", None, None, f"runner of {model}")


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
    Engine("llama-server", b"spark-runner: ", read_runner, grows=False),
    Engine("llama-server", b"llama-server", read_llama, grows=False),
    Engine("ollama", b"ollama", read_ollama, grows=False, runs=("llama-server",)),
)
# Titles that children give themselves. VLLM_PROCESS_NAME_PREFIX may be anything, but other programs have a Worker as well.
_VLLM_TITLES = ("EngineCore", "Worker", "APIServer", "DPCoordinator")
_SGLANG_PREFIXES = ("sglang", "sgl_diffusion")
MARKERS = (*dict.fromkeys(engine.marker for engine in ENGINES), b"::")
GROWS = {engine.name: engine.grows for engine in ENGINES}
_RUNS = {engine.name: (engine.name, *engine.runs) for engine in ENGINES}


def runs(parent: str, child: str) -> bool:
    """Whether a server of the second engine below one of the first is its child, and no server in its own right."""
    return child in _RUNS[parent]


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
    found = None
    if len(inner) > 2 and inner[0].rpartition("/")[2] in _SHELLS and inner[1].startswith("-") and inner[1].endswith("c"):
        for words in _shell_commands(inner[2]):
            start = next((at for at, word in enumerate(words) if word.rpartition("/")[2] in _IN_SHELL), len(words))
            found = recognise(words[start:], read_file)
            if found:
                inner = words[start:]
                break
    elif _is_vllm_image(container, inner):
        found = recognise(["vllm", "serve", *inner], read_file)
    else:
        found = recognise(inner, read_file)
    return (container.replace(command=tuple(inner)), found) if found else None


_SHELLS = ("bash", "sh", "dash", "zsh")
_IN_SHELL = ("vllm", "python", "python3", "sglang", "trtllm-serve", "llama-server", "ollama")


def _is_vllm_image(container: containers.Container, args: Sequence[str]) -> bool:
    """Whether the image's own entrypoint is likely to be `vllm serve`, so that these are its arguments and no program."""
    image = container.image or ""
    if container.entrypoint or "vllm" not in image or not args or args[0].rpartition("/")[2] in _SHELLS + _IN_SHELL:
        return False
    return "vllm-openai" in image or args[0].startswith("-")


def title_of(argv: Sequence[str]) -> tuple[str, str] | None:
    """('vllm', 'EngineCore') for VLLM::EngineCore_DP0: a child that has overwritten its command line with a title."""
    prefix, colons, rest = argv[0].rpartition("::") if len(argv) == 1 else ("", "", "")
    if not colons:
        return None
    if prefix in _SGLANG_PREFIXES:
        return "sglang", rest
    title = rest.partition("_")[0]
    return ("vllm", title) if title == "EngineCore" or (title in _VLLM_TITLES and prefix == "VLLM") else None


# shlex takes the square of a word's length: a day for one of 5 MB, which a process may give itself.
_MOST_SCRIPT_CHARACTERS = 1 << 15


def _shell_words(text: str) -> list[str]:
    import shlex  # 3 ms, for the few command lines that hold another one

    if len(text) > _MOST_SCRIPT_CHARACTERS:
        return text[:_MOST_SCRIPT_CHARACTERS].split()
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _shell_commands(text: str) -> list[list[str]]:
    """The words of each command of a shell's -c, as far as they can be told without being a shell."""
    import shlex

    if len(text) > _MOST_SCRIPT_CHARACTERS:
        return [text[:_MOST_SCRIPT_CHARACTERS].split()]
    text = text.replace("\\\n", " ")
    operators = ";&|()<>\n"
    lexer = shlex.shlex(text, posix=True, punctuation_chars=operators)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    commands: list[list[str]] = [[]]
    try:
        for word in lexer:
            if word.strip(operators):
                commands[-1].append(word)
            else:
                commands.append([])
    except ValueError:  # a quote that is not closed
        return [text.split()]
    return commands


def _asks_for_help(args: Sequence[str]) -> bool:
    return "--help" in args or "-h" in args


def _pairs(args: Sequence[str]) -> dict[str, str | None]:
    """--key value and --key=value of a command line whose parser is not vLLM's; the last one wins."""
    pairs: dict[str, str | None] = {}
    for i, word in enumerate(args):
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            pairs[key.replace("_", "-")] = value if equals else (args[i + 1] if i + 1 < len(args) else None)
    return pairs


def _port(text: str | None, default: int | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 6 else default


def _number(values: Mapping[str, str | None], names: Sequence[str], default: int = 1) -> int:
    texts = (values.get(name) for name in names)
    return next((int(text[:5]) for text in texts if text and text.isascii() and text.isdigit()), default)
