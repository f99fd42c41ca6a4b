"""Which memory leaves the device between two uses, when it is free, and when it comes back: from a trace alone.

    moment       left      freed            fetched   needed
    device       █████████████                ███████████
    outward        └─ copy ─┘
    inward                                    └─ copy ─┘
    away                      ················

Both lanes carry one block at a time: outward in the order of first uses, inward in that of second ones, as late as
possible. What is chosen lowers the most bytes that there are after a moment, until no more can leave without the device
waiting for it. With a limit, until all fits; then it waits where it has to.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

import numpy as np
from numpy.typing import NDArray

from mural.memory.offload.step_trace import StepTrace

COPY_START = 1.5e-5
"""Seconds that a copy takes to begin."""
HOST_MOMENT = 6e-5
"""Seconds that the host takes for a moment of a step from which something leaves; on the host of an H200."""
WORTH = 0.02
"""Nothing leaves unasked unless the peak sinks by this part: every step pays the host's time for it."""
HOST_BOUND = 0.7
"""A step whose host is busy for this part of it waits for the host, so that what the host does makes it longer."""

EASE, EASY = (0.91, 0.94), 0.08
"""A plan for a limit leaves room below it, such parts of it, where the step takes no more than this part longer: what
arrives late needs it, and so does an allocator that cannot fill every gap. Of 19 mixes of a Swin transformer planned
for all of 4 GiB, 14 ran out of memory on an H200; of 8 planned for seven eighths, none (`mural bench choice`)."""

Gap = tuple[int, int, int]
"""A block of memory, the moment after which it is not used for a while, and the one at which it has to be there."""
Bytes = NDArray[np.int64]


@dataclass(frozen=True)
class Absence:
    """One block of memory away: last used after moment `left`, it has to be there at moment `needed`.

    Its memory is free from moment `freed` on, and is taken again at moment `fetched`.
    """

    memory: int
    left: int
    freed: int
    fetched: int
    needed: int
    size: int
    copied: bool = True
    """Whether it is copied to the host; else it has left before in this step, and the host has it."""


@dataclass(frozen=True)
class SwapPlan:
    """The absences of a step, and what they make of it: the most bytes on the device, and its seconds."""

    absences: tuple[Absence, ...]
    peak: int
    seconds: float

    @property
    def host(self) -> int:
        """Bytes of the host's memory: each block has its own."""
        return sum({a.memory: a.size for a in self.absences}.values())

    @property
    def moved(self) -> tuple[int, int]:
        """Bytes to the host, and back."""
        return sum(a.size for a in self.absences if a.copied), sum(a.size for a in self.absences)


@dataclass(frozen=True, eq=False)
class SwapChoice:
    """The question which memory of a trace leaves: `kinds` of it, blocks of at least `least` bytes.

    The link carries so many bytes a second each way, at the same time; the host has room for so many.
    """

    trace: StepTrace
    kinds: Collection[str]
    link: float
    least: int = 1
    host: float = inf

    @cached_property
    def gaps(self) -> list[Gap]:
        """All that may leave."""
        memory = enumerate(self.trace.memory)
        leaving = [(n, one) for n, one in memory if one.kind in self.kinds and one.size >= self.least]
        return [(n, a, b) for n, one in leaving for a, b in one.gaps()]

    def everything(self) -> SwapPlan:
        """Everything leaves at once and comes back at the last moment, whatever that takes."""
        return self.planned(Absence(n, a, a + 1, b, b, self._size(n)) for n, a, b in self.gaps)

    def free(self) -> SwapPlan:
        """All that lowers the peak and can leave without the device waiting."""
        return self.planned(self.windows(self._unnoticed(0)))

    def within(self, limit: float) -> SwapPlan:
        """Enough for the bytes on the device to stay within a limit, if that is possible."""
        chosen, now = self._unnoticed(limit), np.zeros(0, dtype=np.int64)
        must: dict[Gap, tuple[int, int]] = {}
        while True:
            found = self.windows([*chosen, *(g for g in must if g not in chosen)], must)
            now = self.bytes(found)
            if not len(now) or now.max() <= limit:
                return self.planned(found)
            fullest = int(now.argmax())
            there = {(a.memory, a.left, a.needed) for a in found if a.freed <= fullest < a.fetched}
            held = {a.memory: a.size for a in found}
            left = self.host - sum(held.values())
            fitting = [g for g in self.gaps if g[0] in held or self._size(g[0]) <= left]
            over = [g for g in fitting if g[1] < fullest < g[2] and g not in there]
            if not over:
                return self.planned(found)
            begins = self.trace.begins
            gap = max(over, key=lambda g: (begins[g[2]] - begins[g[1] + 1], self._size(g[0])))
            first = last = fullest
            while first - 1 > gap[1] and now[first - 1] > limit:
                first -= 1
            while last + 1 < gap[2] and now[last + 1] > limit:
                last += 1
            before = must.get(gap, (first, last))
            must[gap] = min(before[0], first), max(before[1], last)

    def eased(self, limit: float) -> SwapPlan:
        """As `within`, with room below the limit where that costs little; nothing leaves for the sake of that alone."""
        tight = self.within(limit)
        if not tight.absences:
            return tight
        easy = (1 + EASY) * tight.seconds
        found = (self.within(share * limit) for share in EASE)
        return next((plan for plan in found if plan.peak < tight.peak and plan.seconds <= easy), tight)

    def _unnoticed(self, limit: float) -> list[Gap]:
        """Gaps in which memory leaves while the device computes: at the fullest moment, the largest first."""
        chosen: list[Gap] = []
        open_gaps, now, held = list(self.gaps), self.bytes(()), 0
        while len(now) and now.max() > limit:
            fullest = int(now.argmax())
            over = [g for g in open_gaps if g[1] < fullest < g[2]]
            if not over:
                break
            gap = max(over, key=lambda g: (self._size(g[0]), g[2] - g[1]))
            open_gaps.remove(gap)
            more = 0 if any(gap[0] == other[0] for other in chosen) else self._size(gap[0])
            trial = self.windows([*chosen, gap])
            after = self.bytes(trial)
            if held + more <= self.host and all(a.freed < a.fetched for a in trial) and after[fullest] < now[fullest]:
                chosen.append(gap)
                now, held = after, held + more
        return chosen

    def windows(self, chosen: Collection[Gap], must: dict[Gap, tuple[int, int]] | None = None) -> list[Absence]:
        """The chosen gaps as absences, if the device never waits; `must` are moments after which they are away."""
        begins, gone, copied = self.trace.begins, dict[Gap, float](), dict[Gap, bool]()
        left, last = set[int](), 0.0
        for gap in sorted(chosen, key=lambda g: (g[1], g[2])):
            copied[gap], after = self._is_copied(gap[0], left), begins[gap[1] + 1]
            left.add(gap[0])
            if copied[gap]:
                last = max(last, after) + self._seconds(gap[0])
            gone[gap] = last if copied[gap] else after
        found: list[Absence] = []
        later = inf
        for gap in sorted(chosen, key=lambda g: (-g[2], -g[1])):
            later = min(later, begins[gap[2]]) - self._seconds(gap[0])
            freed = max(bisect_left(begins, gone[gap]), gap[1] + 1)
            fetched = min(bisect_right(begins, later) - 1, gap[2])
            if must is not None and gap in must:
                first, until = must[gap]
                freed, fetched = (freed, fetched) if freed < fetched else (first, until + 1)
                freed, fetched = min(freed, first), max(fetched, until + 1)
            absence = Absence(gap[0], gap[1], freed, fetched, gap[2], self._size(gap[0]), copied[gap])
            if must is None or freed < fetched:
                found.append(absence)
        return found

    def bytes(self, absences: Iterable[Absence]) -> Bytes:
        """The most bytes on the device after each moment."""
        change = np.zeros(self.trace.length + 1, dtype=np.int64)
        for a in absences:
            if a.freed < a.fetched:
                change[a.freed] -= a.size
                change[a.fetched] += a.size
        return np.array(self.trace.bytes, dtype=np.int64) + np.cumsum(change[:-1])

    def planned(self, absences: Iterable[Absence]) -> SwapPlan:
        """The plan with these absences, those that free memory."""
        found = sorted((a for a in absences if a.freed < a.fetched), key=lambda a: (a.left, a.needed))
        left: set[int] = set()
        for place, a in enumerate(found):
            found[place] = replace(a, copied=self._is_copied(a.memory, left))
            left.add(a.memory)
        now = self.bytes(found)
        return SwapPlan(tuple(found), int(now.max()) if len(now) else 0, self.seconds(found))

    def seconds(self, absences: Collection[Absence]) -> float:
        """The seconds of a step: moments wait for memory that is not free yet, and for what is not back."""
        leaving, freed, fetched, needed = (by_moment(absences, name) for name in ("left", "freed", "fetched", "needed"))
        now = outward = inward = 0.0
        gone, back = dict[Absence, float](), dict[Absence, float]()
        for k in range(self.trace.length + 1):
            for a in leaving.get(k - 1, ()):
                outward = max(outward, now) + self._seconds(a.memory) if a.copied else outward
                gone[a] = outward if a.copied else now
            now = max([now, *(gone[a] for a in freed.get(k, ()))])
            for a in fetched.get(k, ()):
                inward = back[a] = max(inward, now) + self._seconds(a.memory)
            now = max([now, *(back[a] for a in needed.get(k, ()))])
            now += self.trace.seconds[k] if k < self.trace.length else 0.0
        return now

    def _is_copied(self, memory: int, left: Collection[int]) -> bool:
        """Whether memory is copied to the host when it leaves; some has `left` before."""
        return memory not in left or self.trace.memory[memory].changes

    def _size(self, memory: int) -> int:
        return self.trace.memory[memory].size

    def _seconds(self, memory: int) -> float:
        return COPY_START + self._size(memory) / self.link


def is_worth(plan: SwapPlan, trace: StepTrace, host_seconds: float) -> bool:
    """Whether a plan frees a larger part of the peak than it adds to the time of a step that nobody limits.

    The device waits for the host in short steps; in others, what the host does goes unnoticed.
    """
    seconds = sum(trace.seconds)
    added = HOST_MOMENT * trace.length / seconds if host_seconds > HOST_BOUND * seconds else 0.0
    return plan.peak <= (1 - max(WORTH, added)) * max(trace.bytes)


def by_moment(absences: Iterable[Absence], name: str) -> dict[int, list[Absence]]:
    """Absences by the moment of that name."""
    found: dict[int, list[Absence]] = {}
    for absence in absences:
        found.setdefault(getattr(absence, name), []).append(absence)
    return found
