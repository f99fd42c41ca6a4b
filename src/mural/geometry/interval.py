"""Half-open intervals of global positions, and boxes made of one interval per dim."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import NamedTuple


class Interval(NamedTuple):
    """The positions start, …, stop - 1; empty when stop <= start.

    >>> Interval(2, 7) & Interval(5, 9)
    Interval(start=5, stop=7)
    >>> Interval(2, 7).shift(-2).size
    5
    """

    start: int
    stop: int

    @property
    def size(self) -> int:
        """The number of positions."""
        return max(0, self.stop - self.start)

    def __and__(self, other: Interval) -> Interval:
        """The common positions; an empty interval where there are none."""
        start = max(self.start, other.start)
        return Interval(start, max(start, min(self.stop, other.stop)))

    def shift(self, by: int) -> Interval:
        """The interval moved by that many positions."""
        return Interval(self.start + by, self.stop + by)

    def contains(self, other: Interval) -> bool:
        """Whether every position of `other` is one of this interval's."""
        return other.size == 0 or (self.start <= other.start and other.stop <= self.stop)


Box = tuple[Interval, ...]


def volume(box: Box) -> int:
    """The number of positions in a box.

    >>> volume((Interval(0, 2), Interval(1, 4)))
    6
    """
    product = 1
    for interval in box:
        product *= interval.size
    return product


def overlap(a: Box, b: Box) -> Box:
    """The common part of two boxes."""
    return tuple(x & y for x, y in zip(a, b, strict=True))


def disjoint(boxes: Iterable[Box]) -> bool:
    """Whether no two of the boxes have a position in common."""
    return not any(volume(overlap(a, b)) for a, b in combinations(boxes, 2))


def subtract(outer: Box, inner: Box) -> tuple[Box, ...]:
    """Disjoint boxes that cover `outer` without `inner`, which is inside it.

        outer            slabs
        +---------+      +---------+
        |  +---+  |      |    0    |
        |  | i |  |      | 2| i |3 |
        |  +---+  |      |    1    |
        +---------+      +---------+

    >>> subtract((Interval(0, 4), Interval(0, 3)), (Interval(1, 4), Interval(0, 2)))
    ((Interval(start=0, stop=1), Interval(start=0, stop=3)), (Interval(start=1, stop=4), Interval(start=2, stop=3)))
    """
    slabs: list[Box] = []
    rest = list(outer)
    for dim, (out, inn) in enumerate(zip(outer, inner, strict=True)):
        for side in (Interval(out.start, inn.start), Interval(inn.stop, out.stop)):
            slab = (*rest[:dim], side, *rest[dim + 1 :])
            if volume(slab):
                slabs.append(slab)
        rest[dim] = inn
    return tuple(slabs)


def whole(shape: Sequence[int]) -> Box:
    """The box of a whole tensor of that shape."""
    return tuple(Interval(0, extent) for extent in shape)


def broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape that these shapes broadcast to by torch's rules; raises ValueError if they do not.

    >>> broadcast((2, 1, 5), (3, 1))
    (2, 3, 5)
    """
    ndim = max((len(shape) for shape in shapes), default=0)
    result = [1] * ndim
    for shape in shapes:
        for dim, extent in enumerate(shape, ndim - len(shape)):
            if extent != 1 and result[dim] not in (1, extent):
                raise ValueError(f"shapes {[tuple(s) for s in shapes]} do not broadcast")
            result[dim] = extent if extent != 1 else result[dim]
    return tuple(result)
