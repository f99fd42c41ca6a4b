"""Two passes whose backward is one: a pass that measures norms and keeps nothing, and the pass after it.

The second pass computes again all that the first one did. Apart, each goes back through it:

    second pass   x ─ conv ─ norm ─ loss      gradients of x and of the statistics, through the convolution
    first pass    x ─ conv ─ statistics       gradients of x, through the convolution again, added to those of x

Joined, the gradients of the statistics come first, for which nothing goes back further than to the norm. Then they and
the gradients of the norm's results go through the convolution together, and x is written once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from mural.memory.passes import Passes, StreamPass
from mural.memory.tile_calls import TileCall


@dataclass(frozen=True)
class Join:
    """Two passes that follow each other, and the one that goes back through both."""

    before: StreamPass
    after: StreamPass
    both: StreamPass

    @property
    def rest(self) -> tuple[TileCall, ...]:
        """The calls of the second pass that the statistics reach: norms, and what is computed from them."""
        reached, found = {call for call, _ in self.before.measures}, list[TileCall]()
        for call in self.after.calls:
            if call.node.id in reached or any(source in reached for source in call.node.inputs):
                reached.add(call.node.id)
                found.append(call)
        return tuple(found)


@dataclass(frozen=True)
class Joins:
    """The joins of a step's passes, by the number of their second pass."""

    found: Mapping[int, Join]

    def of(self, one: StreamPass) -> Join | None:
        """The join whose second pass this is."""
        return None if one.whole else self.found.get(one.number)

    def skips(self, one: StreamPass) -> bool:
        """Whether a pass has no backward of its own."""
        return any(join.before is one for join in self.found.values())


def joined_passes(passes: Passes) -> Joins:
    """The joins that save work; each pass is in one of them at most."""
    found: dict[int, Join] = {}
    every = passes.passes
    for before, after in reversed([*pairwise(every)]):
        if Joins(found).skips(after) or not can_join(passes, before, after):
            continue
        number, measures = len(every) + after.number, (*before.measures, *after.measures)
        join = Join(before, after, replace(after, number=number, like=after.number, measures=measures))
        if saves(passes, join):
            found[after.number] = join
    return Joins(found)


def can_join(passes: Passes, before: StreamPass, after: StreamPass) -> bool:
    """Whether the second pass computes all that the first one does, and the first one measures norms alone."""
    calls = passes.graph.calls
    return (
        not (before.whole or after.whole or before.keeps)
        and bool(before.measures)
        and all(calls[call].norm for call, _ in before.measures)
        and set(before.measures).issubset(after.uses)
        and {call.node.id for call in before.calls}.issubset(call.node.id for call in after.calls)
        and set(before.reads).issubset(after.reads)
        and not any(call.random for call in after.calls)
    )


def saves(passes: Passes, join: Join) -> bool:
    """Whether less is computed: the first pass's backward, for what comes after its norms forward and partly back."""
    work = passes.graph.work
    apart = sum(work[call.node.id][1] for call in join.before.calls)
    return apart > sum(work[call.node.id][0] + work[call.node.id][1] / 2 for call in join.rest)
