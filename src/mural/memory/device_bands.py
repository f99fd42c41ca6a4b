"""Room on a device for rows of tensors that are kept on the host: one block of memory, divided here.

    │ leaving │ still here │ coming │ in use │      free      │

All rows pass through it on their way to the host and back. They stay until there is need for their room, and need not
come back: sweeps go through the image down and up in turn, so what one wrote or read last, the next one reads first.
What is read last from now on makes room first (`ReadPlan`).

Memory of torch's allocator would belong to one stream, be held for the others without being counted, and be cut into
sizes that the next sweep cannot use. Here a part is used again after the moments at which its users are done: a stream
waits for them, not the process. So what leaves cannot pile up, and the device's peak is known.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mural.comm.copy_streams import CudaLanes, Moment
from mural.geometry import Interval
from mural.memory.read_plan import NEVER, ReadPlan

if TYPE_CHECKING:
    from mural.memory.host_memory import HostRows

ALIGNED = 512
"""Parts begin at multiples of so many bytes."""


@dataclass(eq=False)
class Part:
    """A part of the block: its bytes, and when it may be written to."""

    start: int
    stop: int
    after: tuple[Moment, ...] = ()
    held: bool = True
    """Whether a band has it."""

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.stop - self.start


@dataclass(eq=False)
class RecentBand:
    """Rows of a tensor that are on the device as well; without a part, in memory that is not of the block."""

    owner: HostRows
    image: int
    at: Interval
    band: Tensor
    moment: Moment
    """When its numbers are there."""
    part: Part | None
    coming: bool = False
    """Whether it comes from the host."""
    due: int = -1
    """The read of the plan that needs it next, as far as that is known."""


class Spot(NamedTuple):
    """A part that can be had: its band, if there is one, the read that needs that next, and how new it is."""

    part: Part
    band: RecentBand | None = None
    due: int = NEVER
    age: int = -1


FREE = (False, False, 0, -NEVER, -1)
"""The worth of gaps that nobody uses: there is nothing better."""


class DeviceBands:
    """A block of `room` bytes, for bands of rows that are written, read, and still here."""

    def __init__(self, device: torch.device, room: int, lanes: CudaLanes | None = None):
        self.room, self.lanes, self.sweeps = room // ALIGNED * ALIGNED, lanes, 0
        self.block = torch.empty(self.room, dtype=torch.uint8, device=device)
        begun = () if lanes is None else (lanes.now(),)  # what had the memory before may still be computed
        self.gaps = [Part(0, self.room, begun, False)] if self.room else []
        self.bands: list[RecentBand] = []
        """The bands that are here, the oldest first."""
        self.in_use: list[Part] = []
        """What the tile that is computed reads."""
        self.plan = ReadPlan()
        self.taken = self.margin = 0
        """Bytes that this tile has taken at once, and that the one before it took: as much is left for the next one."""
        self.crowded = False
        """Whether a band had to wait for others to leave."""

    def begin(self, plan: ReadPlan) -> None:
        """Begin a sweep, with what it and the next ones read."""
        self.plan, self.sweeps = plan, self.sweeps + 1
        for held in self.bands:
            held.due = -1

    # -- memory --------------------------------------------------------------------------------------------------------

    def take(
        self, shape: Sequence[int], dtype: torch.dtype, ahead: int | None = None, keep: Collection[RecentBand] = ()
    ) -> tuple[Tensor, Part] | None:
        """Memory for a band, in place of those that are read last; None if all others are needed, or some are `keep`.

        One that is brought `ahead`, for that read of the plan, has the room of those alone that are read after it.
        """
        size = prod(shape) * dtype.itemsize
        wide = max(1, -(-size // ALIGNED)) * ALIGNED
        spots = self._spots(-1 if ahead is None else ahead, keep)
        short = ahead is not None and sum(spot.part.size for spot in spots) < wide + self.margin
        if short or not (run := self._run(spots, wide)):
            return None
        if ahead is not None and self.plan.tiles[ahead] > self.plan.tile and any(spot.part.after for spot in run):
            return None  # what is read first would wait, too: copies come one after the other
        for spot in run:
            if spot.band is not None:
                self._let_go(spot.band)
        gap = next(gap for gap in self.gaps if gap.start <= run[0].part.start < gap.stop)
        self.crowded |= ahead is None and self.sweeps > 0 and bool(gap.after)
        self.taken += wide if ahead is None else 0
        part = Part(gap.start, gap.start + wide, gap.after)
        gap.start += wide
        self.gaps = [other for other in self.gaps if other.size]
        return self.block[part.start : part.start + size].view(dtype).view(tuple(shape)), part

    def _spots(self, after: int, keep: Collection[RecentBand]) -> list[Spot]:
        """The gaps, and the parts of bands that no read up to that one needs, in the order of their places."""
        found = [Spot(gap) for gap in self.gaps]
        read = set(map(id, self.in_use))
        for age, held in enumerate(self.bands):
            part = held.part
            if part is not None and id(part) not in read and held not in keep and (due := self.due(held)) > after:
                found.append(Spot(part, held, due, age))
        if self.lanes is not None:
            over = self.lanes.over
            for part, *_ in found:
                if part.after:
                    part.after = tuple([moment for moment in part.after if not over(moment)])
        found.sort(key=by_place)
        return found

    def _run(self, spots: Sequence[Spot], size: int) -> Sequence[Spot]:
        """Neighbours that have so many bytes: if possible without a band that is on its way here, or read by this tile
        or the next one; then without one that is still used, or leaves, or else the oldest; then what is read last.
        """
        soon = bisect_right(self.plan.tiles, self.plan.tile + 1)
        best, found = None, range(0)
        for first, (begin, *_) in enumerate(spots):
            stop = start = begin.start
            used = coming = False
            newest, due = -1, NEVER
            last = first
            for part, band, needed, age in islice(spots, first, None):
                if part.start != stop:
                    break
                stop, last = part.stop, last + 1
                newest, due = age if age > newest else newest, needed if needed < due else due
                if part.after:
                    used, coming = True, coming or (band is not None and band.coming)
                if stop - start >= size:
                    break
            if stop - start < size:
                continue
            worth = coming or due < soon, used, newest if used else 0, -due, newest
            if best is None or worth < best:
                best, found = worth, range(first, last)
                if worth == FREE:
                    break
        return [spots[place] for place in found]

    def due(self, held: RecentBand) -> int:
        """The read of the plan that needs a band next."""
        plan = self.plan
        if held.due != NEVER and (held.due < 0 or plan.tiles[held.due] < plan.tile):
            reads = plan.later(held.owner, held.image, held.at)
            held.due = next((n for n in reads if self._serves(held, plan.reads[n].at)), NEVER)
        return held.due

    def _serves(self, held: RecentBand, at: Interval) -> bool:
        """Whether rows are read from a band: it has all of them, or no other one has."""
        return held.at.contains(at) or self.whole(held.owner, held.image, at) is None

    def end_tile(self, moment: Moment) -> None:
        """A tile was computed, or will be at a moment: what it read is free for others."""
        read, self.in_use = {id(part): part for part in self.in_use}, []
        self.plan.tile += 1
        self.taken, self.margin = 0, self.taken
        for part in read.values():
            part.after = part.after if moment is None else (*part.after, moment)
            if not part.held:
                self._free(part)

    def _free(self, part: Part) -> None:
        """Join a part with the gaps next to it."""
        before = next((g for g in self.gaps if g.stop == part.start), None)
        behind = next((g for g in self.gaps if g.start == part.stop), None)
        joined = [gap for gap in (before, part, behind) if gap is not None]
        after = dict.fromkeys(moment for gap in joined for moment in gap.after)
        self.gaps = [gap for gap in self.gaps if gap not in (before, behind)]
        self.gaps.append(Part(joined[0].start, joined[-1].stop, tuple(after), False))
        self.gaps.sort(key=lambda gap: gap.start)

    # -- recent bands --------------------------------------------------------------------------------------------------

    def keep(self, held: RecentBand) -> None:
        """Have a band stay, as long as there is room; those that have no other rows go."""
        for other in self.of(held.owner, held.image, held.at):
            if held.at.contains(other.at):
                self._let_go(other)
        self.bands.append(held)

    def of(self, owner: HostRows, image: int, at: Interval) -> list[RecentBand]:
        """The bands that have rows of an interval."""
        mine = (held for held in self.bands if held.owner is owner and held.image == image)
        return [held for held in mine if held.at.start < at.stop and at.start < held.at.stop]

    def whole(self, owner: HostRows, image: int, at: Interval) -> RecentBand | None:
        """A band that has all rows of an interval."""
        return next((held for held in self.of(owner, image, at) if held.at.contains(at)), None)

    def forget(self, owner: HostRows, image: int | None = None, at: Interval | None = None) -> None:
        """Let go of all bands of a tensor, or of those that have rows of an interval."""
        gone = [b for b in self.bands if b.owner is owner] if image is None or at is None else self.of(owner, image, at)
        for held in gone:
            self._let_go(held)

    def _let_go(self, held: RecentBand) -> None:
        """A band goes; if a read was to find it, that has to be asked for again."""
        self.plan.asked = min(self.plan.asked, self.due(held))
        self.bands = [other for other in self.bands if other is not held]
        if held.part is not None:
            held.part.held = False
            if held.part not in self.in_use:
                self._free(held.part)


def by_place(spot: Spot) -> int:
    """Where a spot begins."""
    return spot.part.start
