"""Textures that are computed box by box: every value follows from the seed and its global position alone.

Only additions, multiplications and look-ups are used, whose bits do not depend on where a value is in an array; the
functions of a mathematical library may differ there, and two boxes that overlap would then disagree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mural.geometry import Box, Interval, slices

Field = NDArray[Any]
"""Values of float32; numpy's annotations lose that in most operations."""

PRIMES = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)


def chance(seed: int, positions: Sequence[NDArray[np.int64]], salt: int = 0) -> Field:
    """A number in [0, 1) for each point of the grid that one list of positions per dim spans: a hash of the point."""
    total = np.uint64((seed * PRIMES[3] + salt * PRIMES[2]) % 2**64) + np.zeros((1,) * len(positions), np.uint64)
    for dim, along in enumerate(positions):
        shape = [-1 if d == dim else 1 for d in range(len(positions))]
        total = mixed(total ^ (along.astype(np.uint64) * np.uint64(PRIMES[dim % 3])).reshape(shape))
    return (total >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)


def mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Numbers of which every bit depends on every bit of the given ones (splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def knots(box: Box, spacing: int) -> Box:
    """The knots, every `spacing` positions, that enclose a box."""
    return tuple(Interval(i.start // spacing, (i.stop - 1) // spacing + 2) for i in box)


def between(values: Field, box: Box, spacing: int, ease: bool = False) -> Field:
    """Values at the knots of a box, interpolated at all of its positions; the first dim last, whole rows at a time."""
    for dim in reversed(range(len(box))):
        positions = np.arange(box[dim].start, box[dim].stop)
        at = positions // spacing - box[dim].start // spacing
        share = ((positions % spacing) / spacing).astype(np.float32)
        if ease:
            share = share * share * (3 - 2 * share)
        steps = np.diff(values, axis=dim).take(at, axis=dim)
        steps *= share.reshape([-1 if d == dim else 1 for d in range(len(box))])
        values = values.take(at, axis=dim)
        values += steps
    return values


def smooth(box: Box, spacing: int, seed: int, salt: int) -> Field:
    """Noise between -1 and 1 whose spots are about `spacing` wide."""
    grid = knots(box, spacing)
    values = 2 * chance(seed, [np.arange(i.start, i.stop) for i in grid], salt) - 1
    return between(values, box, spacing, ease=True)


@dataclass(frozen=True)
class Ellipses:
    """One ellipse (ellipsoid) or none for each cell of a lattice, around a jittered centre; radii in positions.

    `large` tells which cells hold the larger kind. An ellipse reaches at most `margin` positions beyond its cell.
    """

    seed: int
    spacing: int
    margin: int

    def paint(self, box: Box) -> tuple[Field, NDArray[np.bool_]]:
        """How deep each position is in an ellipse (1 at a centre, 0 on the rim, below outside), and in which kind."""
        cells = [
            Interval((i.start - self.margin) // self.spacing, (i.stop + self.margin) // self.spacing + 1) for i in box
        ]
        pairs = [-(-c.size // 2) for c in cells]
        shape = [(2 * n + 1) * self.spacing for n in pairs]
        depth, large = np.full(shape, -1, np.float32), np.zeros(shape, np.bool_)
        width = self.spacing + 2 * self.margin
        # Cells of equal parity have windows that do not overlap, so each of the 2^n parities is painted at once:
        #     |<---- 2 spacing ---->|
        #     [window.......]       [window.......]       even
        #                [window.......]       [window.......]       odd
        for parity in product((0, 1), repeat=len(box)):
            numbers = [c.start + p + 2 * np.arange(n) for c, p, n in zip(cells, parity, pairs, strict=True)]
            places = tuple(
                slice(p * self.spacing, (p + 2 * n) * self.spacing) for p, n in zip(parity, pairs, strict=True)
            )
            blocks = tuple(size for n in pairs for size in (n, 2 * self.spacing))
            windows = (slice(None), slice(0, width)) * len(box)
            found, kind = self.windows(numbers, width)
            canvas, kinds = depth[places].reshape(blocks)[windows], large[places].reshape(blocks)[windows]
            np.copyto(kinds, kind, where=found > canvas)
            np.maximum(canvas, found, out=canvas)
        starts = [c.start * self.spacing - self.margin for c in cells]
        inside = slices(box, [Interval(start, start + n) for start, n in zip(starts, shape, strict=True)])
        return depth[inside], large[inside]

    def windows(self, cells: Sequence[NDArray[np.int64]], width: int) -> tuple[Field, NDArray[np.bool_]]:
        """Depth and kind in the window of each cell, as arrays (cells, width, cells, width, …)."""
        ndim = len(cells)

        def draw(salt: int) -> Field:
            return chance(self.seed, cells, salt)

        crowd = smooth(tuple(Interval(int(c[0]), int(c[-1]) + 1) for c in cells), 5, self.seed, 90)
        crowd = crowd[(slice(None, None, 2),) * ndim]
        kind = crowd > 0.1
        long = (5 + 2 * draw(1) + np.float32(2.5) * kind) * np.float32(self.spacing / 22)
        short = long * (0.55 + 0.4 * draw(2))
        slope = 2 * draw(3) - 1
        cos, sin = (1 - slope * slope) / (1 + slope * slope), 2 * slope / (1 + slope * slope)
        # Depth is 1 - q: q = a·y² + 2b·y·x + c·x² over the last two dims, and z² / short² over those before.
        a, c = cos * cos / short**2 + sin * sin / long**2, cos * cos / long**2 + sin * sin / short**2
        b = cos * sin * (1 / long**2 - 1 / short**2)
        # A tenth more than the radius, for callers that bend the rim a little.
        reach = np.clip((width - 1) / 2 - np.float32(1.1) * long, 0, np.float32(0.38 * self.spacing))
        offsets: list[Field] = []
        for dim in range(ndim):
            centre = (width - 1) / 2 + (2 * draw(10 + dim) - 1) * reach
            along = [width if d == 2 * dim + 1 else 1 for d in range(2 * ndim)]
            offsets.append(np.arange(width, dtype=np.float32).reshape(along) - spread(centre))
        *before, y, x = offsets
        top = np.where(draw(4) < 0.72 + 0.4 * crowd, np.float32(1), np.float32(-9))
        rest = spread(top) - spread(a) * (y * y)
        for z in before:
            rest = rest - spread(1 / short**2) * (z * z)
        # What is left of x is the only work on whole windows: rest - x·(2b·y + c·x).
        found = spread(2 * b) * y + spread(c) * x
        found *= x
        return rest - found, spread(kind)


def spread(values: Field) -> Field:
    """A value for each cell, as an array (cells, 1, cells, 1, …)."""
    return values.reshape([size for n in values.shape for size in (n, 1)])
