"""Regrouping: what a reshape does to a layout, as data.

A reshape merges and splits runs of dims. A cut survives a split if its bounds fall between two positions of the new
dim. Several cut dims that merge into one stay separate underneath: the merged dim is a *fold* of them, the data stay
where they are, and the next reshape finds the dims again (windows of Swin, tokens of a transformer).

      (B, H, W, C)  ->  (B, H·W, C)     layout (B, H, W, C), folds (1, 2, 1)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from math import prod

from mural.errors import LayoutError
from mural.geometry import Cuts
from mural.shard.layout import Layout

Folds = tuple[int, ...]
"""For each dim of a tensor, how many dims of its layout it merges; () stands for one each."""


def folded_shape(shape: Sequence[int], folds: Folds) -> tuple[int, ...]:
    """The shape of a tensor whose layout has that shape.

    >>> folded_shape((2, 8, 6, 3), (1, 2, 1))
    (2, 48, 3)
    """
    if not folds:
        return tuple(shape)
    return tuple(prod(shape[a:b]) for a, b in spans(folds))


def spans(folds: Folds) -> list[tuple[int, int]]:
    """The range of layout dims that each dim of a tensor merges.

    >>> spans((1, 2, 1))
    [(0, 1), (1, 3), (3, 4)]
    """
    stops = [0]
    for count in folds:
        stops.append(stops[-1] + count)
    return list(pairwise(stops))


def groups(old: Sequence[int], new: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Runs of old dims and new dims with equal products, as short as possible.

    >>> groups((2, 3, 4, 5), (2, 12, 5))
    [([0], [0]), ([1, 2], [1]), ([3], [2])]
    """
    found: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        left, right = [i] if i < len(old) else [], [j] if j < len(new) else []
        i, j = i + len(left), j + len(right)
        while (a := prod(old[d] for d in left)) != (b := prod(new[d] for d in right)) or not left or not right:
            if i >= len(old) and j >= len(new):
                break
            if (a <= b and i < len(old)) or j >= len(new):
                left.append(i)
                i += 1
            else:
                right.append(j)
                j += 1
        found.append((left, right))
    return found


@dataclass
class Regrouped:
    """A reshape's result: the new layout and folds, valid if `lost` and `aligned` are empty.

    `lost` dims have to be gathered first; `aligned` dims have to be cut at multiples of a number first.
    """

    dims: list[tuple[int, str | None, Cuts | None]] = field(default_factory=list[tuple[int, str | None, Cuts | None]])
    folds: list[int] = field(default_factory=list[int])
    lost: list[int] = field(default_factory=list[int])
    aligned: dict[int, Cuts] = field(default_factory=dict[int, Cuts])
    made: Layout | None = None

    def add(self, *dims: tuple[int, str | None, Cuts | None]) -> None:
        """One more dim of the tensor, which merges these dims of the layout."""
        self.dims += dims
        self.folds.append(len(dims))

    def layout(self, old: Layout) -> Layout:
        """The new layout."""
        if self.made is None:
            shape, axes, cuts = zip(*self.dims, strict=True) if self.dims else ((), (), ())
            self.made = replace(old, shape=shape, axes=axes, cuts=cuts)
        return self.made

    @property
    def fold(self) -> Folds:
        """The new folds, () where no dims merge."""
        return tuple(self.folds) if any(n != 1 for n in self.folds) else ()


def aligned_cuts(cuts: Cuts, step: int) -> Cuts | None:
    """The cuts with every bound moved to the nearest multiple of a step; None if a part would be empty.

    >>> aligned_cuts(Cuts.even(20, 2), 4).bounds, aligned_cuts(Cuts.even(8, 3), 4)
    ((0, 8, 20), None)
    """
    bounds = tuple(b if b == cuts.extent else step * round(b / step) for b in cuts.bounds)
    return Cuts(bounds, cuts.owners) if all(a < b for a, b in pairwise(bounds)) else None


@lru_cache(maxsize=8192)
def regrouped(layout: Layout, shape: tuple[int, ...], fold: bool) -> Regrouped:
    """What a reshape to a shape makes of a layout; without `fold`, dims that would fold are lost instead."""
    if prod(layout.shape) != prod(shape):
        raise LayoutError(f"a tensor of shape {layout.shape} cannot become {shape}: the number of values differs")
    found = Regrouped()
    for left, right in groups(layout.shape, shape):
        regroup(layout, left, [shape[d] for d in right], fold, found)
    return found


def regroup(layout: Layout, left: list[int], right: list[int], fold: bool, found: Regrouped) -> None:
    """Add one run of new extents, made of a run of old dims."""
    # A tile is of one image even where that is all there is: its images come at other times.
    real = [d for d in left if layout.shape[d] != 1 or (fold and layout.mesh.tiled and layout.is_cut(d))]
    found.lost += [d for d in left if real and d not in real and layout.is_cut(d)]
    real = real or [d for d in left if layout.is_cut(d)]
    named = [d for d in left if layout.axes[d] is not None and (d in real or not real)]
    main = next((i for i, n in enumerate(right) if n != 1), 0)
    single = sum(n != 1 for n in right) <= 1

    def spread(*dims: tuple[int, str | None, Cuts | None]) -> None:
        """The main new dim, and the others uncut."""
        for i, n in enumerate(right):
            found.add(*(dims if i == main else ((n, None, None),)))

    if not right or not left:
        found.lost += [d for d in left if layout.is_cut(d)]
        spread(*((n, None, None) for n in right[main : main + 1]))
    elif not named:
        spread((right[main], None, None))
    elif single and len(real) <= 1:
        spread((right[main], layout.axes[named[0]], layout.cuts[named[0]]))
    elif single and fold and (len(named) > 1 or named[0] != real[0]):
        spread(*((layout.shape[d], layout.axes[d], layout.cuts[d]) for d in real))
    else:
        found.lost += [d for d in named if d != real[0] and layout.is_cut(d)]
        first = real[0]
        axis, cuts = (layout.axes[first], layout.cuts[first]) if first in named else (None, None)
        old, new = prod(layout.shape[d] for d in left if d > first), prod(right[main + 1 :])
        if cuts is not None and new and all(b * old % new == 0 for b in cuts.bounds):
            spread((right[main], axis, Cuts(tuple(b * old // new for b in cuts.bounds), cuts.owners)))
            return
        if cuts is not None and cuts.parts > 1:
            moved = aligned_cuts(cuts, new // old) if old and new and new % old == 0 else None
            if moved is None:
                found.lost.append(first)
            else:
                found.aligned[first] = moved
        whole = cuts is not None and cuts.parts == 1
        spread((right[main], axis, Cuts.of((0, right[main])) if whole else None))
