"""A grid of tiles: where each is, which of them a box touches, and boxes cut at their edges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, product

from mural.geometry.interval import Box, Interval, overlap, volume, whole

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


def split(box: Box, chunks: Sequence[int], parts: int, most: int) -> tuple[Box, ...]:
    """A box of a file cut into about that many parts of at most about `most` positions, at edges of the file's tiles.

    The dim with the most tiles is cut first, the outermost of several: no tile is in two parts.

    >>> [box[0] for box in split((Interval(10, 100), Interval(0, 64)), (32, 64), 2, 10**6)]
    [Interval(start=10, stop=64), Interval(start=64, stop=100)]
    """
    rows = [-(-i.stop // c) - i.start // c if i.size else 0 for i, c in zip(box, chunks, strict=True)]
    dim = max(range(len(box)), key=lambda d: (rows[d], -d))
    wanted = min(rows[dim], max(parts, -(-volume(box) // most)))
    if wanted < 2:
        return (box,)
    first, step = box[dim].start // chunks[dim], chunks[dim]
    edges = [(first + rows[dim] * k // wanted) * step for k in range(wanted + 1)]
    edges[0], edges[-1] = box[dim]
    cut = [(*box[:dim], Interval(a, b), *box[dim + 1 :]) for a, b in pairwise(edges)]
    return tuple(part for piece in cut for part in split(piece, chunks, 1, most))
