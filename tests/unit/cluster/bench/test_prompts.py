"""Prompts that nobody's cache has seen, and that can be made again."""

from __future__ import annotations

from sparkguard.cluster.bench.prompts import Prompts


def test_the_same_seed_gives_the_same_text() -> None:
    """But for the salt, two runs with one seed ask the same."""
    first, second = Prompts(7, "aaaaaa").prefill(3, 2000), Prompts(7, "bbbbbb").prefill(3, 2000)
    assert first != second
    assert first.split("] ", 1)[1] == second.split("] ", 1)[1]


def test_no_two_begin_alike() -> None:
    """The salt stands first, and its first letters differ already: prefix caches compare from there."""
    prompts = Prompts(7, "abcdef")
    starts = {prompts.prefill(number, 500)[:7] for number in range(200)}
    assert len(starts) == 200


def test_the_length_is_as_asked() -> None:
    """In characters, for both kinds."""
    prompts = Prompts(1, "abcdef")
    assert [len(make(0, 3000)) for make in (prompts.decode, prompts.prefill)] == [3000, 3000]


def test_a_short_prompt_is_still_a_task() -> None:
    """No room for text leaves the salt and the task."""
    assert Prompts(1, "abcdef").decode(0, 1).count(". ") == 0
    assert "?" in Prompts(1, "abcdef").prefill(0, 1)
