"""A GPU's copies, imitated on the CPU: each happens when it is waited for, or at random before, in order of its lane.

What is computed happens at once; but nobody knows that it has until it is waited for, or by chance.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from mural.memory.host_memory import HostMemory


class Late:
    """A moment of a lane, after a copy; or of what is computed, with a number."""

    def __init__(self, copies: LateCopies, lane: deque[Late] | None, number: int, copy: Any = None, after: Any = ()):
        self.copies, self.lane, self.number, self.copy, self.after = copies, lane, number, copy, tuple(after)
        self.before = lane[-1] if lane else None
        self.done = False

    @property
    def over(self) -> bool:
        return self.done if self.lane is not None else self.number <= self.copies.computed

    def reach(self) -> None:
        """Let all happen that comes before it, and itself."""
        if self.lane is None:
            self.copies.computed = max(self.copies.computed, self.number)
        while self.lane is not None and not self.done:
            first = self.lane.popleft()
            for moment in first.after:
                moment.reach()
            first.copy[0].copy_(first.copy[1])
            first.done = True

    def follows(self, other: Late) -> bool:
        """Whether it comes after a moment of what is computed, whatever happens."""
        if self.lane is None:
            return self.number >= other.number
        earlier = self.after if self.before is None else (*self.after, self.before)
        return any(moment.follows(other) for moment in earlier)


class LateCopies:
    """Two lanes whose copies are late."""

    device = torch.device("cpu")

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.lanes: tuple[deque[Late], deque[Late]] = (deque(), deque())
        self.asked = self.computed = 0
        """How many moments of what is computed there were, and how many are known to be over."""
        self.reads: list[tuple[int, int, Late]] = []
        """Memory that tiles read, from one address to another, and when they are done."""

    def _by_chance(self) -> None:
        for lane in self.lanes:
            while lane and self.random.random() < 0.3:
                lane[0].reach()
        self.computed += self.computed < self.asked and self.random.random() < 0.3

    def now(self) -> Late:
        self._by_chance()
        self.asked += 1
        return Late(self, None, self.asked)

    def copy(self, target: Tensor, source: Tensor, outward: bool, after: Sequence[Late], mark: Any = None) -> Late:
        self._by_chance()
        if not outward:
            self._check(target, after)
        self.lanes[outward].append(Late(self, self.lanes[outward], 0, (target, source), after))
        return self.lanes[outward][-1]

    def copies(self, pairs: Iterable[tuple[Tensor, Tensor]], outward: bool, after: Sequence[Late]) -> list[Late]:
        return [self.copy(target, source, outward, after) for target, source in pairs]

    def _check(self, target: Tensor, after: Sequence[Late]) -> None:
        """A copy that comes must not overwrite what a tile may still read."""
        start = target.data_ptr()
        stop = start + target.nbytes
        for a, b, moment in self.reads:
            assert moment.over or stop <= a or b <= start or any(other.follows(moment) for other in after)

    def wait(self, moments: Iterable[Late]) -> None:
        for moment in moments:
            moment.reach()

    def join(self, moment: Late, tensor: Tensor) -> None:
        moment.reach()

    def finish(self, moment: Late) -> None:
        moment.reach()

    def over(self, moment: Late) -> bool:
        self._by_chance()
        return moment.over

    def catch_up(self) -> None:
        for lane in self.lanes:
            while lane:
                lane[0].reach()

    def arriving(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def hold(self, tensor: Tensor) -> None:
        """The copy holds it."""


class LateMemory(HostMemory):
    """Host memory whose copies are late."""

    def __init__(self, seed: int):
        super().__init__(torch.device("cpu"))
        self.copies = LateCopies(seed)
        self.lanes = self.copies  # type: ignore[assignment]

    def end_tile(self) -> None:
        """Note what the tile has read."""
        parts, block = list(self.bands.in_use), self.bands.block.data_ptr()
        super().end_tile()
        moment = Late(self.copies, None, self.copies.asked)
        self.copies.reads = [read for read in self.copies.reads if not read[2].over]
        self.copies.reads += [(block + part.start, block + part.stop, moment) for part in parts]
