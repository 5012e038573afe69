"""The reader of vLLM's arguments: the corpus that vLLM's own parser was asked, and what holds for any arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkguard.core.share import parse_share
from sparkguard.probe import vllm_argv
from sparkguard.probe.vllm_argv import GIB, Declared

ROWS = json.loads((Path(__file__).parents[2] / "data" / "argv" / "corpus.json").read_text())


def read(*args: str, **files: str) -> Declared | None:
    return vllm_argv.read(args, {f"{name}.yaml": text for name, text in files.items()}.get)


def declared(*args: str, **files: str) -> Declared:
    found = read(*args, **files)
    assert found is not None
    return found


def name_of(row: dict[str, Any]) -> str:
    return " ".join(row["args"]) + "".join(f" {text!r}" for text in row.get("files", {}).values())


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_corpus(row: dict[str, Any]) -> None:
    """The reader reads what vLLM reads; what vLLM refuses is unreadable where the reader can tell, and never breaks it."""
    found = vllm_argv.read(row["args"], row.get("files", {}).get)
    reader = row.get("reader", {})
    if row.get("expect") == "help":
        assert found is None
        return
    assert found is not None
    if reader == "unreadable":
        assert found.unreadable and found.share is found.total_bytes is found.kv_bytes is None
    elif "expect" not in row:
        assert found.unreadable is None
        wanted = {
            "share": parse_share(row["share"]) if "share" in row else None,
            "kv_bytes": row.get("kv"),
            "port": row.get("port", 8000),
            "model": row.get("model"),
            "gpus": row.get("gpus", row.get("tp", 1) * row.get("pp", 1) * row.get("dp", 1)),
            "device_ids": row.get("devices"),
            **reader,
        }
        assert {name: getattr(found, name) for name in wanted} == wanted


@pytest.mark.parametrize(
    "args, source",
    [
        (["m"], "default"),
        (["m", "--gpu-memory-utilization", "0.4"], "argument"),
        (["m", "--kv-cache-memory-bytes", "8G"], "argument"),
        (["m", "--config", "c.yaml"], "config"),
        (["m", "--config", "c.yaml", "--gpu-mem", "0.4"], "argument"),
        (["m", "--config", "kv.yaml"], "config"),
        (["m", "--config", "port.yaml"], "default"),
        (["m", "--config=c.yaml"], "default"),
    ],
    ids=" ".join,
)
def test_source(args: list[str], source: str) -> None:
    """Where the size came from is told."""
    found = declared(*args, c="gpu-memory-utilization: 0.3\n", kv="kv-cache-memory-bytes: 8G\n", port="port: 8001\n")
    assert found.source == source


@pytest.mark.parametrize(
    "text, amount", [("40", 40 * GIB), ("0.5", GIB // 2), ("112", 112 * GIB)], ids=["40", "0.5", "112, sparkrun issue 136"]
)
def test_gib_of_the_patch(text: str, amount: int) -> None:
    """--gpu-memory-utilization-gb, of a patch that is common on GB10, is GiB and no fraction."""
    for args in (
        ["--gpu-memory-utilization-gb", text],
        [f"--gpu_memory_utilization_gb={text}"],
        ["--gpu-memory-utilization-g", text],
    ):
        found = declared("m", *args)
        assert (found.total_bytes, found.share) == (amount, None)


@pytest.mark.parametrize(
    "args, text",
    [
        (["m", "--gpu-memory-utilization", "40%"], "--gpu-memory-utilization 40% is no number"),
        (["m", "--port"], "--port has no value that can be read"),
        (["m", "--config", "gone.yaml"], "config gone.yaml cannot be read"),
        (["m", "--config", "c.json"], "config c.json is no .yaml file, and vLLM takes no other"),
        (["m", "--config", "bad.yaml"], "config bad.yaml cannot be understood: just text"),
        (["m", "--config"], "--config takes one file, once"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_read_is_named(args: list[str], text: str) -> None:
    """People are told which word is wrong."""
    assert declared(*args, bad="just text\n").unreadable == text


def test_flags_set() -> None:
    """Which settings a list of arguments fixes, by vLLM's names, the last one winning."""
    args = ["--gp", "0.3", "--port=1", "--port", "2", "--model", "m", "--kv-cache-mem=1G", "-tp", "2", "--headless"]
    expected = {"gpu-memory-utilization": "0.3", "port": "2", "model": "m", "kv-cache-memory-bytes": "1G"}
    assert vllm_argv.flags_set(args) == expected


@pytest.mark.parametrize(
    "text, expected",
    [
        ("a: 1\nb_c: 'x y'\nd: \"e\"\n", {"a": "1", "b_c": "x y", "d": "e"}),
        ("a: 1 # one\nb: x#y\nc: # none\n", {"a": "1", "b": "x#y", "c": "None"}),
        ("a:\n  b: 1\nc: 2\n", {"a": None, "c": "2"}),
        ("a: [1, 2]\nb: {c: 1}\nd: &x 1\ne: *x\nf: >-\n  text\ng: !!int 1\n", dict.fromkeys("abdefg")),
        ("a: 'it''s'\nb: \"x\\n\"\nc: 'open\n", dict.fromkeys("abc")),
        ("%YAML 1.1\n---\na: 1\n...\nb: 2\n", {"a": "1"}),
        ("a:\n\n  # c\n  b: 1\n", {"a": None}),
        ("path: C:\\x\nurl: http://x:1/y\n", {"path": "C:\\x", "url": "http://x:1/y"}),
    ],
)
def test_flat_yaml(text: str, expected: dict[str, str | None]) -> None:
    """Top-level scalars are read; anything else is present and not understood."""
    assert vllm_argv.flat_yaml(text) == expected


@pytest.mark.parametrize(
    "text", ["", "# only\n", "{a: 1}\n", "- a\n", "text\n", "a: 1\n b: 2\nc\n", "<<: *x\n", "  a: 1\nb: 2\n"]
)
def test_flat_yaml_refuses(text: str) -> None:
    """A document that is no block mapping is not understood as an empty one."""
    with pytest.raises(ValueError):
        vllm_argv.flat_yaml(text)


# What holds for any arguments.

OPTIONS = st.sampled_from(
    """--gpu-memory-utilization --gpu_memory_utilization --gpu-mem --gp --device-memory-utilization --gpu-memory-utilization-gb
    --kv-cache-memory-bytes --port --model --config -tp -dp -n --headless --help --served-model-name --hf-overrides.a --nonsense
    -- - -x""".split()
)
VALUES = st.one_of(
    st.sampled_from(["0.4", "10G", "8001", "-1", "", "m", "c.yaml", "--gpu-memory-utilization 0.7"]), st.text(max_size=8)
)
WORDS = st.lists(st.one_of(OPTIONS, VALUES, st.builds("{}={}".format, OPTIONS, VALUES)), max_size=12)
SHARES = st.integers(0, 10**9).map(lambda share: f"{share / 10**9:.9f}")
# Words that are no option, and options that are none of ours.
OTHER = st.sampled_from(
    [
        "--served-model-name",
        "a",
        "--enforce-eager",
        "--hf-overrides",
        '{"port": 1}',
        "x --gpu-memory-utilization 0.7",
        "--x.y=--gp",
        "-q",
    ]
)
FLAG = "--gpu-memory-utilization"


@given(WORDS, st.text())
def test_nothing_breaks_the_reader(args: list[str], text: str) -> None:
    """Whatever the arguments and the file: a declaration or None, and what cannot be read claims no size."""
    found = vllm_argv.read(args, lambda path: text)
    if found is not None and found.unreadable:
        assert found.share is found.total_bytes is found.kv_bytes is None


@given(st.lists(OTHER), st.lists(SHARES, min_size=1), st.lists(OTHER))
def test_the_last_one_wins(before: list[str], shares: list[str], after: list[str]) -> None:
    """Of a repeated option the last counts, wherever it stands and whatever is between."""
    args = [*before, *(word for share in shares for word in (FLAG, share, "--enforce-eager")), *after]
    assert declared("m", *args).share == parse_share(shares[-1])


@given(st.lists(OTHER), SHARES, st.lists(OTHER), st.booleans())
def test_splitting(before: list[str], share: str, after: list[str], underscores: bool) -> None:
    """One word with '=', or two words, dashes or underscores: the same."""
    flag = FLAG[:2] + FLAG[2:].replace("-", "_") if underscores else FLAG
    assert read("m", *before, flag, share, *after) == read("m", *before, f"{FLAG}={share}", *after)


@given(st.integers(len("--gp"), len(FLAG)), SHARES)
def test_prefixes(length: int, share: str) -> None:
    """Every unique prefix is the option itself."""
    assert declared("m", FLAG[:length], share).share == parse_share(share)


@given(
    st.text(alphabet=" \t\n{}'\"x0.4=-", max_size=12),
    st.sampled_from(["--chat-template", "--served-model-name", "--hf-overrides"]),
)
def test_text_inside_an_argument_never_counts(text: str, option: str) -> None:
    """A flag inside another argument is text."""
    assert declared("m", option, f"{text}x {FLAG} 0.7", "--port", "8001").share is None
    assert declared("m", f"{option}={text} {FLAG}=0.7", "--port", "8001").share is None
    assert declared("m", option, json.dumps({FLAG: text})).share is None


@given(st.lists(OTHER), st.lists(OTHER))
def test_nothing_after_two_dashes_counts(before: list[str], after: list[str]) -> None:
    """Two dashes end the options."""
    assert declared("m", *before, "--", FLAG, "0.7", *after).share is None


@given(st.integers(0, 10**6), st.sampled_from("kKmMgGtT"))
def test_sizes(number: int, unit: str) -> None:
    """A capital is a power of 1024, a small letter one of 1000."""
    power = "kmgt".index(unit.lower()) + 1
    assert vllm_argv.parse_size(f"{number}{unit}") == number * (1024 if unit.isupper() else 1000) ** power
