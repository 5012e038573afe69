"""An .env file as OpenAI's own libraries and many tools read it: OPENAI_BASE_URL and OPENAI_MODEL. The key is not touched."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from sparkguard.errors import CONFIG, SparkguardError

if TYPE_CHECKING:
    from sparkguard.cluster.clients.target import Target

_LINE = re.compile(r"(?P<before>[ \t]*(?:export[ \t]+)?(?P<name>[A-Za-z_][A-Za-z0-9_]*)[ \t]*=)(?P<value>.*)", re.DOTALL)
_COMMENT = re.compile(r"[ \t]+#.*")
_SAFE = re.compile(r"[A-Za-z0-9_./:@%+,-]+")


class EnvFile:
    name = "the .env file"
    makes_file = True

    def retarget(self, text: str, target: Target) -> str:
        """The lines of these two names alone are changed, all of them where there are several; a missing one comes last."""
        wanted = {"OPENAI_BASE_URL": target.base_url, "OPENAI_MODEL": target.served}
        lines = text.splitlines(keepends=True)
        ending = "\r\n" if lines and lines[0].endswith("\r\n") else "\n"
        found = set()
        quote = ""
        for number, line in enumerate(lines):
            if quote:  # within a value of several lines nothing is an assignment
                quote = "" if _ends(line, quote) else quote
                continue
            match = _LINE.fullmatch(line)
            if match is None:
                continue
            value = match["value"].strip()
            quote = value[:1] if value[:1] in ("'", '"') and not _ends(value[1:], value[:1]) else ""
            if match["name"] in wanted:
                if quote:
                    raise SparkguardError(f"line {number + 1}: a quote is not closed", "mend it by hand", CONFIG)
                found.add(match["name"])
                lines[number] = match["before"] + _quoted(wanted[match["name"]]) + _comment(match["value"]) + _ending(line)
        if lines and not lines[-1].endswith("\n") and found != set(wanted):
            lines[-1] += ending
        lines += [f"{name}={_quoted(value)}{ending}" for name, value in wanted.items() if name not in found]
        return "".join(lines)


def _ends(text: str, quote: str) -> bool:
    if quote == "'":
        return "'" in text
    return re.search(r'(?<!\\)(?:\\\\)*"', text) is not None


def _comment(value: str) -> str:
    """What stands behind the value on its line."""
    bare = value.strip()
    if bare[:1] in ("'", '"'):
        bare = bare[1:].partition(bare[0])[2]
        return f"  {bare.strip()}" if bare.strip().startswith("#") else ""
    match = _COMMENT.search(value.rstrip("\r\n"))
    return match[0].rstrip() if match else ""


def _ending(line: str) -> str:
    return line[len(line.rstrip("\r\n")) :]


def _quoted(value: str) -> str:
    """As shells and dotenv readers both take it."""
    if _SAFE.fullmatch(value):
        return value
    if any(char in value for char in "'\n\r"):
        raise SparkguardError("the model's id has a character that no .env file can hold", None, CONFIG)
    return f"'{value}'"
