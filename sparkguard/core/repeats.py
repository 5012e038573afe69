"""Which layers of a model tell what all of them need of its work buffer.

Layers repeat: all alike, or one of another kind every few. The allocator is a machine that each layer moves on by the same
steps, so where it comes back to how it was some layers ago, it goes round in a circle for as long as the layers repeat, and
no round needs more than the first. So one round is laid out, and then what follows the last. Whether the machine did come
back is looked at, not assumed (graph.Moment).
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    Chosen = tuple[list[int], list[tuple[int, int]]]

_PERIODS = range(1, 11)  # in layers; most models have one of 1, 2, 4 or 6, Jamba has 8, Granite 10


def without_repeats(kinds: Sequence[int], periods: int = 1) -> Chosen:
    """The layers to lay out, and places among them, in pairs: nothing is lost if the buffer before both is alike.

    Of each row of repeated layers there are a few to begin with, in which the buffer settles; the periods that bring it back to
    where it was; and the rest, from a layer like the one after the first place on: a layer's results are read by the next.
    """
    kept: list[int] = []
    pairs = []
    at = 0
    while at < len(kinds):
        begin, end, left_out = max((_round(kinds, at, period, periods) for period in _PERIODS), key=lambda found: found[2])
        if left_out <= 0:
            begin = end = at + 1
            left_out = 0
        kept += range(at, end)
        if left_out:
            pairs.append((len(kept) - (end - begin), len(kept)))
        at = end + left_out
    return kept, pairs


def _round(kinds: Sequence[int], at: int, period: int, periods: int) -> tuple[int, int, int]:
    """Where a round would begin and end in the row from there on, and how many layers it would save."""
    row = at + period
    while row < len(kinds) and kinds[row] == kinds[row - period]:
        row += 1
    begin = at + _settling(period, periods)
    length = period * periods
    return begin, begin + length, (row - begin - length - 1) // length * length


def _settling(period: int, periods: int) -> int:
    """How many layers it takes in nearly all shapes of the tests."""
    if periods > 1:
        return 6
    return 2 if period == 1 else 4
