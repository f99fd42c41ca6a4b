"""A trace: the moments of a step, the time between them, and the memory that is used, as data."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal

Kind = Literal["activations", "parameters", "gradients", "optimizer", "fixed"]
"""What memory holds: values that backward needs, parameters, gradients that a step adds to, the optimizer's numbers; or
what never leaves."""


@dataclass(frozen=True)
class TracedMemory:
    """One block of memory: its bytes, after which moments it is used, and at which moments it has to be there.

    Moment -1 is what was before the step. A use that no such gate comes before cannot wait for memory that is away.
    """

    size: int
    kind: Kind
    uses: tuple[int, ...]
    gates: frozenset[int]

    @property
    def changes(self) -> bool:
        """Whether the step writes to it, so that it is copied whenever it leaves."""
        return self.kind == "gradients"

    def gaps(self) -> list[tuple[int, int]]:
        """The times in which it may be away: after a use, and until the next gate.

        >>> TracedMemory(8, "activations", (0, 1, 5), frozenset({4, 5})).gaps()
        [(1, 4)]
        """
        gates = sorted(self.gates)
        nexts = ((a, b, gates[bisect_right(gates, a) :][:1]) for a, b in pairwise(self.uses))
        return [(a, gate) for a, b, following in nexts for gate in following if a + 1 < gate <= b]


@dataclass(frozen=True)
class StepTrace:
    """A step: the seconds after each moment, the most bytes on the device then if nothing leaves, and the memory.

    Where `watched` is known, it has the seconds of a step from which something leaves: watching takes time by itself.
    """

    seconds: tuple[float, ...]
    bytes: tuple[int, ...]
    memory: tuple[TracedMemory, ...] = field(repr=False)
    watched: tuple[float, ...] = field(default=(), repr=False)

    def leaving(self) -> StepTrace:
        """The step if something leaves."""
        return replace(self, seconds=self.watched or self.seconds, watched=())

    @property
    def length(self) -> int:
        """The number of moments, without the end of the step."""
        return len(self.seconds)

    @cached_property
    def begins(self) -> tuple[float, ...]:
        """When each moment is, and when the step ends."""
        return (0.0, *accumulate(self.seconds))
