"""Reads vLLM's arguments the way vLLM's own parser does, as far as memory, devices and the port are concerned.

Facts are of vLLM 0.30 to 0.33 (vllm/utils/argparse_utils.py): underscores of an option's name count as dashes, unique
prefixes are accepted, the last of repeated options wins, '--config FILE' (two words) is a YAML file that the command line
beats, and '--config=FILE' is silently not read. tests/system/test_vllm_parser.py asks the real parser.
"""

from __future__ import annotations

from sparkguard.core.record import Record
from sparkguard.core.share import parse_share

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

GIB = 1 << 30
DEFAULT_PORT = 8000
# Far beyond any machine: the arithmetic and the text of larger numbers would be slow, or end in an error of Python's.
_MOST_BYTES = 1 << 60
_MOST_COUNT = 1 << 16

# Long option -> its shortest prefix that no other option of vLLM 0.32 shares. Where the name itself is the only safe
# spelling (--config, --model, --data-parallel-size have longer siblings), it is its own shortest prefix.
_LONG = {
    "gpu-memory-utilization": "gp",
    "device-memory-utilization": "device-m",
    # A public patch for GB10 (eugr/spark-vllm-docker, mods/gpu-mem-util-gb): GiB in place of a fraction.
    "gpu-memory-utilization-gb": "gpu-memory-utilization-",
    "kv-cache-memory-bytes": "kv-cache-mem",
    "port": "por",
    "model": "model",
    "config": "config",
    "device-ids": "device-i",
    "tensor-parallel-size": "te",
    "pipeline-parallel-size": "pi",
    "prefill-context-parallel-size": "prefill-c",
    "data-parallel-size": "data-parallel-size",
    "data-parallel-size-local": "data-parallel-size-",
    "data-parallel-rank": "data-parallel-ra",
    "nnodes": "nn",
    "headless": "hea",
    "uds": "ud",
    "help": "hel",
}
_SHORT = {
    "-tp": "tensor-parallel-size",
    "-t": "tensor-parallel-size",  # argparse takes unique prefixes of these, too
    "-pp": "pipeline-parallel-size",
    "-pcp": "prefill-context-parallel-size",
    "-pc": "prefill-context-parallel-size",
    "-dp": "data-parallel-size",
    "-dpl": "data-parallel-size-local",
    "-dpn": "data-parallel-rank",
    "-n": "nnodes",
    "-h": "help",
}
_NO_VALUE = ("headless", "help")
_ALIAS = {"device-memory-utilization": "gpu-memory-utilization"}
_SIZES = ("gpu-memory-utilization", "gpu-memory-utilization-gb", "kv-cache-memory-bytes")
_OURS = (*_SIZES, "port", "model")
_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off")


class Declared(Record):
    """What a vLLM command line says about itself. share None: no fraction given, so the version's default counts."""

    share: int | None = None
    total_bytes: int | None = None  # --gpu-memory-utilization-gb
    kv_bytes: int | None = None  # --kv-cache-memory-bytes
    port: int | None = DEFAULT_PORT
    model: str | None = None
    gpus: int = 1  # workers on this machine: tensor x pipeline x prefill context x local data parallel size
    device_ids: str | None = None
    source: str = "argument"  # argument, config, default
    unreadable: str | None = None  # what could not be read, so that nothing above may be believed


def options(args: Sequence[str]) -> list[tuple[str, str | None]]:
    """(canonical option name, value) of the options known here, in their order; a value may be missing."""
    found: list[tuple[str, str | None]] = []
    at = 0
    while at < len(args):
        word = args[at]
        at += 1
        if word == "--":
            break
        if not word.startswith("-"):
            continue
        key, equals, value = word.partition("=")
        if "." in key:  # --some-config.field VALUE: whatever VALUE looks like
            at += not equals
            continue
        if word.startswith("-n") and key not in _SHORT:  # of one letter, so its value may follow at once: -n2
            key, equals, value = "-n", "=", word[2:]
        name = _long(key[2:]) if word.startswith("--") else _SHORT.get(key)
        if name is None:
            continue
        if equals:
            found.append((name, value))
        elif name not in _NO_VALUE and at < len(args) and not _looks_like_option(args[at]):
            found.append((name, args[at]))
            at += 1
        else:
            found.append((name, None))
    return found


def _looks_like_option(word: str) -> bool:
    """argparse's rule for what may not be an option's value: '-1', '-' and words with a blank in them may."""
    if not word.startswith("-") or word == "-" or " " in word.partition("=")[0]:
        return False
    whole, _, fraction = word[1:].partition(".")
    return not (whole + fraction).isdigit()


def _long(text: str) -> str | None:
    name = text.replace("_", "-")
    if name not in _LONG:
        name = next((full for full, shortest in _LONG.items() if full.startswith(name) and name.startswith(shortest)), "")
    return _ALIAS.get(name, name) or None


def flags_set(args: Sequence[str]) -> dict[str, str]:
    """The memory, port and model options that these arguments set, by canonical name; the last one wins."""
    return {name: value for name, value in options(args) if name in _OURS and value is not None}


def read(args: Sequence[str], read_file: Callable[[str], str | None]) -> Declared | None:
    """The declaration of `vllm serve ARGS`; None for a one-shot (--help). read_file gives a config's text, or None."""
    given = dict(options(args))
    if "help" in given:
        return None
    try:
        from_config = _read_config(args, read_file)
        values = {**from_config, **given}
        if args and not args[0].startswith("-"):
            values["model"] = args[0]
        missing = next((name for name, value in values.items() if value is None and name not in _NO_VALUE), None)
        if missing:
            raise ValueError(f"--{missing} has no value that can be read")
        size = next((name for name in _SIZES if name in values), None)
        source = "default" if size is None else "argument" if size in given else "config"
        share, total_gib = (_text(values, name) for name in _SIZES[:2])
        kv = _optional(values, "kv-cache-memory-bytes")
        bound = "headless" not in values and _optional(values, "uds") is None
        return Declared(
            share=None if share is None else _number(_SIZES[0], share, _parse_fraction),
            total_bytes=None if total_gib is None else _number(_SIZES[1], total_gib, _parse_gib),
            kv_bytes=None if kv is None else _number(_SIZES[2], kv, parse_size),
            port=_count(values, "port", DEFAULT_PORT) if bound else None,
            model=_text(values, "model"),
            gpus=_gpus(values),
            device_ids=_text(values, "device-ids"),
            source=source,
        )
    except ValueError as error:
        return Declared(source="unknown", unreadable=str(error))


def _read_config(args: Sequence[str], read_file: Callable[[str], str | None]) -> dict[str, str | None]:
    """The known options in the file of --config. Raises ValueError for what vLLM, or this reader, cannot read."""
    if "--config" not in args:  # vLLM tests for exactly this word
        return {}
    at = list(args).index("--config") + 1
    if at == len(args) or "--config" in args[at:]:
        raise ValueError("--config takes one file, once")
    path = args[at]
    if not path.endswith((".yaml", ".yml")):
        raise ValueError(f"config {path} is no .yaml file, and vLLM takes no other")
    text = read_file(path)
    if text is None:
        raise ValueError(f"config {path} cannot be read")
    try:
        found = flat_yaml(text)
    except ValueError as error:
        raise ValueError(f"config {path} cannot be understood: {shorten(str(error))}") from None
    values = {}
    for key, value in found.items():
        name = _long(key)
        if name is None or (value or "").lower() in _FALSE:  # vLLM leaves out what is false, and gives true no value
            continue
        values[name] = None if (value or "").lower() in _TRUE else value
    return values


def _text(values: dict[str, str | None], name: str) -> str | None:
    return values.get(name)


def _optional(values: dict[str, str | None], name: str) -> str | None:
    """vLLM takes an empty value, and the word None, for an option not given; only where its type allows None."""
    value = values.get(name)
    return None if value in ("", "None") else value


def _number(name: str, text: str, parse: Callable[[str], int]) -> int:
    try:
        return parse(text)
    except ValueError:
        raise ValueError(f"--{name} {shorten(text)} is no number") from None


def _count(values: dict[str, str | None], name: str, default: int = 1) -> int:
    text = values.get(name)
    return default if text is None else _number(name, text, _parse_count)


def _parse_count(text: str) -> int:
    return _within(int(text), _MOST_COUNT)


def _parse_gib(text: str) -> int:
    return _within(-(-parse_share(text) * GIB // 10**9), _MOST_BYTES)


def _parse_fraction(text: str) -> int:
    return _within(parse_share(text), _MOST_BYTES)


def _within(number: int, most: int) -> int:
    if abs(number) > most:
        raise ValueError(number)
    return number


def shorten(text: str) -> str:
    """For a message: what somebody else wrote may be a megabyte."""
    return text if len(text) <= 60 else text[:60] + "..."


def _gpus(values: dict[str, str | None]) -> int:
    """How many workers run on this machine; vllm/engine/arg_utils.py splits them over the nodes in this order."""
    workers = _count(values, "tensor-parallel-size") * _count(values, "pipeline-parallel-size")
    workers *= _count(values, "prefill-context-parallel-size")
    nodes = _count(values, "nnodes")
    if nodes > 1:
        workers = workers * _count(values, "data-parallel-size") // nodes
    elif "data-parallel-rank" not in values:
        workers *= _count(values, "data-parallel-size-local", _count(values, "data-parallel-size"))
    return max(1, workers)


def parse_size(text: str) -> int:
    """vLLM's human_readable_int: '4096', '10G' (2^30), '10g' (10^9), '1.5g'; '1.5G' and '10GiB' are refused (ValueError)."""
    text = text.strip()
    if len(text) > 30:
        raise ValueError(text)
    number, unit = text[:-1], text[-1:]
    power = "kmgt".find(unit.lower()) + 1
    if not unit or not power:
        return _within(int(text), _MOST_BYTES)
    whole, dot, fraction = number.partition(".")
    if not (number.isascii() and whole.isdigit() and (fraction.isdigit() if dot else True)):
        raise ValueError(text)
    if unit.isupper():
        return _within(int(number) << (10 * power), _MOST_BYTES)
    return _within(int(float(number) * 1000**power), _MOST_BYTES)


def flat_yaml(text: str) -> dict[str, str | None]:
    """The top-level scalars of a YAML mapping: all that vLLM's config file needs, without a YAML library's start time.

    Nested values, lists and whatever else is no plain scalar come back as None: present, not understood; an empty value
    and null as 'None', which is what vLLM makes of them. Raises ValueError where the top level is no block mapping.
    """
    found: dict[str, str | None] = {}
    indent: int | None = None
    open_brackets = 0
    key = ""
    for line in text.lstrip("\ufeff").splitlines():
        body = line.strip()
        if not body or body[0] == "#" or (indent is None and (body[0] == "%" or body == "---" or body.startswith("--- #"))):
            continue
        depth = len(line) - len(line.lstrip(" "))
        if indent is None:
            indent = depth
        if open_brackets > 0 or depth > indent or body.startswith("- ") or body == "-":
            if not key:
                raise ValueError(body)
            found[key] = None
            open_brackets += _opened(body) if open_brackets > 0 else 0
            continue
        if body == "...":
            break
        quote = body[0] if body[0] in "'\"" else ""
        name, colon, value = (body[1:].partition(quote + ":") if quote else body.partition(":")) if ":" in body else ("", "", "")
        if depth < indent or not colon or (value and value[0] not in " \t") or (not quote and body[0] in "{}[]&*!|>?,@`<%"):
            raise ValueError(body)
        key = name.strip()
        value = value.strip()
        open_brackets = _opened(value) if value[:1] in ("{", "[") else 0
        found[key] = _scalar(value)
    if indent is None:
        raise ValueError("it is empty")
    return found


def _opened(text: str) -> int:
    return sum(text.count(bracket) for bracket in "{[") - sum(text.count(bracket) for bracket in "}]")


def _scalar(value: str) -> str | None:
    quote = value[:1]
    if quote in ("'", '"') and quote:
        inner, closed, rest = value[1:].partition(quote)
        plain = closed and "\\" not in inner and (not rest or rest.lstrip().startswith("#"))
        return inner if plain else None
    if value.startswith("#"):
        return "None"
    value = value.partition(" #")[0].rstrip()
    if value[:1] and value[0] in "&*!|>{[@`%":
        return None
    return "None" if value in ("", "~", "null", "Null", "NULL") else value
