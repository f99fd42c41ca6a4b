"""Host memory for kept values: bands of rows leave the device and come back while it computes.

Positions of one row lie next to each other, whatever the memory format of the model, so that a band of rows is one
block of memory:

    host     │ image │ row │ column │ channel │
    write    rows 512 … 767 of a tile ─────────────────▶ on a stream of their own, after the tile
    read     rows 510 … 769 ◀───── asked for ahead, on another stream

On the device, bands are in one block of memory, in which they stay as long as there is room (`DeviceBands`). What is
read next, in this sweep and the ones after it, is brought there meanwhile (`ReadPlan`).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from math import inf, prod
from pathlib import Path

import torch
from torch import Tensor

from mural.comm.copy_streams import CudaLanes, Moment
from mural.comm.host_staging import Buffer, PageableMemory, Pinned
from mural.geometry import Interval, slices
from mural.memory.device_bands import DeviceBands, Part, RecentBand
from mural.memory.file_memory import FileMemory
from mural.memory.read_plan import Read, ReadPlan

HostBuffer = Buffer | FileMemory
UNDER_WAY = 0.1
"""The part of the block for bands that may be on its way to the device: what is asked for too early takes the room of
what is still there for the next sweep."""


class HostMemory:
    """Host memory that steps take and give back, pinned for a GPU.

    What a step did not take goes back to the system when the next one begins: images of another size need other memory.
    What exceeds `most` bytes is in files in a folder, if there is one.
    """

    def __init__(self, device: torch.device, folder: Path | None = None, most: float = inf):
        self.device, self.folder, self.most = device, folder, most
        self.made: weakref.WeakSet[Buffer] = weakref.WeakSet()
        self.lanes = CudaLanes(device) if device.type == "cuda" else None
        self.bands = DeviceBands(device, 0)
        self.idle: list[HostBuffer] = []
        self.unused: list[HostBuffer] = []
        """Those of the idle buffers that nobody has taken since the step began."""
        self.under_way: deque[tuple[Moment, int]] = deque()
        """The bands that were asked for ahead: when they are there, and their bytes."""

    def begin(self, bands: int) -> None:
        """Begin a step; bands have so many bytes on the device."""
        if bands or self.bands.room:
            self.bands = DeviceBands(self.device, bands, self.lanes)
        self.idle = [b for b in self.idle if not any(b is other for other in self.unused)]
        self.unused = list(self.idle)

    def begin_sweep(self, tiles: Sequence[Sequence[Read]]) -> None:
        """Begin a sweep, with what its tiles and those of the next sweeps read."""
        self.bands.begin(ReadPlan(tiles))
        self.look_ahead()

    def look_ahead(self) -> None:
        """Have what is read next brought to the device, in order, as far as there is room."""
        plan = self.bands.plan
        while plan.asked < len(plan.reads) and not self._is_busy():
            number, read = plan.asked, plan.reads[plan.asked]
            if read.settled and not read.rows.bring_ahead(read.image, read.at, number):
                return
            plan.asked = number + 1

    def _is_busy(self) -> bool:
        """Whether enough is on its way."""
        while self.under_way and (self.lanes is None or self.lanes.over(self.under_way[0][0])):
            self.under_way.popleft()
        return sum(size for _, size in self.under_way) >= max(1, self.bands.room * UNDER_WAY)

    def end_tile(self) -> None:
        """All that computes a tile was asked for: bands that it read are free for others after it."""
        self.bands.end_tile(None if self.lanes is None else self.lanes.now())

    def end(self) -> None:
        """End a step: give the memory on the device back, to be used once nothing travels through it."""
        if self.lanes is not None:
            self.lanes.catch_up()
        self.bands = DeviceBands(self.device, 0)
        self.under_way.clear()

    def take(self, size: int) -> HostBuffer:
        """A buffer of at least that many bytes."""
        fitting = [b for b in self.idle if size <= b.memory.numel() <= size + size // 4]
        if fitting:
            found = min(fitting, key=lambda b: b.memory.numel())
            self.idle = [b for b in self.idle if b is not found]
            self.unused = [b for b in self.unused if b is not found]
            return found
        held = sum(buffer.memory.nbytes for buffer in self.made)
        if self.folder is not None and held + size > self.most:
            return FileMemory(size, self.folder)
        made = Pinned(size) if self.device.type == "cuda" else PageableMemory(size)
        self.made.add(made)
        return made

    def rows(self, shape: tuple[int, ...]) -> HostRows:
        """A tensor, (images, rows, …), without memory as yet."""
        return HostRows(self, shape)

    def give(self, buffer: HostBuffer) -> None:
        """Take a buffer back."""
        self.idle.append(buffer)


class HostRows:
    """One tensor on the host, (images, rows, …): bands of whole rows are written and read."""

    def __init__(self, memory: HostMemory, shape: tuple[int, ...]):
        self.memory, self.shape = memory, shape
        self.dtype, self.rows = torch.float32, torch.empty(0)
        self.buffer: HostBuffer | None = None
        self.users: list[HostRows] = []
        """Those whose memory it is."""
        self.written: list[tuple[int, Interval, Moment]] = []
        """Rows that are on their way to the host, and when they are there."""

    @property
    def there(self) -> bool:
        """Whether it has memory."""
        return self.buffer is not None

    def begin(self, dtype: torch.dtype, instead: HostRows | None = None) -> None:
        """Take memory; that of another one, if its numbers are as large."""
        size = prod(self.shape) * dtype.itemsize
        if instead is not None and instead.buffer is not None and instead.dtype.itemsize == dtype.itemsize:
            self.buffer, self.users = instead.buffer, instead.users
        else:
            self.buffer, self.users = self.memory.take(size), []
        self.users.append(self)
        self.dtype, self.rows = dtype, self.buffer.memory[:size].view(dtype).view(self.shape)

    def write(self, image: int, at: Interval, band: Tensor) -> None:
        """Send a band of rows to the host."""
        lanes, bands = self.memory.lanes, self.memory.bands
        bands.forget(self, image, at)
        found, part = bands.take(band.shape, band.dtype) or (band, None)
        if part is not None:
            if lanes is not None:
                lanes.wait(part.after)
            found.copy_(band)
        now, target = None if lanes is None else lanes.now(), self.rows[image, at.start : at.stop]
        if lanes is None:
            target.copy_(found)
        else:
            written = lanes.copy(target, found, True, [now])
            self.written = [*(sent for sent in self.written if not lanes.over(sent[2])), (image, at, written)]
        if part is not None:
            part.after = () if lanes is None else (self.written[-1][2],)
            bands.keep(RecentBand(self, image, at, found, now, part))
        elif lanes is not None:
            lanes.hold(found)

    def read(self, image: int, at: Interval) -> Tensor:
        """A band on the device, until the tile ends. Do not write to it."""
        bands, lanes = self.memory.bands, self.memory.lanes
        found = bands.whole(self, image, at)
        if found is None and self._missing(image, at):
            found = self._brought(image, at)
        if found is None:
            band = self._joined(image, at)
        else:
            band = found.band[at.start - found.at.start : at.stop - found.at.start]
            bands.in_use += [] if found.part is None else [found.part]
            if lanes is not None and found.moment is not None:
                lanes.join(found.moment, band)
        return band

    def bring_ahead(self, image: int, at: Interval, number: int) -> bool:
        """Whether there was room for a band, for that read of the plan; or it is here, or cannot be yet."""
        if not self.there or not self._missing(image, at):
            return True
        bands = self.memory.bands
        found = bands.take((at.size, *self.shape[2:]), self.dtype, number, bands.of(self, image, at))
        if found is not None:
            self._fill(image, at, *found)
        return found is not None

    def _missing(self, image: int, at: Interval) -> bool:
        """Whether some rows are not on the device."""
        return any(held is None for _, held in self._sources(image, at))

    def _joined(self, image: int, at: Interval) -> Tensor:
        """Rows of several bands that are here, put together for the tile."""
        bands, lanes = self.memory.bands, self.memory.lanes
        recent = bands.of(self, image, at)
        band, part = bands.take((at.size, *self.shape[2:]), self.dtype, keep=recent) or (self._elsewhere(at), None)
        if part is not None:
            part.held = False
        parts = [held.part for held in recent if held.part is not None]
        bands.in_use += parts if part is None else [*parts, part]
        if lanes is not None:
            lanes.wait([*(() if part is None else part.after), *(held.moment for held in recent)])
        for rows, held in self._sources(image, at):
            if held is not None:
                band[slices([rows], [at])] = held.band[slices([rows], [held.at])]
        return band

    def _brought(self, image: int, at: Interval) -> RecentBand:
        """A band that is brought now."""
        bands, lanes = self.memory.bands, self.memory.lanes
        recent = bands.of(self, image, at)
        found = bands.take((at.size, *self.shape[2:]), self.dtype, keep=recent)
        if found is None and not recent and lanes is None and self.memory.device.type == "cpu":
            return RecentBand(self, image, at, self._on_host(image, at), None, None)
        return self._fill(image, at, *(found or (self._elsewhere(at, coming=True), None)))

    def _elsewhere(self, at: Interval, coming: bool = False) -> Tensor:
        """Memory for a band that is not of the block."""
        lanes = self.memory.lanes
        with lanes.arriving() if lanes is not None and coming else nullcontext():
            return torch.empty((at.size, *self.shape[2:]), dtype=self.dtype, device=self.memory.device)

    def _on_host(self, image: int, at: Interval) -> Tensor:
        return self.rows[image, at.start : at.stop]

    def _fill(self, image: int, at: Interval, band: Tensor, part: Part | None) -> RecentBand:
        """A band whose numbers come from the host, and from bands that are here."""
        lanes, found = self.memory.lanes, RecentBand(self, image, at, band, None, part, coming=True)
        after = () if part is None else part.after
        for rows, held in self._sources(image, at):
            target = band[slices([rows], [at])]
            source = self._on_host(image, rows) if held is None else held.band[slices([rows], [held.at])]
            if lanes is None:
                target.copy_(source)
                continue
            there = self._written(image, rows) if held is None else [held.moment]
            found.moment = lanes.copy(target, source, False, [*after, *there])
            if held is not None and held.part is not None:
                held.part.after = (*held.part.after, found.moment)
        if part is not None:
            part.after = () if lanes is None else (found.moment,)
            self.memory.under_way.append((found.moment, part.size))
            self.memory.bands.keep(found)
        return found

    def _written(self, image: int, at: Interval) -> list[Moment]:
        """When rows are on the host that were written."""
        return [moment for number, rows, moment in self.written if number == image and (rows & at).size]

    def _sources(self, image: int, at: Interval) -> Iterator[tuple[Interval, RecentBand | None]]:
        """The rows of an interval, with the bands that have them; None for those on the host."""
        start = at.start
        for held in sorted(self.memory.bands.of(self, image, at), key=lambda held: held.at.start):
            both = held.at & Interval(start, at.stop)
            if not both.size:
                continue
            if start < both.start:
                yield Interval(start, both.start), None
            yield both, held
            start = both.stop
        if start < at.stop:
            yield Interval(start, at.stop), None

    def drop(self) -> None:
        """Give the memory back, once nothing travels."""
        self.memory.bands.forget(self)
        if self.buffer is None:
            return
        if self.memory.lanes is not None and self.written:
            self.memory.lanes.finish(self.written[-1][2])
        self.users.remove(self)
        if not self.users:
            self.memory.give(self.buffer)
        self.buffer, self.rows = None, torch.empty(0)
