"""Prompts: natural text from a seed, each behind a salt of its own, so that no prefix cache has seen it.

Natural text, since speculative decoding guesses text well and noise badly: a rate measured on noise is nobody's rate. The salt
stands first, since prefix caches compare from the first token on. Pure: the same seed and salts give the same prompts.
"""

from __future__ import annotations

import hashlib
import random

SUBJECTS = (
    "The harbour master", "A retired surveyor", "The night shift", "Our neighbour's daughter", "The old ferry",
    "A travelling clockmaker", "The village council", "The lighthouse keeper", "A young botanist", "The baker on the corner",
    "The river", "An apprentice printer", "The station clerk", "A pair of herons", "The last tram", "The schoolteacher",
    "A crew of roofers", "The weather office",
)  # fmt: skip
VERBS = (
    "wrote down", "measured", "forgot about", "waited for", "carried home", "compared", "described at length", "repaired",
    "lost track of", "asked the others about", "counted", "kept a record of", "had never understood", "slowly rebuilt",
    "watched over", "made a drawing of",
)  # fmt: skip
OBJECTS = (
    "the height of the spring tide", "three crates of apples", "a letter without a stamp", "the bridge's northern pier",
    "every boat that came in", "the smell of rain on warm stone", "a map of the lower fields",
    "the town's only printing press", "the sound of the second bell", "two ledgers bound in green cloth",
    "the path between the orchards", "a bicycle with one brake", "the colour of the evening sky", "the price of lamp oil",
    "a song from the valley", "the long wall behind the mill",
)  # fmt: skip
ENDS = (
    "before the fog lifted", "although nobody had asked", "while the kettle boiled", "because the winter had been mild",
    "until the lamps were lit", "as the market closed", "on the first Monday of the month",
    "and said little about it afterwards", "which surprised the whole street", "so that the work could go on",
    "when the wind turned east", "after the harvest was in",
)  # fmt: skip
TASKS = (
    "Tell the story of how one small town changed over a hundred years, in long and detailed paragraphs.",
    "Explain step by step how a wooden sailing ship is built, from the keel to the rigging.",
    "Describe a journey along a great river from its spring to the sea, with the people met on the way.",
    "Write a long letter from a gardener to a friend about all that grew in one year, month by month.",
    "Explain how bread is made, from the field to the table, and why each step matters.",
    "Describe the daily work of a railway station in the year 1910, hour by hour.",
)


class Prompts:
    """salts: a text that no other run has; number: which prompt of the run."""

    def __init__(self, seed: int, salts: str) -> None:
        self._seed = seed
        self._salts = salts

    def decode(self, number: int, characters: int) -> str:
        """A task whose answer is long; in front of it, as much text as makes it this long."""
        chooser = random.Random(f"{self._seed} decode {number}")
        task = chooser.choice(TASKS)
        head = self._salt(number)
        room = characters - len(head) - len(task) - 1
        return f"{head}{text(chooser, room)} {task}" if room > 0 else head + task

    def prefill(self, number: int, characters: int) -> str:
        """Text of this length, and a question whose answer may be short."""
        chooser = random.Random(f"{self._seed} prefill {number}")
        question = "In one sentence: what is this text about?"
        head = self._salt(number)
        return f"{head}{text(chooser, max(0, characters - len(head) - len(question) - 1))} {question}"

    def _salt(self, number: int) -> str:
        """Digits that differ from the first one on, from prompt to prompt and from run to run."""
        return f"[{hashlib.sha256(f'{self._salts} {number}'.encode()).hexdigest()[:12]}] "


def text(chooser: random.Random, characters: int) -> str:
    """Sentences, cut at the length."""
    made: list[str] = []
    length = 0
    while length < characters:
        parts = (chooser.choice(SUBJECTS), chooser.choice(VERBS), chooser.choice(OBJECTS), chooser.choice(ENDS))
        sentence = f"{' '.join(parts)}."
        made.append(sentence)
        length += len(sentence) + 1
    return " ".join(made)[: max(0, characters)]
