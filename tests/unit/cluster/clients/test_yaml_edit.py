"""A value is set and no other byte is touched; what cannot be edited so is refused, and no message shows what was in it."""

from __future__ import annotations

import difflib
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sparkguard.cluster.clients.yaml_edit import Document
from sparkguard.errors import SparkguardError


def after(text: str, path: str, value: Any) -> str:
    document = Document(text)
    document.set(tuple(path.split(".")), value)
    return document.text


@pytest.mark.parametrize(
    ("text", "path", "value", "expected"),
    [
        ("a: 1\nb: 2\n", "a", 3, "a: 3\nb: 2\n"),
        ("a:   1   # why\nb: 2\n", "a", 3, "a:   3   # why\nb: 2\n"),
        ("a: 'x'\n", "a", "y z", 'a: "y z"\n'),
        ("a: |\n  one\n  two\nb: 2\n", "a", "x", "a: x\nb: 2\n"),
        ("a:\nb: 2\n", "a", "x", "a: x\nb: 2\n"),
        ("a: ~\n", "a", "x", "a: x\n"),
        ("a: 1", "b", 2, "a: 1\nb: 2\n"),
        ("a: 1\r\nb: 2\r\n", "c", 3, "a: 1\r\nb: 2\r\nc: 3\r\n"),
        ("a:\n  b: 1\n# about c\nc: 2\n", "a.d", 3, "a:\n  b: 1\n  d: 3\n# about c\nc: 2\n"),
        ("a:\n    b: 1\nc: 2\n", "a.d.e", True, "a:\n    b: 1\n    d:\n      e: true\nc: 2\n"),
        ("a:\n- x\n- y\n\nb: 2\n", "c", 3, "a:\n- x\n- y\n\nb: 2\nc: 3\n"),
        ("a:\n- x\n- y\n# end\n", "c", 3, "a:\n- x\n- y\nc: 3\n# end\n"),
        ("a:\n  b: |\n    # no comment\n    x\nc: 1\n", "a.d", 3, "a:\n  b: |\n    # no comment\n    x\n  d: 3\nc: 1\n"),
        ("a: {b: 1}\n", "a.c", 2, "a: {b: 1, c: 2}\n"),
        ("a: {b: 1,}\n", "a.c", 2, "a: {b: 1, c: 2,}\n"),
        ("a: {}\n", "a.c.d", 2, "a: {c: {d: 2}}\n"),
        ("a:\nb: 1\n", "a.c.d", 2, "a: {c: {d: 2}}\nb: 1\n"),
        ("a: {b: 1, c: [1, 2]}  # x\n", "a.c2", 2, "a: {b: 1, c: [1, 2], c2: 2}  # x\n"),
        ("---\na: 1\n...\n", "b", 2, "---\na: 1\nb: 2\n...\n"),
        ("a: 1\n", "yes", "no", 'a: 1\n"yes": "no"\n'),
        ("a: 1\n", "b", "über: ü # \n", 'a: 1\nb: "über: ü # \\n"\n'),
        ("x: !vault |\n  abc\na: 1\n", "a", 2, "x: !vault |\n  abc\na: 2\n"),
    ],
)
def test_a_value_is_set_and_the_rest_stays(text: str, path: str, value: Any, expected: str) -> None:
    """Comments, quotes, line ends, indentation and order, to the byte."""
    assert after(text, path, value) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a:\n  b: 1\n  c: 2\n  # d's\n  d: 3\n", "a:\n  b: 1\n  # d's\n  d: 3\n"),
        ("a:\n  c: 2\n  d: 3\n", "a:\n  d: 3\n"),
        ("a:\n  b: 1\n  c: |\n    x\n    y\nd: 3\n", "a:\n  b: 1\nd: 3\n"),
        ("a: {b: 1, c: 2, d: 3}\n", "a: {b: 1, d: 3}\n"),
        ("a: {c: 2, d: 3}\n", "a: {d: 3}\n"),
        ("a: {b: 1, c: 2}\n", "a: {b: 1}\n"),
        ("a:\n  b: 1\n", "a:\n  b: 1\n"),
        ("b: 1\n", "b: 1\n"),
    ],
)
def test_an_entry_is_deleted_and_the_rest_stays(text: str, expected: str) -> None:
    """Where it is there; its neighbours keep their comments."""
    document = Document(text)
    document.delete(("a", "c"))
    assert document.text == expected


@pytest.mark.parametrize(
    "text",
    [
        "a: &x {b: 1}\nc: *x\n",  # both would change
        "c: &x {b: 1}\na: *x\n",
        "a: {b: 1}\na: {b: 2}\n",  # which one is meant?
        "a: [1]\n",
        "a: text\n",
        "a:\n  b: &y 1\n  c: *y\n",
    ],
)
def test_what_cannot_be_edited_alone_is_refused(text: str) -> None:
    """And the document is as it was."""
    document = Document(text)
    with pytest.raises(SparkguardError, match="cannot be edited without touching the rest"):
        document.set(("a", "b"), 3)
    assert document.text == text


NONE = ["", "# only\n", "- a\n", "text", "a: [\n", "a: b: c\n", "\tx: 1\n", "a: *b\n", "a: 1\n---\nb: 2\n", "a: \x00"]


@pytest.mark.parametrize("text", NONE)
def test_what_holds_no_settings_is_refused(text: str) -> None:
    """Empty, a list, several documents, or no YAML at all."""
    with pytest.raises(SparkguardError):
        Document(text)


def test_no_message_shows_a_secret() -> None:
    """The parser's own words quote the line."""
    for text in (
        "key: sk-secret: x\n",
        "a: 1\n  key: sk-secret\n",
        "key: 'sk-secret\n",
        "key: [sk-secret\n",
        "key: *sk-secret\n",
    ):
        with pytest.raises(SparkguardError) as caught:
            Document(text)
        assert "sk-secret" not in f"{caught.value.message}{caught.value.hint}"


keys = st.sampled_from(["a", "b", "model", "providers", "on", "1", "x y", "ü"])
leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=12), st.lists(st.integers(), max_size=3))
trees = st.recursive(leaves, lambda inner: st.dictionaries(keys, inner, max_size=4), max_leaves=12)


@given(
    st.dictionaries(keys, trees, min_size=1, max_size=4),
    st.lists(keys, min_size=1, max_size=3),
    st.text(max_size=10),
    st.booleans(),
)
def test_any_setting_in_any_document(value: dict[str, Any], path: list[str], new: str, flow: bool) -> None:
    """It means what was meant and takes the place of one value at most, or it is refused."""
    text = yaml.safe_dump(value, default_flow_style=flow, allow_unicode=True, sort_keys=False)
    document = Document(text)
    try:
        document.set(tuple(path), new)
    except SparkguardError:
        at: Any = value
        for key in path:
            at = at.get(key) if isinstance(at, dict) else at
        assert at is not None and not isinstance(at, str)  # a scalar on the way, or a collection at the end
        return
    found = yaml.safe_load(document.text)
    for key in path:
        found = found[key]
    assert found == new
    if not flow:
        old, now = text.splitlines(), document.text.splitlines()
        matcher = difflib.SequenceMatcher(None, old, now, autojunk=False)
        touched = [opcode for opcode in matcher.get_opcodes() if opcode[0] != "equal"]
        assert len(touched) <= 1
