"""The sweeps of a streamed step, in order: each goes once through the tiles of a pass.

forward    pass 0, 1, …       in the last one, forward and backward are one where that is possible
backward   …, 1, 0            two that are joined: the adjoints of the first one's norms, then both at once
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mural.graph.nodes import Place
from mural.memory.joined_passes import Joins
from mural.memory.passes import Passes, StreamPass


@dataclass(frozen=True)
class Sweep:
    """Once through the tiles of a pass: forward, backward (which computes forward again), or both in one.

    "adjoints" stands for a backward that goes no further than to the norms of the pass before.
    """

    one: StreamPass
    kind: str
    peak: int = 0
    """The most bytes on the device while it ran."""

    @property
    def key(self) -> tuple[int, bool, str]:
        """What tells it from the other sweeps of a step."""
        return self.one.number, self.one.whole, self.kind

    @property
    def back(self) -> bool:
        """Whether it computes with gradients."""
        return self.kind != "forward"

    @property
    def writes_gradients(self) -> bool:
        """Whether it finds the gradients of what it reads, not of totals alone."""
        return self.back and "adjoints" not in self.kind

    @property
    def reads(self) -> frozenset[tuple[Place, bool]]:
        """What its tiles read: values, and gradients (True) of what its pass made."""
        return frozenset((place, False) for place in self.one.reads).union(
            (place, True) for place in self.one.keeps if self.back
        )

    @property
    def writes(self) -> frozenset[tuple[Place, bool]]:
        """What it writes: values, and gradients (True)."""
        values = () if self.back else ((place, False) for place in self.one.keeps)
        return frozenset(values).union((place, True) for place in self.one.reads if self.writes_gradients)


def sweeps_of(passes: Passes, joins: Joins, in_one: bool = True) -> Iterator[Sweep]:
    """The sweeps of a step; `in_one` says that forward and backward of the last pass are one."""
    *others, last = passes.passes
    yield from (Sweep(one, "forward") for one in others)
    join = joins.of(last)
    if last.whole or (in_one and join is None):
        yield Sweep(last, "forward and backward")
    elif in_one and join is not None:
        yield from (Sweep(last, "forward and adjoints"), Sweep(join.both, "backward"))
    else:
        yield Sweep(last, "forward")
        yield from backward_of(last, joins)
    for one in reversed(others):
        if not joins.skips(one):
            yield from backward_of(one, joins)


def backward_of(one: StreamPass, joins: Joins) -> list[Sweep]:
    """The sweeps with the gradients of a pass, and of the one that is joined to it."""
    join = joins.of(one)
    return [Sweep(one, "backward")] if join is None else [Sweep(one, "adjoints"), Sweep(join.both, "backward")]
