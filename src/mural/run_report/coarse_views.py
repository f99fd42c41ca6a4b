"""Large images at the size of a picture: read by boxes from the coarsest level that will do, never as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from mural.data import Source
from mural.geometry import Box, Interval, volume
from mural.geometry.tile_grid import split

SIZE = 720
"""Pixels of a picture's longer side."""
AT_ONCE = 2**22
"""Positions that are read at once, unless a chunk has more."""
MOST = 2**29
"""Positions that are read for one picture; of an image without a level that is as coarse, a part is shown."""
PART = 4096
"""The sides of such a part."""
Told = Callable[[], None]
"""What is called after each box."""


@dataclass(frozen=True)
class View:
    """What is shown of an image with some extents: a box of it, in depth one slice, as a picture of some size."""

    extents: tuple[int, ...]
    box: Box
    size: tuple[int, int]

    @property
    def words(self) -> str:
        """The extents, and which part of them is shown.

        >>> View((64, 512, 512), (Interval(32, 33), Interval(0, 512), Interval(0, 512)), (512, 512)).words
        '64 × 512 × 512, the middle slice'
        """
        depth = ["the middle slice"] if len(self.extents) > 2 else []
        inside = [i.size for i in self.box[-2:]]
        part = [f"the middle {inside[0]} × {inside[1]}"] if tuple(inside) != self.extents[-2:] else []
        return ", ".join([" × ".join(map(str, self.extents)), *depth, *part])


def view_of(extents: Sequence[int], sources: Sequence[Source]) -> View:
    """A view of all of an image, or of its middle, where too much would have to be read of one of the sources."""
    found = whole_view(extents)
    if max(volume(place(source, found)[1]) for source in sources) <= MOST:
        return found
    return framed(extents, [middle(n, PART) for n in extents[-2:]])


def whole_view(extents: Sequence[int]) -> View:
    """The view of a whole image, or of the middle slice of a volume.

    >>> whole_view((960, 2400)).size
    (288, 720)
    """
    return framed(extents, [Interval(0, n) for n in extents[-2:]])


def framed(extents: Sequence[int], inside: Sequence[Interval]) -> View:
    """The view of a part of an image, smaller than it is if that is too large."""
    longest = max(i.size for i in inside)
    high, wide = (min(i.size, max(1, round(i.size * SIZE / longest))) for i in inside)
    return View(tuple(extents), (*(middle(n, 1) for n in extents[:-2]), *inside), (high, wide))


def middle(extent: int, side: int) -> Interval:
    """The middle of an extent."""
    start = max(0, extent - side) // 2
    return Interval(start, min(extent, start + side))


def place(source: Source, view: View) -> tuple[int, Box]:
    """The coarsest level of a source that has at least the pixels of a view, and the box of it."""
    found = scaled_box(view, source.shape[1:])
    best = 0
    for number, level in enumerate(source.levels[1:], 1):
        box = scaled_box(view, level.shape[1:])
        if all(i.size >= n for i, n in zip(box[-2:], view.size, strict=True)) and volume(box) < volume(found):
            best, found = number, box
    return best, found


def scaled_box(view: View, extents: Sequence[int]) -> Box:
    """The box of a view in a level of other extents."""
    found: list[Interval] = []
    for interval, mine, there in zip(view.box, view.extents, extents, strict=True):
        start = interval.start * there // mine
        found.append(Interval(start, max(start + 1, -(-interval.stop * there // mine))))
    return tuple(found)


def boxes_of(source: Source, view: View) -> tuple[int, tuple[Box, ...]]:
    """The level that is read for a view, and its boxes."""
    level, box = place(source, view)
    return level, split(box, source.chunks[1:], 1, AT_ONCE)


def coarse_values(source: Source, view: View, channels: int, told: Told) -> Tensor:
    """The first channels of a view, (C, H, W): each pixel is the mean of what it stands for."""
    level, parts = boxes_of(source, view)
    _, box = place(source, view)
    high, wide = view.size
    sums, counts = torch.zeros(channels, high, wide), torch.zeros(high, wide)
    for part in parts:
        values = source.read(((0, channels), *part), level).float()
        values = values.reshape(channels, *values.shape[-2:])
        rows, columns = (bins(i, whole, n) for i, whole, n in zip(part[-2:], box[-2:], view.size, strict=True))
        narrow = torch.zeros(channels, high, values.shape[2]).index_add_(1, rows, values)
        sums.index_add_(2, columns, narrow)
        counts += torch.outer(torch.bincount(rows, minlength=high), torch.bincount(columns, minlength=wide))
        told()
    return sums / counts.clamp(min=1)


def coarse_labels(source: Source, view: View, channels: int, told: Told) -> Tensor:
    """The first channels of a view, (C, H, W): each pixel is the value at its middle, as the file holds it."""
    level, parts = boxes_of(source, view)
    _, box = place(source, view)
    found = torch.zeros(channels, *view.size, dtype=source.dtype)
    for part in parts:
        rows, columns = (centres(i, whole, n) for i, whole, n in zip(part[-2:], box[-2:], view.size, strict=True))
        if prod((len(rows[0]), len(columns[0]))):
            values = source.read(((0, channels), *part), level)
            values = values.reshape(channels, *values.shape[-2:])
            found[:, rows[0][:, None], columns[0]] = values[:, rows[1][:, None], columns[1]]
        told()
    return found


def bins(part: Interval, whole: Interval, count: int) -> Tensor:
    """Which of `count` pixels each position of a part belongs to.

    >>> bins(Interval(4, 8), Interval(0, 8), 4).tolist()
    [2, 2, 3, 3]
    """
    return (torch.arange(part.start, part.stop) - whole.start) * count // whole.size


def centres(part: Interval, whole: Interval, count: int) -> tuple[Tensor, Tensor]:
    """The pixels whose middles are in a part, and where these are in it.

    >>> [found.tolist() for found in centres(Interval(4, 8), Interval(0, 8), 4)]
    [[2, 3], [1, 3]]
    """
    at = whole.start + (2 * torch.arange(count) + 1) * whole.size // (2 * count)
    inside = ((at >= part.start) & (at < part.stop)).nonzero().flatten()
    return inside, at[inside] - part.start
