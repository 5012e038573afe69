"""The text that engines expose for Prometheus, read within bounds: what is wanted, line by line.

Not prometheus-client's parser: that one ends at the first line it cannot read, and with it goes the whole scrape; it gives
counters other names than stand in the text; and it reads the labels of a thousand series where forty are wanted.
tests/unit/core/test_prometheus_text.py holds this reader to that parser's answers.
"""

from __future__ import annotations

from sparkguard.core.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container

MAX_CHARS = 2 << 20  # as much of a body as is read at all; vLLM 0.32 with one model: 50 KB
MAX_SAMPLES = 20_000

Labels = tuple[tuple[str, str], ...]  # by name


class Sample(Record):
    name: str
    labels: Labels
    value: float

    def label(self, name: str) -> str | None:
        return dict(self.labels).get(name)


def parse(text: str, wanted: Container[str] | None = None) -> tuple[Sample, ...]:
    """Samples by name and labels, those of other names left out; None wants all.

    A line that cannot be read, and a value that is no number (NaN, infinite), count as not being there. A series that
    appears twice counts once, with its first value, as for Prometheus.
    """
    found: dict[tuple[str, Labels], Sample] = {}
    for line in text[:MAX_CHARS].split("\n"):
        if line[:1] in ("#", ""):
            continue
        end = _name_end(line)
        name = line[:end]
        if not name or (wanted is not None and name not in wanted):
            continue
        sample = _sample(name, line[end:])
        if sample is not None and (name, sample.labels) not in found:
            found[name, sample.labels] = sample
            if len(found) == MAX_SAMPLES:
                break
    return tuple(found.values())


def _name_end(line: str) -> int:
    for i, char in enumerate(line):
        if char in "{ \t":
            return i
    return 0


def _sample(name: str, rest: str) -> Sample | None:
    labels: Labels = ()
    if rest[0] == "{":
        found, rest = _labels(rest)
        if found is None:
            return None
        labels = found
    words = rest.split("#", 1)[0].split()  # behind a # comes an exemplar, and behind the value a time
    value = _number(words[0]) if 0 < len(words) <= 2 else None
    return None if value is None else Sample(name, labels, value)


def _number(word: str) -> float | None:
    if "_" in word:
        return None  # Python reads 1_0, Prometheus does not
    try:
        value = float(word)
    except ValueError:
        return None
    return value if value - value == 0 else None


def _labels(text: str) -> tuple[Labels | None, str]:
    """{a="b",c="d"} and what follows it; None where the text is not of that form."""
    labels: dict[str, str] = {}
    i = 1
    while True:
        while text[i : i + 1] in (" ", ","):
            i += 1
        if text[i : i + 1] == "}":
            return tuple(sorted(labels.items())), text[i + 1 :]
        equals = text.find('="', i)
        if equals < 0:
            return None, ""
        value, end = _quoted(text, equals + 2)
        if value is None:
            return None, ""
        labels[text[i:equals].strip()] = value
        i = end


def _quoted(text: str, start: int) -> tuple[str | None, int]:
    """The value between a quote before start and the next one, and the place behind that."""
    end = text.find('"', start)
    if end >= 0 and "\\" not in text[start:end]:
        return text[start:end], end + 1
    parts: list[str] = []
    i = start
    while i < len(text):
        char = text[i]
        if char == '"':
            return "".join(parts), i + 1
        if char == "\\":
            i += 1
            char = {"n": "\n", '"': '"', "\\": "\\"}.get(text[i : i + 1], "\\" + text[i : i + 1])
        parts.append(char)
        i += 1
    return None, i
