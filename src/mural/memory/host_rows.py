"""Kept tensors in host memory: rows of the image that leave the device and come back while it computes.

Positions of one row lie next to each other, whatever the memory format of the model, so that a band of rows is one
block of memory:

    host     │ image │ row │ column │ channel │
    write    rows 512 … 767 of a tile ─────────────────▶ on a stream of their own, after the tile
    read     rows 510 … 769 ◀───── asked for one window ahead, on another stream

The gradients of windows overlap. Rows that the next window adds to stay on the device until it has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from mural.comm.copy_streams import CudaLanes, Moment
from mural.comm.host_staging import PageableMemory, Pinned
from mural.geometry import Box, Interval, slices
from mural.memory.tile_calls import Axes
from mural.memory.tile_needs import hull
from mural.ranks.mesh import SPATIAL

AHEAD = 2
"""How many windows are asked for before they are used, that in use included."""


class HostMemory:
    """Host memory that steps take and give back, pinned for a GPU.

    What a step did not take goes back to the system when the next one begins: images of another size need other memory.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.lanes = CudaLanes(device) if device.type == "cuda" else None
        self.idle: list[Pinned | PageableMemory] = []
        self.unused: list[Pinned | PageableMemory] = []
        """Those of the idle buffers that nobody has taken since the step began."""

    def begin(self) -> None:
        """Begin a step."""
        self.idle = [b for b in self.idle if not any(b is other for other in self.unused)]
        self.unused = list(self.idle)

    def take(self, size: int) -> Pinned | PageableMemory:
        """A buffer of at least that many bytes."""
        fitting = [b for b in self.idle if size <= b.memory.numel() <= size + size // 4]
        if fitting:
            found = min(fitting, key=lambda b: b.memory.numel())
            self.idle = [b for b in self.idle if b is not found]
            self.unused = [b for b in self.unused if b is not found]
            return found
        return Pinned(size) if self.lanes is not None else PageableMemory(size)

    def rows(self, shape: tuple[int, ...], dtype: torch.dtype) -> HostRows:
        """A tensor, (images, rows, …)."""
        return HostRows(self, shape, dtype)

    def give(self, buffer: Pinned | PageableMemory) -> None:
        """Take a buffer back."""
        self.idle.append(buffer)


class HostRows:
    """One tensor on the host, (images, rows, …): bands of whole rows are written and read."""

    def __init__(self, memory: HostMemory, shape: tuple[int, ...], dtype: torch.dtype):
        self.memory, self.buffer = memory, memory.take(prod(shape) * dtype.itemsize)
        self.rows = self.buffer.memory[: prod(shape) * dtype.itemsize].view(dtype).view(shape)
        self.written: Moment = None
        self.queue: deque[tuple[int, Interval]] = deque()
        self.coming: deque[tuple[tuple[int, Interval], Tensor, Moment]] = deque()

    def write(self, image: int, at: Interval, band: Tensor) -> None:
        """Send a band of rows to the host."""
        lanes, target = self.memory.lanes, self.rows[image, at.start : at.stop]
        if lanes is None:
            target.copy_(band)
            return
        self.written = lanes.copy(target, band, True, [lanes.now()])
        band.record_stream(lanes.outward)

    def plan(self, bands: Sequence[tuple[int, Interval]]) -> None:
        """Learn which bands are read next, in order."""
        self.queue, self.coming = deque(bands), deque()

    def read(self, image: int, at: Interval) -> Tensor:
        """The next band on the device; the one after it is on its way."""
        while len(self.coming) < AHEAD and self.queue:
            self._ask(*self.queue.popleft())
        while self.coming and self.coming[0][0] != (image, at):
            self.coming.popleft()
        if not self.coming:
            self._ask(image, at)
        _, band, moment = self.coming.popleft()
        if self.memory.lanes is not None:
            self.memory.lanes.join(moment, band)
        return band

    def _ask(self, image: int, at: Interval) -> None:
        source, lanes = self.rows[image, at.start : at.stop], self.memory.lanes
        if lanes is None:
            self.coming.append(((image, at), source, None))
            return
        with torch.cuda.stream(lanes.inward):
            band = torch.empty(source.shape, dtype=source.dtype, device=lanes.device)
        after = [] if self.written is None else [self.written]
        self.coming.append(((image, at), band, lanes.copy(band, source, False, after)))

    def drop(self) -> None:
        """Give the memory back, once nothing travels."""
        if self.memory.lanes is not None and self.written is not None:
            self.memory.lanes.finish(self.written)
        self.memory.give(self.buffer)


class HostTensor:
    """A value that passes write by bands of rows and read by wider bands, and its gradient; both on the host."""

    def __init__(self, box: Box, axes: Axes, memory: HostMemory):
        self.box, self.axes, self.memory = box, axes, memory
        order = ["data", *SPATIAL]
        dims = sorted(range(len(axes)), key=lambda d: order.index(axes[d] or "") if axes[d] else len(order) + d)
        self.order = tuple(dims)
        self.back = tuple(dims.index(d) for d in range(len(dims)))
        self.shape = tuple(box[d].size for d in dims)
        self.values: HostRows | None = None
        self.grads: HostRows | None = None
        self.scale: Tensor | None = None
        self.covered: dict[int, tuple[Interval, ...]] = {}
        """The rows of each image that have a gradient, of the passes that have ended: the others were never written."""
        self.carry: tuple[int, int, Tensor] | None = None  # image, first row, rows that the next window adds to
        self.starts: deque[tuple[int, int]] = deque()
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

    def plan(self, boxes: Sequence[Box]) -> None:
        """Learn which windows are read next, in order."""
        bands = [(image, rows) for box in boxes for images, rows in [self._bands(box)] for image in images if rows.size]
        self.starts = deque((image, rows.start) for image, rows in bands)
        if self.values is not None:
            self.values.plan(bands)

    def write(self, box: Box, tile: Tensor) -> None:
        """Write a tile."""
        images, rows = self._bands(box)
        ordered = self._outward(tile)
        if self.values is None:
            self.values = self.memory.rows(self.shape, tile.dtype)
        for number, image in enumerate(images):
            self.values.write(image, rows, ordered[number])

    def read(self, box: Box) -> Tensor:
        """A window."""
        if self.values is None:
            raise RuntimeError("a kept value is read before it was written")
        images, rows = self._bands(box)
        bands = [self.values.read(image, rows) if rows.size else self.values.rows[image, :0] for image in images]
        return self._inward([band.to(self.memory.device)[:, *self._inner(box)] for band in bands])

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
        if self.grads is None:
            self.grads = self.memory.rows(self.shape, grad.dtype)
        for number, image in enumerate(images):
            self._add(image, rows, ordered[number])

    def _add(self, image: int, rows: Interval, band: Tensor) -> None:
        if self.carry is not None and self.carry[0] == image and self.carry[1] <= rows.stop:
            _, first, held = self.carry
            start, stop = min(first, rows.start), max(first + len(held), rows.stop)
            if (start, stop) != (rows.start, rows.stop):
                wide = torch.zeros(stop - start, *band.shape[1:], dtype=band.dtype, device=band.device)
                wide[rows.start - start : rows.stop - start] = band
                band, rows = wide, Interval(start, stop)
            band[first - rows.start : first - rows.start + len(held)] += held
        elif self.carry is not None:
            self._settle(*self.carry)
        self.carry = None
        if self.starts and self.starts[0] == (image, rows.start):
            self.starts.popleft()
        while self.starts and self.starts[0][0] == image and self.starts[0][1] < rows.start:
            self.starts.popleft()
        following = self.starts[0] if self.starts else (-1, 0)
        end = min(rows.stop, following[1]) if following[0] == image else rows.stop
        self._settle(image, rows.start, band[: end - rows.start])
        if end < rows.stop:
            self.carry = (image, end, band[end - rows.start :])

    def _settle(self, image: int, first: int, band: Tensor) -> None:
        """Write rows that are complete, added to what other passes found."""
        if self.grads is None or not len(band):
            return
        rows = Interval(first, first + len(band))
        shared = [both for held in self.covered.get(image, ()) if (both := rows & held).size]
        band = band.clone() if shared else band.contiguous()
        for both in shared:
            band[both.start - first : both.stop - first] += self.grads.read(image, both)
        self.grads.write(image, rows, band)
        self.pending[image] = united(self.pending.get(image, ()), rows)

    def end_pass(self) -> None:
        """All windows of a pass were added."""
        if self.carry is not None:
            self._settle(*self.carry)
            self.carry = None
        for image, parts in self.pending.items():
            for rows in parts:
                self.covered[image] = united(self.covered.get(image, ()), rows)
        self.pending = {}

    def plan_gradient(self, boxes: Sequence[Box]) -> None:
        """Learn which tiles' gradients are read next, in order."""
        self.end_pass()
        if self.grads is not None:
            self.grads.plan([(image, rows) for box in boxes for images, rows in [self._bands(box)] for image in images])

    def gradient(self, box: Box) -> Tensor | None:
        """The gradient of a tile; None if nothing has one."""
        if self.grads is None:
            return None
        images, rows = self._bands(box)
        found = self._inward([self._gradient_rows(image, rows)[:, *self._inner(box)] for image in images])
        return found if self.scale is None else found * self.scale

    def _gradient_rows(self, image: int, rows: Interval) -> Tensor:
        """Rows of the gradient, with zeros where no window reached."""
        if self.grads is None:
            raise RuntimeError("no gradient")
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
        if bool(factor):
            self.scale = factor
        elif self.grads is not None:
            self.grads.drop()
            self.grads, self.carry, self.covered, self.pending = None, None, {}, {}

    def drop(self) -> None:
        """Give all memory back."""
        for held in (self.values, self.grads):
            if held is not None:
                held.drop()
        self.values = self.grads = None


def united(parts: Sequence[Interval], more: Interval) -> tuple[Interval, ...]:
    """Disjoint intervals together with another one; those that touch become one.

    >>> united((Interval(0, 4), Interval(8, 9)), Interval(4, 6))
    (Interval(start=8, stop=9), Interval(start=0, stop=6))
    """
    touching = [part for part in parts if part.start <= more.stop and more.start <= part.stop]
    for part in touching:
        more = hull(more, part)
    return (*(part for part in parts if part not in touching), more)
