"""What is read next: bands of rows of this sweep and of those after it, tile by tile.

A plan says which band on the device is of use the longest time from now, and what to bring there meanwhile. Nothing
else depends on it: what is read though it was not planned is brought when it is read.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from mural.geometry import Interval

if TYPE_CHECKING:
    from mural.memory.host_memory import HostRows

NEVER = 2**62
"""The number of a read that does not happen."""


class Read(NamedTuple):
    """Rows of an image that a tile reads of a tensor on the host."""

    rows: HostRows
    image: int
    at: Interval
    settled: bool = True
    """Whether they can be read ahead: no sweep before that of the tile writes them."""


class ReadPlan:
    """The reads of tiles in order, of which the first `asked` are on the device or on their way."""

    def __init__(self, tiles: Sequence[Sequence[Read]] = ()):
        self.reads = [read for tile in tiles for read in tile]
        self.tiles = [number for number, tile in enumerate(tiles) for _ in tile]
        self.tile = self.asked = 0
        self.of: dict[HostRows, deque[int]] = defaultdict(deque)
        """The numbers of a tensor's reads to come."""
        for number, read in enumerate(self.reads):
            self.of[read.rows].append(number)

    def later(self, rows: HostRows, image: int, at: Interval) -> Iterator[int]:
        """The numbers of the reads to come that have some of these rows."""
        mine = self.of.get(rows, deque())
        while mine and self.tiles[mine[0]] < self.tile:
            mine.popleft()
        for number in mine:
            _, other, (start, stop), _ = self.reads[number]
            if other == image and start < at.stop and at.start < stop:
                yield number
