"""Host memory for kept values: bands of rows leave the device and come back while it computes.

Positions of one row lie next to each other, whatever the memory format of the model, so that a band of rows is one
block of memory:

    host     │ image │ row │ column │ channel │
    write    rows 512 … 767 of a tile ─────────────────▶ on a stream of their own, after the tile
    read     rows 510 … 769 ◀───── asked for one window ahead, on another stream

On the device, bands are in one block of memory, in which the newest ones stay as long as there is room (`DeviceBands`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from mural.comm.copy_streams import CudaLanes, Moment
from mural.comm.host_staging import PageableMemory, Pinned
from mural.geometry import Interval
from mural.memory.device_bands import DeviceBands, Part, RecentBand

AHEAD = 2
"""How many windows are asked for before they are used, that in use included."""


class HostMemory:
    """Host memory that steps take and give back, pinned for a GPU.

    What a step did not take goes back to the system when the next one begins: images of another size need other memory.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.lanes = CudaLanes(device) if device.type == "cuda" else None
        self.bands = DeviceBands(device, 0)
        self.idle: list[Pinned | PageableMemory] = []
        self.unused: list[Pinned | PageableMemory] = []
        """Those of the idle buffers that nobody has taken since the step began."""

    def begin(self, bands: int) -> None:
        """Begin a step; bands have so many bytes on the device."""
        self.bands = DeviceBands(self.device, bands, self.lanes)
        self.idle = [b for b in self.idle if not any(b is other for other in self.unused)]
        self.unused = list(self.idle)

    def end_tile(self) -> None:
        """All that computes a tile was asked for: bands that it read are free for others after it."""
        self.bands.end_tile(None if self.lanes is None else self.lanes.now())

    def end(self) -> None:
        """End a step: give the memory on the device back, to be used once nothing travels through it."""
        if self.lanes is not None:
            self.lanes.catch_up()
        self.bands = DeviceBands(self.device, 0)

    def take(self, size: int) -> Pinned | PageableMemory:
        """A buffer of at least that many bytes."""
        fitting = [b for b in self.idle if size <= b.memory.numel() <= size + size // 4]
        if fitting:
            found = min(fitting, key=lambda b: b.memory.numel())
            self.idle = [b for b in self.idle if b is not found]
            self.unused = [b for b in self.unused if b is not found]
            return found
        return Pinned(size) if self.lanes is not None else PageableMemory(size)

    def rows(self, shape: tuple[int, ...], dtype: torch.dtype, instead: HostRows | None = None) -> HostRows:
        """A tensor, (images, rows, …); in the memory of another one, if its numbers are as large."""
        fits = instead is not None and instead.dtype.itemsize == dtype.itemsize
        return HostRows(self, shape, dtype, instead if fits else None)

    def give(self, buffer: Pinned | PageableMemory) -> None:
        """Take a buffer back."""
        self.idle.append(buffer)


class Coming(NamedTuple):
    """A band on its way to the device, or there: its image and rows, and when its numbers are there."""

    key: tuple[int, Interval]
    band: Tensor
    moment: Moment
    part: Part | None
    """Its memory; None if it is that of torch, or of the host."""


class HostRows:
    """One tensor on the host, (images, rows, …): bands of whole rows are written and read."""

    def __init__(self, memory: HostMemory, shape: tuple[int, ...], dtype: torch.dtype, instead: HostRows | None = None):
        self.memory, self.dtype = memory, dtype
        self.buffer = memory.take(prod(shape) * dtype.itemsize) if instead is None else instead.buffer
        self.users = [self] if instead is None else instead.users
        """Those whose memory it is."""
        if instead is not None:
            self.users.append(self)
        self.rows = self.buffer.memory[: prod(shape) * dtype.itemsize].view(dtype).view(shape)
        self.written: Moment = None
        self.queue: deque[tuple[int, Interval]] = deque()
        self.coming: deque[Coming] = deque()

    def write(self, image: int, at: Interval, band: Tensor) -> None:
        """Send a band of rows to the host."""
        lanes, bands, target = self.memory.lanes, self.memory.bands, self.rows[image, at.start : at.stop]
        bands.forget(self, image, at)
        found, part = bands.take(band.shape, band.dtype) or (band, None)
        if part is not None:
            if lanes is not None:
                lanes.wait(part.after)
            found.copy_(band)
        now = None if lanes is None else lanes.now()
        if lanes is None:
            target.copy_(found)
        else:
            self.written = lanes.copy(target, found, True, [now])
        if part is not None:
            part.after = () if self.written is None else (self.written,)
            bands.keep(self, image, at, found, now, part)
        elif lanes is not None:
            found.record_stream(lanes.outward)

    def plan(self, bands: Sequence[tuple[int, Interval]]) -> None:
        """Learn which bands are read next, in order."""
        self._pass_over(len(self.coming))
        self.queue = deque(bands)

    def _pass_over(self, count: int) -> None:
        """Let go of the first bands that are under way."""
        for _ in range(count):
            if (part := self.coming.popleft().part) is not None:
                self.memory.bands.release(part)

    def read(self, image: int, at: Interval) -> Tensor:
        """The next band on the device, until the tile ends; the one after it is on its way. Do not write to it."""
        while len(self.coming) < AHEAD and self.queue:
            self._ask(*self.queue.popleft())
        while self.coming and self.coming[0].key != (image, at):
            self._pass_over(1)
        if not self.coming:
            self._ask(image, at)
        found, lanes = self.coming.popleft(), self.memory.lanes
        if lanes is not None and found.moment is not None:
            lanes.join(found.moment, found.band)
        if found.part is not None:
            self.memory.bands.release(found.part, reading=True)
        return found.band

    def _ask(self, image: int, at: Interval) -> None:
        """Have a band brought to the device, or put together of what is there."""
        lanes, bands = self.memory.lanes, self.memory.bands
        recent = bands.of(self, image, at)
        for held in recent:
            held.used = True
        if len(recent) == 1 and recent[0].at.contains(at):
            first, held = at.start - recent[0].at.start, recent[0]
            held.part.holders += 1
            self.coming.append(Coming((image, at), held.band[first : first + at.size], held.moment, held.part))
            return
        if lanes is None and not recent:
            self.coming.append(Coming((image, at), self.rows[image, at.start : at.stop], None, None))
            return
        for held in recent:
            held.part.holders += 1  # until it is copied
        band, part = self._memory_for((at.size, *self.rows.shape[2:]))
        moment: Moment = None
        for rows, source, after in self._sources(image, at, recent):
            target = band[rows.start - at.start : rows.stop - at.start]
            if lanes is None:
                target.copy_(source)
                continue
            moment = lanes.copy(target, source, False, [*(() if part is None else part.after), *after])
        for held in recent:
            held.part.after = held.part.after if moment is None else (*held.part.after, moment)
            bands.release(held.part)
        if part is not None and moment is not None:
            part.after = (*part.after, moment)  # it may be passed over before it is there
        self.coming.append(Coming((image, at), band, moment, part))

    def _memory_for(self, shape: tuple[int, ...]) -> tuple[Tensor, Part | None]:
        """Memory on the device for a band that comes."""
        lanes = self.memory.lanes
        if (found := self.memory.bands.take(shape, self.dtype)) is not None:
            return found
        if lanes is None:
            return torch.empty(shape, dtype=self.dtype, device=self.memory.device), None
        with torch.cuda.stream(lanes.inward):
            return torch.empty(shape, dtype=self.dtype, device=lanes.device), None

    def _sources(
        self, image: int, at: Interval, recent: Sequence[RecentBand]
    ) -> Iterator[tuple[Interval, Tensor, list[Moment]]]:
        """The rows of an interval from where they are, with the moments after which they are there."""
        start, written = at.start, [] if self.written is None else [self.written]
        for held in sorted(recent, key=lambda held: held.at.start):
            both = held.at & at
            if start < both.start:
                yield Interval(start, both.start), self.rows[image, start : both.start], written
            yield (
                both,
                held.band[both.start - held.at.start : both.stop - held.at.start],
                [] if held.moment is None else [held.moment],
            )
            start = both.stop
        if start < at.stop:
            yield Interval(start, at.stop), self.rows[image, start : at.stop], written

    def drop(self) -> None:
        """Give the memory back, once nothing travels."""
        self._pass_over(len(self.coming))
        self.memory.bands.forget(self)
        if self.memory.lanes is not None and self.written is not None:
            self.memory.lanes.finish(self.written)
        self.users.remove(self)
        if not self.users:
            self.memory.give(self.buffer)
