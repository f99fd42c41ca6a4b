"""A kept value on the host, and its gradient: windows of rows that overlap.

Gradients of windows add up. Rows that the next window adds to stay on the device until it has. In the last backward
that reads a value, its gradient takes the place of the value, row by row, as windows go on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from mural.geometry import Box, Interval, slices
from mural.memory.host_memory import HostMemory, HostRows
from mural.memory.read_plan import Read
from mural.memory.tile_calls import Axes
from mural.memory.tile_needs import hull
from mural.ranks.mesh import SPATIAL


class HostTensor:
    """A value that passes write by bands of rows and read by wider bands, and its gradient; both on the host."""

    def __init__(self, box: Box, axes: Axes, memory: HostMemory, readers: int):
        self.box, self.memory, self.readers = box, memory, readers
        order = ["data", *SPATIAL]
        dims = sorted(range(len(axes)), key=lambda d: order.index(axes[d] or "") if axes[d] else len(order) + d)
        self.order = tuple(dims)
        self.back = tuple(dims.index(d) for d in range(len(dims)))
        self.shape = tuple(box[d].size for d in dims)
        self.values, self.grads = memory.rows(self.shape), memory.rows(self.shape)
        self.scale: Tensor | None = None
        self.covered: dict[int, tuple[Interval, ...]] = {}
        """The rows of each image that have a gradient, of the passes that have ended: the others were never written."""
        self.carry: tuple[int, Interval, Tensor] | None = None  # image, rows that the next window adds to, their sum
        self.windows: deque[tuple[int, Interval]] = deque()
        self.pending: dict[int, tuple[Interval, ...]] = {}
        """Those of the pass that goes on."""

    def _bands(self, box: Box) -> tuple[range, Interval]:
        """The images and rows of a box, counted from those that are held."""
        images, rows = self.order[0], self.order[1]
        first, top = self.box[images].start, self.box[rows].start
        return range(box[images].start - first, box[images].stop - first), box[rows].shift(-top)

    def _inner(self, box: Box) -> tuple[slice, ...]:
        """Where a box lies in a band of rows, in all dims but images and rows: rows are held whole."""
        return slices([box[d] for d in self.order[2:]], [self.box[d] for d in self.order[2:]])

    def _outward(self, tile: Tensor) -> Tensor:
        return tile.detach().permute(self.order).contiguous()

    def _inward(self, bands: Sequence[Tensor]) -> Tensor:
        return (bands[0][None] if len(bands) == 1 else torch.stack(list(bands))).permute(self.back)

    def _nothing(self, box: Box, like: HostRows) -> Tensor:
        """A window of no image, or of no rows."""
        shape = [box[d].size for d in self.order]
        return torch.empty(shape, dtype=like.dtype, device=self.memory.device).permute(self.back)

    def plan(self, boxes: Sequence[Box]) -> None:
        """Learn which windows are read next, in order, and where gradients are added."""
        self.windows = deque(window for box in boxes for window in self._windows(box))

    def _windows(self, box: Box) -> list[tuple[int, Interval]]:
        images, rows = self._bands(box)
        return [(image, rows) for image in images if rows.size]

    def reads_ahead(self, boxes: Sequence[Box | None], adds: bool) -> list[list[Read]]:
        """What is read for windows in order, of values, and of gradients where it `adds` to those of other passes."""
        found = [[] if box is None else self._windows(box) for box in boxes]
        tiles = [[Read(self.values, *window) for window in windows] for windows in found]
        numbered = [(number, *window) for number, windows in enumerate(found) for window in windows if adds]
        for (number, image, rows), after in zip_longest(numbered, numbered[1:]):
            for part in without(rows, rows_of(None if after is None else after[1:], image)):
                tiles[number] += [Read(self.grads, image, both) for both in self._found(image, part)]
        return tiles

    def gradients_ahead(self, boxes: Sequence[Box]) -> list[list[Read]]:
        """What is read for the gradients of tiles in order."""
        return [[Read(self.grads, *window) for window in self._windows(box)] for box in boxes]

    def write(self, box: Box, tile: Tensor) -> None:
        """Write a tile."""
        images, rows = self._bands(box)
        ordered = self._outward(tile)
        if not self.values.there:
            self.values.begin(tile.dtype)
        for number, image in enumerate(images):
            self.values.write(image, rows, ordered[number])

    def read(self, box: Box) -> Tensor:
        """A window."""
        if not self.values.there:
            raise RuntimeError("a kept value is read before it was written")
        images, rows = self._bands(box)
        if not images or not rows.size:
            return self._nothing(box, self.values)
        bands = [self.values.read(image, rows) for image in images]
        return self._inward([band.to(self.memory.device)[:, *self._inner(box)] for band in bands])

    def copied(self, box: Box) -> Tensor:
        """A window in memory of its own, which stays as it is."""
        return self.read(box).clone()

    # -- gradients -----------------------------------------------------------------------------------------------------

    def add_gradient(self, box: Box, grad: Tensor) -> None:
        """Add the gradient of a window; windows of a pass come in the order of their rows."""
        images, rows = self._bands(box)
        if not rows.size:
            return
        ordered = self._outward(grad if self.scale is None else grad / self.scale)
        if ordered.shape[2:] != self.shape[2:]:
            part, ordered = ordered, ordered.new_zeros(*ordered.shape[:2], *self.shape[2:])
            ordered[:, :, *self._inner(box)] = part
        if not self.grads.there:
            self.grads.begin(grad.dtype, self.values if self.readers == 1 else None)
        for number, image in enumerate(images):
            self._add(image, rows, ordered[number])

    def _add(self, image: int, rows: Interval, band: Tensor) -> None:
        """Add a window; rows that the next window does not add to are complete."""
        window = (image, rows)
        if self.carry is not None and self.carry[0] == image and touch(self.carry[1], rows):
            _, more, held = self.carry
            whole = hull(more, rows)
            wide = torch.zeros(whole.size, *band.shape[1:], dtype=band.dtype, device=band.device)
            wide[slices([rows], [whole])] = band  # a copy: the gradient may be that of another value, too
            band, rows = wide, whole
            band[slices([more], [rows])] += held
        elif self.carry is not None:
            self._settle(*self.carry)
        while self.windows and self.windows.popleft() != window:
            pass
        following = rows_of(self.windows[0] if self.windows else None, image)
        for part in without(rows, following):
            self._settle(image, part, band[slices([part], [rows])])
        both = rows & following
        # A copy: the gradient may lie where the next tile's will.
        self.carry = (image, both, band[slices([both], [rows])].clone()) if both.size else None

    def _settle(self, image: int, rows: Interval, band: Tensor) -> None:
        """Write rows that are complete, added to what other passes found."""
        if not self.grads.there:
            return
        shared = self._found(image, rows)
        band = band.clone() if shared else band.contiguous()
        for both in shared:
            band[slices([both], [rows])] += self.grads.read(image, both)
        self.grads.write(image, rows, band)
        self.pending[image] = united(self.pending.get(image, ()), rows)

    def _found(self, image: int, rows: Interval) -> list[Interval]:
        """The rows of an interval that have a gradient of other passes."""
        return [both for held in self.covered.get(image, ()) if (both := rows & held).size]

    def end_pass(self) -> None:
        """All windows of a pass were added."""
        self.end_windows()
        self.readers -= 1
        if not self.readers:
            self.values.drop()

    def end_windows(self) -> None:
        """What was found for windows so far is part of the gradient."""
        if self.carry is not None:
            self._settle(*self.carry)
            self.carry = None
        for image, parts in self.pending.items():
            for rows in parts:
                self.covered[image] = united(self.covered.get(image, ()), rows)
        self.pending = {}

    def gradient(self, box: Box) -> Tensor | None:
        """The gradient of a tile; None if nothing has one."""
        if not self.grads.there:
            return None
        images, rows = self._bands(box)
        if not images or not rows.size:
            return self._nothing(box, self.grads)
        found = self._inward([self._gradient_rows(image, rows)[:, *self._inner(box)] for image in images])
        return found if self.scale is None else found * self.scale

    def _gradient_rows(self, image: int, rows: Interval) -> Tensor:
        """Rows of the gradient, with zeros where no window reached."""
        found, covered = self.grads.read(image, rows), self.covered.get(image, ())
        if any(held.contains(rows) for held in covered):
            return found
        whole = torch.zeros_like(found)
        for held in covered:
            part = slices([rows & held], [rows])[0] if (rows & held).size else slice(0, 0)
            whole[part] = found[part]
        return whole

    def rescale(self, factor: Tensor) -> None:
        """Scale the gradient, once, as it is read; a factor of 0 forgets it."""
        if not self.grads.there:
            return
        if bool(factor):
            self.scale = factor
        else:
            self.grads.drop()
            self.carry, self.covered, self.pending = None, {}, {}

    def drop(self) -> None:
        """Give all memory back."""
        self.values.drop()
        self.grads.drop()


def rows_of(window: tuple[int, Interval] | None, image: int) -> Interval:
    """The rows of a window, if it is one of that image."""
    return window[1] if window is not None and window[0] == image else Interval(0, 0)


def touch(one: Interval, other: Interval) -> bool:
    """Whether nothing is between two intervals."""
    return one.start <= other.stop and other.start <= one.stop


def without(rows: Interval, other: Interval) -> list[Interval]:
    """The rows that another interval does not have.

    >>> without(Interval(0, 9), Interval(6, 12)), without(Interval(0, 9), Interval(0, 0))
    ([Interval(start=0, stop=6)], [Interval(start=0, stop=9)])
    """
    both = rows & other
    if not both.size:
        return [rows] if rows.size else []
    return [part for part in (Interval(rows.start, both.start), Interval(both.stop, rows.stop)) if part.size]


def united(parts: Sequence[Interval], more: Interval) -> tuple[Interval, ...]:
    """Disjoint intervals together with another one; those that touch become one.

    >>> united((Interval(0, 4), Interval(8, 9)), Interval(4, 6))
    (Interval(start=8, stop=9), Interval(start=0, stop=6))
    """
    touching = [part for part in parts if touch(part, more)]
    for part in touching:
        more = hull(more, part)
    return (*(part for part in parts if part not in touching), more)
