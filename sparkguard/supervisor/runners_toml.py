"""runners.toml: what a person has set for a model. Written back with its comments and order kept."""

from __future__ import annotations

import difflib
import os
import tempfile
from collections.abc import Iterable
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from sparkguard.conf_file import split_words
from sparkguard.core import engine_args
from sparkguard.core.estimate import CACHE_TYPES, MOST_SEQUENCES
from sparkguard.core.record import Record
from sparkguard.errors import OSERR, SparkguardError
from sparkguard.probe.files import read_file
from sparkguard.supervisor.runner_settings import is_device

_MOST_CONTEXT = 1 << 31
_MOST_FILE_BYTES = 4 << 20


class ModelSettings(Record):
    """None or empty: not set, and the default or the site's setting counts."""

    file: str | None = None
    aliases: tuple[str, ...] = ()
    device: str | None = None
    context: int | None = None
    kv_type: str | None = None
    parallel: int | None = None
    threads: int | None = None
    unload_when_idle: bool = True
    args: tuple[str, ...] = ()
    projector: str | bool | None = None  # False: none, although one lies beside the model
    draft: str | None = None
    lora: tuple[str, ...] = ()


class BadSetting(SparkguardError):
    """A value that its key does not take; param is the key."""

    def __init__(self, param: str, message: str, hint: str | None = None) -> None:
        super().__init__(message, hint)
        self.param = param


_KEYS = ModelSettings._fields
_TAKES = {
    "file": "a path",
    "aliases": "a list of names",
    "device": "auto, cpu, cuda or cuda:N",
    "context": f"a number of tokens below {_MOST_CONTEXT}; 0: what the model was trained for",
    "kv_type": ", ".join(CACHE_TYPES),
    "parallel": f"1 to {MOST_SEQUENCES}",
    "threads": "a number, 0 or more",
    "unload_when_idle": "true or false",
    "args": "a list of the engine's arguments, or one text",
    "projector": "a path, or false for none",
    "draft": "a path",
    "lora": "a list of paths",
}
# What the supervisor itself decides; another value would break what it counts or whom it talks to.
_OURS = frozenset(
    (
        "-m --model --host --port -dev --device --models-dir --models-preset -hf -hfr --hf-repo -hff --hf-file -mu --model-url "
        "-dr --docker-repo --api-key --api-key-file --api-prefix --ssl-key-file --ssl-cert-file -ngl --gpu-layers --n-gpu-layers "
        "-c --ctx-size -np --parallel -ctk --cache-type-k -ctv --cache-type-v -mm --mmproj -mmu --mmproj-url --lora "
        "--lora-scaled -md --model-draft --spec-draft-model -hfd -hfrd --hf-repo-draft --spec-draft-hf"
    ).split()
)
# Files of one's choice that the engine reads or writes as its user, and what lets it act on other machines or this one.
_REACHING = frozenset(
    (
        "--log-file --log-prompts-dir --slot-save-path -lcs --lookup-cache-static -lcd --lookup-cache-dynamic --path "
        "--media-path --chat-template-file --grammar-file -jf --json-schema-file --ui-config-file --webui-config-file "
        "--control-vector --control-vector-scaled -mv --model-vocoder -hfv -hfrv --hf-repo-v -hffv --hf-file-v --rpc "
        "--tools -ag --agent --ui-mcp-proxy --webui-mcp-proxy"
    ).split()
)


def parse(text: str, path: str) -> dict[str, ModelSettings]:
    """Settings by id. Raises SparkguardError naming the file, the model and the key."""
    return _models(_document(text, path), path)


def read(path: str) -> dict[str, ModelSettings]:
    return parse(_text(path), path)


def change(path: str, id: str, changes: dict[str, Any]) -> None:
    """Sets some keys of a model; None takes a key away. The file is written whole or not at all."""
    document = _document(_text(path), path)
    if "models" not in document:
        document["models"] = tomlkit.table(is_super_table=True)
    models: Any = document["models"]
    if id not in models:
        models[id] = tomlkit.table()
    for key, value in changes.items():
        check(id, key, value if value is not None else _default(key), path)
        if value is None:
            models[id].pop(key, None)
        else:
            models[id][key] = value
    if not models[id]:
        del models[id]
    _models(document, path)
    _write(path, tomlkit.dumps(document))


def check(id: str, key: str, value: Any, place: str) -> Any:
    """The value as ModelSettings has it."""
    if key not in _KEYS:
        nearest = next(iter(difflib.get_close_matches(key, _KEYS, 1, 0.6)), None)
        hint = f"did you mean {nearest}?" if nearest else "known keys: " + ", ".join(_KEYS)
        raise BadSetting(key, f"{place}: unknown key {key!r} of model {id!r}", hint)
    if key in ("aliases", "lora", "args"):
        if key == "args" and isinstance(value, str):
            try:
                value = split_words(value)
            except ValueError as error:
                raise BadSetting(key, f"{place}: args of model {id!r} cannot be split: {error}") from None
        valid = isinstance(value, (list, tuple)) and all(_is_text(each) for each in value)
        value = tuple(str(each) for each in value) if valid else ()
        if key == "args" and (bad := next((each for each in value if _flag(each) in _OURS), None)):
            hint = "the supervisor decides that itself, or a key of its own sets it"
            raise BadSetting(key, f"{place}: args of model {id!r} has {bad}", hint)
        if key == "args" and (why := engine_args.unusable(value)):
            raise BadSetting(key, f"{place}: args of model {id!r}: {why}", "leave it out")
    elif key == "unload_when_idle":
        valid = isinstance(value, bool)
    elif key in ("context", "parallel", "threads"):
        least, most = {"context": (0, _MOST_CONTEXT - 1), "parallel": (1, MOST_SEQUENCES), "threads": (0, 4096)}[key]
        valid = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
    elif key == "projector" and isinstance(value, bool):
        valid = not value
    else:
        valid = _is_text(value)
        valid = valid and (key != "device" or is_device(value)) and (key != "kv_type" or value in CACHE_TYPES)
    if not valid:
        raise BadSetting(key, f"{place}: {key} of model {id!r} is {_plain(value)!r}", f"it takes {_TAKES[key]}")
    return _plain(value)


def reaching(args: Iterable[str]) -> tuple[str, ...]:
    """Those that only the owner of the file may set, not whoever reaches the port."""
    return tuple(each for each in args if _flag(each) in _REACHING)


def _flag(word: str) -> str:
    """As llama-server reads it: --ctx_size is --ctx-size."""
    flag = word.partition("=")[0]
    return flag.replace("_", "-") if flag.startswith("--") else flag


def _is_text(value: Any) -> bool:
    """What a process takes for an argument or a path, and a file for text: JSON brings zeros and halves of characters."""
    return isinstance(value, str) and bool(value) and not any(c == "\0" or "\ud800" <= c <= "\udfff" for c in value)


def _plain(value: Any) -> Any:
    """tomlkit's values are subclasses that drag their document along."""
    return value.unwrap() if hasattr(value, "unwrap") else value


def _default(key: str) -> Any:
    """Any value that passes, for a key that is taken away."""
    return {
        "aliases": [], "lora": [], "args": [], "unload_when_idle": True, "context": 0, "parallel": 1, "threads": 0,
        "device": "auto", "kv_type": "f16", "projector": False,
    }.get(key, "none")  # fmt: skip


def _document(text: str, path: str) -> tomlkit.TOMLDocument:
    try:
        return tomlkit.parse(text)
    except TOMLKitError as error:
        raise SparkguardError(f"{path}: {error}") from None
    except RecursionError:
        raise SparkguardError(f"{path} is nested too deeply") from None


def _models(document: tomlkit.TOMLDocument, path: str) -> dict[str, ModelSettings]:
    other = next((key for key in document if key != "models"), None)
    if other is not None:
        raise SparkguardError(f"{path}: unknown table {other!r}", 'a model is set under [models."ID"]')
    models = document.get("models", {})
    if not isinstance(models, dict) or not all(isinstance(table, dict) for table in models.values()):
        raise SparkguardError(f"{path}: models is no table of tables", 'a model is set under [models."ID"]')
    settings = {
        str(id): ModelSettings(**{str(key): check(str(id), str(key), value, path) for key, value in table.items()})
        for id, table in models.items()
    }
    names: dict[str, str] = {}
    for id, each in settings.items():
        for alias in each.aliases:
            if alias in settings or names.setdefault(alias, id) != id:
                other_id = alias if alias in settings else names[alias]
                raise BadSetting("aliases", f"{path}: {alias!r} is an alias of {id!r} and a name of {other_id!r}")
    return settings


def _text(path: str) -> str:
    try:
        return read_file(path, _MOST_FILE_BYTES).decode()
    except FileNotFoundError:
        return ""
    except UnicodeDecodeError as error:
        raise SparkguardError(f"{path} is not UTF-8: {error.reason}") from None
    except OSError as error:
        raise SparkguardError(f"{path} cannot be read: {error.strerror}", status=OSERR) from None


def _write(path: str, text: str) -> None:
    """Through a link to the file it means, so that a link into a repository of dot files stays one."""
    path = os.path.realpath(path)
    folder = os.path.dirname(path)
    temporary = ""
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=".runners.toml-")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, os.stat(path).st_mode & 0o777 if os.path.exists(path) else 0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)
        raise SparkguardError(f"{path} cannot be written: {error.strerror}", status=OSERR) from None
