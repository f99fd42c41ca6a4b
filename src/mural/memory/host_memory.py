"""Host memory for kept values: bands of rows leave the device and come back while it computes.

Positions of one row lie next to each other, whatever the memory format of the model, so that a band of rows is one
block of memory:

    host     │ image │ row │ column │ channel │
    write    rows 512 … 767 of a tile ─────────────────▶ on a stream of their own, after the tile
    read     rows 510 … 769 ◀───── asked for one window ahead, on another stream

Sweeps go through the image down and up in turn. So what one sweep wrote last, the next one reads first, and it need not
travel: the newest bands stay on the device, as far as there is room (`RecentBands`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from mural.comm.copy_streams import CudaLanes, Moment
from mural.comm.host_staging import PageableMemory, Pinned
from mural.geometry import Interval

AHEAD = 2
"""How many windows are asked for before they are used, that in use included."""


class HostMemory:
    """Host memory that steps take and give back, pinned for a GPU.

    What a step did not take goes back to the system when the next one begins: images of another size need other memory.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.lanes = CudaLanes(device) if device.type == "cuda" else None
        self.recent = RecentBands(0)
        self.idle: list[Pinned | PageableMemory] = []
        self.unused: list[Pinned | PageableMemory] = []
        """Those of the idle buffers that nobody has taken since the step began."""

    def begin(self, recent: int) -> None:
        """Begin a step; so many bytes on the device are for bands that were written lately."""
        self.recent = RecentBands(recent)
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

    def rows(self, shape: tuple[int, ...], dtype: torch.dtype, instead: HostRows | None = None) -> HostRows:
        """A tensor, (images, rows, …); in the memory of another one, if its numbers are as large."""
        fits = instead is not None and instead.dtype.itemsize == dtype.itemsize
        return HostRows(self, shape, dtype, instead if fits else None)

    def give(self, buffer: Pinned | PageableMemory) -> None:
        """Take a buffer back."""
        self.idle.append(buffer)


@dataclass(eq=False)
class RecentBand:
    """Rows of a tensor that are on the device as well."""

    owner: HostRows
    image: int
    at: Interval
    band: Tensor
    moment: Moment
    sweep: int
    used: bool = False

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.band.numel() * self.band.element_size()


class RecentBands:
    """Bands that were written lately, within a room of bytes."""

    def __init__(self, room: int):
        self.room, self.sweep, self.bands = room, 0, list[RecentBand]()

    def turn(self) -> bool:
        """Begin a sweep; whether it goes up."""
        self.sweep += 1
        return self.sweep % 2 == 0

    def add(self, owner: HostRows, image: int, at: Interval, band: Tensor, moment: Moment) -> None:
        """Keep a band that is written; what it replaces goes."""
        self.forget(owner, image, at)
        if self.room:
            self.bands.append(RecentBand(owner, image, at, band, moment, self.sweep))
        while sum(held.size for held in self.bands) > self.room:
            self.bands.remove(min(self.bands, key=self._worth))

    def _worth(self, held: RecentBand) -> int:
        """Bands that were read are not read again soon. This sweep reads those of the one before it, the next one
        those of this one, the last ones first.
        """
        if held.used or held.sweep < self.sweep - 1:
            return 0
        return 1 if held.sweep == self.sweep else 2

    def of(self, owner: HostRows, image: int, at: Interval) -> list[RecentBand]:
        """The bands that have rows of an interval."""
        return [held for held in self.bands if held.owner is owner and held.image == image and (held.at & at).size]

    def forget(self, owner: HostRows, image: int | None = None, at: Interval | None = None) -> None:
        """Let go of all bands of a tensor, or of those that have rows of an interval."""
        gone = [b for b in self.bands if b.owner is owner] if image is None or at is None else self.of(owner, image, at)
        self.bands = [held for held in self.bands if not any(held is other for other in gone)]


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
        self.coming: deque[tuple[tuple[int, Interval], Tensor, Moment]] = deque()

    def write(self, image: int, at: Interval, band: Tensor) -> None:
        """Send a band of rows to the host; do not write to it afterwards."""
        lanes, target = self.memory.lanes, self.rows[image, at.start : at.stop]
        now = None if lanes is None else lanes.now()
        self.memory.recent.add(self, image, at, band, now)
        if lanes is None:
            target.copy_(band)
            return
        self.written = lanes.copy(target, band, True, [now])
        band.record_stream(lanes.outward)

    def plan(self, bands: Sequence[tuple[int, Interval]]) -> None:
        """Learn which bands are read next, in order."""
        self.queue, self.coming = deque(bands), deque()

    def read(self, image: int, at: Interval) -> Tensor:
        """The next band on the device; the one after it is on its way. Do not write to it."""
        while len(self.coming) < AHEAD and self.queue:
            self._ask(*self.queue.popleft())
        while self.coming and self.coming[0][0] != (image, at):
            self.coming.popleft()
        if not self.coming:
            self._ask(image, at)
        _, band, moment = self.coming.popleft()
        if self.memory.lanes is not None and moment is not None:
            self.memory.lanes.join(moment, band)
        return band

    def _ask(self, image: int, at: Interval) -> None:
        """Have a band brought to the device, or put together of what is there."""
        key, lanes = (image, at), self.memory.lanes
        recent = self.memory.recent.of(self, image, at)
        for held in recent:
            held.used = True
        if len(recent) == 1 and recent[0].at.contains(at):
            first = at.start - recent[0].at.start
            self.coming.append((key, recent[0].band[first : first + at.size], recent[0].moment))
            return
        if lanes is None and not recent:
            self.coming.append((key, self.rows[image, at.start : at.stop], None))
            return
        shape = (at.size, *self.rows.shape[2:])
        if lanes is None:
            band = torch.empty(shape, dtype=self.rows.dtype)
        else:
            with torch.cuda.stream(lanes.inward):
                band = torch.empty(shape, dtype=self.rows.dtype, device=lanes.device)
        moment: Moment = None
        for rows, source, after in self._sources(image, at, recent):
            target = band[rows.start - at.start : rows.stop - at.start]
            if lanes is None:
                target.copy_(source)
                continue
            moment = lanes.copy(target, source, False, [] if after is None else [after])
            if source.is_cuda:
                source.record_stream(lanes.inward)
        self.coming.append((key, band, moment))

    def _sources(
        self, image: int, at: Interval, recent: Sequence[RecentBand]
    ) -> Iterator[tuple[Interval, Tensor, Moment]]:
        """The rows of an interval from where they are, with the moment when they are there."""
        start = at.start
        for held in sorted(recent, key=lambda held: held.at.start):
            both = held.at & at
            if start < both.start:
                yield Interval(start, both.start), self.rows[image, start : both.start], self.written
            yield both, held.band[both.start - held.at.start : both.stop - held.at.start], held.moment
            start = both.stop
        if start < at.stop:
            yield Interval(start, at.stop), self.rows[image, start : at.stop], self.written

    def drop(self) -> None:
        """Give the memory back, once nothing travels."""
        self.memory.recent.forget(self)
        if self.memory.lanes is not None and self.written is not None:
            self.memory.lanes.finish(self.written)
        self.users.remove(self)
        if not self.users:
            self.memory.give(self.buffer)
