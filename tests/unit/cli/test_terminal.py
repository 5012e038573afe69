"""Tables, and what may be printed at all."""

from __future__ import annotations

import pytest

from sparkguard.cli.terminal import epilog, printable, printable_lines, table


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("vllm", "vllm"),
        ("größe 模型", "größe 模型"),
        ("a\nb", "a\\nb"),
        ("\x1b[2J", "\\x1b[2J"),
        ("\udcff", "\\udcff"),
        ("\u202e", "\\u202e"),
    ],
)
def test_what_could_steer_the_terminal_is_escaped(text: str, shown: str) -> None:
    """Control characters, text direction and bytes that are no UTF-8 come out as escapes; letters of any script stay."""
    assert printable(text) == shown


def test_lines_stay_lines() -> None:
    """Where a text has lines of its own, only what is within them is escaped."""
    assert printable_lines("a\nb\x07") == "a\nb\\x07"


def test_columns_are_aligned() -> None:
    """Numbers flush right, words flush left, nothing behind the last word; a cell stays in its row."""
    text = table(("NAME", "SIZE"), [("a", "1"), ("long\nname", "100")], ("SIZE",))
    assert [line.rstrip() for line in text.splitlines()][1:] == ["a              1", "long\\nname   100"]


def test_examples_and_statuses_are_not_rewrapped() -> None:
    r"""Each block starts with click's \b, and a status has the one table's words."""
    assert epilog("\n one\n two\n", 0, 75).split("\n\n") == [
        "\b\nexamples:\n  one\n  two",
        "\b\nexit status:\n  0    admitted, or done\n  75   refused now: others hold what it needs",
    ]
