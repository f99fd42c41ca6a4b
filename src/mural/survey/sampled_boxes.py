"""Boxes of an image to look at: all of a small one, some of a large one, along the chunks of its file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from random import Random
from typing import TypeVar

from mural.data.source import Source
from mural.geometry import Box, whole
from mural.geometry.tile_grid import grid, split, tile_at

LEAST = {1: 4096, 2: 256, 3: 32}
"""The extent of a sampled box along each of so many dims, at least."""
AT_ONCE = 2**20
"""Positions that are read at once, unless a chunk has more."""
THREADS = 4
T = TypeVar("T")
R = TypeVar("R")
Progress = Callable[[str, int, int], None]
"""What is told of long work: what it is, how much of it is done, and of how much."""


def boxes(source: Source, most: int) -> tuple[list[Box], bool]:
    """Boxes of about `most` positions, the same whenever they are asked for, and whether they are the whole image.

    A file that can only be decoded as a whole is looked at as a whole.
    """
    extents, chunks = source.shape[1:], source.chunks[1:]
    channels = whole(source.shape[:1])
    if prod(extents) <= most or tuple(chunks) == extents:
        return [channels + box for box in split(whole(extents), chunks, 1, AT_ONCE)], True
    least = LEAST[len(extents)]
    unit = [min(n, -(-least // chunk) * chunk) for n, chunk in zip(extents, chunks, strict=True)]
    tiles = grid(extents, unit)
    count = min(prod(tiles), max(1, most // prod(unit)))
    chosen = sorted(Random(0).sample(range(prod(tiles)), count))
    return [channels + tile_at(index_of(number, tiles), unit, extents) for number in chosen], count == prod(tiles)


def index_of(number: int, counts: Sequence[int]) -> tuple[int, ...]:
    """The place of a number in a grid, the last dim fastest.

    >>> index_of(7, (2, 4))
    (1, 3)
    """
    found: list[int] = []
    for count in reversed(counts):
        number, place = divmod(number, count)
        found.append(place)
    return tuple(reversed(found))


def spread(items: Sequence[T], most: int) -> list[T]:
    """At most so many of the items, evenly spread.

    >>> spread(range(10), 4)
    [0, 2, 5, 7]
    """
    count = min(most, len(items))
    return [items[len(items) * k // count] for k in range(count)]


def told(what: str, function: Callable[[T], R], items: Sequence[T], progress: Progress) -> Iterator[R]:
    """What a function makes of each item, on a few threads, in order; after each, it is told how many are done."""
    with ThreadPoolExecutor(THREADS, thread_name_prefix="mural-survey") as threads:
        for done, result in enumerate(threads.map(function, items), 1):
            progress(what, done, len(items))
            yield result
