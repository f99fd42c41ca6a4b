"""A source as windows are read from it: checked, by spatial boxes, directly or by way of kept blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from mural.errors import DataError, LayoutError
from mural.geometry import Box, Interval, overlap, slices, volume
from mural.geometry.tile_grid import split, tile_at, touched
from mural.memory.decoded_cache import Block, DecodedCache, block_extents
from mural.memory.readable import Readable

MOST_AT_ONCE = 2**20
"""Positions that one task reads at most: little memory next to the windows, and soon done when reading is closed."""

Fill = tuple[Callable[[], None], Block | None]
"""What fills a part of a window, and the block that it has to decode for itself and for others, if any."""


class HeldImage:
    """A tensor (C, *extents) as a source: `read` returns views without history."""

    def __init__(self, tensor: Tensor):
        self.values = tensor.detach()
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype

    def read(self, box: Box) -> Tensor:
        """That box."""
        return self.values[slices(box)]


class WindowSource:
    """One image of a pass."""

    def __init__(self, source: Readable | Tensor, number: int):
        if not isinstance(source, Tensor) and not hasattr(source, "read"):
            raise LayoutError(f"image {number} is a {type(source).__name__}: windows are read from tensors and sources")
        self.source: Readable = HeldImage(source) if isinstance(source, Tensor) else source
        self.name = str(getattr(source, "name", None) or f"image {number}")
        self.shape = tuple(int(extent) for extent in source.shape)
        self.extents = self.shape[1:]
        chunks: Any = getattr(source, "chunks", ())
        self.tile = tuple(chunks[1:]) if len(chunks) == len(self.shape) else (1,) * len(self.extents)
        self.block = block_extents(self.extents, self.tile)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The type of the pixels; where the source does not say it, that of one pixel."""
        said = getattr(self.source, "dtype", None)
        return said if isinstance(said, torch.dtype) else self.source.read([(0, 1) for _ in self.shape]).dtype

    def check(self, window: Box) -> None:
        """Raise unless a window is within the image."""
        inside = len(window) == len(self.extents)
        if not inside or any(not 0 <= a <= b <= n for (a, b), n in zip(window, self.extents, strict=True)):
            raise LayoutError(
                f"{self.name}: the window {pairs(window)} is not within the spatial extents {self.extents}: it has one "
                f"(start, stop) per spatial dim, with 0 <= start <= stop <= extent"
            )

    def decoded(self, window: Box) -> int:
        """The positions that are decoded for a window alone: those of all tiles of the file that it touches."""
        reach = zip(window, self.tile, self.extents, strict=True)
        return prod(min(-(-b // t) * t, n) - a // t * t for (a, b), t, n in reach)

    def read(self, part: Box) -> Tensor:
        """All channels of a spatial box, without history."""
        box = (Interval(0, self.shape[0]), *part)
        pixels = self.source.read(box)
        shape = tuple(i.size for i in box)
        if tuple(pixels.shape) != shape or pixels.dtype != self.dtype:
            raise DataError(
                f"{self.name}: its read gave {tuple(pixels.shape)} of {pixels.dtype} for the box {pairs(box)}: it has "
                f"to give {shape} of {self.dtype}",
                self.name,
                pairs(box),
            )
        return pixels.detach()

    def fills(self, window: Box, out: Tensor, parts: int, cache: DecodedCache | None) -> Iterator[Fill]:
        """What to call, each on any thread, to fill `out` (C, *window) with a window.

        Without a budget, the window is divided into about that many `parts`, between tiles of the file. A tensor is in
        memory already, so nothing of it is kept. Blocks that are decoded already are copied by at most `parts` calls:
        a call for each would take longer than the copies.
        """
        if not volume(window):
            return
        if cache is None or not cache.budget or isinstance(self.source, HeldImage):
            for part in split(window, self.tile, parts, MOST_AT_ONCE):
                yield partial(self.fill, part, out[(slice(None), *slices(part, window))]), None
            return
        decoded: list[Callable[[], None]] = []
        for index in touched(window, self.block):
            box = tile_at(index, self.block, self.extents)
            part = overlap(box, window)
            target = out[(slice(None), *slices(part, window))]
            block, mine = cache.claim(self.source, index, self.shape[0] * volume(box) * self.dtype.itemsize)
            if block is None:
                yield partial(self.fill, part, target), None
            elif mine:
                yield partial(self.decode, part, target, box, block, cache), block
            elif block.pixels.done():
                decoded.append(partial(self.copy, part, target, box, block))
            else:
                yield partial(self.copy, part, target, box, block), None
        for first in range(min(parts, len(decoded))):
            yield partial(call_each, decoded[first::parts]), None

    def fill(self, part: Box, target: Tensor) -> None:
        """Read a part of a window to its place."""
        target.copy_(self.read(part))

    def decode(self, part: Box, target: Tensor, box: Box, block: Block, cache: DecodedCache) -> None:
        """Read a whole block, for all windows that need it, and copy a part of it.

        A block that cannot be read is given up: what is wrong with it may be outside of the window, so the part is then
        read alone and raises for itself.
        """
        try:
            # A copy: what a source returns may be a part of something larger, which would be kept with it.
            cache.put(block, self.read(box).clone(memory_format=torch.contiguous_format))
        except BaseException:
            cache.withdraw(block)
        self.copy(part, target, box, block)

    def copy(self, part: Box, target: Tensor, box: Box, block: Block) -> None:
        """Copy a part of a window from its block, which may still be under way.

        No thread waits for what nobody does: a block is claimed before others find it, its task is queued at once, and
        threads take tasks in the order of the queue.
        """
        pixels = block.pixels.result()
        if pixels is None:
            self.fill(part, target)
        else:
            target.copy_(pixels[(slice(None), *slices(part, box))])


def call_each(calls: Sequence[Callable[[], None]]) -> None:
    """One call after the other."""
    for call in calls:
        call()


def pairs(box: Box) -> tuple[tuple[int, int], ...]:
    """The box as plain pairs, for messages."""
    return tuple((int(start), int(stop)) for start, stop in box)
