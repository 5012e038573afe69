"""What all verbs share about the terminal: help, tables, JSON, and what may be printed at all."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from sparkguard import streams
from sparkguard.errors import OSERR, STATUSES, SparkguardError, report

if TYPE_CHECKING:
    from collections.abc import Sequence

HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def exit_statuses(*statuses: int) -> str:
    """A block of help; errors.py has the one table."""
    lines = [f"  {status:<4} {STATUSES[status][1]}" for status in statuses]
    return "\n".join(["\b", "exit status:", *lines])


def epilog(examples: str, *statuses: int) -> str:
    """The end of a verb's help: examples, a line each, and its exit statuses."""
    lines = [f"  {line.strip()}" for line in examples.strip().splitlines()]
    return "\n".join(["\b", "examples:", *lines, "", exit_statuses(*statuses)])


def error_text(error: SparkguardError, program: str = "sparkguard") -> str:
    return "".join(printable(line) + "\n" for line in report(error, program).splitlines())


def say(text: str) -> None:
    """Talk, which is not the product: to stderr."""
    click.echo(printable_lines(text), err=True)


def show(text: str) -> None:
    """The product, for people: to stdout."""
    _put(text)


def show_json(value: dict[str, Any], one_line: bool = False) -> None:
    _put(json.dumps(value, indent=None if one_line else 2, ensure_ascii=True, allow_nan=False))


def _put(text: str) -> None:
    try:
        click.echo(text)
    except BrokenPipeError:
        raise  # click ends quietly: the reader has had enough
    except OSError as error:
        streams.discard(1)
        raise SparkguardError(f"stdout cannot be written: {error.strerror}", None, OSERR) from None


def printable(text: str) -> str:
    """Nothing in a process's name may steer the terminal, and lone surrogates cannot be encoded."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode() for char in text)


def printable_lines(text: str) -> str:
    return "\n".join(printable(line) for line in text.split("\n"))


def bold(text: str) -> str:
    return click.style(text, bold=True)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> str:
    """Aligned columns, two blanks apart; the columns named in right are flush right."""
    cells = [[printable(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = []
    for row in cells:
        padded = [cell.rjust(width) if name in right else cell.ljust(width) for name, cell, width in zip(header, row, widths)]
        lines.append("  ".join(padded).rstrip())
    return "\n".join([bold(lines[0]), *lines[1:]])
