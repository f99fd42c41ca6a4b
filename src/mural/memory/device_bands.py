"""Room on a device for rows of tensors that are kept on the host: one block of memory, divided here.

    │ leaving │ still here │ coming │ in use │      free      │

All rows pass through it on their way to the host and back. Those that have left stay as long as there is room, and need
not come back: sweeps go through the image down and up in turn, so what one wrote last, the next one reads first.

Memory of torch's allocator would belong to one stream, be held for the others without being counted, and be cut into
sizes that the next sweep cannot use. Here a part is used again after the moments at which its users are done: a stream
waits for them, not the process. So what leaves cannot pile up, and the device's peak is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from mural.comm.copy_streams import CudaLanes, Moment
from mural.geometry import Interval

ALIGNED = 512
"""Parts begin at multiples of so many bytes."""


@dataclass(eq=False)
class Part:
    """A part of the block: its bytes, how many hold it, and when it may be written to."""

    start: int
    stop: int
    after: tuple[Moment, ...] = ()
    holders: int = 1


@dataclass(eq=False)
class RecentBand:
    """Rows of a tensor that are on the device as well."""

    owner: object
    image: int
    at: Interval
    band: Tensor
    moment: Moment
    """When its numbers are there."""
    part: Part
    sweep: int
    used: bool = False


class DeviceBands:
    """A block of `room` bytes, for bands of rows that are written, read, and still here."""

    def __init__(self, device: torch.device, room: int, lanes: CudaLanes | None = None):
        self.room, self.lanes, self.sweep = room // ALIGNED * ALIGNED, lanes, 0
        self.block = torch.empty(self.room, dtype=torch.uint8, device=device)
        begun = () if lanes is None else (lanes.now(),)  # what had the memory before may still be computed
        self.gaps = [Part(0, self.room, begun)] if self.room else []
        self.bands: list[RecentBand] = []
        self.in_use: list[Part] = []
        """What the tile that is computed reads."""
        self.crowded = False
        """Whether a band had to wait for others to leave."""

    def turn(self) -> bool:
        """Begin a sweep; whether it goes up."""
        self.sweep += 1
        return self.sweep % 2 == 0

    # -- memory --------------------------------------------------------------------------------------------------------

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Part] | None:
        """Memory for a band, in place of those that are of least use; None if all others are needed."""
        size = prod(shape) * dtype.itemsize
        wide = -(-size // ALIGNED) * ALIGNED
        while (gap := self._gap(wide)) is None:
            victims = [held for held in self.bands if held.part.holders == 1 and held.part not in self.in_use]
            if wide > self.room or not victims:
                return None
            self._let_go(min(victims, key=self._worth))
        self.crowded |= self.sweep > 0 and bool(gap.after)
        part = Part(gap.start, gap.start + wide, gap.after)
        gap.start += wide
        self.gaps = [other for other in self.gaps if other.start < other.stop]
        return self.block[part.start : part.start + size].view(dtype).view(tuple(shape)), part

    def _gap(self, size: int) -> Part | None:
        """A free part of at least that size: one that nothing travels through any more, if there is one."""
        if self.lanes is not None:
            for gap in self.gaps:
                gap.after = tuple(moment for moment in gap.after if not self.lanes.over(moment))
        return min((g for g in self.gaps if g.stop - g.start >= size), key=lambda g: len(g.after), default=None)

    def _worth(self, held: RecentBand) -> int:
        """Bands that were read are not read again soon. This sweep reads those of the one before it, the next one
        those of this one, the last ones first.
        """
        if held.used or held.sweep < self.sweep - 1:
            return 0
        return 1 if held.sweep == self.sweep else 2

    def release(self, part: Part, reading: bool = False) -> None:
        """Hold a part no longer; if the tile that is computed reads it, it is free after that tile."""
        part.holders -= 1
        if reading:
            self.in_use.append(part)
        elif not part.holders and part not in self.in_use:
            self._free(part)

    def end_tile(self, moment: Moment) -> None:
        """A tile was computed, or will be at a moment: what it read is free for others."""
        read, self.in_use = {id(part): part for part in self.in_use}, []
        for part in read.values():
            part.after = part.after if moment is None else (*part.after, moment)
            if not part.holders:
                self._free(part)

    def _free(self, part: Part) -> None:
        """Join a part with the gaps next to it."""
        before = next((g for g in self.gaps if g.stop == part.start), None)
        behind = next((g for g in self.gaps if g.start == part.stop), None)
        joined = [gap for gap in (before, part, behind) if gap is not None]
        after = dict.fromkeys(moment for gap in joined for moment in gap.after)
        self.gaps = [gap for gap in self.gaps if gap not in (before, behind)]
        self.gaps.append(Part(joined[0].start, joined[-1].stop, tuple(after)))
        self.gaps.sort(key=lambda gap: gap.start)

    # -- recent bands --------------------------------------------------------------------------------------------------

    def keep(self, owner: object, image: int, at: Interval, band: Tensor, moment: Moment, part: Part) -> None:
        """Have a band stay that was written, as long as there is room."""
        self.bands.append(RecentBand(owner, image, at, band, moment, part, self.sweep))

    def of(self, owner: object, image: int, at: Interval) -> list[RecentBand]:
        """The bands that have rows of an interval."""
        return [held for held in self.bands if held.owner is owner and held.image == image and (held.at & at).size]

    def forget(self, owner: object, image: int | None = None, at: Interval | None = None) -> None:
        """Let go of all bands of a tensor, or of those that have rows of an interval."""
        gone = [b for b in self.bands if b.owner is owner] if image is None or at is None else self.of(owner, image, at)
        for held in gone:
            self._let_go(held)

    def _let_go(self, held: RecentBand) -> None:
        self.bands = [other for other in self.bands if other is not held]
        self.release(held.part)
