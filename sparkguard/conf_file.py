"""The syntax of spark.conf and of the specs: KEY=value lines, as a shell and systemd both mean them. Nothing is executed."""

from __future__ import annotations

import os

from sparkguard.core.record import Record
from sparkguard.errors import OSERR, SparkguardError
from sparkguard.probe.files import read_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_MOST_FILE_BYTES = 1 << 20
_MOST_VALUE_CHARACTERS = (1 << 17) - 1  # MAX_ARG_STRLEN: a longer argument or variable is refused by the kernel


class Value(Record):
    """A setting's text and where it came from: 'environment', 'default', or 'FILE, line N'."""

    text: str
    origin: str


def read_conf(path: str, names: Mapping[str, str]) -> dict[str, Value] | None:
    """Every key's last value; names is what $NAME may mean. None: there is no such file."""
    try:
        text = read_file(path, _MOST_FILE_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SparkguardError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from None
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not os.path.islink(path):
            return None
        raise SparkguardError(f"{path} cannot be read: {error.strerror}", status=OSERR) from None
    values: dict[str, Value] = {}
    names = dict(names)
    for number, line in enumerate(text.split("\n"), 1):
        line = line.strip()
        if not line or line[0] in "#;":
            continue
        place = f"{path}, line {number}"
        if "\0" in line:
            raise SparkguardError(f"{place} holds a NUL byte", "no argument and no variable can: write the line anew")
        key, equals, rest = line.removeprefix("export ").partition("=")
        key = key.strip()
        if not equals or not key.isidentifier() or not key.isascii():
            raise SparkguardError(f"{place}: {line!r} is not KEY=VALUE", "one setting a line; # starts a comment")
        names[key] = _read_value(rest, place, names)
        # Also against names that double each other: forty such lines would be a terabyte.
        if len(names[key]) > _MOST_VALUE_CHARACTERS:
            raise SparkguardError(f"{place}: the value has {len(names[key])} characters", "no program can be given that much")
        values[key] = Value(names[key], place)
    return values


def _read_value(rest: str, place: str, names: Mapping[str, str]) -> str:
    """The value as a shell and systemd both mean it.

    A quote counts only right after the '=', as in systemd's EnvironmentFile=; an unquoted value keeps its blanks and its
    inner quotes, so that VLLM_EXTRA_ARGS=--dtype bfloat16 needs no quoting. $NAME and ${NAME} are looked up, as a shell
    would; a comment starts at a blank and '#'.
    """
    rest = rest.strip()
    quote = rest[:1] if rest[:1] in ("'", '"') else ""
    if quote:
        end = 1
        while end < len(rest) and rest[end] != quote:
            end += 2 if rest[end] == "\\" and quote == '"' else 1
        if end >= len(rest):
            raise SparkguardError(f"{place}: the quote {quote} is not closed")
        after = rest[end + 1 :].strip()
        if after and not after.startswith("#"):
            raise SparkguardError(
                f"{place}: {after!r} follows the closing quote", "put one pair of quotes around the whole value"
            )
        if quote == "'":
            return rest[1:end]
        rest = rest[1:end]
    else:
        comment = next((at for at, char in enumerate(rest) if char == "#" and (not at or rest[at - 1].isspace())), len(rest))
        rest = rest[:comment].rstrip()
    return _look_up(rest, quote, place, names)


def _look_up(text: str, quote: str, place: str, names: Mapping[str, str]) -> str:
    out = []
    at = 0
    while at < len(text):
        char = text[at]
        # An unquoted value keeps its backslashes: split_words() comes to them, and JSON has its own.
        if char == "\\" and text[at + 1 : at + 2] in (('"', "\\", "$", "`") if quote else ("$", "`")):
            out.append(text[at + 1])
            at += 2
        elif char == "`" or text.startswith("$(", at):
            raise SparkguardError(
                f"{place}: command substitution is never executed", "write the value itself, or '...' to keep it as text"
            )
        elif char == "$":
            braced = text.startswith("${", at)
            start = at + 1 + braced
            end = start
            while end < len(text) and (text[end].isalnum() or text[end] == "_"):
                end += 1
            name = text[start:end]
            if not name or (braced and text[end : end + 1] != "}"):
                raise SparkguardError(
                    f"{place}: {text[at:]!r} is no variable", "$NAME and ${NAME} are looked up; '...' keeps a $"
                )
            if name not in names:
                raise SparkguardError(f"{place}: ${name} is not set")
            out.append(names[name])
            at = end + braced
        else:
            out.append(char)
            at += 1
    return "".join(out)


def split_words(text: str) -> list[str]:
    """Splits arguments as a shell does, except that a word that starts as JSON is kept whole, quotes and blanks too.

    A drop-in can hardly carry two levels of quotes, so {"method": "mtp"} must survive without any.
    Raises ValueError for a quote or a bracket that is not closed.
    """
    words: list[str] = []
    at = 0
    while True:
        while at < len(text) and text[at].isspace():
            at += 1
        if at >= len(text):
            return words
        word: list[str] = []
        while at < len(text) and not text[at].isspace():
            char = text[at]
            if char in "{[" and (not word or word[-1] == "="):
                end = _json_end(text, at)
                word.append(text[at:end])
            elif char == "\\":
                end = at + 2
                word.append(text[at + 1 : end])
            elif char == "'":
                end = text.find("'", at + 1) + 1
                if not end:
                    raise ValueError("a ' is not closed")
                word.append(text[at + 1 : end - 1])
            elif char == '"':
                end = at + 1
                while end < len(text) and text[end] != '"':
                    escaped = text[end] == "\\" and text[end + 1 : end + 2] in ('"', "\\", "$", "`")
                    word.append(text[end + escaped])
                    end += 1 + escaped
                if end >= len(text):
                    raise ValueError('a " is not closed')
                end += 1
            else:
                end = at + 1
                word.append(char)
            at = end
        words.append("".join(word))


def _json_end(text: str, at: int) -> int:
    depth = 0
    quoted = escaped = False
    for i in range(at, len(text)):
        char = text[i]
        if quoted:
            quoted = char != '"' or escaped
            escaped = char == "\\" and not escaped
        elif char == '"':
            quoted = True
        elif char in "{[":
            depth += 1
        elif char in "}]":
            depth -= 1
            if not depth:
                return i + 1
    raise ValueError(f"the {text[at]} of {text[at : at + 20]!r} is not closed")
