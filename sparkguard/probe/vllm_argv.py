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

# Long option -> its shortest prefix that no other option of vLLM shares. Where the name itself is the only safe
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
    "tensor-parallel-size": "tensor-parallel-size",
    "pipeline-parallel-size": "pi",
    "data-parallel-size": "data-parallel-size",
    "data-parallel-size-local": "data-parallel-size-",
    "headless": "headl",
    "uds": "uds",
    "help": "hel",
}
_SHORT = {
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dp": "data-parallel-size",
    "-dpl": "data-parallel-size-local",
    "-h": "help",
}
_NO_VALUE = ("headless", "help")
_ALIAS = {"device-memory-utilization": "gpu-memory-utilization"}
_OURS = ("gpu-memory-utilization", "gpu-memory-utilization-gb", "kv-cache-memory-bytes", "port", "model")


class Declared(Record):
    """What a vLLM command line says about itself. share None: no fraction given, so the version's default counts."""

    share: int | None = None
    total_bytes: int | None = None  # --gpu-memory-utilization-gb
    kv_bytes: int | None = None  # --kv-cache-memory-bytes
    port: int | None = DEFAULT_PORT
    model: str | None = None
    gpus: int = 1  # tensor x pipeline x local data parallel size
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
        name = _long(key[2:]) if word.startswith("--") else _SHORT.get(key)
        if name is None:
            continue
        if name in _NO_VALUE:
            found.append((name, value if equals else None))
        elif equals:
            found.append((name, value))
        elif at < len(args):
            found.append((name, args[at]))
            at += 1
        else:
            found.append((name, None))
    return found


def _long(text: str) -> str | None:
    head, dot, tail = text.partition(".")
    name = head.replace("_", "-") + dot + tail
    if name not in _LONG:
        name = next((full for full, shortest in _LONG.items() if full.startswith(name) and name.startswith(shortest)), "")
    return _ALIAS.get(name, name) or None


def flags_set(args: Sequence[str]) -> dict[str, str]:
    """The memory, port and model options that these arguments set, by canonical name; the last one wins."""
    return {name: value for name, value in options(args) if name in _OURS and value is not None}


def read(args: Sequence[str], read_file: Callable[[str], str | None]) -> Declared | None:
    """The declaration of `vllm serve ARGS`; None for a one-shot (--help). read_file gives a config's text, or None."""
    given = options(args)
    if any(name == "help" for name, _ in given):
        return None
    values: dict[str, str | None] = {}
    from_config: dict[str, str | None] = {}
    unreadable = None
    if "--config" in args[:-1]:  # vLLM tests for exactly this word
        path = args[list(args).index("--config") + 1]
        text = read_file(path)
        if text is None:
            unreadable = f"config {path} cannot be read"
        else:
            for key, value in flat_yaml(text).items():
                if name := _long(key):
                    from_config[name] = value
    values.update(from_config)
    values.update(given)
    if args and not args[0].startswith("-"):
        values["model"] = args[0]
    source = "default"
    for name in ("gpu-memory-utilization", "gpu-memory-utilization-gb", "kv-cache-memory-bytes"):
        if name in values:
            source = "config" if name in from_config and name not in dict(given) else "argument"
            break
    try:
        share = values.get("gpu-memory-utilization")
        total_gib = values.get("gpu-memory-utilization-gb")
        kv = values.get("kv-cache-memory-bytes")
        return Declared(
            share=None if "gpu-memory-utilization" not in values else parse_share(share or ""),
            total_bytes=None if total_gib is None else -(-parse_share(total_gib) * GIB // 10**9),
            kv_bytes=None if kv is None else parse_size(kv),
            port=None if "headless" in values or "uds" in values else int(values.get("port") or DEFAULT_PORT),
            model=values.get("model"),
            gpus=_count(values, "tensor-parallel-size") * _count(values, "pipeline-parallel-size") * _data_parallel(values),
            device_ids=values.get("device-ids"),
            source=source,
            unreadable=unreadable,
        )
    except ValueError as error:
        return Declared(source="unknown", unreadable=f"{error} is no number")


def _count(values: dict[str, str | None], name: str) -> int:
    return max(1, int(values.get(name) or 1))


def _data_parallel(values: dict[str, str | None]) -> int:
    return _count(values, "data-parallel-size-local" if "data-parallel-size-local" in values else "data-parallel-size")


def parse_size(text: str) -> int:
    """vLLM's human_readable_int: '4096', '10G' (2^30), '10g' (10^9), '1.5g'; '1.5G' and '10GiB' are refused (ValueError)."""
    text = text.strip()
    powers = "kmgt"
    unit = text[-1:].lower()
    if not unit or unit not in powers:
        return int(text)
    power = powers.index(unit) + 1
    number = text[:-1]
    if text[-1] != unit:
        return int(number) << (10 * power)
    return int(parse_share(number) * 1000**power // 10**9)


def flat_yaml(text: str) -> dict[str, str | None]:
    """The top-level scalars of a YAML mapping: all that vLLM's config file needs, without a YAML library's start time.

    Nested values, lists and anything that starts with YAML punctuation come back as None: present, not understood.
    """
    found: dict[str, str | None] = {}
    for line in text.lstrip("\ufeff").splitlines():
        if not line or line[0] in " \t#-%" or ":" not in line:
            continue
        key, _, value = line.partition(":")
        value = value.strip()
        quote = value[:1]
        if quote in ("'", '"') and quote:
            value = value[1:].partition(quote)[0]
        else:
            value = value.partition(" #")[0].rstrip()
        found[key.strip().strip("'\"")] = value if value and value[0] not in "&*!|>{[#" else None
    return found
