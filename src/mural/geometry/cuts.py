"""Cuts: who owns which interval of a dim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from mural.errors import LayoutError
from mural.geometry.interval import Interval


@dataclass(frozen=True)
class Cuts:
    """A dim divided into one interval for each coordinate of a mesh axis.

    `bounds` ascend from 0 to the extent; part i is [bounds[i], bounds[i+1]) and belongs to coordinate
    `owners[i]`. The owners are 0, 1, 2, … except in a flipped tensor, whose data stay where they are.

    >>> Cuts.even(10, 3)
    Cuts(bounds=(0, 3, 7, 10), owners=(0, 1, 2))
    >>> Cuts.even(10, 3).scaled(5).bounds
    (0, 2, 4, 5)
    >>> Cuts.even(10, 3).flipped().interval(0)
    Interval(start=7, stop=10)
    """

    bounds: tuple[int, ...]
    owners: tuple[int, ...]

    @property
    def extent(self) -> int:
        """The length of the dim."""
        return self.bounds[-1]

    @property
    def parts(self) -> int:
        """How many coordinates share the dim."""
        return len(self.owners)

    def interval(self, coordinate: int) -> Interval:
        """The positions that a coordinate owns."""
        part = self.owners.index(coordinate)
        return Interval(self.bounds[part], self.bounds[part + 1])

    def intervals(self) -> tuple[Interval, ...]:
        """The positions of every coordinate, in the order of coordinates."""
        return tuple(self.interval(c) for c in range(self.parts))

    def scaled(self, extent: int) -> Cuts:
        """The same proportions of another extent, each bound rounded to the nearest position.

        The result depends only on these cuts and the extent, so tensors of equal extent always have the same cuts.
        """
        return _scaled(self, extent)

    def sliced(self, start: int, stop: int, step: int = 1) -> Cuts:
        """The cuts of positions start, start + step, … below stop, with all data left where they are.

        >>> Cuts.even(10, 2).sliced(1, 10, 3).bounds
        (0, 2, 3)
        """
        count = max(0, -(-(stop - start) // step))
        inner = (min(count, max(0, -(-(b - start) // step))) for b in self.bounds[1:-1])
        return Cuts((0, *inner, count), self.owners)

    def flipped(self) -> Cuts:
        """The cuts after a flip, with all data left where they are."""
        return Cuts(tuple(self.extent - b for b in reversed(self.bounds)), self.owners[::-1])

    @classmethod
    def of(cls, bounds: Sequence[int]) -> Cuts:
        """Cuts at these bounds, owned in order."""
        return cls(tuple(bounds), tuple(range(len(bounds) - 1)))

    @classmethod
    def even(cls, extent: int, parts: int, align: int = 1) -> Cuts:
        """Parts as equal as multiples of `align` allow."""
        return cls.weighted(extent, (1,) * parts, align)

    @classmethod
    def weighted(cls, extent: int, weights: Sequence[float], align: int = 1) -> Cuts:
        """Parts in proportion to the weights, each inner bound at a multiple of `align`.

        >>> Cuts.weighted(100, (1, 3), align=8).bounds
        (0, 24, 100)
        """
        total = sum(weights)
        if total <= 0 or min(weights) < 0:
            raise LayoutError(f"weights {tuple(weights)} of a cut must not be negative, and one must be above 0")
        ends = (extent * w / total / align for w in accumulate(weights))
        inner = [min(extent, align * int(end + 0.5)) for end in ends]
        return cls.of((0, *inner[:-1], extent))

    @classmethod
    def sized(cls, sizes: Sequence[int]) -> Cuts:
        """Parts of exactly these sizes."""
        return cls.of((0, *accumulate(sizes)))


@lru_cache(maxsize=65536)
def _scaled(cuts: Cuts, extent: int) -> Cuts:
    if extent == cuts.extent:
        return cuts
    if cuts.extent == 0:
        return Cuts(Cuts.even(extent, cuts.parts).bounds, cuts.owners)
    scaled = ((2 * b * extent + cuts.extent) // (2 * cuts.extent) for b in cuts.bounds)
    return Cuts(tuple(scaled), cuts.owners)


def check_bounds(bounds: Sequence[int], extent: int, parts: int) -> None:
    """Raise unless the bounds cut an extent into that many parts."""
    ascending = all(a <= b for a, b in pairwise(bounds))
    if len(bounds) != parts + 1 or bounds[0] != 0 or bounds[-1] != extent or not ascending:
        raise LayoutError(
            f"cuts {tuple(bounds)} do not divide an extent of {extent} into {parts} parts: "
            f"give {parts} sizes that add up to {extent}, or {parts + 1} ascending bounds from 0 to {extent}"
        )
