"""Decoded blocks of images, kept within a budget of bytes for later passes over the same images."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from math import prod

from torch import Tensor

from mural.geometry.tile_grid import Index
from mural.memory.readable import Readable

POSITIONS = 2**18
"""Positions that a block has at most, unless a single tile of the file has more: 512 × 512, or 64 × 64 × 64."""


def block_extents(extents: Sequence[int], tile: Sequence[int]) -> tuple[int, ...]:
    """The block of an image whose file is decoded in such tiles: whole tiles, as square as they allow.

    >>> block_extents((9000, 9000), (256, 256)), block_extents((9000, 9000), (8, 9000))
    ((512, 512), (16, 9000))
    """
    found = list(tile)
    while True:
        growing = [d for d, extent in enumerate(extents) if found[d] < extent]
        if not growing or 2 * prod(found) > POSITIONS:
            return tuple(found)
        found[min(growing, key=lambda d: found[d])] *= 2


@dataclass(frozen=True, eq=False)
class Block:
    """The pixels of one block, once they are decoded; None where that was given up."""

    key: tuple[int, Index]
    size: int
    pixels: Future[Tensor | None]


class DecodedCache:
    """Blocks of decoded pixels of at most `budget` bytes, for as long as the cache lives: those that came first.

    A step passes over its images several times. With room for b of n blocks, a fixed set of b saves b reads in each
    further pass, in whatever order that goes. No policy saves more: it holds b blocks when a pass begins, so n - b have
    to be read. Keeping those that were used last would save none where passes go the same way: each block is evicted
    just before it is needed again. So what is kept stays, and what does not fit is read again.

    Sources are told apart as objects: give the same ones to every pass. Threads may share a cache.
    """

    def __init__(self, budget: int):
        self.budget, self.bytes = budget, 0
        self._lock = threading.Lock()
        self._blocks: dict[tuple[int, Index], Block] = {}
        self._sources: dict[int, Readable] = {}
        """Kept alive, so that no other source takes their ids."""

    def claim(self, source: Readable, index: Index, size: int) -> tuple[Block | None, bool]:
        """The block at that index of a source's lattice, and whether the caller has to `put` or `withdraw` it.

        None where the block is not kept and `size` more bytes exceed the budget.
        """
        key = (id(source), index)
        with self._lock:
            if key in self._blocks:
                return self._blocks[key], False
            if self.bytes + size > self.budget:
                return None, False
            self.bytes += size
            self._sources[id(source)] = source
            self._blocks[key] = block = Block(key, size, Future())
            return block, True

    def put(self, block: Block, pixels: Tensor) -> None:
        """Give everybody who waits for a block its pixels."""
        block.pixels.set_result(pixels)

    def withdraw(self, block: Block) -> None:
        """Give up a block that was claimed and not put: who waits for it reads for himself."""
        with self._lock:
            if block.pixels.done():
                return
            del self._blocks[block.key]
            self.bytes -= block.size
            block.pixels.set_result(None)

    def __len__(self) -> int:
        """The number of blocks that are kept or under way."""
        return len(self._blocks)
