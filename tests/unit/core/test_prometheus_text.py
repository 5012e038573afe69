"""The reader of Prometheus's text against prometheus-client's, on what engines write and on what they should not."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from sparkguard.core.prometheus_text import MAX_CHARS, MAX_SAMPLES, Sample, parse

DATA = sorted((Path(__file__).parents[2] / "data" / "metrics").glob("*.txt"))
names = st.from_regex(r"[a-z_:][a-z0-9_:]{0,12}", fullmatch=True)
labels = st.dictionaries(st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True), st.text(max_size=12), max_size=4)


def theirs(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if math.isfinite(sample.value):
                name = sample.name if sample.name in text else sample.name.removesuffix("_total")  # it adds that to counters
                found.setdefault((name, tuple(sorted(sample.labels.items()))), sample.value)
    return found


def ours(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {(sample.name, sample.labels): sample.value for sample in parse(text)}


def escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


@pytest.mark.parametrize("path", DATA, ids=lambda path: path.name)
def test_what_real_engines_write(path: Path) -> None:
    """Every sample of a real scrape, with the value and the labels that prometheus-client finds."""
    text = path.read_text(encoding="utf-8")
    assert len(ours(text)) >= 10
    assert ours(text) == theirs(text)


@given(names, labels, st.floats(allow_nan=False, allow_infinity=False))
def test_any_label_comes_back(name: str, pairs: dict[str, str], value: float) -> None:
    """Quotes, backslashes, braces and line ends in a label's value are the value's."""
    pairs.pop("__name__", None)
    inside = ",".join(f'{key}="{escaped(text)}"' for key, text in pairs.items())
    assert parse(f"{name}{{{inside}}} {value!r}\n") == (Sample(name, tuple(sorted(pairs.items())), value),)


@given(st.text(max_size=200))
def test_no_text_breaks_the_reader(text: str) -> None:
    """Whatever comes, only finite numbers are read from it."""
    assert all(math.isfinite(sample.value) for sample in parse(text))


def test_a_broken_line_costs_itself_alone() -> None:
    """The lines around it are read; prometheus-client gives up the whole body."""
    broken = ('a{b="c 1', "a", "a{b='1'} 2", "a 1_0", "a 1 2 3", "{} 1", "a{=} 1", "\x00", 'a{b="\\')
    for line in broken:
        assert parse(f"x 1\n{line}\ny 2\n") == (Sample("x", (), 1.0), Sample("y", (), 2.0)), line


def test_what_is_no_number_is_not_there() -> None:
    """NaN and the infinities are dropped: a rate from them would be one, too."""
    assert parse("a NaN\nb +Inf\nc -Inf\nd 1e400\ne 2\n") == (Sample("e", (), 2.0),)


def test_a_series_counts_once() -> None:
    """A series that stands twice in one body is not added to itself."""
    assert parse('a{x="1",y="2"} 5\na{y="2",x="1"} 7\n') == (Sample("a", (("x", "1"), ("y", "2")), 5.0),)


def test_times_and_exemplars_are_passed_over() -> None:
    """The value is the first word behind the labels."""
    assert parse('a 1 1700000000000\nb_bucket{le="1"} 3 # {trace_id="x"} 0.5\n') == (
        Sample("a", (), 1.0),
        Sample("b_bucket", (("le", "1"),), 3.0),
    )


def test_an_endless_body_is_bounded() -> None:
    """Neither its length nor the number of its series goes beyond what one engine may need."""
    assert len(parse("".join(f"a{i} 1\n" for i in range(MAX_SAMPLES + 5)))) == MAX_SAMPLES
    assert parse("#" + "x" * MAX_CHARS + "\nafter 1\n") == ()


def test_only_what_is_wanted_is_read() -> None:
    """Names that nobody asks for cost no time."""
    assert parse("a 1\nb 2\n", {"b"}) == (Sample("b", (), 2.0),)
