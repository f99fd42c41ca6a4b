"""A grid of tiles: where each is, and which of them a box touches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from mural.geometry import Box, Interval, overlap, whole

Index = tuple[int, ...]


def tile_at(index: Index, chunks: Sequence[int], shape: Sequence[int] | None = None) -> Box:
    """The box of a tile within an image of that shape; without one, it may reach beyond the image."""
    tile = tuple(Interval(i * chunk, (i + 1) * chunk) for i, chunk in zip(index, chunks, strict=True))
    return tile if shape is None else overlap(tile, whole(shape))


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
