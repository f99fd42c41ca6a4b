"""Views: which box of a file's image a box of the image that the model sees comes from.

A view is a window of the file's image (a crop, or a larger window whose outside is padding), then flips and quarter
turns. Both only rename positions, so a rank reads the box that its own comes from, and turns what it read.

        file               window            view (a quarter turn)
    +-----------+         +-----+            +---+
    |   +-----+ |         |  ab |            |b  |
    |   |  ab | |   ->    |     |     ->     |a  |
    |   +-----+ |         +-----+            |   |
    +-----------+                            +---+
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mural.geometry import Box, Interval

SAME_BITS = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Types that torch cannot flip, and those of the same size that it can."""


@dataclass(frozen=True)
class QuarterTurns:
    """Flips and quarter turns: dim d of the result is dim `dims[d]` of the original, reversed where `flips[d]`.

    >>> quarter = QuarterTurns.rotation(2, 1, (0, 1))
    >>> quarter, quarter.then(quarter) == QuarterTurns.rotation(2, 2, (0, 1))
    (QuarterTurns(dims=(1, 0), flips=(True, False)), True)
    """

    dims: tuple[int, ...]
    flips: tuple[bool, ...]

    @classmethod
    def none(cls, ndim: int) -> QuarterTurns:
        """The turn that changes nothing."""
        return cls(tuple(range(ndim)), (False,) * ndim)

    @classmethod
    def flip(cls, ndim: int, dims: Sequence[int]) -> QuarterTurns:
        """Those dims reversed."""
        return cls(tuple(range(ndim)), tuple(d in dims for d in range(ndim)))

    @classmethod
    def rotation(cls, ndim: int, quarters: int, plane: tuple[int, int]) -> QuarterTurns:
        """Quarter turns in a plane, in the direction of `torch.rot90`."""
        found, (a, b) = cls.none(ndim), plane
        dims, flips = list(found.dims), list(found.flips)
        dims[a], dims[b], flips[a] = b, a, True
        quarter = cls(tuple(dims), tuple(flips))
        for _ in range(quarters % 4):
            found = found.then(quarter)
        return found

    def then(self, other: QuarterTurns) -> QuarterTurns:
        """This turn, and another one of its result."""
        return QuarterTurns(
            tuple(self.dims[d] for d in other.dims),
            tuple(flip != self.flips[d] for d, flip in zip(other.dims, other.flips, strict=True)),
        )

    def apply(self, piece: Tensor) -> Tensor:
        """A piece with its last dims turned; dims before them stay."""
        lead = piece.ndim - len(self.dims)
        turned = piece.permute(*range(lead), *(lead + d for d in self.dims))
        reversed_dims = [lead + d for d, flip in enumerate(self.flips) if flip]
        if not reversed_dims:
            return turned
        kind = SAME_BITS.get(piece.dtype, piece.dtype)
        return turned.view(kind).flip(reversed_dims).view(piece.dtype)


@dataclass(frozen=True)
class View:
    """The image that the model sees: a window of the file's spatial extents, turned.

    >>> view = View((100, 80), (Interval(10, 60), Interval(0, 80)), QuarterTurns.rotation(2, 1, (0, 1)))
    >>> view.shape, view.behind((Interval(0, 8), Interval(0, 50)))
    ((80, 50), (Interval(start=10, stop=60), Interval(start=72, stop=80)))
    """

    extents: tuple[int, ...]
    window: Box
    turn: QuarterTurns

    @property
    def shape(self) -> tuple[int, ...]:
        """The spatial extents of the view."""
        return tuple(self.window[d].size for d in self.turn.dims)

    def behind(self, box: Box) -> Box:
        """The box of the file's image that a box of the view comes from; it may stick out where the window does."""
        found = list(self.window)
        for (start, stop), d, flip in zip(box, self.turn.dims, self.turn.flips, strict=True):
            first, end = (-stop, -start) if flip else (start, stop)
            found[d] = Interval(first, end).shift(self.window[d].stop if flip else self.window[d].start)
        return tuple(found)

    def before(self, box: Box) -> Box:
        """The box of the view that shows a box of the file's image: the inverse of `behind`."""
        found: list[Interval] = []
        for d, flip in zip(self.turn.dims, self.turn.flips, strict=True):
            (start, stop), window = box[d], self.window[d]
            found.append(
                Interval(window.stop - stop, window.stop - start)
                if flip
                else Interval(start - window.start, stop - window.start)
            )
        return tuple(found)
