"""A grid of tiles: which of them a box touches, and what part of the box each holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from mural.geometry import Box, Interval, overlap, slices

Index = tuple[int, ...]


def tile_at(index: Index, chunks: Sequence[int]) -> Box:
    """The box of a tile, which may reach beyond the image."""
    return tuple(Interval(i * chunk, (i + 1) * chunk) for i, chunk in zip(index, chunks, strict=True))


def touched(box: Box, chunks: Sequence[int]) -> Iterator[Index]:
    """The tiles that a box without empty dims touches.

    >>> list(touched((Interval(0, 3), Interval(5, 9)), (3, 4)))
    [(0, 1), (0, 2)]
    """
    return product(*(range(i.start // chunk, -(-i.stop // chunk)) for i, chunk in zip(box, chunks, strict=True)))


def grid(shape: Sequence[int], chunks: Sequence[int]) -> tuple[int, ...]:
    """The number of tiles along each dim."""
    return tuple(-(-extent // chunk) for extent, chunk in zip(shape, chunks, strict=True))


def count(box: Box, chunks: Sequence[int]) -> int:
    """How many tiles a box without empty dims touches."""
    total = 1
    for interval, chunk in zip(box, chunks, strict=True):
        total *= -(-interval.stop // chunk) - interval.start // chunk
    return total


def shared(box: Box, tile: Box) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Where the common part of a box and a tile lies in each of them."""
    part = overlap(box, tile)
    return slices(part, box), slices(part, tile)
