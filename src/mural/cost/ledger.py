"""The ledger of a walk: which memory is alive, who holds it, and the most that there was."""

from __future__ import annotations

from collections import Counter


class Ledger:
    """Memory that is alive: each with its size and how many hold it; a moment's peak, and where it was."""

    def __init__(self) -> None:
        self.live = self.peak = 0
        self.where = ("", "forward")
        self._size: dict[int, int] = {}
        self._holders: Counter[int] = Counter()

    def make(self, size: int) -> int:
        """New memory that nobody holds yet."""
        number = len(self._size)
        self._size[number] = size
        self.live += size
        return number

    def hold(self, memory: int | None) -> None:
        """One more holds it."""
        if memory is not None:
            self._holders[memory] += 1

    def drop(self, memory: int | None) -> None:
        """One fewer holds it; when nobody does, it is freed."""
        if memory is not None:
            self._holders[memory] -= 1
            if self._holders[memory] == 0:
                self.live -= self._size[memory]

    def alone(self, memory: int) -> bool:
        """Whether it has exactly one holder."""
        return self._holders[memory] == 1

    def size(self, memory: int) -> int:
        """Its bytes."""
        return self._size[memory]

    def touch(self, more: int, site: str, phase: str) -> None:
        """Note that this many bytes more were in use for a moment."""
        if self.live + more > self.peak:
            self.peak, self.where = self.live + more, (site, phase)
